"""Parameters, gradients and steps for tests of training loops with any optimizer."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch.nn import Parameter

__all__ = [
    "INF",
    "Step",
    "after",
    "both_ways",
    "give",
    "iterate",
    "losses",
    "made",
    "overflow",
    "scaler_at",
    "scaler_for",
    "steps",
]

INF = float("inf")
SHAPES = ((3, 2), (2, 2))

both_ways = pytest.mark.parametrize("split", [False, True], ids=["joined", "split"])


@dataclass(frozen=True)
class Step:
    """The gradients of one step.

    Attributes:
        numbers: elements of all gradients, one after another.
        bad: non-finite value that replaces the first element; ``None`` for a finite step.
    """

    numbers: tuple[float, ...]
    bad: float | None = None


def steps(max_size: int = 4, overflows: bool = True) -> st.SearchStrategy[list[Step]]:
    """Strategy of one to ``max_size`` steps."""
    numbers = st.integers(-64, 64).map(lambda n: n / 16)
    size = sum(rows * columns for rows, columns in SHAPES)
    bad = st.sampled_from([None, None, INF, -INF, float("nan")]) if overflows else st.none()
    step = st.builds(Step, st.tuples(*[numbers] * size), bad)
    return st.lists(step, min_size=1, max_size=max_size)


def made(cls: Any, **options: Any) -> tuple[Any, list[Parameter]]:
    """Make an optimizer and its parameters: matrices, which every optimizer takes."""
    start = [torch.arange(6.0).reshape(3, 2) / 4, torch.tensor([[1.0, -2.0], [0.5, 0.25]])]
    params = [Parameter(p.clone()) for p in start]
    return cls(params, **options), params


def give(optimizer: Any, step: Step | float, scale: Any = 1.0) -> None:
    """Set the gradients of ``step``, or all elements to one number, multiplied by ``scale``."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    sparse = isinstance(optimizer, torch.optim.SparseAdam)
    numbers: Iterable[float]
    if isinstance(step, Step):
        numbers = step.numbers if step.bad is None else (step.bad, *step.numbers[1:])
    else:
        numbers = (step,) * sum(p.numel() for p in params)
    grads = torch.tensor(tuple(numbers)).split([p.numel() for p in params])
    for p, values in zip(params, grads, strict=True):
        grad = values.reshape(p.shape) * scale
        if sparse:
            rows = torch.arange(p.shape[0])[None]
            grad = torch.sparse_coo_tensor(rows, grad, p.shape, check_invariants=True)
        p.grad = grad


def overflow(param: Parameter) -> None:
    """Set the gradient of ``param``, with three elements, to 1, inf, 1."""
    param.grad = torch.tensor([1.0, INF, 1.0])


def losses(optimizer: Any, coefficients: Sequence[float]) -> torch.Tensor:
    """A loss of all parameters, whose gradients differ."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    terms = [c * (p - 1).square().sum() for c, p in zip(coefficients, params, strict=False)]
    return torch.stack(terms).sum()


def scaler_at(scale: float, cls: Any = torch.amp.GradScaler, **options: Any) -> Any:
    """Make a scaler that has scaled a loss, as ``scaler.step`` requires."""
    scaler = cls("cpu", init_scale=scale, **options)
    scaler.scale(torch.zeros(()))
    return scaler


def scaler_for(param: Parameter, init_scale: float = 4.0) -> Any:
    """Make a torch scaler that can step on the gradient of ``param``, and does not grow."""
    assert param.grad is not None
    return scaler_at(init_scale, growth_interval=100)


def after(scaler: Any, optimizer: Any, steps: Any, unscale_first: bool) -> list[Any]:
    """Take ``steps``, and return the scaler's state after each."""
    scaler.scale(torch.zeros(()))
    states = []
    for step in steps:
        give(optimizer, step, scaler.get_scale())
        if unscale_first:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        states.append(scaler.state_dict())
    return states


def iterate(scaler: Any, optimizer: Any, step: Any, unscale_first: bool, clip: float = 0) -> None:
    """Take ``step`` under ``scaler``, with gradients clamped to ``clip`` unless that is 0."""
    give(optimizer, step, scaler.get_scale())
    if unscale_first or clip:
        scaler.unscale_(optimizer)
    if clip:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        for p in params:  # torch's clipping refuses sparse gradients
            assert p.grad is not None
            (p.grad._values() if p.grad.is_sparse else p.grad).clamp_(-clip, clip)
    scaler.step(optimizer)
    scaler.update()
