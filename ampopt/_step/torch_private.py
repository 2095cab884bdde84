"""All private names of torch that ampopt uses: what each is for, and what to do when it changes.

Torch promises nothing about names that begin with an underscore. Outside the kernels, ampopt takes
them only from this module. If a new torch lacks one, the import fails at a line of this file, and
the text there (after "Gone:" or "Renamed:") says what to do. ``test_torch_private.py`` checks that
no other module uses private names, and tries each of them on the installed torch.
``torch._foreach_*`` are not among them: torch documents those.

Some private names cannot be imported, because torch calls or reads them on ampopt's classes:

* ``Optimizer._patch_step_function`` puts hooks around the step of a class. ampopt's override
  removes a wrapper that would hide the step of another base class. If torch renames it,
  ``ampopt.Optimizer`` hides the step of the class that it is mixed into, and
  ``test_third_party.py`` fails.
* ``Optimizer._optimizer_step_code`` is called after every step, before the post-hooks. ampopt's
  override ends a pending unscale. If torch drops it, a plain ``step()`` leaves the unscale pending
  and the next ``unscale`` is refused: register a step post-hook that runs first.
* ``_step_supports_amp_scaling`` tells ``torch.amp.GradScaler`` to leave its flag to the step (see
  ``torch_scaler``). If torch reads another name, it synchronizes to read the flag: slower, but
  right.
* ``_scale``, ``_enabled``, ``_check_inf_per_device`` and ``_found_inf_per_device`` of
  ``torch.amp.GradScaler`` exist on ``ampopt.GradScaler``, too, because frameworks read them. The
  entry ``_growth_tracker`` of its state dict is part of the format.
"""

import functools
import inspect
import operator
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from typing import Any, TypeVar, cast

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
    "INIT_GROUP",
    "LOCAL_TENSOR",
    "POST_HOOKS",
    "PRE_HOOKS",
    "SPEC",
    "BatchNorm",
    "NormBase",
    "TorchDispatchMode",
    "adjusted_lr",
    "any_flattened_by_fsdp1",
    "check_for_fused",
    "constant_to_dynamo",
    "count_of_groups",
    "flatten",
    "function_modes",
    "functional_bodies",
    "global_post_hooks",
    "global_pre_hooks",
    "hooks_of",
    "is_flattened_by_fsdp1",
    "is_profiled",
    "is_wrapped_by_scheduler",
    "mark_as_called",
    "operator_name",
    "operators_named",
    "orthogonalize",
    "put_step_hooks",
    "pytree",
    "records_operators",
    "replicas_of_fsdp1",
    "root_of",
    "schema_of",
    "spin",
    "undo_state_initialization",
    "storage_key",
    "uncoalesced_values",
    "uncompiled",
    "version",
    "with_tensors",
    "written_by",
]


# --- the step of an optimizer, and its hooks ------------------------------------------------------

global_pre_hooks = _optimizer._global_optimizer_pre_hooks
global_post_hooks = _optimizer._global_optimizer_post_hooks
"""Step hooks of all optimizers, as ``register_optimizer_step_pre_hook`` adds them. A rule-based
step bypasses torch's wrapper if there are none. Gone: always go through it; slower, right."""

PRE_HOOKS, POST_HOOKS = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
HOOKS = (
    PRE_HOOKS,
    POST_HOOKS,
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
"""Attributes in which an optimizer keeps its hooks. Torch's constructor makes them; for a wrapper
that does not call that constructor, ampopt makes them. Renamed: such wrappers fail in
``register_...``."""

INIT_GROUP = "_init_group"
"""The method by which torch's own steps make the states of a group. Renamed: a class that overrides
it is not refused, and its method is not called."""

hooks_of = operator.attrgetter(PRE_HOOKS, POST_HOOKS)
"""The step hooks of an optimizer: used as the global ones are."""

is_profiled: Any = torch.autograd._profiler_enabled  # pyright: ignore[reportPrivateImportUsage]
"""Whether a profiler is on, for which torch's wrapper records each step. Gone: as for the hooks."""

put_step_hooks = operator.methodcaller("_patch_step_function")
"""Puts the wrapper that runs the hooks around the step of an optimizer's class, if torch's
constructor has not been called. Renamed: its step hooks do not run."""

check_for_fused = _optimizer._device_dtype_check_for_fused
"""Refuses a parameter that torch's ``fused=True`` does not support. Gone: leave the check out; such
parameters are then stepped with where torch would refuse them."""


CALLED = "_opt_called"

mark_as_called = operator.methodcaller("__setattr__", CALLED, True)
"""Marks ``optimizer.step`` as called: torch's schedulers warn if it was not. Renamed: a scheduler
warns that it was stepped first."""


def is_wrapped_by_scheduler(step: Any) -> bool:
    """Whether ``step`` is the wrapper that a scheduler sets on an instance to track calls.

    Renamed: it is taken for a step of the user's own, whose hooks run inside it; slower, right.
    """
    return hasattr(step, "_wrapped_by_lr_sched")


orthogonalize: Any = _muon._zeropower_via_newtonschulz
adjusted_lr: Any = _muon._adjust_lr
"""How ``torch.optim.Muon`` orthogonalizes a matrix and adjusts its learning rate. ampopt applies
both to whole matrices if they are ``DTensor``s. Gone: have ``Muon`` take torch's step there, with
many collectives for each matrix."""


# --- compiling ------------------------------------------------------------------------------------

_Function = TypeVar("_Function", bound=Callable[..., Any])


def uncompiled(function: _Function) -> _Function:
    """Decorator: ``torch.compile`` does not trace ``function``, but breaks the graph around it.

    Tracing a step gains nothing: its kernels are compiled and few already. It would also do harm,
    because a trace treats as constant the Python objects that a plan has to check in each step.
    Functions that ``function`` calls may still be compiled, such as the model in a closure.

    This is ``torch.compiler.disable`` without importing the compiler, which takes seconds; torch
    puts it around its own optimizers. Gone: use that. It takes 7 microseconds, so it is left out
    where nothing is being compiled. Gone: return ``disabled``.
    """
    disabled: Any = torch._compile._disable_dynamo(function)

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if _compiles() is None:
            return function(*args, **kwargs)
        return disabled(*args, **kwargs)

    called._torchdynamo_disable = True  # type: ignore[attr-defined]
    return cast("_Function", called)


_compiles = cast("Any", torch._C)._dynamo.eval_frame.get_eval_frame_callback
"""``None`` where ``torch.compile`` does not look at the functions that are called."""


def constant_to_dynamo(function: _Function) -> _Function:
    """``torch.compiler.assume_constant_result``, also without importing the compiler.

    Renamed: a call of ``function`` is compiled, or ends the graph; slower, right.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


# --- tensors --------------------------------------------------------------------------------------


def version(tensor: Any) -> int:
    """The number of in-place writes to a tensor that autograd has counted.

    Of a ``DTensor``, also of those to its shard, as ``fully_shard`` adds gradients up.
    With master weights, it detects edits of a ``p.grad`` that the step does not read. Gone: leave
    that error out.
    """
    shard = getattr(tensor, LOCAL_TENSOR, None)
    return tensor._version + (0 if shard is None else shard._version)


_cdata = operator.attrgetter("_cdata")


def storage_key(tensor: Tensor) -> int:
    """A key, equal for tensors that share a storage. Gone: its ``data_ptr()``, if not empty."""
    return _cdata(tensor.untyped_storage())


uncoalesced_values = operator.methodcaller("_values")
"""The values of a sparse tensor, duplicates included. Gone: those of the coalesced one."""


# --- what passes through torch's dispatcher -------------------------------------------------------

pytree = _pytree
"""Traversal of nested containers of tensors. Users register their own containers with
``torch.utils._pytree.register_pytree_node``. Gone: the package ``optree``, or whatever torch's
documentation names for it by then."""

TorchDispatchMode = torch.utils._python_dispatch.TorchDispatchMode
"""Intercepts each operator; torch's documentation recommends it in spite of the underscore in its
module's name. Gone: ``ampopt.profile`` and ``ampopt.testing`` do not see what a step computes."""


schema_of = operator.attrgetter("_schema")
"""The arguments and results of an operator, and which it writes. Gone: ``ampopt.autocast`` takes
every registered operator for one that writes."""


def operator_name(func: Any) -> str:
    """``"namespace::name"`` of an operator of ``torch.ops``; of other functions ``__name__``.

    Gone: ``__name__`` alone, so that operators of ``torch.library`` are found by the second part.
    """
    if isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return "::".join(str(func).split(".")[:2])
    return func.__name__


def operators_named(name: str) -> list[Any]:
    """The overloads of the operator ``"namespace::name"``; none if it is not registered."""
    namespace, _, operator = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), operator, None) if operator else None
    return [getattr(packet, overload) for overload in packet.overloads()] if packet else []


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """The arguments that the operator ``func`` is about to write."""
    for position, argument in enumerate(schema_of(func).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[position] if position < len(args) else kwargs.get(argument.name)


def records_operators() -> bool:
    """Whether ``make_fx`` or ``torch.jit.trace`` records the operators that are called.

    A record lacks what compiled code does. Gone: return ``False``.
    """
    c: Any = torch._C
    mode = c._get_dispatch_mode(c._TorchDispatchModeKey.PROXY)
    return mode is not None or c._get_tracing_state() is not None


function_modes: Any = torch.overrides._get_current_function_mode_stack  # pyright: ignore[reportPrivateImportUsage]
"""The ``TorchFunctionMode`` objects that are on, as torch's checkpointing reads them. Gone:
``ampopt.autocast`` has to keep a stack of its own for its ``context_fn``."""


def functional_bodies() -> dict[Any, Any]:
    """Maps functions of ``torch.nn.functional`` to copies that do not dispatch to function modes.

    An active mode that calls the original would be called again, without end; an inactive one would
    not intercept the functions that the original calls. If torch changes how it dispatches,
    ``ampopt.autocast`` intercepts such functions only as a whole: not the ``"linear"`` inside
    ``torch.nn.MultiheadAttention``.
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
"""Context manager that swaps a module's parameters and buffers for other tensors. The public
``functional_call`` uses it, but also calls ``__call__`` and so the hooks again. Gone: swap them by
hand, by ``setattr``."""

BatchNorm = torch.nn.modules.batchnorm._BatchNorm
NormBase = torch.nn.modules.batchnorm._NormBase
"""The base class of all batch norms, and that of batch and instance norms. Gone: list them.
"""


# --- ranks ----------------------------------------------------------------------------------------

LOCAL_TENSOR = "_local_tensor"
"""The attribute of a ``DTensor`` that holds this rank's shard, to read and to replace. The public
``to_local()`` is an autograd function: it returns another tensor, and waits for collectives. Gone:
``to_local().detach()``, and ``DTensor.from_local`` where the shard is moved into a buffer."""

SPEC = "_spec"
"""The attribute of a ``DTensor`` that holds mesh and placements, one object to compare. Gone:
compare the two."""


def is_flattened_by_fsdp1(param: Any) -> bool:
    """Whether FSDP1 has flattened several parameters into ``param``.

    Gone: ranks decide apart; name a group.
    """
    return getattr(param, "_fsdp_flattened", False)


def any_flattened_by_fsdp1(params: Iterable[Any]) -> bool:
    """Whether :func:`is_flattened_by_fsdp1` of any of hundreds, in no Python for each."""
    return any(map(getattr, params, repeat("_fsdp_flattened"), repeat(False)))


def replicas_of_fsdp1(module: Any) -> Any:
    """The group of ranks that hold the same shards of an FSDP1 module with a hybrid strategy.

    Gone: ``module.process_group``'s complement in the ``device_mesh`` that was passed.
    """
    return module._inter_node_pg


def count_of_groups() -> int:
    """The number of process groups that this rank is in; from torch 2.15 on, that it has made.

    Torch names a group that is made with ``use_local_synchronization`` by it. Gone: see what the
    name is made of, and that ranks which are in different groups get the same one.
    """
    c10d: Any = torch.distributed.distributed_c10d
    counts_made = "group_count" in c10d._hash_ranks_to_str.__code__.co_names
    return c10d._world.group_count if counts_made else len(c10d._world.pg_names)


def root_of(mesh: Any) -> Any:
    """The mesh that ``mesh`` was sliced from. Gone: ask for a ``process_group`` instead."""
    return mesh._get_root_mesh()


def flatten(mesh: Any) -> Any:
    """``mesh`` with one dimension, so that one process group has all its ranks.

    Gone: one all-reduce after another, over the groups of ``get_all_groups``.
    """
    return mesh._flatten()


def undo_state_initialization(optimizer: Any) -> bool:
    """Whether ``_init_optim_state`` of torch is stepping ``optimizer``; undo what it has changed.

    ``get_state_dict`` of ``torch.distributed.checkpoint`` calls it to have a step make states: with
    learning rates of 0, which it keeps in a local variable ``lrs``, and gradients of zero, where
    there were none. After the step it calls ``zero_grad``.

    Renamed: such a save discards what ``accumulate`` has summed.
    """
    module = sys.modules.get("torch.distributed.checkpoint.state_dict")
    code = getattr(getattr(module, "_init_optim_state", None), "__code__", None)
    frame = inspect.currentframe() if code is not None else None
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    if frame is None:
        return False
    lrs = iter(frame.f_locals["lrs"])
    for group in optimizer.param_groups:
        if "lr" in group:
            group["lr"] = next(lrs)
        for param in group["params"]:
            param.grad = None
    return True


# --- measuring ------------------------------------------------------------------------------------


def spin(cycles: int) -> None:
    """Keep a CUDA device busy for ``cycles`` clock cycles.

    ``ampopt.bench`` queues kernels behind it, so that it does not time their launches.

    Gone: multiply a large matrix instead.
    """
    torch.cuda._sleep(cycles)  # pyright: ignore[reportPrivateImportUsage]
