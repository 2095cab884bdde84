"""Calls of compiled functions: the sums over rows and columns."""

import functools
import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from ampopt_kernels import Rule, State, jit, tl
from ampopt_kernels.cpu.bundles import BUNDLE, Slices
from ampopt_kernels.cpu.calls import CompiledAverages
from ampopt_kernels.cpu.cpp import source_of
from ampopt_kernels.native.build import Library, cpp_compiler
from ampopt_kernels.row_column_states import RowColumnStates
from ampopt_kernels.tensors import arithmetic

pytestmark = pytest.mark.skipif(cpp_compiler() is None, reason="there is no C++ compiler here")

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


@jit
def _averages(p, g, state, h, flags):
    BOTH: tl.constexpr = flags[0]
    if BOTH:
        return g * g, tl.abs(p) * h[0], g + state[0]
    else:
        return (p + state[0] * g,)


@jit
def _update(p, g, state, h, flags):
    return p, (state[0],)


@jit
def _reduce(p, g, state, h, flags):
    return (p,)


@jit
def _scalars(s, h, flags, sums):
    return s, h


RULE = Rule(
    update=_update,
    reduce=_reduce,
    scalars=_scalars,
    averages=_averages,
    factors=lambda means, state, h, flags: (means, means),
    hyper=("a",),
    flags=("both",),
    state=(
        State("first", shape="rows", when="both"),
        State("elementwise"),
        State("second", shape="columns"),
        State("third", shape="rows", when="both"),
    ),
)
"""A rule with different terms for rows and columns, or with columns only."""


@functools.cache
def compiled(both: bool, dtypes: tuple[torch.dtype, ...]) -> CompiledAverages:
    return CompiledAverages(Library(source_of(RULE, (both,), dtypes, 3, "averages").text).load())


def given_to(shape: tuple[int, ...], dtypes: Any, seed: int, offset: int = 0) -> list[torch.Tensor]:
    """Flat gradient, parameter and state, each ``offset`` elements after an aligned address."""
    source, n = torch.Generator().manual_seed(seed), math.prod(shape)
    few = torch.randn(min(n, 997), dtype=F64, generator=source)
    few *= torch.exp2(torch.randn(len(few), dtype=F64, generator=source) * 10)
    return [
        torch.cat([few.new_zeros(offset), few.roll(i).repeat(n // 997 + 1)[:n]]).to(dtype)[offset:]
        for i, dtype in enumerate(dtypes)
    ]


def sums_of(shape: Any, both: bool, tensors: list[torch.Tensor], h: tuple[float, ...]) -> Any:
    dtypes = tuple(t.dtype for t in tensors)
    parts = RULE.row_column_states_for((both,))
    own = RowColumnStates.of(parts, (), tensors[1].view(shape), arithmetic(*dtypes[:2]), shape[-2:])
    whole = Slices.of_one(tensors[0].numel(), h)
    results = compiled(both, dtypes)(whole, tensors, own)
    return own, [sums.squeeze(0) for sums in results]


SIZES = [1, 2, 3, 7, 8, 31, 32, 33, 63, 64, 65, 100, 129, 300]


@given(
    st.sampled_from([((), 1), ((1,), 1), ((3,), 3), ((2, 40), 80)]),
    st.sampled_from(SIZES),
    st.sampled_from(SIZES),
    st.booleans(),
    st.sampled_from([(F32, F32, F32), (F64, F64, F64), (BF16, F32, BF16)]),
    st.sampled_from([(1.0, 1.0), (2.0**-16, 0.7)]),
    st.integers(0, 7),
    st.integers(0, 2**31),
)
def test_sums_are_those_of_float64(stack, m, n, both, dtypes, factors, offset, seed):
    """For rows of any length, any number of rows and matrices, and any alignment."""
    batch, matrices = stack
    if matrices > 3:
        m, n = min(m, 9), min(n, 9)
    tensors = given_to((*batch, m, n), dtypes, seed, offset)
    own, results = sums_of((*batch, m, n), both, tensors, (*factors, 0.3))
    compute = arithmetic(*dtypes[:2])
    g, p, state = (t.to(compute).view(matrices, m, n) for t in tensors)
    averages = RULE.torch_averages_in(compute)
    terms = averages(p, g * factors[0] * factors[1], (state,), (0.3,), (both,))
    for part, sums, term in zip(own.parts, results, terms, strict=True):
        assert sums.shape == part.beside((*batch, m, n)) and sums.dtype == F64
        lines = term if part.shape == "rows" else term.mT
        lines = lines.reshape(-1, lines.shape[-1]).tolist()
        expected = torch.tensor([math.fsum(line) for line in lines], dtype=F64)
        size = torch.tensor([math.fsum(map(abs, line)) for line in lines], dtype=F64)
        # An addition of float64 is off by 2**-53 at most.
        assert ((sums.flatten() - expected).abs() <= size * max(m, n) * 2.0**-53).all()


@given(
    st.sampled_from([(3, BUNDLE // 2), (BUNDLE // 2, 3), (700, 100), (900, 9, 9), (BUNDLE + 1, 1)]),
    st.integers(0, 2**31),
)
def test_no_bit_depends_on_the_number_of_threads(shape, seed):
    tensors, before = given_to(shape, (F32, F32, F32), seed), torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            results.append(sums_of(shape, True, tensors, (1.0, 0.7, 0.3))[1])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_stays_in_its_row_and_column(value):
    shape = (2, 40, 70)
    tensors = given_to(shape, (F32, F32, F32), 0)
    tensors[0].view(shape)[1, 33, 65] = value
    _, (rows, columns, _) = sums_of(shape, True, tensors, (1.0, 1.0, 0.3))
    assert (~rows.isfinite()).nonzero().tolist() == [[1, 33, 0]]
    assert columns.isfinite().all()  # which are of the parameter
    *_, (columns,) = sums_of(shape, False, tensors, (1.0, 1.0, 0.3))
    assert (~columns.isfinite()).nonzero().tolist() == [[1, 0, 65]]


def test_averages_are_not_marked_as_exact():
    assert not source_of(RULE, (True,), (F32, F32, F32), 3, "averages").exact
