"""Blocks: what each row gets does not depend on the step counts of the other rows."""

from array import array
from typing import NamedTuple

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support.compiled_scalars import by_cpp, needs_compiler

from ampopt_kernels import Rule, State, jit, rules
from ampopt_kernels.cpu.blocks import Block
from ampopt_kernels.cpu.scalars import scalars_on_host
from ampopt_kernels.work import ParamRow


@jit
def _scalars(s, h):
    return (s[0] * (1 - h[0]),), (s[0] + h[0],)


@jit
def _update(p, g, state, h, flags):
    return p - h[0] * g, ()


DECAYED = Rule(update=_update, scalars=_scalars, hyper=("lr",), scalar_state=(State("rate"),))
"""Rounds its scalar state at every step, when it is stored."""
HYPER = {
    DECAYED: (1e-3,),
    rules.adam: (1e-3, 0.9, 0.999, 1e-8, 0.01),
    rules.nadam: (2e-3, 0.9, 0.999, 1e-8, 0.01, 4e-3),
}
"""For each rule, the learning rate and the other hyperparameters."""
IDS = ["a number", "a count", "two scalar states"]
COEFFICIENTS = (0.25, 0.5)
BEFORE = 2
"""Rows of the work in front of the block."""


class Step(NamedTuple):
    """One step: the rows that have a gradient, the learning rate, and a row that is set back."""

    present: frozenset[int]
    lr: float
    reset: int | None


N = 5
STEPS = st.builds(
    Step,
    st.frozensets(st.integers(0, N - 1)),
    st.sampled_from([1e-3, 1e-3, 1e-3, 0.5]),
    st.sampled_from([None, None, None, *range(N)]),
)
ONE_LACKS = [Step(frozenset(range(1 + i % 2, N)), 1e-3, None) for i in range(30)]
SCHEDULED = [Step(frozenset({0, 1 + i % 4}), 1e-3 / (i + 1), None) for i in range(6)]


def stored(row: tuple[float, ...]) -> tuple[float, ...]:
    """Scalar states as float32 tensors hold them."""
    return tuple(array("f", row))


by_both = pytest.mark.parametrize(
    "computes", [scalars_on_host, pytest.param(by_cpp, marks=needs_compiler)]
)


def assert_rows_step_alone(rule, counts, steps, computes):
    """Step a block of rows with these step counts, and each row by Python numbers."""
    hyper, flags = HYPER[rule], (False,) * len(rule.flags)
    expected = [(float(count), 0.75)[: len(rule.scalar_state)] for count in counts]
    columns = [torch.tensor(column) for column in zip(*expected, strict=True)]
    scalars = zip(*(column.unbind() for column in columns), strict=True)
    rows = [ParamRow(torch.float32, torch.ones(2), scalars=own, flags=flags) for own in scalars]
    block = Block.of(rows, BEFORE)
    for present, lr, reset in steps:
        if reset is not None:
            expected[reset] = (1.0, 0.5)[: len(rule.scalar_state)]
            for column, value in zip(columns, expected[reset], strict=True):
                column[reset] = value
        here = [i in present for i in range(len(rows))]
        flagged = None if all(here) else bytearray([0] * BEFORE + here)
        given_h = [(lr, *hyper[1:])]
        numbers = block.advance(rule, given_h, COEFFICIENTS, None, flagged, computes)
        table, of_rows = numbers
        assert of_rows is None or [i >= 0 for i in of_rows.tolist()] == here
        given_to = numbers.of_each(len(rows)) if present else []
        for i in filter(present.__contains__, range(len(rows))):
            new, h = rule.scalars_on_numbers(expected[i], (lr, *hyper[1:]), flags)
            expected[i] = stored(new)
            assert array("d", given_to[i]) == array("d", (*COEFFICIENTS, *h))
        assert list(zip(*(column.tolist() for column in columns), strict=True)) == expected


@by_both
@pytest.mark.parametrize("rule", HYPER, ids=IDS)
@example([0] * N, ONE_LACKS)
@example([3, 1, 2, 2, 0], SCHEDULED)
@given(
    st.lists(st.integers(0, 3), min_size=N, max_size=N),
    st.lists(STEPS, min_size=1, max_size=12),
)
def test_each_row_gets_the_bits_that_it_gets_alone(rule, computes, counts, steps):
    assert_rows_step_alone(rule, counts, steps, computes)
