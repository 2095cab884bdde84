"""Every rule by Triton, compared with the same rule by torch operations on the same device."""

from typing import Any

import torch
from torch import Tensor

import ampopt
from evidence.fidelity import optimizers
from evidence.first_hour.record import PartRecord

__all__ = ["RULES", "run"]

RULES = tuple(optimizers())
_STORAGE: tuple[tuple[torch.dtype, dict[str, Any]], ...] = (
    (torch.float32, {}),
    (torch.bfloat16, {}),
    (torch.bfloat16, {"master_weights": True}),
    (torch.float16, {"master_weights": True}),
    (torch.float64, {}),
    (torch.float32, {"state_bits": 8}),
    (torch.bfloat16, {"master_weights": True, "state_bits": 16}),
    (torch.bfloat16, {"master_weights": True, "master_bits": 24, "state_bits": 8}),
    (torch.float16, {"master_weights": True, "master_bits": 24}),
)
_SIZES = (1, 3, 1000, 1025, 40000)
_LIMITS = {torch.float32: 1e-5, torch.float64: 1e-12}
"""Limits of the relative difference, by dtype; 0.01 in 16 bits, where one rounding is 0.004, and
with small states, where one rounding is 0.05."""


def run(record: PartRecord, device: torch.device, rules: tuple[str, ...] = RULES) -> None:
    """Take four clipped steps with each rule and storage; the third of them overflows."""
    for name in rules:
        for dtype, options in _STORAGE:
            limit = 1e-2 if "state_bits" in options else _LIMITS.get(dtype, 1e-2)
            for shift in (0, 1):  # offset in elements; 1 makes no address aligned
                storage = [str(dtype)[6:], *(f"{key}={value}" for key, value in options.items())]
                what = ", ".join([name, *storage]) + ", shifted" * shift
                with record.trying(what):
                    ends = [_train(name, b, dtype, options, shift, device) for b in _BACKENDS]
                    worst = max(map(_difference, *(params for params, _ in ends)))
                    same = worst <= limit and ends[0][1] == ends[1][1]
                    detail = {"difference": worst, "scales": [end[1] for end in ends]}
                    record.check(what, same, detail)


_BACKENDS = ("triton", "eager")


def _train(
    name: str,
    backend: str,
    dtype: torch.dtype,
    options: dict[str, Any],
    shift: int,
    device: torch.device,
) -> tuple[list[Tensor], float]:
    """Parameters and loss scale after training; NaN if the skipped step changed a parameter."""
    ampopt.set_backend(backend)
    torch.manual_seed(0)  # small states and 24-bit masters are rounded by chance
    generator = torch.Generator(device).manual_seed(0)

    def draw(n: int) -> Tensor:
        return torch.randn(n + shift, device=device, generator=generator)

    params = [torch.nn.Parameter(draw(n).to(dtype)[shift:]) for n in _SIZES]
    for p, n in zip(params, _SIZES, strict=True):
        p.grad = draw(n).mul_(64).to(dtype)[shift:]
    momentum = {"momentum": 0.9} if name == "SGD" else {}
    optimizer = getattr(ampopt, name)(params, **options, **momentum)
    scale: Any = ampopt.DynamicLossScale(init_scale=64.0, growth_interval=2)
    for number in range(4):
        grad: Any = params[1].grad
        old_grad, before = grad.clone(), [p.detach().clone() for p in params]
        if number == 2:
            grad[1] = float("inf")
        result = optimizer.unscale_and_step(grads_scaled_by=scale, max_norm=1.0)
        scale = result.scale
        if number == 2:
            same = all(torch.equal(a, b) for a, b in zip(params, before, strict=True))
            if not (same and result.skipped):
                return [torch.full_like(p, float("nan")) for p in params], scale.item()
        grad.copy_(old_grad)
    return [p.detach() for p in params], scale.item()


def _difference(a: Tensor, b: Tensor) -> float:
    """The largest relative difference of two tensors; inf if one of them has NaN."""
    a, b = a.double(), b.double()
    worst = ((a - b).abs() / (b.abs() + 1e-3)).max().item()
    return worst if worst == worst else float("inf")
