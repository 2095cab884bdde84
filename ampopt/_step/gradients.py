"""The gradients of an optimizer: which parameters have one, and the tensor with its values."""

import operator
from collections.abc import Callable, Container, Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampopt._step.sharding import dtensor
from ampopt._step.tensor_subclasses import inner_names
from ampopt_kernels.gradient_reports import Owner
from ampopt_kernels.step import reciprocal
from ampopt_kernels.tensors import real, was_freed

__all__ = [
    "DTYPES",
    "UNDERFLOWING",
    "ParamWithGrad",
    "check_gradient",
    "device_of",
    "grad_of",
    "named_params",
    "name_of",
    "offenders",
    "params_of",
    "params_with_grads",
    "present",
    "values_of",
]

grad_of: Any = operator.attrgetter("grad")
"""The gradient of a tensor: ``map`` takes half the time of a comprehension over hundreds."""

DTYPES = frozenset(
    {
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex32,
        torch.complex64,
        torch.complex128,
    }
)
"""The dtypes of parameters that can be stepped, and of their gradients."""

UNDERFLOWING = (torch.float16, torch.complex32)
"""Dtypes of gradients that cannot be unscaled in place: small values would become zero."""


def params_of(param_groups: Iterable[dict[str, Any]]) -> Iterator[Any]:
    """The parameters of all groups."""
    return chain.from_iterable(group["params"] for group in param_groups)


def present(param_groups: Iterable[dict[str, Any]]) -> list[tuple[int, Tensor]]:
    """``(group index, parameter)`` for every parameter that has a gradient."""
    return [
        (index, param)
        for index, group in enumerate(param_groups)
        for param in group["params"]
        if param.grad is not None
    ]


def device_of(param_groups: list[dict[str, Any]]) -> torch.device:
    """The device for decisions about these parameters; the CPU if there are no parameters.

    It is the device of the first parameter with a gradient, else of the first parameter.
    """
    first = None
    for group in param_groups:
        for param in group["params"]:
            if param.grad is not None:
                return param.device
            first = param if first is None else first
    return torch.device("cpu") if first is None else first.device


def name_of(param_groups: list[dict[str, Any]], param: Tensor) -> str:
    """The name of ``param`` in messages; see :func:`named_params`."""
    names = (name for _, candidate, name in named_params(param_groups) if candidate is param)
    return next(names, "unknown parameter")


def named_params(param_groups: Iterable[dict[str, Any]]) -> Iterator[tuple[int, Any, str]]:
    """The index of the group, the parameter and its name, for each parameter.

    The name is that of ``param_names``. Without one, it is made of group and position, which are
    also added to a name that an earlier parameter has, as in a second model.
    """
    taken = set()
    for index, group in enumerate(param_groups):
        names = group.get("param_names")
        for position, param in enumerate(group["params"]):
            if not names or names[position] in taken:
                place = f"group {index}, parameter {position}"
                yield index, param, f"{names[position]} ({place})" if names else place
            else:
                taken.add(names[position])
                yield index, param, names[position]


class ParamWithGrad(NamedTuple):
    """A tensor with a gradient, and the parameter it stands for.

    Attributes:
        group: index of the param group.
        tensor: the tensor that has the gradient: the parameter, or its master.
        owner: name and id of the parameter.
    """

    group: int
    tensor: Any
    owner: Owner


def params_with_grads(
    param_groups: Iterable[dict[str, Any]],
    *,
    absent: Container[int] = (),
) -> list[ParamWithGrad]:
    """Every parameter that has a gradient, with its name, in the order of :func:`present`.

    One that is in a group twice, which torch allows with a warning, is returned once.

    Args:
        param_groups: the param groups.
        absent: the ``id`` of each parameter to include even if it has no gradient.

    Raises:
        RuntimeError: a gradient is on another device than its parameter.
        ValueError: a gradient has another shape than its parameter.
        TypeError: a gradient or parameter has a dtype or layout that kernels do not support.
    """
    with_grads: dict[int, ParamWithGrad] = {}
    for index, param, name in named_params(param_groups):
        if id(param) in with_grads or (param.grad is None and id(param) not in absent):
            continue
        if param.grad is not None:
            check_gradient(param, name)
        with_grads[id(param)] = ParamWithGrad(index, param, Owner(name, id(param)))
    return list(with_grads.values())


def check_gradient(param: Any, name: str) -> None:
    """Raise if the dtype, layout, shape or device of the gradient does not suit ``param``.

    Args:
        param: a parameter that has a gradient.
        name: its name in messages.

    Raises:
        RuntimeError, TypeError, ValueError: see :func:`params_with_grads`.
    """
    grad = param.grad
    if grad.dtype not in DTYPES or param.dtype not in DTYPES:
        of_grad = grad.dtype not in DTYPES
        what = f"the gradient of {name} is {grad.dtype}" if of_grad else f"{name} is {param.dtype}"
        raise TypeError(
            f"{what}; float16, bfloat16, float32, float64 and complex can be optimized: convert it"
        )
    if grad.is_complex() != param.is_complex():
        raise TypeError(
            f"the gradient of {name} is {grad.dtype}, the parameter {param.dtype}: convert it"
        )
    if grad.layout not in (torch.strided, torch.sparse_coo):
        raise TypeError(
            f"the gradient of {name} is {grad.layout}; dense and torch.sparse_coo gradients can be "
            "optimized: convert it"
        )
    if type(grad) is not Tensor and inner_names(grad) and not dtensor.is_awaited(grad):
        raise TypeError(
            f"the gradient of {name} is a {type(grad).__name__}, whose values are in other "
            "tensors: convert it to an ordinary tensor"
        )
    if grad.shape != param.shape:
        raise ValueError(
            f"the gradient of {name} has shape {tuple(grad.shape)}, the parameter "
            f"{tuple(param.shape)}: call zero_grad() and backward() after resizing a parameter"
        )
    if grad.device != param.device:
        raise RuntimeError(
            f"the gradient of {name} is on {grad.device}, the parameter on {param.device}: move "
            "the model before making the optimizer, and call zero_grad() after a move"
        )
    if type(grad) is Tensor and grad.layout is torch.strided and was_freed(grad):
        raise RuntimeError(
            f"the memory of the gradient of {name} was freed (by untyped_storage().resize_()), so "
            "that its values are lost: call zero_grad() and backward(), or set p.grad = None to "
            "leave the parameter out of this step"
        )


def values_of(param: Tensor) -> Tensor:
    """The values of ``param.grad`` as a real, strided tensor; of a ``DTensor``, the local shard.

    If no memory holds the values, ``param.grad`` is replaced: a sparse gradient is coalesced, since
    a sum of duplicates may overflow; a lazy conjugate or negative, which autograd leaves on complex
    parameters, is resolved; a ``DTensor`` is redistributed to the placements of the parameter; the
    result of an asynchronous collective is waited for, on the device.
    """
    grad = param.grad
    assert grad is not None
    if distributed := dtensor.is_dtensor(grad):
        dtensor.redistribute_gradient(param)
        grad = param.grad
        assert grad is not None
    elif dtensor.is_awaited(grad):
        grad = param.grad = dtensor.waited_for(grad)
    if grad.is_sparse:
        grad = param.grad = grad.coalesce()
        return real(grad.values())
    if grad.is_conj() or grad.is_neg():
        grad = param.grad = grad.resolve_conj().resolve_neg()
    return real(dtensor.local(grad) if distributed else grad)


def offenders(
    param_groups: list[dict[str, Any]],
    scale: Tensor | None,
    holder: Callable[[int, Tensor], Tensor],
) -> Iterator[str]:
    """Names of the parameters whose gradients are not finite once unscaled. Synchronizes.

    Args:
        param_groups: the param groups of the optimizer.
        scale: the factor that the gradients still have; ``None`` if they were unscaled in place.
        holder: ``holder(group index, param)`` is the tensor whose ``grad`` to test: the parameter
            or its master.
    """
    inverse = 1.0 if scale is None else reciprocal(float(scale))
    for index, param in present(param_groups):
        tensor = holder(index, param)
        if tensor.grad is None:
            continue
        values = values_of(tensor)
        dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
        unscaled_values = values.to(dtype) * torch.tensor(inverse, dtype=dtype, device="cpu")
        if not bool(unscaled_values.isfinite().all()):
            yield name_of(param_groups, param)
