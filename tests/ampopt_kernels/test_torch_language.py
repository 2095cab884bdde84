"""The language of rules on torch tensors and numbers."""

import functools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ampopt_kernels import div_rn, jit, maximum, minimum, power, sqrt_rn, tl, torch_language
from ampopt_kernels.language import HAS_TRITON

FLOATS = st.floats(-100, 100) | st.sampled_from([0.0, -0.0, 1e300, -1e300, math.inf, -math.inf])
UNARY = "abs sqrt rsqrt exp exp2 log log2 sin cos floor ceil sigmoid".split()


@jit
def square(x):
    return x * x


@jit
def nested(x, y, FLAG: tl.constexpr):
    LOCAL: tl.constexpr = FLAG
    if LOCAL:
        x = maximum(x, y)
    else:
        x = tl.where(x > y, square(x), minimum(power(tl.abs(y), 2.0), 9.0))
    return x, (x + 1,)


@jit
def unknown(x):
    return tl.hyperbolic(x)


@jit
def with_default(x, factor=3.0):
    return x * factor


def same(a, b, rel=1e-12):
    return (math.isnan(a) and math.isnan(b)) or a == pytest.approx(b, rel=rel, abs=1e-300)


@given(x=st.floats(-8, 8), y=st.floats(-8, 8), flag=st.booleans())
def test_one_body_for_tensors_and_numbers(x, y, flag):
    bound = torch_language.bind(nested)
    wide = (torch.tensor([v], dtype=torch.float64) for v in (x, y))
    tensor, (next_tensor,) = bound(*wide, flag)
    number, (next_number,) = bound(x, y, flag)
    expected = max(x, y) if flag else (x * x if x > y else min(y * y, 9.0))
    assert same(number, expected)
    assert same(tensor.item(), expected)
    assert next_number == number + 1
    assert next_tensor.item() == tensor.item() + 1


def test_bind_leaves_the_function_as_it_was():
    before = dict(nested.fn.__globals__)
    torch_language.bind(nested)
    assert nested.fn.__globals__ == before
    assert nested.fn.__globals__["tl"] is tl


def test_bind_keeps_defaults():
    assert torch_language.bind(with_default)(2.0) == 6.0


def test_an_unknown_function_is_named_with_those_there_are():
    with pytest.raises(AttributeError, match=r"the rule uses tl\.hyperbolic") as raised:
        torch_language.bind(unknown)(torch.ones(1))
    offered = str(raised.value).split("All backends have: ")[1].split(". Write")[0].split(", ")
    assert set(UNARY) | {"where", "float32"} <= set(offered)
    # What is offered is of the language, not of the module's own making.
    assert not {"torch", "math", "Callable", "bind", "jit", "types", "Any"} & set(offered)


@given(name=st.sampled_from(UNARY), x=FLOATS)
def test_numbers_have_the_results_of_tensors(name, x):
    """Also if Python would raise: a step may use numbers on the CPU, and tensors on a device."""
    function = getattr(torch_language, name)
    assert same(function(x), function(torch.tensor(x, dtype=torch.float64)).item())


@given(x=FLOATS, y=FLOATS, of_tensors=st.tuples(st.booleans(), st.booleans()))
def test_choosing(x, y, of_tensors):
    larger, smaller = torch_language.bind(maximum), torch_language.bind(minimum)
    a, b = (
        torch.tensor(v, dtype=torch.float64) if t else v
        for v, t in zip((x, y), of_tensors, strict=True)
    )
    assert float(larger(a, b)) == max(x, y)
    assert float(smaller(a, b)) == min(x, y)
    assert float(torch_language.where(a > b, a, b)) == max(x, y)
    assert float(torch_language.where(x > y, a, b)) == max(x, y)


@pytest.mark.filterwarnings("ignore:Bitwise inversion:DeprecationWarning")
@pytest.mark.parametrize("where", [torch_language.where, torch_language.on_numbers.where])
def test_a_python_condition_holds_as_it_does_as_a_tensor(where):
    both = (True, False)
    cases = [(x, x != 0) for x in (2, 1, 0, -1, -4)]
    cases += [(~x & y, not x and y) for x in both for y in both]
    cases += [(~x | y, not x or y) for x in both for y in both]
    cases += [(~(~x & y), x or not y) for x in both for y in both]
    for condition, holds in cases:
        assert where(condition, 1.0, 0.0) == float(holds), condition


@jit
def larger_and_smaller(x, y):
    return maximum(x, y), minimum(x, y)


@given(y=FLOATS, first=st.booleans(), of_tensors=st.tuples(st.booleans(), st.booleans()))
def test_nan_is_neither_larger_nor_smaller_but_nan(y, first, of_tensors):
    values = (math.nan, y) if first else (y, math.nan)
    wide = functools.partial(torch.tensor, dtype=torch.float64)
    arguments = [wide(v) if t else v for v, t in zip(values, of_tensors, strict=True)]
    for result in torch_language.bind(larger_and_smaller)(*arguments):
        assert math.isnan(float(result))


root = sqrt_rn


@jit
def calls_a_helper_by_another_name(x):
    return root(x)


def test_a_helper_may_have_another_name():
    assert torch_language.bind(calls_a_helper_by_another_name)(4.0) == 2.0


@given(base=st.floats(0, 1), exponent=st.integers(1, 10**6))
def test_power(base, exponent):
    function = torch_language.bind(power)
    expected = base**exponent
    # exp2(e log2 b) loses what digits the size of the exponent takes.
    assert same(function(base, float(exponent)), expected, rel=1e-9)
    wide = torch.tensor(base, dtype=torch.float64)
    assert same(function(wide, float(exponent)).item(), expected, rel=1e-9)


def test_power_of_nothing():
    assert torch_language.bind(power)(0.0, 3.0) == 0.0
    assert torch_language.bind(power)(torch.zeros(2), 3.0).tolist() == [0.0, 0.0]


@jit
def rounded(x, y):
    return sqrt_rn(x), div_rn(x, y)


def test_rounded_functions_take_either_dtype_and_numbers():
    function = torch_language.bind(rounded)
    for dtype in (torch.float32, torch.float64):
        x, y = torch.tensor([2.0, 1e-40], dtype=dtype), torch.tensor([3.0, 7.0], dtype=dtype)
        root, quotient = function(x, y)
        assert torch.equal(root, x.sqrt())
        assert root.dtype == dtype
        assert torch.equal(quotient, x / y)
    assert function(2.0, 3.0) == (math.sqrt(2.0), 2.0 / 3.0)


if HAS_TRITON:

    @jit
    def on_device(source, target, FUNCTION: tl.constexpr, N: tl.constexpr):
        at = tl.arange(0, N)
        x = tl.load(source + at)
        y = tl.load(source + N + at)
        for i, value in enumerate(FUNCTION(x, y)):
            tl.store(target + i * N + at, value)

    @jit
    def all_functions(x, y):
        return (
            sqrt_rn(x),
            div_rn(y, x),
            power(x, 3.0),
            tl.where(x > y, x, y),
            maximum(x, y),
            minimum(x, y),
            tl.exp2(y),
            tl.log2(x),
            tl.exp(y),
            tl.log(x),
            tl.floor(y),
            tl.ceil(y),
            tl.abs(y),
            tl.rsqrt(x),
            tl.sigmoid(y),
        )


@pytest.mark.skipif(not HAS_TRITON, reason="Triton cannot be imported here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@given(data=st.data())
def test_triton_agrees(dtype, data):
    """In a kernel, results are close; those of correctly rounded functions are the same."""
    positive = data.draw(st.lists(st.floats(0.0625, 8, width=32), min_size=4, max_size=4))
    any_sign = data.draw(st.lists(st.floats(-8, 8, width=32), min_size=4, max_size=4))
    source = torch.tensor([positive, any_sign], dtype=dtype)
    expected = torch.stack(torch_language.bind(all_functions)(*source))
    target = torch.empty_like(expected)
    on_device[(1,)](source, target, FUNCTION=all_functions, N=4)
    # In float64, rounded once more for float32, which finds the nearest as well.
    nearest = [
        [math.sqrt(x) for x in source[0].tolist()],
        (source[1].double() / source[0]).tolist(),
    ]
    assert torch.equal(target[:2], torch.tensor(nearest, dtype=torch.float64).to(dtype))
    eps = 16 * torch.finfo(dtype).eps
    torch.testing.assert_close(target, expected, rtol=eps, atol=eps)
