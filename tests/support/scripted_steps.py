"""Fixed parameters and gradients, steps with them, and skipped steps."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import Parameter

__all__ = ["assert_a_skip_changes_no_bit", "gradient", "params_of", "step"]


def params_of(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[Parameter]:
    return [
        Parameter(torch.linspace(-1, 2, torch.Size(shape).numel()).to(dtype).reshape(shape))
        for shape in shapes
    ]


def gradient(p: torch.Tensor, step: int) -> torch.Tensor:
    return torch.linspace(-2 + step, 1, p.numel(), dtype=torch.float64).reshape(p.shape) + 0.25


def step(optimizer: Any, params: list[Any], i: int, bad: float = 0.0, **options: Any) -> None:
    for p in params:
        p.grad = (gradient(p, i) * 4 + bad).to(p.dtype)
    optimizer.unscale_and_step(grads_scaled_by=4.0, **options)


def assert_a_skip_changes_no_bit(
    make: Callable[[list[Parameter]], Any], shapes: Sequence[tuple[int, ...]]
) -> None:
    """Check that a skip changes no state, and that a run with skips ends like one without."""
    ends = []
    for skips in (False, True):
        params = params_of(shapes, torch.float32)
        optimizer = make(params)
        if skips:
            step(optimizer, params, 0, bad=float("inf"))
        step(optimizer, params, 0)
        if skips:
            before = copy.deepcopy(optimizer.state_dict()["state"])
            step(optimizer, params, 1, bad=float("nan"))
            after = optimizer.state_dict()["state"]
            assert all(torch.equal(after[k][n], before[k][n]) for k in before for n in before[k])
        step(optimizer, params, 1)
        ends.append([t for p in params for t in (p.detach(), *optimizer.state[p].values())])
    assert all(map(torch.equal, *ends))
