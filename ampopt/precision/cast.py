"""Modules in a dtype: a model with its norms kept in float32, and one that computes in its own."""

import fnmatch
import functools
from collections.abc import Collection, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ampopt._step.torch_private import NormBase, pytree, with_tensors

__all__ = ["NORMS", "cast", "run_in"]

NORMS: tuple[type[nn.Module], ...] = (
    NormBase,  # BatchNorm*, SyncBatchNorm and InstanceNorm*
    nn.LayerNorm,
    nn.GroupNorm,
    nn.LocalResponseNorm,
    nn.RMSNorm,
)
"""The normalizations of torch, by type: what ``cast`` keeps in float32 unless told otherwise."""

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_CAST, _RUN_IN = "_ampopt_cast", "_ampopt_run_in"  # where a module has the handles of our hooks
_M = TypeVar("_M", bound=nn.Module)


def cast(
    model: _M,
    dtype: torch.dtype,
    keep: Collection[Any] = NORMS,
    outputs: torch.dtype | None = None,
) -> _M:
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
        TypeError: ``model`` is no module, or an element of ``keep`` is none of those.
        ValueError: a kept name or module is not in the model, or a tensor cannot be cast: it is
            quantized, sparse or not initialized, or tied to one that stays in float32. Nothing has
            changed then.

    Does not synchronize.
    """
    _check(model, dtype)
    kept = _matching(model, keep)
    wanted = _dtypes(model, dtype, kept)
    for module in model.modules():
        _take_off(module, _CAST)
    for tensor, its_dtype in wanted.items():
        tensor.data = tensor.data.to(its_dtype)
        if tensor.grad is not None:
            tensor.grad = tensor.grad.to(its_dtype)
    own = {m for outer in model.modules() if _RUN_IN in vars(outer) for m in outer.modules()}
    for module in kept:
        if module not in own:
            _put_on(module, _CAST, torch.float32, dtype)
    _put_on(model, _CAST, dtype, outputs)
    return model


def run_in(module: _M, dtype: torch.dtype) -> _M:
    """Have one module compute in a dtype of its own, whatever is around it.

    Its inputs are cast, and its parameters where they are used; they stay what they are. Autocast
    is off inside, and the result has that dtype. What :func:`cast` keeps in float32 in there is
    stored so, but computes as the rest; a module inside may have a dtype of its own. MindSpore
    calls this ``to_float``, Paddle a black variable name, apex ``float_function``. Saying it again
    replaces what was said before.

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
    _check(module, dtype)
    _dtypes(module, dtype)
    for inner in module.modules():
        _take_off(inner, _CAST)
    _take_off(module, _RUN_IN)
    _put_on(module, _RUN_IN, dtype, dtype)
    module.__dict__["forward"] = functools.partial(_forward_in, module, dtype)
    return module


def _forward_in(module: nn.Module, dtype: torch.dtype, *args: Any, **kwargs: Any) -> Any:
    own = dict(_own_tensors(module))
    copies = {name: tensor.to(dtype) for name, tensor in own.items()}
    leaves = (*pytree.tree_leaves((args, kwargs)), *own.values(), torch.empty(0))
    device = next(leaf for leaf in leaves if isinstance(leaf, Tensor)).device.type
    with torch.autocast(device, enabled=False), with_tensors(module, copies):
        result = type(module).forward(module, *args, **kwargs)
    for name, tensor in own.items():
        if tensor.dtype != dtype and not isinstance(tensor, nn.Parameter):
            # What was written to a buffer, as to running statistics, is kept.
            same = copies[name] == tensor.to(dtype)
            tensor.copy_(torch.where(same, tensor, copies[name]))
    return result


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Its parameters and buffers, not those of modules in it, under every name that they have."""
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    yield from module.named_buffers(recurse=False, remove_duplicate=False)


def _own_tensors(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Floating-point parameters and buffers, but for those of modules with a dtype of their own."""
    for name, tensor in _tensors_of(module):
        if tensor.is_floating_point():
            yield prefix + name, tensor
    for name, child in module.named_children():
        if _RUN_IN not in vars(child):
            yield from _own_tensors(child, f"{prefix}{name}.")


# Partials of functions of the module, as hooks have to be pickled and copied with the model.


def _cast_inputs(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> Any:
    return _to(args, dtype), _to(kwargs, dtype)


def _cast_outputs(dtype: torch.dtype, module: nn.Module, args: Any, outputs: Any) -> Any:
    return _to(outputs, dtype)


def _to(tree: Any, dtype: torch.dtype) -> Any:
    return pytree.tree_map_only(Tensor, lambda t: t.to(dtype) if t.dtype in FLOATS else t, tree)


def _put_on(module: nn.Module, name: str, inputs: torch.dtype, outputs: torch.dtype | None) -> None:
    before = functools.partial(_cast_inputs, inputs)
    handles = [module.register_forward_pre_hook(before, with_kwargs=True)]
    if outputs is not None:
        handles.append(module.register_forward_hook(functools.partial(_cast_outputs, outputs)))
    module.__dict__[name] = [*module.__dict__.get(name, ()), *handles]


def _take_off(module: nn.Module, name: str) -> None:
    for handle in module.__dict__.pop(name, ()):
        handle.remove()


def _check(module: Any, dtype: Any) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(module).__name__}")
    if dtype not in FLOATS:
        raise ValueError(f"dtype must be one of {FLOATS}, got {dtype!r}")


def _matching(model: nn.Module, keep: Collection[Any]) -> list[nn.Module]:
    """The modules to keep, without those inside of others."""
    named = dict(model.named_modules())
    kept: set[nn.Module] = set()
    for one in keep:
        if isinstance(one, type):
            matches = {m for m in named.values() if isinstance(m, one)}
        elif isinstance(one, str):
            matches = {m for name, m in named.items() if fnmatch.fnmatchcase(name, one)}
        elif isinstance(one, nn.Module):
            matches = {one} & set(named.values())
        else:
            raise TypeError(f"keep takes types, names and modules, got {one!r}")
        if not matches and not isinstance(one, type):
            raise ValueError(f"keep: no module matches {one!r}; there are {list(named)[1:]}")
        kept |= matches
    within = {m for outer in kept for m in outer.modules() if m is not outer}
    return [m for m in named.values() if m in kept - within]


def _dtypes(
    model: nn.Module, dtype: torch.dtype, kept: Collection[nn.Module] = ()
) -> dict[Tensor, torch.dtype]:
    """Each tensor of the model that can be cast, with the dtype that it gets."""
    inside = {m for outer in kept for m in outer.modules()}
    wanted: dict[Tensor, torch.dtype] = {}
    for prefix, module in model.named_modules():
        if ".quantized." in type(module).__module__:
            raise ValueError(f"{prefix or type(module).__name__} cannot be cast: it is quantized")
        for name, tensor in _tensors_of(module):
            path = f"{prefix}.{name}".lstrip(".")
            if is_lazy(tensor):
                raise ValueError(f"{path} cannot be cast: it is not initialized")
            if tensor.is_quantized or tensor.layout != torch.strided:
                raise ValueError(f"{path} cannot be cast: {tensor.layout}, {tensor.dtype}")
            its = torch.float32 if module in inside else dtype
            if tensor.is_floating_point() and wanted.setdefault(tensor, its) != its:
                raise ValueError(f"{path} is tied to a tensor that keep treats otherwise")
    return wanted
