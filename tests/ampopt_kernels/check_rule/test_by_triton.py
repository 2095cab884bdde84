"""A rule that Triton refuses is refused before its first step, with the place and a remedy."""

import inspect
import re
from pathlib import Path

import pytest
import torch
from support.refused_rules import assert_refused, optimizer_of
from torch.nn import Parameter

import ampopt
import ampopt_kernels
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
    rand,
    randn,
    sign,
    sqrt_rn,
    tl,
    torch_language,
)
from ampopt_kernels.check_rule import by_triton
from ampopt_kernels.language import HAS_TRITON
from ampopt_kernels.triton.compiler import compilable

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="Triton cannot be imported here")
HYPER = ("lr", "decay")
ROOT = Path(__file__).parents[3]
GAMMA = 0.5
DELTA = tl.constexpr(0.5)  # pyright: ignore[reportCallIssue]


@jit
def global_number(p, g, state, h, flags):
    return p - GAMMA * g, state  # here


@jit
def squares(p, g, state, h, flags):
    # A comment and an empty line before it.

    return p - h[0] * g**2, state  # here


@jit
def powers(p, g, state, h, flags):
    return p - h[0] ** h[1] * g, state  # here


@jit
def loops_over_a_tuple(p, g, state, h, flags):
    for rate in h:  # here
        p = p - rate * g
    return p, state


@jit
def root_of_a_comparison(p, g, state, h, flags):
    return p - tl.sqrt(g > 0) * g, state  # here


def unmarked(x):
    return 2 * x


@jit
def calls_unmarked(p, g, state, h, flags):
    return p - unmarked(g), state  # here


@jit
def formats(p, g, state, h, flags):
    name = f"{h[0]}"  # here # noqa: F841
    return p - g, state


@jit
def unpacks_the_rest(p, g, state, h, flags):
    rate, *rest = h  # here
    return p - rate * g, state


@jit
def writes_the_seed(p, g, state, h, flags, at):
    return p - h[0] * g * rand(0, h[1], at), state  # here


@jit
def pythons_own(p, g, state, h, flags):
    return p - abs(g), state  # here


@jit
def has_a_lambda(p, g, state, h, flags):
    twice = lambda x: 2 * x  # here # noqa: E731
    return p - twice(g), state


def of(rate):
    @jit
    def reads_around(p, g, state, h, flags):
        return p - rate * g, state  # here

    return reads_around


@jit
def cubed(x):
    return x**3  # here


@jit
def calls_one_that_is_refused(p, g, state, h, flags):
    return p - cubed(g), state


@jit
def doubled(x):
    # Longer than its caller.

    return x + x


@jit
def calls_one_and_a_global_number(p, g, state, h, flags):
    return p - GAMMA * doubled(g), state  # here


@needs_triton
@pytest.mark.parametrize(
    ("function", "code", "advice"),
    [
        (global_number, "GAMMA", "NAME: tl.constexpr = NUMBER"),
        (squares, "g**2", "x * x"),
        (powers, "h[0] ** h[1]", "power(x, y) of ampopt_kernels"),
        (loops_over_a_tuple, "`for rate in h:`", "tl.static_range(len(state))"),
        (root_of_a_comparison, "tl.sqrt(g > 0)", "tl.where(x > 0, 1.0, 0.0)"),
        (calls_unmarked, "unmarked(g)", "marked with jit"),
        (formats, 'f"{h[0]}"', "The language of rules"),
        (unpacks_the_rest, "`rate, *rest = h`", "a + (b,)"),
        (writes_the_seed, "rand(0, h[1], at)", "are numbers of h"),
        (pythons_own, "abs(g)", "Write tl.abs(x)"),
        (has_a_lambda, "lambda x: 2 * x", "The language of rules"),
        (of(0.5), "rate", "NAME: tl.constexpr = NUMBER"),
        (calls_one_that_is_refused, "x**3", "x * x"),
        (calls_one_and_a_global_number, "GAMMA", "NAME: tl.constexpr = NUMBER"),
    ],
    ids=lambda value: getattr(getattr(value, "fn", None), "__name__", ""),
)
def test_what_triton_refuses_is_named_with_its_line_and_a_remedy(function, code, advice):
    at_fault = cubed if function is calls_one_that_is_refused else function
    lines, first = inspect.getsourcelines(at_fault.fn)
    (line,) = (first + i for i, text in enumerate(lines) if "# here" in text)
    place = f"{__file__}:{line}, in {at_fault.fn.__name__}: `"
    assert_refused(Rule(update=function, hyper=HYPER), "update of", place, code, advice)


@jit
def averages_with_a_global_number(p, g, state, h, flags):
    return (GAMMA * g * g,)  # here


@jit
def divides_by_rows(p, g, state, h, flags):
    return p - h[0] * g * state[0], ()


@needs_triton
def test_what_triton_refuses_in_averages_is_named_too():
    rule = Rule(
        update=divides_by_rows,
        averages=averages_with_a_global_number,
        factors=lambda means, state, h, flags: (means, means),
        hyper=HYPER,
        state=(State("by_row", shape="rows"),),
    )
    param = Parameter(torch.ones(2, 3))
    param.grad = torch.ones(2, 3)
    optimizer = optimizer_of(rule)([param])
    with pytest.raises(
        ValueError, match="averages of Author's rule: .*GAMMA.* cannot be compiled for a GPU"
    ):
        optimizer.step()
    assert not optimizer.state and param.eq(1).all()


@needs_triton
def test_triton_names_the_fault_again_when_a_rule_is_tried_again():
    """After an error, Triton leaves a placeholder as the cache key of the function."""
    function = compilable(calls_unmarked)
    messages = []
    for _ in range(2):
        with pytest.raises(Exception, match="unmarked") as raised:
            _ = function.cache_key
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


@jit
def counts_in_powers(s, h):
    return (s[0] + 1,), (h[0] * 0.5 ** s[0], h[1])


@jit
def plain(p, g, state, h, flags):
    return p - h[0] * g, state


@needs_triton
def test_scalars_are_compiled_too():
    rule = Rule(update=plain, hyper=HYPER, scalars=counts_in_powers, scalar_state=(State("count"),))
    assert_refused(rule, "scalars of", "in counts_in_powers: `return", "0.5 ** s[0]", "power")


@jit
def rounds_a_whole_number(s, h):
    return (s[0] + tl.floor(2),), h


@needs_triton
def test_what_only_the_verifier_of_triton_finds_is_refused(capfd):
    kinds = {"scalars": rounds_a_whole_number, "scalar_state": (State("count"),)}
    assert_refused(Rule(update=plain, hyper=HYPER, **kinds), "scalars of", "cannot be compiled")
    assert "error: 'math.floor' op" in capfd.readouterr().err


@jit
def refused_under_a_flag(p, g, state, h, flags):
    EXTRA: tl.constexpr = flags[0]
    if EXTRA:
        g = g**2
    return p - h[0] * g, state


@needs_triton
def test_a_rule_is_compiled_under_the_flags_of_its_groups():
    class Author(ampopt.ElementwiseOptimizer):
        rule = Rule(update=refused_under_a_flag, hyper=HYPER, flags=("extra",))

    param = Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    optimizer = Author([param], {"lr": 0.5, "decay": 0.25, "extra": False})
    optimizer.step()
    optimizer.param_groups[0]["extra"] = True
    with pytest.raises(ValueError, match=r"`g = g\*\*2`"):
        optimizer.step()
    assert param.tolist() == [0.5, 0.5, 0.5]


@jit
def narrow_at_first(p, g, state, h, flags):
    total = sign(g)  # float32
    for _ in range(2):
        total = 0.5 * total + g
    return p - h[0] * total, state


@needs_triton
def test_a_rule_is_compiled_in_the_dtypes_that_its_parameters_are_computed_in():
    optimizer = optimizer_of(Rule(update=narrow_at_first, hyper=HYPER))
    for dtype in (torch.bfloat16, torch.complex64, torch.float64, torch.complex128):
        param = Parameter(torch.ones(3, dtype=dtype))
        param.grad = torch.ones_like(param)
        if dtype not in (torch.float64, torch.complex128):
            optimizer([param]).step()
            continue
        with pytest.raises(ValueError, match=r"Loop-carried .*fp64.*total = p \* 0 \+ total"):
            optimizer([param]).step()
        assert param.eq(1).all()


@jit
def marked_number(p, g, state, h, flags):
    return p - DELTA * g, (DELTA * state[0] + g,)


@pytest.mark.parametrize("backend", ["eager", "eager on a device", "compiled"], indirect=True)
def test_a_number_that_is_marked_where_it_stands_is_a_number(backend):
    """Triton's compiler accepts such a number; its interpreter only on the right of a block."""

    class Author(ampopt.ElementwiseOptimizer):
        rule = Rule(update=marked_number, hyper=HYPER, state=(State("sum", init=2.0),))

    param = Parameter(torch.ones(3))
    param.grad = torch.tensor([1.0, -2.0, 0.0])
    optimizer = Author([param], {"lr": 0.5, "decay": 0.25})
    optimizer.step()
    assert param.tolist() == [0.5, 2.0, 1.0]
    assert optimizer.state[param]["sum"].tolist() == [2.0, -1.0, 1.0]


# --- what a rule may use -------------------------------------------------------------------------


def documented(*, of_tl: bool) -> set[str]:
    """The functions that the guide lists, of ``tl`` or of this package."""
    guide = (ROOT / "examples/guides/rule_language.md").read_text(encoding="utf-8")
    _, tl_functions, helpers, *_ = re.split(r"- from `|- `if`", guide)
    return set(re.findall(r"`(\w+)`", tl_functions if of_tl else helpers)) - {
        "tl",
        "ampopt_kernels",
        "jit",
    }


def test_the_documented_functions_are_those_there_are():
    assert documented(of_tl=True) == torch_language.FUNCTIONS
    rest = {"Codec", "Rule", "State", "jit", "tl"}
    assert documented(of_tl=False) == set(ampopt_kernels.__all__) - rest


@jit
def uses_all_there_is(x):
    y = tl.abs(x) + 1.0
    z = tl.sin(x) + tl.cos(x) + tl.exp(-y) + tl.exp2(-y) + tl.floor(x) + tl.ceil(x)
    z = z + tl.log(y) + tl.log2(y) + tl.sqrt(y) + tl.rsqrt(y) + tl.sigmoid(x)
    for i in tl.static_range(2):
        z = z + tl.where((x > i) & (y < 4) | ~(x > -1), x, y)
    z = maximum(minimum(z, 4.0), x) * sign(x)
    return z + div_rn(x, y) + sqrt_rn(y) + as_float32(x) + power(y, 2.0)


@jit
def all_in_update(p, g, state, h, flags, at):
    drawn = rand(h[0], h[1], at) + randn(h[0], h[1], at)
    return p - uses_all_there_is(g) + exp2_linear(log2_linear(tl.abs(g) + 1.0)) + drawn, state


@jit
def all_in_scalars(s, h):
    return s, (uses_all_there_is(h[0]), h[1])


ALL = Rule(update=all_in_update, scalars=all_in_scalars, hyper=HYPER)


@needs_triton
def test_all_there_is_compiles():
    source = inspect.getsource(uses_all_there_is.fn) + inspect.getsource(all_in_update.fn)
    for name in documented(of_tl=True) | documented(of_tl=False):
        assert re.search(rf"\b(tl\.)?{name}\(", source), name
    for dtype in (torch.float32, torch.float64):
        by_triton.check(ALL, (), 2, "Author", dtype)


@pytest.mark.parametrize("backend", ["triton"], indirect=True)
def test_a_rule_passes_after_one_has_run(backend):
    """Triton's interpreter leaves its own functions in ``tl``."""
    param = Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    ampopt.Adam([param]).unscale_and_step(grads_scaled_by=2.0)
    for dtype in (torch.float32, torch.float64):
        by_triton.check(ALL, (), 2, "Author", dtype)
