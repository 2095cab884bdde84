"""The decision of a step by torch operations: skip or not, clip coefficient, next scale.

The eager backend and both CPU backends decide by it. Where the host may read tensors at no cost
(on the CPU), the decision is computed on Python numbers, else on 0-d tensors of the device.
"""

from typing import Any

import torch
from torch import Tensor

from ampopt_kernels import torch_language
from ampopt_kernels.decision import Coefficients, Decision, Partials, Request
from ampopt_kernels.policy import next_scale
from ampopt_kernels.step import Backend
from ampopt_kernels.tensors import widest
from ampopt_kernels.work import Work

__all__ = ["as_tensor", "decide", "reciprocal", "widened"]

_next_scale = torch_language.bind(next_scale)


def decide(self: Backend, work: Work, request: Request, partials: Partials | None) -> Decision:
    """The method :meth:`Backend.control` of backends that run torch operations."""
    device, on_host = work.device, self.host_sees
    read = Tensor.item if on_host else widened
    make: Any = torch.tensor if on_host else as_tensor

    found: Any = 0.0
    if request.check and partials is not None:
        flags = partials.flags
        if isinstance(flags, list):
            found = float(any(flags))
        elif flags.numel():
            found = read(flags.max())
    if request.found_inf is not None:
        flag = read(request.found_inf)
        found = torch_language.where(flag > 0, flag, found)
    inverse: Any = 1.0
    if request.scale is not None:
        value = read(request.scale)
        inverse = reciprocal(value)
        if request.check:
            usable = (value > 0) & (value < float("inf"))
            found = torch_language.where(usable, found, 1.0)
    if request.write:  # detect has stored the gradients unscaled
        inverse = 1.0
    skip = found if request.drop else 0.0

    norm, coefficient = None, 1.0
    if request.max_norm is not None and partials is not None:
        assert partials.squares is not None
        norm = partials.squares.sum().sqrt()
        if request.max_norm < float("inf"):  # an infinite limit only measures the norm
            coefficient = request.max_norm / (read(norm) + 1e-6)
            coefficient = torch_language.where(coefficient > 1.0, 1.0, coefficient)  # keeps NaN
        norm = norm.to(torch.float64 if work.float64 else torch.float32)

    scale = counters = None
    if request.policy is not None:
        assert request.scale is not None and request.counters is not None
        read_all = Tensor.tolist if on_host else _unbound  # one copy for both counters
        new = _next_scale(read(request.scale), *read_all(request.counters), found, request.policy)
        scale = make(new[0], dtype=request.scale.dtype, device=device)
        if request.scale.ndim:
            scale = scale.reshape(request.scale.shape)
        counters = make(new[1:], dtype=torch.int32, device=device)

    coefficients: Any = Coefficients(skip, inverse, coefficient)
    if not on_host:
        coefficients = as_tensor(coefficients, widest(device), device)
    return Decision(
        found_inf=make(found, dtype=torch.float32, device=device),
        coefficients=coefficients,
        norm=norm,
        scale=scale,
        counters=counters,
        found=() if partials is None else partials.found,
        scaled_by=request.scale,
        earlier_decision=request.earlier_decision,
    )


def reciprocal(value: Any) -> Any:
    """1 / ``value``, of a scale that is a number or a tensor; infinity for 0."""
    if isinstance(value, Tensor):
        return value.reciprocal()
    return 1.0 / value if value else float("inf")


def widened(tensor: Tensor) -> Tensor:
    """``tensor``, of one element, as a 0-d tensor of the widest dtype of its device."""
    return tensor.detach().reshape(()).to(widest(tensor.device))


def _unbound(tensor: Tensor) -> tuple[Tensor, ...]:
    return tensor.to(widest(tensor.device)).unbind()


def as_tensor(value: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A new tensor on ``device`` of numbers or of 0-d tensors that are on it already."""
    if isinstance(value, Tensor):
        return value.to(dtype=dtype, copy=True)
    if isinstance(value, (list, tuple)) and any(isinstance(v, Tensor) for v in value):
        return torch.stack([as_tensor(v, dtype, device) for v in value])
    return torch.tensor(value, dtype=dtype, device=device)
