"""Convert modules to a dtype: a model with its norms in float32, or one module inside a model."""

import fnmatch
import functools
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from ampopt._step.torch_private import NormBase, pytree, with_tensors

__all__ = ["NORMS", "Model", "as_tuple", "cast", "check_dtypes", "run_in", "run_kept_in_float32"]

# NormBase stands for BatchNorm*, SyncBatchNorm and InstanceNorm*.
NORMS = (NormBase, nn.LayerNorm, nn.GroupNorm, nn.LocalResponseNorm, nn.RMSNorm)
"""The normalization modules of torch: the default of ``keep``, which stay in float32."""

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
Model = TypeVar("Model", bound=nn.Module)
Runs = TypeVar("Runs", bound=Callable[..., Any])


def cast(
    model: Model,
    dtype: torch.dtype,
    keep: Collection[Any] = NORMS,
    outputs: torch.dtype | None = None,
) -> Model:
    """Convert a model to ``dtype``, in place, and keep some of its modules in float32.

    Parameters and buffers are converted, and forward hooks are installed. The hooks cast the
    floating-point inputs of the model to ``dtype``, and the inputs of each module that has
    parameters of its own to the dtype of these parameters. So a ``forward`` that computes in
    float32 in between, or passes a module a tensor of another dtype, needs no cast back.
    Parameters stay the same objects, with the same state-dict keys and ties; copies, pickles and
    compiled versions of the model behave like it. A second call, with any dtype, replaces the
    first; after a call with float32, only the inputs and results of the model are cast. Does not
    synchronize.

    Hooks run only where a module is called: a module whose weights are used by its parent, such as
    the ``out_proj`` of ``nn.MultiheadAttention``, cannot stay in float32 alone. For a module whose
    inputs must not be cast, use :func:`run_in`. ``fully_shard`` requires one dtype in a group:
    apply it first to the modules that stay in float32.

    Args:
        model: any module.
        dtype: ``torch.float16`` or ``torch.bfloat16``, or ``torch.float32`` to convert back.
        keep: the modules that stay in float32, with all modules in them: types, names as in
            ``model.named_modules()`` (with wildcards), or modules. Their inputs are cast to
            float32, their results to ``dtype``.
        outputs: the dtype to cast the results of the model to; ``None`` for no cast.

    Returns:
        The model.

    Raises:
        TypeError: ``model`` is not a module, or ``keep`` not a list of types, names and modules.
        ValueError: a kept name or module is not in the model; ``dtype`` or ``outputs`` is not a
            floating-point dtype; or a tensor cannot be cast, because it is quantized, sparse or not
            initialized, or tied to one that stays in float32. Nothing has changed then.
    """
    check_dtypes(dtype=dtype, outputs=dtype if outputs is None else outputs)
    kept_modules, dtypes = _plan(model, dtype, keep)
    _take_off_hooks(model)
    for tensor, target in dtypes.items():
        tensor.data = tensor.data.to(target)
        if tensor.grad is not None:
            tensor.grad = tensor.grad.to(target)
    within = _in_own(model)
    hooks: dict[nn.Module, Any] = {}
    if dtype != torch.float32:
        own = {module: _dtype_of(module) for module in model.modules() if module not in within}
        hooks = {module: (inputs, None) for module, inputs in own.items() if inputs is not None}
        hooks.update(dict.fromkeys(kept_modules - within, (torch.float32, dtype)))
    hooks[model] = (torch.float32, outputs or dtype) if model in kept_modules else (dtype, outputs)
    for module, (inputs, output_dtype) in hooks.items():
        _put_on_hooks(module, inputs, output_dtype)
    return model


@overload
def run_in(module: Runs, dtype: torch.dtype) -> Runs: ...


@overload
def run_in(module: torch.dtype) -> Callable[[Runs], Runs]: ...


def run_in(module: Any, dtype: Any = None) -> Any:
    """Make one module or function compute in ``dtype``, whatever the dtype of the model around it.

    Inputs are cast to ``dtype``, and so are parameters for each forward pass; stored parameters do
    not change. Autocast is off inside, and the result has ``dtype``. A submodule that :func:`cast`
    keeps in float32 is stored in float32, but computes in ``dtype``, unless it has a ``run_in`` of
    its own. A second call replaces the first. Does not synchronize.

    Parameters that a forward pre-hook computes are not cast: use
    ``torch.nn.utils.parametrizations.spectral_norm``, not ``torch.nn.utils.spectral_norm``.

    The arguments and the result of a function are cast, but no other tensor that the function uses.
    As a decorator (apex's ``float_function``)::

        @ampopt.run_in(torch.float32)
        def similarity(a, b):
            return (a * b).sum(-1)

    Args:
        module: the module, which is changed in place; or a function; or, alone, the ``dtype``.
        dtype: a floating-point dtype.

    Returns:
        The module; or a new function, which calls the function; or a decorator.

    Raises:
        TypeError: ``module`` is neither a module nor a function.
        ValueError: ``dtype`` is not a floating-point dtype; or a tensor of the module cannot be
            cast, because it is quantized, sparse or not initialized.
    """
    if isinstance(module, torch.dtype) and dtype is None:
        check_dtypes(dtype=module)
        return functools.partial(run_in, dtype=module)
    check_dtypes(dtype=dtype)
    if not isinstance(module, nn.Module):
        if isinstance(module, type) or not callable(module):
            what = "a class" if isinstance(module, type) else type(module).__name__
            raise TypeError(f"expected a torch.nn.Module or a function, got {what}")

        @functools.wraps(module)  # a function, so that it may become a method
        def function(*args: Any, **kwargs: Any) -> Any:
            return _call_in(dtype, module, args, kwargs)

        return function
    _plan(module, dtype, ())
    _take_off_hooks(module)
    _put_on_forward(module, dtype)
    return module


def run_kept_in_float32(model: nn.Module, keep: Collection[Any]) -> None:
    """Turn autocast off in the modules that match ``keep``, until the next :func:`cast`.

    A module with a ``run_in`` of its own keeps it.
    """
    for module in _matching(model, keep) - _in_own(model):
        _put_on_forward(module, torch.float32)
        module.__dict__["_ampopt_kept"] = True


def _put_on_forward(module: nn.Module, dtype: torch.dtype) -> None:
    """Make ``module`` run in ``dtype``, with the forward of the instance if it has one."""
    if _runs_in_own(module):
        _take_off_forward(module)
    own = vars(module).get("forward")
    module.__dict__["forward"] = partial(_forward_in, module, dtype, own)


def _take_off_forward(module: nn.Module) -> None:
    """Undo :func:`_put_on_forward`."""
    _, _, own = module.__dict__.pop("forward").args
    if own is not None:
        module.__dict__["forward"] = own


def _forward_in(
    module: nn.Module,
    dtype: torch.dtype,
    own: Callable[..., Any] | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The forward pass of ``module`` with tensors and inputs in ``dtype``; see :func:`run_in`.

    ``own`` is the forward of the instance, as hooks of Accelerate set it; ``None`` for its class's.
    """
    apart = {inner for inner in module.modules() if inner is not module and _runs_in_own(inner)}
    places = [place for place in _tensors(module, apart) if place[2].is_floating_point()]
    of_each = {tensor: tensor.to(dtype) for _, _, tensor in places}
    copies = {path: of_each[tensor] for path, _, tensor in places}  # tied ones stay tied
    forward = partial(type(module).forward, module) if own is None else own
    with with_tensors(module, copies):
        result = _call_in(dtype, forward, args, kwargs, (tensor for _, _, tensor in places))
    for path, owner, tensor in places:
        now = copies[path]  # what is in the module at the end of its forward
        if isinstance(tensor, nn.Parameter):
            continue
        if tensor.dtype == dtype or now.shape != tensor.shape:  # the module has replaced a buffer
            setattr(owner, path.rpartition(".")[2], now.to(tensor.dtype))
            continue
        # Copy back what the module wrote to a buffer, such as running statistics, and keep the full
        # precision of elements that it did not write.
        same = now == tensor.to(dtype)
        tensor.copy_(torch.where(same, tensor, now))
    return result


def _call_in(
    dtype: torch.dtype, function: Any, args: Any, kwargs: Any, tensors: Iterable[Tensor] = ()
) -> Any:
    """Call ``function``, which uses ``tensors``, with inputs and results in ``dtype``."""
    args, kwargs = _to((args, kwargs), dtype)
    leaves = (*pytree.tree_leaves((args, kwargs)), *tensors, torch.empty(0))
    device = next(leaf for leaf in leaves if isinstance(leaf, Tensor)).device.type
    with torch.autocast(device, enabled=False):
        return _to(function(*args, **kwargs), dtype)


def _runs_in_own(module: nn.Module) -> bool:
    """Whether ``run_in`` was applied to ``module``."""
    return getattr(vars(module).get("forward"), "func", None) is _forward_in


def _in_own(model: nn.Module) -> set[nn.Module]:
    """The modules of ``model`` that ``run_in`` was applied to, and all modules in them."""
    return {inner for outer in model.modules() if _runs_in_own(outer) for inner in outer.modules()}


def _tensors(model: nn.Module, but: Any = None) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Path, module and tensor of each parameter and buffer, except in the modules ``but``."""
    for prefix, module in model.named_modules(but):
        for named_tensors in (module.named_parameters, module.named_buffers):
            for path, tensor in named_tensors(prefix, recurse=False, remove_duplicate=False):
                yield path, module, tensor


def _dtype_of(module: nn.Module) -> torch.dtype | None:
    """The dtype of the floating-point parameters of ``module`` itself; ``None`` without any."""
    owners = [module]
    if parametrize.is_parametrized(module):
        owners.extend(module.parametrizations.children())  # type: ignore[union-attr, operator]
    own = (p for owner in owners for p in owner.parameters(recurse=False))
    return next((p.dtype for p in own if p.is_floating_point()), None)


def _to(tree: Any, dtype: torch.dtype) -> Any:
    """``tree`` with all floating-point tensors cast to ``dtype``."""
    return pytree.tree_map_only(Tensor, lambda t: t.to(dtype) if t.dtype in _FLOATS else t, tree)


# The hooks are partials of module-level functions, so that a model can be pickled and copied.


def _cast_inputs(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """A forward pre-hook that casts the inputs to ``dtype``."""
    if not kwargs and len(args) == 1 and isinstance(args[0], Tensor) and args[0].dtype == dtype:
        return None  # the usual case, a tensor that needs no cast, is fast
    return _to((args, kwargs), dtype)


def _cast_outputs(dtype: torch.dtype, module: nn.Module, args: Any, outputs: Any) -> Any:
    """A forward hook that casts the results to ``dtype``."""
    return _to(outputs, dtype)


def _put_on_hooks(module: nn.Module, inputs: torch.dtype, outputs: torch.dtype | None) -> None:
    """Make ``module`` cast its inputs and, unless ``outputs`` is ``None``, its results."""
    handles = [module.register_forward_pre_hook(partial(_cast_inputs, inputs), with_kwargs=True)]
    if outputs is not None:
        handles.append(module.register_forward_hook(partial(_cast_outputs, outputs)))
    module.__dict__["_ampopt_cast"] = handles


def _take_off_hooks(model: nn.Module) -> None:
    """Remove what an earlier :func:`cast` put on ``model`` and its submodules."""
    for module in model.modules():
        for handle in module.__dict__.pop("_ampopt_cast", ()):
            handle.remove()
        if module.__dict__.pop("_ampopt_kept", False) and _runs_in_own(module):
            _take_off_forward(module)


def as_tuple(name: str, values: Any) -> tuple[Any, ...]:
    """The argument ``name``, which is ``keep``, ``allow`` or ``deny``, as a tuple.

    Raises:
        TypeError: ``values`` is not a collection, or an element is of the wrong type.
    """
    kinds = (str, type, nn.Module) if name == "keep" else (str,)
    listed = isinstance(values, Collection) and not isinstance(values, (str, type, nn.Module))
    if not (listed and all(isinstance(one, kinds) for one in values)):
        what = "types, names and modules" if name == "keep" else "names of operators"
        raise TypeError(f"{name} must be a list or a tuple of {what}, got {values!r}")
    return tuple(values)


def check_dtypes(**dtypes: Any) -> None:
    """Refuse arguments that are not floating-point dtypes.

    Raises:
        ValueError: an argument is not one of float16, bfloat16, float32 and float64.
    """
    for name, dtype in dtypes.items():
        if dtype not in _FLOATS:
            raise ValueError(f"{name} must be one of {_FLOATS}, got {dtype!r}")


def _plan(model: nn.Module, dtype: torch.dtype, keep: Any) -> tuple[set[Any], dict[Tensor, Any]]:
    """The modules to keep, and a dtype for each tensor that can be cast."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    for name, module in model.named_modules():
        if ".quantized." in type(module).__module__:
            raise ValueError(
                f"{name or type(module).__name__} cannot be cast: it is quantized; cast the model "
                "before it is quantized"
            )
    kept_modules = _matching(model, keep)
    inside = {inner for outer in kept_modules for inner in outer.modules()}
    dtypes: dict[Tensor, torch.dtype] = {}
    for path, module, tensor in _tensors(model):
        if is_lazy(tensor) or tensor.is_quantized or tensor.layout != torch.strided:
            what = "not initialized" if is_lazy(tensor) else f"{tensor.layout}, {tensor.dtype}"
            raise ValueError(f"{path} cannot be cast: it is {what}")
        target = torch.float32 if module in inside else dtype
        if tensor.is_floating_point() and dtypes.setdefault(tensor, target) != target:
            raise ValueError(
                f"{path} is tied to a tensor that gets another dtype: keep both, or neither"
            )
    return kept_modules, dtypes


def _matching(model: nn.Module, keep: Collection[Any]) -> set[nn.Module]:
    """The modules that match ``keep``, without modules inside of others that match."""
    modules = dict(model.named_modules(remove_duplicate=False))
    kept_modules: set[nn.Module] = set()
    for one in as_tuple("keep", keep):
        if isinstance(one, type):
            matches = {module for module in modules.values() if isinstance(module, one)}
        elif isinstance(one, str):
            matches = {module for name, module in modules.items() if fnmatch.fnmatchcase(name, one)}
        else:
            matches = {one} & set(modules.values())
        if not matches and not isinstance(one, type):
            raise ValueError(f"keep: no module matches {one!r}; there are {list(modules)[1:]}")
        kept_modules |= matches
    return kept_modules - {
        inner for outer in kept_modules for inner in outer.modules() if inner is not outer
    }
