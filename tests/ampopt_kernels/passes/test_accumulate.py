"""Detect with sums, on every backend: the sums, and the overflow flags."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.kernel_rows import (
    BLOCK,
    CHUNK,
    CPU,
    ENGINES,
    Placed,
    each_engine,
    gradient_works,
)
from support.strategies import fewer

from ampopt_kernels.step_data import Partials, Request
from ampopt_kernels.step_tensors import ParamRow, Work
from ampopt_kernels.tensors import arithmetic

SCALES = st.sampled_from([None, 1.0, 2.0**-10, 2.0**16, 3.0])
sums = st.sampled_from([None, 0.0, -1.5, 3e38, float("inf"), float("nan")])
"""The value of a sum before the pass; ``None`` for new, uninitialized memory."""


def summing(plan: Any, begun: list[float | None]) -> tuple[Work, list[Placed], list[Any]]:
    """Rows of the gradients of ``plan`` and of sums with these values."""
    rows, placed, grads = [], [], plan.build().work.grads
    for grad, number in zip(grads, begun, strict=False):
        fill = float("nan") if number is None else number
        total = torch.full_like(grad, fill, dtype=arithmetic(grad.dtype))
        placed.append(Placed.of(total, 1))
        rows.append(ParamRow(grad.dtype, placed[-1].tensor, flags=(number is None,)))
    return Work(CPU, rows, grads), placed, [grad.clone() for grad in grads]


def unscaled(grad: torch.Tensor, scale: float | None) -> torch.Tensor:
    dtype = arithmetic(grad.dtype)
    inverse = torch.tensor(1.0 / (scale or 1.0), dtype=torch.float64).to(dtype)
    return grad.to(dtype) * inverse


def request(scale: float | None, **kwargs: Any) -> Request:
    value = None if scale is None else torch.tensor(scale)
    return Request(scale=value, accumulate=True, **kwargs)


def accumulated(engine: str, work: Work, asked: Request) -> Partials:
    """What detect finds as it adds the gradients of ``work`` to their sums."""
    backend = ENGINES[engine]()
    backend.prepare(work, asked, decides=True)
    return backend.detect(work, asked)


@each_engine
@pytest.mark.parametrize("reject", [None, 0.0, 2.0])
@fewer(0.5)
@given(
    plan=gradient_works(),
    scale=SCALES,
    begun=st.lists(sums, min_size=3, max_size=3),
)
def test_unscaled_gradients_are_added_and_tested(engine, reject, plan, scale, begun):
    """Each sum is rounded once. The flag is for the new gradients, not for the old sum."""
    work, placed, grads = summing(plan, begun)
    around = [p.around() for p in placed]
    external = None if reject is None else torch.tensor(reject)
    partials = accumulated(engine, work, request(scale, found_inf=external))
    bad = False
    for row, grad_after, grad, number in zip(work.rows, work.grads, grads, begun, strict=False):
        new = old = torch.full_like(grad, number or 0.0, dtype=arithmetic(grad.dtype))
        if not reject:
            new = unscaled(grad, scale) if number is None else old + unscaled(grad, scale)
        torch.testing.assert_close(row.param, new, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(grad_after.nan_to_num(1), grad.nan_to_num(1))
        spoilt = old.isfinite() & ~new.isfinite()
        bad |= bool((spoilt | ~unscaled(grad, scale).isfinite()).any())
    flags = partials.flags_on(CPU)
    assert flags.dtype == torch.float32 and set(flags.tolist()) <= {0.0, 1.0}
    assert bool(flags.any()) == bad
    assert [p.around() for p in placed] == around


@each_engine
@pytest.mark.parametrize("n", [1, BLOCK, BLOCK + 1, CHUNK, CHUNK + 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_two_finite_gradients_whose_sum_is_not_are_found(engine, n, dtype):
    grad, total = torch.ones(n, dtype=dtype), torch.ones(n)
    grad[-1], total[-1] = 3e38, 3e38
    work = Work(CPU, [ParamRow(dtype, total, flags=(False,))], [grad])
    partials = accumulated(engine, work, request(None))
    assert partials.flags_on(CPU).any()
    assert total.tolist() == [2.0] * (n - 1) + [float("inf")]
