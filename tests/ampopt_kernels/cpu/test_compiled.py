"""The passes of the compiled backend: over rows of any kind, and with any number of threads.

That every rule has the bits of torch's operations is in test_cpp.py.
"""

import functools
import math
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given, settings
from support.kernel_rows import edge_numbers, fingerprint
from torch import Tensor

from ampopt_kernels import (
    Rule,
    State,
    as_float32,
    div_rn,
    exp2_linear,
    jit,
    log2_linear,
    maximum,
    minimum,
    power,
    rules,
    sign,
    sqrt_rn,
    tl,
    torch_language,
)
from ampopt_kernels.cpu.compiled import Compiled
from ampopt_kernels.cpu.cpp import WORTH_THREADS
from ampopt_kernels.cpu.gradients import PART
from ampopt_kernels.eager import Eager
from ampopt_kernels.native.build import cpp_compiler
from ampopt_kernels.row_column_means import RowColumnMeans
from ampopt_kernels.state import shape_of_lines
from ampopt_kernels.step import run
from ampopt_kernels.step_data import Coefficients, Decision, Request
from ampopt_kernels.step_tensors import ParamRow, Work
from ampopt_kernels.sums import Sums
from ampopt_kernels.tensors import arithmetic

pytestmark = [
    pytest.mark.skipif(cpp_compiler() is None, reason="there is no C++ compiler here"),
    # From Python 3.12 on. ``torch_language.where`` takes the last bit.
    pytest.mark.filterwarnings("ignore:Bitwise inversion:DeprecationWarning"),
]

CPU = torch.device("cpu")
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def with_threads(compute: Callable[[], Any], *numbers: int) -> list[Any]:
    """What ``compute`` returns with each number of threads."""
    before, results = torch.get_num_threads(), []
    try:
        for threads in numbers:
            torch.set_num_threads(threads)
            results.append(compute())
    finally:
        torch.set_num_threads(before)
    return results


# --- detect --------------------------------------------------------------------------------------

sizes = st.sampled_from([0, 1, 31, 32, 33, 255, 257, PART - 1, PART, 2 * PART + 5])
kinds = st.lists(
    st.tuples(st.sampled_from([F16, BF16, F32, F64]), sizes, st.booleans()), min_size=1, max_size=5
)
SCALES = st.sampled_from([1.0, 3.0, 2.0**16, 2.0**-20, 0.0, 2.0**-140])


def filled(size: int, dtype: torch.dtype, values: Sequence[float]) -> Tensor:
    repeated = (tuple(values) * size)[:size]
    return torch.tensor(repeated, dtype=F64).to(dtype)


def work_of(kinds: Sequence[tuple[torch.dtype, int, bool]], values: Sequence[float]) -> Work:
    """Gradients of these dtypes and sizes, some of which are absent."""
    grads = [filled(n, dtype, values) if here else None for dtype, n, here in kinds]
    params = [torch.empty(n, dtype=dtype) for dtype, n, _ in kinds]
    rows = [ParamRow(p.dtype, p, in_norm=p.numel() != 33) for p in params]
    work = Work(CPU, rows)
    work.refresh(grads, (), bytearray(grad is not None for grad in grads))
    return work


def flagged(partials: Any) -> set[int]:
    """The indices of the rows that overflow."""
    report = next(iter(partials.reports), None)
    if report is None:
        return set()
    return {row for row, flag in zip(report.rows, report.flags, strict=True) if flag}


@given(kinds, edge_numbers(F16) | edge_numbers(F32), SCALES, st.booleans(), st.booleans())
@example([(F16, 1, True)], (0.0,), 0.0, False, True)
@example([(F32, 0, True), (F32, 1, False)], (1.0,), 1.0, True, False)
def test_gradients_are_read_as_torchs_operations_read_them(kinds, values, scale, norm, measure):
    work = work_of(kinds, values)
    limit = math.inf if norm else None
    request = Request(torch.tensor(scale, dtype=F64), max_norm=limit, measure=measure)
    ours: Any = Compiled().detect(work, request)
    theirs: Any = Eager(host_sees=True).detect(work, request)
    assert flagged(ours) == flagged(theirs)
    assert any(ours.flags) == bool(flagged(theirs))
    if norm:
        assert ours.squares.shape == (len(ours.flags),)
    # By 0, which control refuses, the sum of no elements is 0, or NaN where it is unscaled last.
    if norm and not flagged(theirs) and scale:
        assert ours.squares.sum().item() == pytest.approx(theirs.squares.sum().item(), rel=1e-9)
    if measure and theirs.reports[0].measures is not None:
        (report,), (expected,) = ours.reports, theirs.reports
        assert list(report.rows) == list(expected.rows)
        assert torch.equal(report.measures[1:], expected.measures[1:])


@given(kinds, st.lists(st.floats(-(2.0**60), 2.0**60, width=32), min_size=1, max_size=40))
def test_no_bit_of_a_norm_depends_on_threads_or_other_rows(kinds, values):
    kinds = [*kinds, (F32, 64 * PART + 1, True)]  # worth several threads
    work = work_of([kind for kind in kinds if kind[0] in (F32, F64)], values)

    def squares() -> list[float]:
        partials: Any = Compiled().detect(work, Request(max_norm=1.0))
        return partials.squares.tolist()

    results = with_threads(squares, 1, 2, 3)
    assert results == results[:1] * 3
    for row, grad, ours in zip(work.rows, work.grads, results[0], strict=True):
        alone = Work(CPU, [row], [grad])
        partials: Any = Compiled().detect(alone, Request(max_norm=1.0))
        assert partials.squares.tolist() == [ours]
        expected = grad.double().square().sum().item() if row.in_norm and grad is not None else 0.0
        assert ours == pytest.approx(expected, rel=1e-12)


@given(st.sampled_from([F16, BF16, F32, F64]), sizes.filter(bool), st.data())
def test_every_element_is_tested(dtype, size, data):
    largest = torch.finfo(dtype).max
    work = work_of([(dtype, 3, True), (dtype, size, True)], [largest, -largest])
    assert not any(Compiled().detect(work, Request()).flags)
    at = data.draw(st.integers(0, size - 1))
    for value in (math.inf, -math.inf, math.nan):
        work.grads[1][at] = value
        assert flagged(Compiled().detect(work, Request())) == {1}


def test_a_gradient_without_elements_is_there():
    """Its step is counted. Its address is 0, as that of one that is absent."""
    counts = [torch.zeros(()) for _ in range(2)]
    rule, flags = rules.adam, (False,) * len(rules.adam.flags)
    rows = [
        ParamRow(F32, torch.ones(0), (torch.ones(0), torch.ones(0)), scalars=(n,), flags=flags)
        for n in counts
    ]
    work = Work(CPU, rows, [], rule, [[0.1, 0.9, 0.99, 1e-8, 0.0]])
    work.refresh([torch.ones(0), None], work.hyper, bytearray((1, 0)))
    run(lambda _: Compiled(), [work], Request())
    assert [n.item() for n in counts] == [1.0, 0.0]


# --- scalars -------------------------------------------------------------------------------------

EDGES = (0.0, -0.0, 1.0, 5.0, 1e-8, 5e-324, 1e308, -709.9, -1060.3, 1024.0, math.inf, -math.inf)
NUMBERS = st.one_of(
    st.integers(0, 10**6).map(float), st.floats(0, 1), st.sampled_from(EDGES), st.floats()
)


@jit
def _update(p, g, state, h, flags):
    return p - h[0] * g, state


@jit
def _values(s, h):
    x, y = h
    of_one = (tl.abs(x), tl.ceil(x), tl.cos(x), tl.exp(x), tl.exp2(x), tl.floor(x), tl.log(x))
    of_one += (tl.log2(x), tl.rsqrt(x), tl.sigmoid(x), tl.sin(x), tl.sqrt(x), as_float32(x))
    of_one += (sign(x), sqrt_rn(x), log2_linear(tl.abs(x) + 1), exp2_linear(sign(x)), -x, 1 / x)
    of_two = (div_rn(x, y), maximum(x, y), minimum(y, x), power(x, y), x / y, x * y - x + y)
    where = (tl.where(x > y, 0.3, 0.7), tl.where((x >= y) | (y != x), x, y), maximum(x, 0.0))
    where += (tl.where(~(x < y), x, y), tl.where(~(~(x == y) | (y > 1)), 1.0, x))
    return (*of_one, *of_two, *where, minimum(0.0, x), tl.floor(x) * tl.ceil(y), 0.1), h


N_VALUES = len(torch_language.bind(_values)((), (torch.ones(()), torch.ones(())))[0])
EVERY_FUNCTION = Rule(
    update=_update,
    scalars=_values,
    hyper=("x", "y"),
    scalar_state=tuple(State(f"value{i}", dtype=F64) for i in range(N_VALUES)),
)


def bits(numbers: Any) -> bytes:
    return array("d", [math.nan if x != x else x for x in map(float, numbers)]).tobytes()


@example(-1060.3, 2.0)
@given(NUMBERS.filter(bool), NUMBERS.filter(bool))  # Python does not divide by 0
def test_every_function_of_numbers_has_the_bits_that_python_gives(x, y):
    states = tuple(torch.zeros((), dtype=F64) for _ in range(N_VALUES))
    row = ParamRow(F32, torch.ones(2), scalars=states)
    work = Work(CPU, [row], [torch.ones(2)], EVERY_FUNCTION, [[x, y]])
    run(lambda _: Compiled(), [work], Request(check=False))
    expected, _ = EVERY_FUNCTION.on_tensors("scalars", torch.float64)((), (x, y), ())
    assert bits(states) == bits(expected)


@jit
def _with_totals(s, h, flags, sums, totals):
    return (s[1], s[0] + 1), (h[0] * sums[0] / totals[0], sums[1] + totals[1], s[0])


@jit
def _terms(p, g, state, h, flags):
    return p, g


@jit
def _taken(p, g, state, h, flags):
    return p + (h[0] + 100 * h[1] + 10000 * h[2]), state


def test_totals_and_states_that_exchange_places():
    rule = Rule(
        update=_taken,
        reduce=_terms,
        scalars=_with_totals,
        hyper=("lr",),
        scalar_state=(State("a", dtype=F64), State("b", dtype=F64)),
    )
    sums = Sums(torch.tensor([[3.0, 4.0], [5.0, 6.0]]).double(), torch.tensor([8.0, 10.0]).double())
    for backend in (Compiled(), Eager(), Eager(host_sees=True)):
        states = [[torch.tensor(x, dtype=F64) for x in pair] for pair in ((1.0, 10.0), (2.0, 20.0))]
        rows = [ParamRow(F32, torch.zeros(1), scalars=(a, b)) for a, b in states]
        work = Work(CPU, rows, [torch.ones(1), torch.ones(1)], rule, [[2.0]])
        backend.prepare(work, Request(), decides=True)
        decision = Decision(torch.tensor(0.0), Coefficients(0.0, 1.0, 1.0), sums=sums)
        backend.update(work, decision)
        assert [row.param.item() for row in rows if row.param is not None] == [
            pytest.approx(11400.75),
            pytest.approx(21601.25),
        ]
        assert [[s.item() for s in own] for own in states] == [[10.0, 2.0], [20.0, 3.0]]


steps = st.lists(
    st.tuples(
        st.lists(st.booleans(), min_size=5, max_size=5),
        st.sampled_from([1e-3, 1e-3, 0.5]),
        st.sampled_from([1.0, 0.0]),
    ),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize(
    "rule", [rules.adam, rules.nadam, rules.lamb], ids=["adam", "nadam", "lamb"]
)
@settings(max_examples=30)
@given(st.lists(st.integers(0, 3), min_size=5, max_size=5), st.sampled_from([F32, F64]), steps)
def test_each_row_gets_the_bits_that_it_gets_alone(rule, counts, scalar_dtype, steps):
    """Rows of two groups, of which some have no gradient, with step counts of their own."""
    flags, generator = (True,) + (False,) * (len(rule.flags) - 1), torch.Generator().manual_seed(0)
    shapes = [(3,), (40,), (), (0,), (7, 9)]
    drawn = [
        [torch.rand(shape, generator=generator) for _ in range(3 + len(rule.state))]
        for shape in shapes
    ]

    def rows() -> list[ParamRow]:
        return [
            ParamRow(
                F32,
                tensors[0].clone(),
                tuple(t.clone() for t in tensors[3 : 3 + len(rule.state_for(flags))]),
                scalars=tuple(
                    torch.tensor(float(count), dtype=scalar_dtype) for _ in rule.scalar_state
                ),
                flags=flags,
                variant=i % 2,
            )
            for i, (tensors, count) in enumerate(zip(drawn, counts, strict=True))
        ]

    def trained(chosen: list[int]) -> list[Any]:
        own = [row for i, row in enumerate(rows()) if i in chosen]
        work, backend = Work(CPU, own, [], rule), Compiled()
        for number, (here, lr, grads) in enumerate(steps):
            hyper = [[rate, 0.9, 0.99, 1e-8, *[0.01] * 2][: n_hyper(rule)] for rate in (lr, lr / 3)]
            now = [drawn[i][1 + number % 2] * grads if here[i] else None for i in chosen]
            work.refresh(now, hyper, bytearray(g is not None for g in now))
            run(lambda _: backend, [work], Request(scale=torch.tensor(4.0)))
        return [[fingerprint(t) for t in (*row.outputs, *row.scalars) if t is not None]
                for row in own]  # fmt: skip

    assert trained([*range(5)]) == [trained([i])[0] for i in range(5)]


def n_hyper(rule: Rule) -> int:
    """The number of hyperparameters, tuples flattened."""
    return len(rule.hyper) + ("betas" in rule.hyper)


# --- threads -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [rules.adam, rules.lamb], ids=["adam", "lamb"])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_no_bit_of_a_step_depends_on_the_number_of_threads(rule, dtype):
    flags = (False,) * len(rule.flags)

    def trained() -> list[str]:
        shapes = (70, 2 * WORTH_THREADS + 3, 1, WORTH_THREADS - 1)
        tensors = [torch.linspace(-1, 1, n).to(dtype) for n in shapes]
        rows = [
            ParamRow(
                dtype,
                p,
                tuple(torch.zeros_like(p) for _ in rule.state_for(flags)),
                scalars=(torch.zeros(()),),
                flags=flags,
            )
            for p in tensors
        ]
        hyper = [[0.1, 0.9, 0.99, 1e-8, *[0.01] * 2][: n_hyper(rule)]]
        work = Work(CPU, rows, [p.clone() for p in tensors], rule, hyper)
        run(lambda _: Compiled(), [work], Request(scale=torch.tensor(4.0), max_norm=1.0))
        return [fingerprint(t) for row in rows for t in row.outputs]

    results = with_threads(trained, 1, 2, 5)
    assert results == results[:1] * 3


# --- rows and columns ----------------------------------------------------------------------------


@jit
def _averages(p, g, state, h, flags):
    BOTH: tl.constexpr = flags[0]
    if BOTH:
        return g * g, tl.abs(p) * h[0], g + state[0]
    else:
        return (p + state[0] * g,)


@jit
def _kept(p, g, state, h, flags):
    return p, (state[0],)


@jit
def _reduce(p, g, state, h, flags):
    return (p,)


@jit
def _scalars(s, h, flags, sums):
    return s, h


LINES = Rule(
    update=_kept,
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
def given_to(shape: tuple[int, ...], dtypes: Any, seed: int, offset: int = 0) -> list[Tensor]:
    """Gradient, parameter and state, each ``offset`` elements after an aligned address."""
    source, n = torch.Generator().manual_seed(seed), math.prod(shape)
    few = torch.randn(min(n, 997), dtype=F64, generator=source)
    few *= torch.exp2(torch.randn(len(few), dtype=F64, generator=source) * 10)
    flat = [
        torch.cat([few.new_zeros(offset), few.roll(i).repeat(n // 997 + 1)[:n]]).to(dtype)[offset:]
        for i, dtype in enumerate(dtypes)
    ]
    return [t.view(shape) for t in flat]


def line_sums(both: bool, tensors: list[Tensor], factors: Sequence[float]) -> Any:
    """The means of a parameter, and what the pass ``sum_lines`` returns for it."""
    grad, param, state = tensors
    own = RowColumnMeans(LINES.averages_for((both,)), (), tuple(param.shape))
    row = ParamRow(grad.dtype, param, (state,), flags=(both,), row_column_means=own)
    work, backend = Work(CPU, [row], [grad], LINES, [[0.3]]), Compiled()
    backend.prepare(work, Request(), decides=True)
    decision = Decision(torch.tensor(0.0), Coefficients(0.0, *factors))
    backend.sum_lines(work, decision)
    return own, own.sums


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
def test_sums_of_lines_are_those_of_float64(stack, m, n, both, dtypes, factors, offset, seed):
    """For rows of any length, any number of rows and matrices, and any alignment."""
    batch, matrices = stack
    if matrices > 3:
        m, n = min(m, 9), min(n, 9)
    tensors = given_to((*batch, m, n), dtypes, seed, offset)
    own, results = line_sums(both, tensors, factors)
    compute = arithmetic(*dtypes[:2])
    g, p, state = (t.to(compute).view(matrices, m, n) for t in tensors)
    averages = LINES.on_tensors("averages", compute)
    terms = averages(p, g * factors[0] * factors[1], (state,), (0.3,), (both,))
    for over, sums, term in zip(own.over, results, terms, strict=True):
        assert sums.shape == shape_of_lines((*batch, m, n), over) and sums.dtype == F64
        lines = term if over == "rows" else term.mT
        lines = lines.reshape(-1, lines.shape[-1]).tolist()
        expected = torch.tensor([math.fsum(line) for line in lines], dtype=F64)
        size = torch.tensor([math.fsum(map(abs, line)) for line in lines], dtype=F64)
        # An addition of float64 is off by 2**-53 at most.
        assert ((sums.flatten() - expected).abs() <= size * max(m, n) * 2.0**-53).all()


@given(
    st.sampled_from([(3, 1 << 15), (1 << 15, 3), (700, 100), (900, 9, 9), (WORTH_THREADS + 1, 1)]),
    st.integers(0, 2**31),
)
def test_no_bit_of_sums_of_lines_depends_on_the_number_of_threads(shape, seed):
    tensors = given_to(shape, (F32, F32, F32), seed)
    first, *others = with_threads(lambda: line_sums(True, tensors, (1.0, 0.7))[1], 1, 2, 3, 5)
    for other in others:
        assert all(map(torch.equal, first, other))


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_stays_in_its_row_and_column(value):
    tensors = [t.clone() for t in given_to((2, 40, 70), (F32, F32, F32), 0)]
    tensors[0][1, 33, 65] = value
    _, (rows, columns, _) = line_sums(True, tensors, (1.0, 1.0))
    assert (~rows.isfinite()).nonzero().tolist() == [[1, 33, 0]]
    assert columns.isfinite().all()  # which are of the parameter
    *_, (columns,) = line_sums(False, tensors, (1.0, 1.0))
    assert (~columns.isfinite()).nonzero().tolist() == [[1, 0, 65]]
