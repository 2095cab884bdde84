"""The compiled scalars of every rule have the bits of those on the host.

Only the bits of a NaN may differ, as processors have several.
"""

import math
from array import array
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given, settings
from support.compiled_scalars import by_cpp, needs_compiler

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
)
from ampopt_kernels.cpu import compiled
from ampopt_kernels.cpu.scalars import ScalarRows, scalars_on_host, scalars_source
from ampopt_kernels.sums import Sums
from evidence.aot import count_hyper

pytestmark = [
    needs_compiler,
    # From Python 3.12 on. ``torch_language.where`` takes the last bit.
    pytest.mark.filterwarnings("ignore:Bitwise inversion:DeprecationWarning"),
]

F32, F64 = torch.float32, torch.float64
EDGES = (0.0, -0.0, 1.0, 5.0, 1e-8, 5e-324, 1e308, -709.9, -1060.3, 1024.0, math.inf, -math.inf)
NUMBERS = st.one_of(
    st.integers(0, 10**6).map(float), st.floats(0, 1), st.sampled_from(EDGES), st.floats()
)
COEFFICIENTS = (0.25, 0.5)


@jit
def _update(p, g, state, h, flags):
    return p, state


@jit
def _every_function(s, h):
    (x, omitted), (y,) = s, h
    of_one = (tl.abs(x), tl.ceil(x), tl.cos(x), tl.exp(x), tl.exp2(x), tl.floor(x), tl.log(x))
    of_one += (tl.log2(x), tl.rsqrt(x), tl.sigmoid(x), tl.sin(x), tl.sqrt(x), as_float32(x))
    of_one += (sign(x), sqrt_rn(x), log2_linear(tl.abs(x) + 1), exp2_linear(sign(x)), -x, 1 / x)
    of_two = (div_rn(x, y), maximum(x, y), minimum(y, x), power(x, y), x / y, x * y - x + y)
    where = (tl.where(x > y, 0.3, 0.7), tl.where((x >= y) | (y != x), x, omitted), maximum(x, 0.0))
    where += (tl.where(~(x < y), x, y), tl.where(~(~(x == y) | (y > 1)), 1.0, x))
    return (x + 1, x), (*of_one, *of_two, *where, minimum(0.0, x), tl.floor(x) * tl.ceil(y), 0.1)


EVERY_FUNCTION = Rule(
    update=_update,
    scalars=_every_function,
    hyper=("lr",),
    flags=("more",),
    scalar_state=(State("n"), State("omitted", when="more")),
)
RULES = {name: getattr(rules, name) for name in rules.__all__} | {"every function": EVERY_FUNCTION}


def bits(numbers: Any) -> bytes:
    return array("d", [math.nan if x != x else x for x in map(float, numbers)]).tobytes()


def some(data: st.DataObject, n: int) -> list[float]:
    """Numbers, which are often equal."""
    few = data.draw(st.lists(NUMBERS, min_size=1, max_size=3))
    return data.draw(st.lists(st.sampled_from(few), min_size=n, max_size=n))


def assert_same(rule: Rule, flags: Any, rows: ScalarRows, h: Any) -> None:
    """Compute the scalars of rows by C++, and of each row by itself on the host."""
    ours = rows._replace(states=[None if s is None else s.clone() for s in rows.states])
    numbers = by_cpp(rule, flags, ours, h).of_each(rows.n)
    for i in range(rows.n):
        alone = [None if s is None else s[i : i + 1].clone() for s in rows.states]
        if rows.mask is None or rows.mask[i]:
            sums = rows.sums and Sums(rows.sums.each[i : i + 1], rows.sums.totals)
            row = ScalarRows(1, alone, None, sums)
            (expected,) = scalars_on_host(rule, flags, row, h).of_each(1)
            assert bits(numbers[i]) == bits(expected)
        for new, state in zip(alone, ours.states, strict=True):
            assert new is None or state is None or bits(state[i : i + 1]) == bits(new)


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("name", [n for n in RULES if RULES[n].scalar_state or RULES[n].reduces])
@settings(max_examples=20)
@given(data=st.data())
def test_rows_get_the_bits_that_each_gets_alone_on_the_host(name, dtype, data):
    rule = RULES[name] if dtype == F32 else RULES[name].with_float64_scalars
    flags = (data.draw(st.booleans()),) * len(rule.flags)
    n, n_hyper = data.draw(st.integers(1, 4)), count_hyper(rule, flags)
    here = rule.scalar_state_for(flags)
    states = [
        torch.tensor(some(data, n), dtype=F64).to(part.dtype or dtype) if part in here else None
        for part in rule.scalar_state
    ]
    present = data.draw(st.none() | st.lists(st.booleans(), min_size=n, max_size=n).filter(any))
    h = (*COEFFICIENTS, *some(data, n_hyper))
    rows = ScalarRows(n, states, None if present is None else torch.tensor(present))
    assert_same(rule, flags, rows, h)
    if rule.reduces:
        n_terms = rule.widths(n_hyper).terms
        each = torch.tensor([some(data, n_terms) for _ in range(n)], dtype=F64)
        totals = torch.tensor(some(data, n_terms), dtype=F64)
        assert_same(rule, flags, rows._replace(sums=Sums(each, totals)), h)


@example(-0.0, 1.0)
@example(-1060.3, 2.0)
@example(3.0, 0.0)
@given(NUMBERS, NUMBERS)
def test_every_function_has_the_bits_that_python_gives(x, y):
    rows = ScalarRows(1, [torch.tensor([x], dtype=F64), None], None)
    assert_same(EVERY_FUNCTION, (False,), rows, (*COEFFICIENTS, y))


@jit
def _with_totals(s, h, flags, sums, totals):
    return (s[1], s[0] + 1), (h[0] * sums[0] / totals[0], sums[1] + totals[1], s[0])


@jit
def _reduce(p, g, state, h, flags):
    return p, g


def test_totals_and_states_that_exchange_places():
    rule = Rule(
        update=_update,
        reduce=_reduce,
        scalars=_with_totals,
        hyper=("lr",),
        scalar_state=(State("a", dtype=F64), State("b", dtype=F64)),
    )
    sums = Sums(torch.tensor([[3.0, 4.0], [5.0, 6.0]]).double(), torch.tensor([8.0, 10.0]).double())
    for compute in (by_cpp, scalars_on_host):
        states = [torch.tensor([1.0, 2.0], dtype=F64), torch.tensor([10.0, 20.0], dtype=F64)]
        rows = ScalarRows(2, states, None, sums)
        numbers = compute(rule, (), rows, (*COEFFICIENTS, 2.0)).of_each(2)
        assert numbers == [[*COEFFICIENTS, 0.75, 14.0, 1.0], [*COEFFICIENTS, 1.25, 16.0, 2.0]]
        assert [s.tolist() for s in states] == [[10.0, 20.0], [2.0, 3.0]]


@jit
def _over(s, h):
    return (s[0] + 1,), (2 / s[0], h[0] / 3)


@jit
def _third_over(s, h):
    return (s[0] + 1,), (3 / s[0], h[0])


@pytest.mark.parametrize(("scalars", "exact"), [(_over, True), (_third_over, False)])
def test_scalars_are_compiled_if_torch_rounds_each_quotient_once(scalars, exact, monkeypatch):
    """After a division by zero, torch computes anew what Python computed: 3 * (1 / x) for 3 / x."""
    rule = Rule(update=_update, scalars=scalars, hyper=("lr",), scalar_state=(State("n"),))
    on_host = []

    def recorded(*arguments):
        on_host.append(arguments)
        return scalars_on_host(*arguments)

    monkeypatch.setattr(compiled, "scalars_on_host", recorded)
    h = (*COEFFICIENTS, 0.5)
    ours, theirs = (ScalarRows(2, [torch.tensor([1.0, 49.0])], None) for _ in range(2))
    numbers = compiled.Compiled()._scalars(rule, (), ours, h)
    assert not on_host if exact else on_host
    assert numbers.of_each(2) == scalars_on_host(rule, (), theirs, h).of_each(2)
    assert scalars_source(rule, (), (F32,), len(h)).exact == exact
