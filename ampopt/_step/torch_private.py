"""The one room for torch's private names: what each is for, and what to do when it changes.

Torch promises nothing of a name that begins with an underscore. Whatever of ampopt touches one
outside the kernels takes it from here, so that a new torch that lacks one fails at a line of this
file, at import, and next to what is to be done then. ``tests/ampopt/_step/test_torch_private.py``
holds the rest of the package to it, and tries each of them on the torch that is installed.
``torch._foreach_*`` are not among them: torch documents them, underscore and all.

Some private names torch uses on us, which cannot be imported; they stand where the classes are:

* ``Optimizer._patch_step_function`` puts hooks around the step of a class. Ours takes a wrapper
  away again that would hide the step of another base. If torch renames it, ``ampopt.Optimizer``
  hides the step of whatever it is mixed into, and ``test_extend.py`` fails.
* ``Optimizer._optimizer_step_code`` is called after every step, before the post-hooks. Ours ends a
  pending unscale there. If torch drops it, a plain ``step()`` leaves one pending and the next
  ``unscale`` is refused: register a step post-hook that runs first.
* ``_step_supports_amp_scaling`` tells ``torch.amp.GradScaler`` to leave its flag to the step (see
  ``torch_scaler``). If torch looks for something else, it waits for its flag again: slower, right.
* ``_scale``, ``_enabled``, ``_check_inf_per_device`` and ``_found_inf_per_device`` of
  ``torch.amp.GradScaler``, whose name ``ampopt.GradScaler`` answers to: frameworks read them. The
  entry ``_growth_tracker`` of its state dict is its format.
"""

import operator
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch._compile
import torch.nn.functional as F
import torch.nn.utils.stateless
import torch.optim._muon as _muon
import torch.optim.optimizer as _optimizer
import torch.utils._python_dispatch
from torch import Tensor
from torch.utils import _pytree

__all__ = [
    "CALLED",
    "HOOKS",
    "LOCAL_TENSOR",
    "POST_HOOKS",
    "PRE_HOOKS",
    "SPEC",
    "BatchNorm",
    "NormBase",
    "TorchDispatchMode",
    "adjusted_lr",
    "check_for_fused",
    "constant_to_dynamo",
    "flattened",
    "function_modes",
    "functional_bodies",
    "global_post_hooks",
    "global_pre_hooks",
    "hooks_of",
    "is_flattened_by_fsdp1",
    "is_operator",
    "is_profiled",
    "is_wrapped_by_scheduler",
    "mark_as_called",
    "orthogonalized",
    "put_step_hooks",
    "pytree",
    "root_of",
    "schema_of",
    "spin",
    "storage_key",
    "uncoalesced_values",
    "uncompiled",
    "version",
    "with_tensors",
    "written_by",
]


# --- the step of an optimizer, and what torch hangs on it -----------------------------------------

global_pre_hooks = _optimizer._global_optimizer_pre_hooks
global_post_hooks = _optimizer._global_optimizer_post_hooks
"""Step hooks of all optimizers, as ``register_optimizer_step_pre_hook`` adds them. A step by rule
goes past torch's wrapper where there are none. Gone: always go through it; slower, right."""

PRE_HOOKS, POST_HOOKS = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
HOOKS = (
    PRE_HOOKS,
    POST_HOOKS,
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
"""Attributes in which an optimizer keeps its hooks. Torch's constructor makes them; where a wrapper
of someone else's does not call it, we do. Renamed: such wrappers fail in ``register_...``."""

hooks_of = operator.attrgetter(PRE_HOOKS, POST_HOOKS)
"""The step hooks of an optimizer: used as the global ones are."""

is_profiled: Any = torch.autograd._profiler_enabled  # pyright: ignore[reportPrivateImportUsage]
"""Whether a profiler is on, to which torch's wrapper shows each step. Gone: as for the hooks."""

put_step_hooks = operator.methodcaller("_patch_step_function")
"""Puts the wrapper with the hooks around the step of the class of an optimizer that was not made by
torch's constructor. Renamed: its step hooks do not run."""

check_for_fused = _optimizer._device_dtype_check_for_fused
"""Refuses a parameter that ``fused=True`` of torch's does not take. Gone: leave the check out; such
parameters are then stepped with where torch would refuse them."""


CALLED = "_opt_called"


def mark_as_called(optimizer: Any) -> None:
    """Say that there was a step, where torch's schedulers look for one before theirs.

    Renamed: a scheduler warns that it was stepped first.
    """
    setattr(optimizer, CALLED, True)


def is_wrapped_by_scheduler(step: Any) -> bool:
    """Whether ``step`` is what a scheduler has put on an instance, to see :func:`mark_as_called`.

    Renamed: it is taken for a step of the user's own, whose hooks run inside it; slower, right.
    """
    return hasattr(step, "_wrapped_by_lr_sched")


orthogonalized: Any = _muon._zeropower_via_newtonschulz
adjusted_lr: Any = _muon._adjust_lr
"""What ``torch.optim.Muon`` does to a matrix, and to its learning rate: on ``DTensor``s, to whole
matrices. Gone: have ``Muon`` take torch's step there, with many collectives for each matrix."""


# --- compiling ------------------------------------------------------------------------------------

_Function = TypeVar("_Function", bound=Callable[..., Any])


def uncompiled(function: _Function) -> _Function:
    """``function``, at which a compiled graph of the caller's ends, and goes on behind.

    A step plans in Python what it has compiled already, or launches as few kernels as can be:
    tracing it once more gains nothing, and a trace holds what a plan is to look at in each step
    for constant. What ``function`` calls that is compiled for itself, as a closure's model may be,
    stays so.

    This is ``torch.compiler.disable`` without importing the compiler, which takes seconds; torch
    puts it around its own optimizers. Gone: use that.
    """
    disabled: Any = torch._compile._disable_dynamo(function)
    return disabled


def constant_to_dynamo(function: _Function) -> _Function:
    """``torch.compiler.assume_constant_result``, likewise without the compiler, which goes by it.

    Renamed: a call of ``function`` is compiled, or ends the graph; slower, right.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


# --- tensors --------------------------------------------------------------------------------------


version = operator.attrgetter("_version")
"""How often autograd has seen a tensor written to. With masters, tells a gradient that was edited
where no step looks. Gone: leave that error out."""

_cdata = operator.attrgetter("_cdata")


def storage_key(tensor: Tensor) -> int:
    """What is the same for tensors that share a storage. Gone: its ``data_ptr()``, if not empty."""
    return _cdata(tensor.untyped_storage())


uncoalesced_values = operator.methodcaller("_values")
"""The values of a sparse tensor, duplicates and all. Gone: those of the coalesced one."""


# --- what passes through torch's dispatcher -------------------------------------------------------

pytree = _pytree
"""Containers of tensors, as torch itself sees them: a user registers one by
``torch.utils._pytree.register_pytree_node``. Gone: the package ``optree``, or whatever torch's
documentation names for it by then."""

TorchDispatchMode = torch.utils._python_dispatch.TorchDispatchMode
"""Sees each operator; torch's documentation recommends it in spite of the underscore of its module.
Transactions need it: gone, ``skip_by="auto"`` has to look at the flag, as ``"host"`` does."""


schema_of = operator.attrgetter("_schema")
"""What an operator takes, returns and writes. Gone, as for :func:`is_operator`: treat each as a
higher-order operator, which says nothing."""


def is_operator(func: Any) -> bool:
    """Whether ``func``, which was dispatched, is one operator, whose schema says what it writes."""
    return isinstance(func, torch._ops.OpOverload)


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """The arguments that the operator ``func`` is about to write."""
    for position, argument in enumerate(schema_of(func).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[position] if position < len(args) else kwargs.get(argument.name)


function_modes: Any = torch.overrides._get_current_function_mode_stack  # pyright: ignore[reportPrivateImportUsage]
"""The ``TorchFunctionMode`` objects that are on, as torch's checkpointing reads them. Gone:
``ampopt.autocast`` has to keep a stack of its own for its ``context_fn``."""


def functional_bodies() -> dict[Any, Any]:
    """Functions of ``torch.nn.functional`` → the same without the call that asks for modes.

    A mode that is on while such a function runs would be asked about it again, without end; and
    one that is off would not see what it calls. If torch asks otherwise, ``ampopt.autocast`` sees
    such functions from outside only: not ``"linear"`` in ``torch.nn.MultiheadAttention``.
    """
    asking = [name for name in vars(F) if name.startswith("has_torch_function")]
    names = {**vars(F), **dict.fromkeys(asking, lambda *_: False)}
    bodies = {}
    for function in vars(F).values():
        code = getattr(function, "__code__", None)
        if code is not None and "handle_torch_function" in code.co_names:
            body = types.FunctionType(code, names, function.__name__, function.__defaults__)
            body.__kwdefaults__ = function.__kwdefaults__
            bodies[function] = body
    return bodies


# --- modules --------------------------------------------------------------------------------------

with_tensors = torch.nn.utils.stateless._reparametrize_module
"""A module that has other tensors for parameters and buffers: what ``functional_call`` is made of,
which would call ``__call__`` and its hooks again. Gone: swap them by hand, by ``setattr``."""

BatchNorm = torch.nn.modules.batchnorm._BatchNorm
NormBase = torch.nn.modules.batchnorm._NormBase
"""Batch norms for inputs of any number of dimensions, and instance norms besides. Gone: list them.
"""


# --- ranks ----------------------------------------------------------------------------------------

LOCAL_TENSOR = "_local_tensor"
"""Where a ``DTensor`` has the part that this rank has, to read and to exchange. The public
``to_local()`` is a function of autograd's, whose result is another tensor, and waits. Gone:
``to_local().detach()``, and ``DTensor.from_local`` where the part is laid into a buffer."""

SPEC = "_spec"
"""Where it has its mesh and placements, as one object to compare. Gone: compare the two."""


def is_flattened_by_fsdp1(param: Any) -> bool:
    """Whether FSDP1 has made ``param`` of several. Gone: ranks decide apart; name a group."""
    return getattr(param, "_fsdp_flattened", False)


def root_of(mesh: Any) -> Any:
    """The mesh that ``mesh`` was sliced from. Gone: ask for a ``process_group`` instead."""
    return mesh._get_root_mesh()


def flattened(mesh: Any) -> Any:
    """``mesh`` with one dimension, so that one process group has all its ranks.

    Gone: one all-reduce after another, by ``get_all_groups``, as for a mesh without names.
    """
    return mesh._flatten()


# --- measuring ------------------------------------------------------------------------------------


def spin(cycles: int) -> None:
    """Keep a CUDA device busy for so long, so that ``ampopt.bench`` times what is queued behind it.

    Gone: multiply a large matrix instead.
    """
    torch.cuda._sleep(cycles)  # pyright: ignore[reportPrivateImportUsage]
