"""Modules in a dtype: a model with its norms kept in float32, and one that computes in its own."""

import fnmatch
from collections.abc import Collection, Iterator
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ampopt._step.torch_private import NormBase, pytree, with_tensors

__all__ = ["NORMS", "Model", "as_tuple", "cast", "check_dtypes", "run_in"]

# NormBase stands for BatchNorm*, SyncBatchNorm and InstanceNorm*.
NORMS = (NormBase, nn.LayerNorm, nn.GroupNorm, nn.LocalResponseNorm, nn.RMSNorm)
"""The normalizations of torch, by type: what ``cast`` keeps in float32 unless told otherwise."""

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
Model = TypeVar("Model", bound=nn.Module)


def cast(
    model: Model,
    dtype: torch.dtype,
    keep: Collection[Any] = NORMS,
    outputs: torch.dtype | None = None,
) -> Model:
    """Have a model's parameters, buffers and inputs in ``dtype``, and some modules in float32.

    The model is changed in place: parameters stay the same objects, state-dict keys and tied
    weights what they are, and copies, pickles and compiled versions behave as it does. Casting
    again, to the same or to another dtype, replaces what was said before.

    Forward hooks cast what modules are given and what they return, so a kept module has to be
    called: one whose parent uses its weights directly, as the ``out_proj`` of
    ``nn.MultiheadAttention``, cannot be kept alone. ``fully_shard`` wants one dtype in a group:
    apply it to the kept modules first.

    Args:
        model: any module.
        dtype: ``torch.float16`` or ``torch.bfloat16``; ``torch.float32`` undoes.
        keep: types of modules, names with wildcards as in ``model.named_modules()``, or modules.
            They stay in float32 with all that is in them, and are fed float32; what they return
            goes back to ``dtype``.
        outputs: the dtype of what the model returns; ``None`` for what comes out.

    Returns:
        The model.

    Raises:
        TypeError: ``model`` is no module, or ``keep`` no list of those.
        ValueError: a kept name or module is not in the model, a dtype is none, or a tensor cannot
            be cast: it is quantized, sparse or not initialized, or tied to one that stays in
            float32. Nothing has changed then.

    Does not synchronize.
    """
    check_dtypes(dtype=dtype, outputs=dtype if outputs is None else outputs)
    kept, wanted = _plan(model, dtype, keep)
    _take_off_hooks(model)
    for tensor, its_dtype in wanted.items():
        tensor.data = tensor.data.to(its_dtype)
        if tensor.grad is not None:
            tensor.grad = tensor.grad.to(its_dtype)
    within = {inner for own in model.modules() if _runs_in_own(own) for inner in own.modules()}
    hooks: dict[nn.Module, Any] = dict.fromkeys(kept - within, (torch.float32, dtype))
    hooks[model] = (torch.float32, outputs or dtype) if model in hooks else (dtype, outputs)
    for module, (inputs, returned) in hooks.items():
        _put_on_hooks(module, inputs, returned)
    return model


def run_in(module: Model, dtype: torch.dtype) -> Model:
    """Have one module compute in a dtype of its own, whatever is around it.

    Its inputs are cast, and its parameters where they are used; they stay what they are. Autocast
    is off inside, and the result has that dtype. What :func:`cast` keeps in float32 in there is
    stored so, but computes as the rest; a module inside may have a dtype of its own. MindSpore
    calls this ``to_float``, Paddle a black variable name, apex ``float_function``. Saying it again
    replaces what was said before.

    What a hook makes of parameters before the module runs is not cast: use
    ``torch.nn.utils.parametrizations.spectral_norm``, not ``torch.nn.utils.spectral_norm``.

    Args:
        module: any module; it is changed in place.
        dtype: a floating-point dtype.

    Returns:
        The module.

    Raises:
        TypeError: ``module`` is no module.
        ValueError: a tensor of it cannot be cast: it is quantized, sparse or not initialized.

    Does not synchronize.
    """
    check_dtypes(dtype=dtype)
    _plan(module, dtype, ())
    _take_off_hooks(module)
    module.__dict__["forward"] = partial(_forward_in, module, dtype)
    return module


def _forward_in(module: nn.Module, dtype: torch.dtype, *args: Any, **kwargs: Any) -> Any:
    apart = {inner for inner in module.modules() if inner is not module and _runs_in_own(inner)}
    own = {path: t for path, _, t in _tensors(module, apart) if t.is_floating_point()}
    copies = {name: tensor.to(dtype) for name, tensor in own.items()}
    args, kwargs = _to((args, kwargs), dtype)
    leaves = (*pytree.tree_leaves((args, kwargs)), *own.values(), torch.empty(0))
    device = next(leaf for leaf in leaves if isinstance(leaf, Tensor)).device.type
    with torch.autocast(device, enabled=False), with_tensors(module, copies):
        result = type(module).forward(module, *args, **kwargs)
    for name, tensor in own.items():
        if tensor.dtype != dtype and not isinstance(tensor, nn.Parameter):
            # What was written to a buffer, as to running statistics, is kept.
            same = copies[name] == tensor.to(dtype)
            tensor.copy_(torch.where(same, tensor, copies[name]))
    return _to(result, dtype)


def _runs_in_own(module: nn.Module) -> bool:
    """Whether it computes in a dtype of its own."""
    return getattr(vars(module).get("forward"), "func", None) is _forward_in


def _tensors(model: nn.Module, but: Any = None) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Parameters and buffers, under every name, with their modules, but for those in ``but``."""
    for prefix, module in model.named_modules(but, remove_duplicate=False):
        for named in (module.named_parameters, module.named_buffers):
            for path, tensor in named(prefix, recurse=False, remove_duplicate=False):
                yield path, module, tensor


def _to(tree: Any, dtype: torch.dtype) -> Any:
    return pytree.tree_map_only(Tensor, lambda t: t.to(dtype) if t.dtype in _FLOATS else t, tree)


# Partials of functions of the module, as hooks have to be pickled and copied with the model.


def _cast_inputs(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> Any:
    return _to((args, kwargs), dtype)


def _cast_outputs(dtype: torch.dtype, module: nn.Module, args: Any, outputs: Any) -> Any:
    return _to(outputs, dtype)


def _put_on_hooks(module: nn.Module, inputs: torch.dtype, outputs: torch.dtype | None) -> None:
    handles = [module.register_forward_pre_hook(partial(_cast_inputs, inputs), with_kwargs=True)]
    if outputs is not None:
        handles.append(module.register_forward_hook(partial(_cast_outputs, outputs)))
    module.__dict__["_ampopt_cast"] = handles


def _take_off_hooks(model: nn.Module) -> None:
    for module in model.modules():
        for handle in module.__dict__.pop("_ampopt_cast", ()):
            handle.remove()


def as_tuple(name: str, values: Any) -> tuple[Any, ...]:
    """The argument ``keep``, ``allow`` or ``deny``, of which a caller may give any collection."""
    kinds = (str, type, nn.Module) if name == "keep" else (str,)
    listed = isinstance(values, Collection) and not isinstance(values, (str, type, nn.Module))
    if not (listed and all(isinstance(one, kinds) for one in values)):
        what = "types, names and modules" if name == "keep" else "names of operators"
        raise TypeError(f"{name} must be a list or a tuple of {what}, got {values!r}")
    return tuple(values)


def check_dtypes(**dtypes: Any) -> None:
    """Refuse arguments that are no floating-point dtypes."""
    for name, dtype in dtypes.items():
        if dtype not in _FLOATS:
            raise ValueError(f"{name} must be one of {_FLOATS}, got {dtype!r}")


def _plan(model: nn.Module, dtype: torch.dtype, keep: Any) -> tuple[set[Any], dict[Tensor, Any]]:
    """The modules to keep, and each tensor that can be cast, with the dtype that it gets."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    for name, module in model.named_modules():
        if ".quantized." in type(module).__module__:
            raise ValueError(f"{name or type(module).__name__} cannot be cast: it is quantized")
    kept = _matching(model, keep)
    inside = {inner for outer in kept for inner in outer.modules()}
    wanted: dict[Tensor, torch.dtype] = {}
    for path, module, tensor in _tensors(model):
        if is_lazy(tensor) or tensor.is_quantized or tensor.layout != torch.strided:
            what = "not initialized" if is_lazy(tensor) else f"{tensor.layout}, {tensor.dtype}"
            raise ValueError(f"{path} cannot be cast: it is {what}")
        its = torch.float32 if module in inside else dtype
        if tensor.is_floating_point() and wanted.setdefault(tensor, its) != its:
            raise ValueError(f"{path} is tied to a tensor that keep treats otherwise")
    return kept, wanted


def _matching(model: nn.Module, keep: Collection[Any]) -> set[nn.Module]:
    """The modules that match, without those inside of others."""
    named = dict(model.named_modules(remove_duplicate=False))
    kept: set[nn.Module] = set()
    for one in as_tuple("keep", keep):
        if isinstance(one, type):
            matches = {module for module in named.values() if isinstance(module, one)}
        elif isinstance(one, str):
            matches = {module for name, module in named.items() if fnmatch.fnmatchcase(name, one)}
        else:
            matches = {one} & set(named.values())
        if not matches and not isinstance(one, type):
            raise ValueError(f"keep: no module matches {one!r}; there are {list(named)[1:]}")
        kept |= matches
    return kept - {inner for outer in kept for inner in outer.modules() if inner is not outer}
