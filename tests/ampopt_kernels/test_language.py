from decimal import Context, Decimal

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given

from ampopt_kernels import torch_language
from ampopt_kernels.language import HAS_TRITON, kernel, power, tl

counts = st.integers(1, 2**24).map(float)
averaging = st.one_of(
    st.floats(0.5, 1, exclude_max=True),
    st.sampled_from([0.9, 0.95, 0.96, 0.99, 0.999, 0.9999, 0.99999]),
)


def on_numbers(base, exponent):
    return torch_language.bind(power)(base, exponent)


def on_tensors(base, exponent):
    wide = (torch.tensor([x], dtype=torch.float64) for x in (base, exponent))
    return torch_language.bind(power)(*wide).item()


@kernel
def _power_kernel(base, exponent, out):
    at = tl.arange(0, 2)
    tl.store(out + at, power(tl.load(base + at), tl.load(exponent + at)))


def in_triton(base, exponent):
    if not HAS_TRITON:
        pytest.skip("Triton cannot be imported here")
    base, exponent = (torch.full((2,), x, dtype=torch.float64) for x in (base, exponent))
    out = torch.empty_like(base)
    _power_kernel[(1,)](base, exponent, out)
    return out[0].item()


each_way = pytest.mark.parametrize("raised", [on_numbers, on_tensors, in_triton])


@each_way
@given(averaging, counts)
@example(0.999, 7.0)  # tl.exp2 alone is a unit off under the interpreter with AVX-512
def test_power_is_right_where_rules_subtract_it_from_1(raised, base, exponent):
    result = Decimal(raised(base, exponent))
    exact = Context(prec=60).power(Decimal(base), int(exponent))
    half_an_ulp = Decimal(2) ** -54
    # Its own rounding, and a few units in the last place of what is left of 1.
    assert abs(result - exact) <= (1 + 8 * (1 - exact)) * half_an_ulp


@each_way
@pytest.mark.parametrize("exponent", [0.25, 1.0, 3.0])
def test_power_of_0_is_0_and_of_1_is_1(raised, exponent):
    assert raised(0.0, exponent) == 0
    assert raised(1.0, exponent) == 1


@each_way
@given(st.floats(1, 2**20), st.floats(0.01, 2))
def test_power_beyond_1(raised, base, exponent):
    assert raised(base, exponent) == pytest.approx(base**exponent, rel=2**-47)
