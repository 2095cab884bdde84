"""The gradients of an optimizer as rows of work, checked before anything is touched."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ampopt._step import dtensor, ranks
from ampopt._step.torch_private import overlaps_itself
from ampopt_kernels.found import Owner
from ampopt_kernels.step import Row
from ampopt_kernels.tensors import dense_like, real

__all__ = [
    "UNDERFLOWING",
    "Staged",
    "check",
    "name_of",
    "offenders",
    "owners",
    "present",
    "rows",
    "values_of",
    "with_groups",
]

_DTYPES = frozenset(
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

UNDERFLOWING = (torch.float16, torch.complex32)
"""Dtypes of gradients that cannot be unscaled in place: small ones would become zero."""


def present(param_groups: Iterable[dict[str, Any]]) -> list[tuple[int, Tensor]]:
    """``(group, parameter)`` for every parameter that has a gradient."""
    return [
        (index, param)
        for index, group in enumerate(param_groups)
        for param in group["params"]
        if param.grad is not None
    ]


def with_groups(
    param_groups: Iterable[dict[str, Any]],
) -> list[tuple[dict[str, Any], Tensor, Tensor]]:
    """``(group, parameter, gradient)`` for every parameter that has one."""
    return [
        (group, param, param.grad)
        for group in param_groups
        for param in group["params"]
        if param.grad is not None
    ]


def name_of(param_groups: list[dict[str, Any]], param: Tensor) -> str:
    """How messages call ``param``: its name if the optimizer was given names, else its place."""
    for index, group in enumerate(param_groups):
        for position, candidate in enumerate(group["params"]):
            if candidate is param:
                return _name(group.get("param_names"), index, position)
    return "unknown parameter"


def owners(param_groups: Iterable[dict[str, Any]]) -> list[Owner]:
    """Whose each gradient is, in the order of :func:`present`."""
    return [
        Owner(_name(names, index, position), id(param))
        for index, group in enumerate(param_groups)
        for names in (group.get("param_names"),)
        for position, param in enumerate(group["params"])
        if param.grad is not None
    ]


def _name(names: Any, group: int, position: int) -> str:
    return names[position] if names else f"group {group}, parameter {position}"


def check(param_groups: list[dict[str, Any]]) -> None:
    """Refuse gradients that no backend can take, before anything has changed.

    Raises:
        RuntimeError: a gradient is on another device than its parameter.
        TypeError: a gradient or parameter is of a dtype or layout that no kernel takes.
    """
    for _, param in present(param_groups):
        grad = param.grad
        assert grad is not None
        for tensor, what in ((grad, "the gradient of "), (param, "")):
            if tensor.dtype not in _DTYPES:
                raise TypeError(
                    f"{what}{name_of(param_groups, param)} is {tensor.dtype}; float16, bfloat16, "
                    "float32, float64 and complex can be optimized: convert it"
                )
        if grad.layout not in (torch.strided, torch.sparse_coo):
            raise TypeError(
                f"the gradient of {name_of(param_groups, param)} is {grad.layout}; dense and "
                "torch.sparse_coo gradients can be optimized: convert it"
            )
        if grad.device != param.device:
            raise RuntimeError(
                f"the gradient of {name_of(param_groups, param)} is on {grad.device}, the "
                f"parameter on {param.device}: move the model before making the optimizer, and "
                "call zero_grad() after a move"
            )


def values_of(param: Tensor) -> Tensor:
    """The gradient of ``param`` as the tensor that holds its values, real and strided.

    Where memory does not hold the values, ``param.grad`` is replaced by one that does: a sparse
    gradient is coalesced, as duplicates may overflow where they are summed, and a lazy conjugate
    or negative, such as autograd leaves on complex parameters, is carried out. Of a gradient that
    is spread over ranks, these are the values that are here, placed as the parameter is.
    """
    dtensor.settle(param)
    grad = param.grad
    assert grad is not None
    if grad.is_sparse:
        if not grad.is_coalesced():
            grad = param.grad = grad.coalesce()
        return real(grad.detach().values())
    if grad.is_conj() or grad.is_neg():
        grad = param.grad = grad.resolve_conj().resolve_neg()
    return real(dtensor.local(grad).detach())


class Staged:
    """Dense copies of tensors that no flat kernel can address, and the way back.

    Use :meth:`dense` for each tensor of a row, run the work, then :meth:`store`.
    """

    def __init__(self) -> None:
        """Start with nothing staged."""
        self.copies: list[tuple[Tensor, Tensor]] = []

    def dense(self, tensor: Tensor, like: Tensor, *, written: bool) -> Tensor:
        """``tensor`` laid out as ``like``; itself where it already is."""
        copy = dense_like(tensor, like)
        if written and copy is not tensor:
            self.copies.append((tensor, copy))
        return copy

    def store(self) -> None:
        """Copy what was written back to where it belongs."""
        for original, copy in self.copies:
            original.copy_(copy)


def offenders(
    param_groups: list[dict[str, Any]],
    scale: Tensor | None,
    holder: Callable[[dict[str, Any], Tensor], Tensor],
) -> Iterator[str]:
    """Names of the parameters whose gradients are not finite once unscaled. Synchronizes.

    Args:
        param_groups: of the optimizer.
        scale: what the gradients still carry; ``None`` if they were unscaled in place.
        holder: of a group and a parameter: whose ``grad`` that is, the parameter's or its master's.
    """
    inverse = 1.0 if scale is None else 1.0 / float(scale)
    for index, param in present(param_groups):
        held = holder(param_groups[index], param)
        if held.grad is None:
            continue
        values = values_of(held)
        dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
        unscaled = values.to(dtype) * torch.tensor(inverse, dtype=dtype)
        if not bool(unscaled.isfinite().all()):
            yield name_of(param_groups, param)


def rows(
    holders: Iterable[tuple[int, Tensor]],
    staged: Staged,
    agreement: ranks.Agreement | None,
    whose: Iterable[Owner],
    *,
    written: bool,
) -> tuple[list[Row], list[Tensor]]:
    """A row for the gradient of each ``(group, tensor)``, read, or ``written`` back unscaled.

    Returns:
        The rows, and the gradients as kernels see them.
    """
    result, grads = [], []
    for (index, param), owner in zip(holders, whose, strict=True):
        values = values_of(param)
        if written and overlaps_itself(values):
            # An expanded gradient has one element in several places: it cannot be written.
            param.grad = param.grad.clone(memory_format=torch.contiguous_format)  # type: ignore[union-attr]
            values = values_of(param)
        grads.append(staged.dense(values, values, written=written))
        counted = agreement is None or agreement.counts(param, index)
        result.append(Row(values.dtype, group=index, counted=counted, owner=owner))
    return result, grads
