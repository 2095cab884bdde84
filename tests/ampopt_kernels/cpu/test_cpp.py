"""The C++ of every rule gives the bits of torch's operations.

Only the bits of a NaN may differ, as compilers swap operands; and roots of float64, which are MKL's
in torch.
"""

import platform
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import Phase, given, settings
from support.kernel_rows import fingerprint

from ampopt_kernels import div_rn, jit, maximum, minimum, power, rules, sqrt_rn, tl
from ampopt_kernels.cpu.compiled import Compiled
from ampopt_kernels.cpu.cpp import Kind, source_of, translate
from ampopt_kernels.eager import CHUNK, Eager
from ampopt_kernels.native.build import cpp_compiler
from ampopt_kernels.row_column_means import RowColumnMeans
from ampopt_kernels.rule import Rule, State
from ampopt_kernels.step_data import Coefficients, Decision, Request
from ampopt_kernels.step_tensors import ParamRow, Work
from ampopt_kernels.sums import Sums

pytestmark = pytest.mark.skipif(cpp_compiler() is None, reason="there is no C++ compiler here")

RULES = {name: getattr(rules, name) for name in rules.__all__}
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
DTYPES_OF_TENSORS = [
    # gradient, parameter and states, copy
    (F32, F32, None),
    (F64, F64, None),
    (F16, F16, None),
    (BF16, BF16, None),
    (F16, F32, F16),
    (BF16, F32, BF16),
    (BF16, F16, None),
    (F32, BF16, None),
    (F16, F64, None),
]
WITHOUT_ROOTS = ("adamax", "asgd", "lion", "rprop", "sgd", "sophia")
SIZES = [1, 7, 8, 15, 16, 17, 31, 33, 64, 100, 1000, CHUNK - 1, CHUNK, CHUNK + 17]


def tensors_of(rule: Rule, flags: Any, dtypes: Any, n: int, seed: int) -> list[torch.Tensor]:
    """Tensors with numbers of all magnitudes, most of them near 1; second moments are positive."""
    source = torch.Generator().manual_seed(seed)
    grad_dtype, dtype, copy = dtypes

    few = min(n, 997)

    def drawn(dtype: torch.dtype) -> torch.Tensor:
        values = torch.randn(few, dtype=F64, generator=source)
        wild = torch.randn(few, dtype=F64, generator=source) * 20
        some = torch.rand(few, generator=source) < 0.25
        values = torch.where(some, values * torch.exp2(wild), values)
        values[torch.rand(few, generator=source) < 0.05] = 0.0
        return values.to(dtype).repeat(-(-n // few))[:n].contiguous()

    states = [drawn(dtype).abs() for _ in rule.state_for(flags)]
    tensors = [drawn(grad_dtype), drawn(dtype), *states]
    return [*tensors, tensors[1].to(copy)] if copy is not None else tensors


def row_column_means_of(rule: Rule, flags: Any, p: torch.Tensor) -> Any:
    """The means of a stack of matrices; ``None`` if the rule has none."""
    if not (over := rule.averages_for(flags)):
        return None
    columns = next(n for n in (125, 17, 7, 3, 2, 1) if p.numel() % n == 0)
    rows = p.numel() // columns
    return RowColumnMeans(over, (), (1 + (rows % 2 == 0), rows // (2 - rows % 2), columns))


def updated(
    backend: Any, rule: Rule, flags: Any, tensors: Any, hyper: Any, factors: Any, step: float
) -> list[torch.Tensor]:
    """Copies of ``tensors`` after the pass update, with sums of 0.75, and the scalar states."""
    grad, param, *others = (t.clone() for t in tensors)
    state, copies = others[: len(rule.state_for(flags))], others[len(rule.state_for(flags)) :]
    here = rule.scalar_state_for(flags)
    scalars = tuple(
        torch.tensor(step if part.name == "step" else 0.75) if part in here else None
        for part in rule.scalar_state
    )
    row = ParamRow(
        grad.dtype,
        param,
        tuple(state),
        copies[0] if copies else None,
        scalars=scalars,
        flags=flags,
        row_column_means=row_column_means_of(rule, flags, param),
    )
    work = Work(torch.device("cpu"), [row], [grad], rule, [list(hyper)])
    for factor in (x for stack in work.line_stacks for x in stack.factors):
        factor.copy_(torch.linspace(0.5, 2, factor.numel()).view(factor.shape))
    backend.prepare(work, Request(), decides=True)
    n_terms = rule.widths(len(hyper)).terms
    sums = Sums(*(torch.full(shape, 0.75).double() for shape in ((1, n_terms), (n_terms,))))
    decision = Decision(torch.tensor(0.0), Coefficients(0.0, *factors))
    backend.update(work, replace(decision, sums=sums) if rule.reduces else decision)
    return [grad, *row.outputs, *(s for s in scalars if s is not None)]


def dtypes_of(tensors: list[torch.Tensor]) -> tuple[torch.dtype, ...]:
    return tuple(t.dtype for t in tensors[:2])


def both(rule: Rule, flags: Any, dtypes: Any, n: int, seed: int, *given_to: Any) -> Any:
    """The results of C++ and of torch's operations for the same tensors."""
    tensors = tensors_of(rule, flags, dtypes, n, seed)
    backends = Compiled(), Eager(host_sees=True)
    return [updated(backend, rule, flags, tensors, *given_to) for backend in backends]


HYPER = {
    "lr": [1e-3, 0.1, 3e-4],
    "betas": [(0.9, 0.999), (0.5, 0.75), (0.3, 0.95)],
    "eps": [1e-8, 1e-3],
    "weight_decay": [0.0, 0.01, 0.3],
    "rho": [0.9],
    "lr_decay": [0.0, 0.1],
    "lambd": [1e-4],
    "alpha": [0.75, 0.99],
    "t0": [0.0, 1e6],
    "momentum_decay": [4e-3],
    "momentum": [0.9],
    "dampening": [0.0, 0.5],
    "etas": [(0.5, 1.2)],
    "step_sizes": [(1e-6, 50.0)],
    "bs": [512.0],
    "warmup_steps": [0.0, 10.0],
    "r": [0.0, 0.5],
    "weight_lr_power": [2.0],
    "trust_coefficient": [1e-2],
    "beta2_decay": [-0.8],
    "d": [1.0, 2.0],
}


def samples_of(rule: Rule) -> list[list[Any]]:
    """Values to draw for each hyperparameter."""
    own: dict[str, Any] = {}
    if rule is rules.adan:
        own = {"betas": [(0.98, 0.92, 0.99), (0.5, 0.75, 0.3)]}
    if rule is rules.adafactor:
        own = {"eps": [(1e-7, 1e-3), (0.25, 0.5)]}
    return [{**HYPER, **own}[part] for part in rule.hyper]


def flat(values: list[Any]) -> tuple[float, ...]:
    return tuple(y for x in values for y in (x if isinstance(x, tuple) else (x,)))


def same_bits(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return [fingerprint(t.nan_to_num(1.5)) for t in ours] == [
        fingerprint(t.nan_to_num(1.5)) for t in theirs
    ]


# No shrinking, for which dozens of functions would be compiled.
few = settings(max_examples=4, phases=(Phase.explicit, Phase.reuse, Phase.generate))


@pytest.mark.parametrize("name", RULES)
@settings(few, max_examples=2)
@given(data=st.data())
def test_every_rule_has_the_same_bits_in_cpp(name, data):
    """With any flags and dtypes. Two combinations are compiled, each for several sizes.

    Hypothesis draws alike for all rules, so each rule begins with other dtypes and flags.
    """
    rule, number = RULES[name], list(RULES).index(name)
    flags = tuple(data.draw(st.booleans()) != bool(number % 2) for _ in rule.flags)
    first = number % len(DTYPES_OF_TENSORS)
    dtypes = data.draw(st.sampled_from(DTYPES_OF_TENSORS[first:] + DTYPES_OF_TENSORS[:first]))
    for _ in range(4):
        hyper = flat([data.draw(st.sampled_from(some)) for some in samples_of(rule)])
        step = data.draw(st.sampled_from([0.0, 1.0, 6.0, 1000.0]))
        factors = data.draw(st.sampled_from([(1.0, 1.0), (2.0**-16, 1.0), (1 / 3, 0.7)]))
        n, seed = data.draw(st.sampled_from(SIZES)), data.draw(st.integers(0, 2**31))
        ours, theirs = both(rule, flags, dtypes, n, seed, hyper, factors, step)
        if F64 not in dtypes or name in WITHOUT_ROOTS:
            assert same_bits(ours, theirs)
        else:  # roots of float64 are MKL's in torch, a unit in the last place off at times
            for x, y in zip(ours, theirs, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9, equal_nan=True)


@jit
def _anything(p, g, state, h, flags):
    a, b = h
    larger = tl.where(g > a, 1.0, -0.5) * tl.abs(p)
    mixed = tl.where(a > b, g, 0.1) + tl.where(b > 0.25, 0.1, p) * b
    root = tl.rsqrt(1.0 + g * g) + div_rn(1.0, 3.0 + p * p) + 1.0 / (2.0 + p * p)
    clipped = minimum(maximum(g, -a), b * 0.5) + minimum(p, g) * tl.where(a < b, a - 1, b)
    other = tl.where((g > p) & ~(g <= b) | (p == 0.0) | (g != g), tl.floor(p), tl.ceil(g))
    return larger + mixed * root - clipped / -a + other, (state[0] * sqrt_rn(b) + tl.sqrt(p * p),)


ANYTHING = Rule(update=_anything, hyper=("a", "b"), state=(State("s"),))


@few
@given(
    st.sampled_from([s for s in DTYPES_OF_TENSORS if F64 not in s]),
    st.lists(
        st.tuples(
            st.sampled_from(SIZES), st.integers(0, 2**31), st.floats(0.01, 2), st.floats(0, 1)
        ),
        min_size=8,
        max_size=8,
    ),
)
def test_the_whole_language_has_the_same_bits_in_cpp(dtypes, calls):
    for n, seed, a, b in calls:
        ours, theirs = both(ANYTHING, (), dtypes, n, seed, (a, b), (0.5, 0.7), 0.0)
        assert same_bits(ours, theirs)


@jit
def _mixed(p, g, state, h, flags):
    n = (g * 4.0).to(tl.int32)
    return p - n * g - tl.where(g > 0, n, p * 0.5), ()


def test_an_integer_beside_a_float_becomes_one():
    rule, values = Rule(update=_mixed, hyper=()), torch.linspace(-3.0, 3.0, 100)
    ours, theirs = (
        updated(backend, rule, (), [values, values.flip(0)], (), (1.0, 1.0), 0.0)
        for backend in (Compiled(), Eager(host_sees=True))
    )
    assert same_bits(ours, theirs)


@jit
def _inexact(p, g, state, h, flags):
    x = tl.exp(p) + tl.exp2(p) + tl.log(1.0 + g * g) + tl.log2(1.0 + g * g)
    return x + tl.sin(g) * tl.cos(p) + tl.sigmoid(g) * power(1.0 + p * p, h[0]), ()


def test_functions_that_libraries_round_are_close():
    rule = Rule(update=_inexact, hyper=("a",))
    ours, theirs = both(rule, (), (F32, F32, None), 1000, 0, (0.5,), (1.0, 1.0), 0.0)
    finite = theirs[1].isfinite() & (tensors_of(rule, (), (F32, F32, None), 1000, 0)[0].abs() < 100)
    torch.testing.assert_close(ours[1][finite], theirs[1][finite], rtol=1e-4, atol=1e-5)


x86_64 = pytest.mark.skipif(platform.machine() != "x86_64", reason="this is another processor")


@pytest.mark.parametrize(
    ("dtype", "target"),
    [(F16, ""), (BF16, ""), pytest.param(F16, "-march=x86-64", marks=x86_64)],
    ids=str,
)
def test_every_number_of_half_precision_comes_and_goes(dtype, target, monkeypatch):
    """Bits of NaNs too, and without F16C, the instructions that convert float16."""
    monkeypatch.setenv("CXX", f"{cpp_compiler()} {target}")
    every = torch.arange(1 << 16).to(torch.uint16).view(dtype)
    bits = torch.randint(
        -(1 << 31), 1 << 31, (1 << 16,), generator=torch.Generator().manual_seed(0)
    )
    random = bits.to(torch.int32).view(F32)
    nans = random[random.isnan()][:7]
    between = every.float() + torch.cat([every[1:], every[:1]]).float()
    for values, copy in (
        (every, torch.empty(1 << 16)),
        (between / 2, torch.empty_like(every)),  # the ties, and what overflows
        (random, torch.empty_like(every)),
        (nans, torch.empty(7, dtype=dtype)),  # fewer than a vector has
    ):
        tensors = [torch.zeros_like(copy, dtype=dtype), values, copy]
        rule = Rule(update=_kept, hyper=())
        theirs, ours = (
            updated(backend, rule, (), tensors, (), (1.0, 1.0), 0.0)
            for backend in (Eager(host_sees=True), Compiled())
        )
        assert list(map(fingerprint, ours)) == list(map(fingerprint, theirs))


@jit
def _kept(p, g, state, h, flags):
    return p, ()


@jit
def _branching(p, g, state, h, flags):
    if h[0] > 0:
        p = p - g
    return p, ()


def test_what_has_no_cpp_is_an_error():
    with pytest.raises(TypeError, match="branches on a value"):
        source_of(Kind(Rule(update=_branching, hyper=("a",)), (), (F32, F32), (), 1))


def test_only_what_a_reduce_reads_is_fetched_from_memory():
    """NovoGrad sums gradients only; its update also reads parameters and averages."""
    rule = rules.novograd
    kind = Kind(rule, (False, False), (F32,) * 3, (F32,) * len(rule.scalar_state), 5)
    fetched = [
        [f"fetch<BLOCK>(t{i} " in translate(kind, role) for i in range(3)]
        for role in ("reduce", "update")
    ]
    assert fetched == [[True, False, False], [True, True, True]]
