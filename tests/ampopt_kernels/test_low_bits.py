"""24-bit masters: what a parameter and its low bits stand for, and how masters are rounded."""

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.kernel_rows import CPU, fingerprint

from ampopt_kernels.cpu.compiled import Compiled
from ampopt_kernels.eager import Eager
from ampopt_kernels.language import HAS_TRITON, jit
from ampopt_kernels.low_bits import LOW_BITS, low_bits_of, master_of, split_master
from ampopt_kernels.rule import Rule, State
from ampopt_kernels.step import run
from ampopt_kernels.step_data import Request
from ampopt_kernels.step_tensors import ParamRow, Work

HALF = st.sampled_from([torch.float16, torch.bfloat16])
INF, NAN = float("inf"), float("nan")


@given(HALF, st.lists(st.floats(width=32), min_size=1), st.integers(0, 2**15 - 1))
def test_24_bits_hold_a_float32_within_their_last_place(dtype, numbers, drawn):
    x = torch.tensor(numbers, dtype=torch.float32)
    u = torch.tensor((drawn + 0.5) / 2**15)
    param, low = split_master(x, dtype, u)
    master = master_of(param, low)
    fits = param.isfinite() & x.isfinite()
    smallest = 2.0**-32 if dtype == torch.float16 else 2.0**-141
    allowed = torch.maximum(x.abs() * 2**-14.9, torch.tensor(smallest))
    assert ((master - x).abs() <= allowed)[fits].all()
    nearest = master.to(dtype)
    tie = low == -128
    assert torch.equal(param[fits & ~tie], nearest[fits & ~tie])
    again = split_master(master, dtype, u)
    assert torch.equal(again[0][fits], param[fits]) and torch.equal(again[1][fits], low[fits])
    # Beyond the range of the parameter, it is what a float32 master would round to.
    rounded = x.to(dtype)
    out = ~fits & ~x.isnan()
    assert (param.isinf() & ((param > 0) == (x > 0)))[out].all() and param[x.isnan()].isnan().all()
    assert (rounded.isinf() | (x.abs() > 65500))[out].all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("x", [1.2345678, -3e-6, 2.0**-13 - 2.0**-34, 1e-4])
def test_rounding_has_no_bias(dtype, x):
    u = (torch.arange(2.0**15) + 0.5) / 2**15  # every random number
    full = torch.full_like(u, x)
    rounded = master_of(*split_master(full, dtype, u)).double()
    step = (rounded.max() - rounded.min()).item()
    assert abs(rounded.mean().item() - full[0].item()) <= step * 2**-14
    assert len(rounded.unique()) <= 2


def test_low_bits_of_a_float32_master_leave_its_rounded_value_alone():
    for dtype in (torch.float16, torch.bfloat16):
        master = torch.randn(1 << 14, generator=torch.Generator().manual_seed(0)) / 8
        master[:256] = torch.arange(256) / 2**15 + 1  # ties among them
        param = master.to(dtype)
        error = (master_of(param, low_bits_of(param, master)) - master).abs()
        assert (error <= master.abs() * 2**-14.9 + 2**-32).all()


# Saved masters have these bits: (dtype, parameter, low bits, master).
PARTS_OF_MASTERS = [
    (torch.bfloat16, 1.0, 0, 1.0),
    (torch.bfloat16, 1.0, 127, 1 + 127 * 2.0**-15),
    (torch.bfloat16, -1.0, 1, -1 - 2.0**-15),
    (torch.bfloat16, 1.0, -128, 1 - 2.0**-9),
    (torch.bfloat16, 0.0, 1, 2.0**-141),
    (torch.bfloat16, INF, 0, INF),
    (torch.float16, 1.0, 127, 1 + 127 * 2.0**-18),
    (torch.float16, -1.0, 1, -1 - 2.0**-18),
    (torch.float16, 2.0**-14, -3, 2.0**-14 - 3 * 2.0**-32),
    (torch.float16, -(2.0**-24), 5, -(2.0**-24) - 5 * 2.0**-32),
    (torch.float16, 0.0, 1, 2.0**-32),
    (torch.float16, -INF, 0, -INF),
]


@pytest.mark.parametrize(("dtype", "param", "low", "master"), PARTS_OF_MASTERS)
def test_the_format_stays(dtype, param, low, master):
    """A checkpoint that has low bits is read years later."""
    parts = torch.tensor([param], dtype=dtype), torch.tensor([low], dtype=LOW_BITS)
    assert master_of(*parts).item() == master
    again, low_again = split_master(torch.tensor([master]), dtype, 0.5)
    assert again.item() == param or low == -128  # the middle of two parameters belongs to both
    assert low_again.item() == low or low == -128


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [0.0, -0.0, INF, -INF, NAN])
def test_writing_to_a_parameter_writes_its_master(dtype, value):
    """Whatever low bits it had before: pruning writes zeros. Numbers near 2**128 round to inf."""
    low = torch.arange(-128, 128).to(LOW_BITS)
    param = torch.full_like(low, value, dtype=dtype)
    master, expected = master_of(param, low), param.float()
    if value:
        master, expected = master.clamp(-3e38, 3e38), expected.clamp(-3e38, 3e38)
    torch.testing.assert_close(master, expected, rtol=0, atol=2.0**-25, equal_nan=True)


# --- backends -------------------------------------------------------------------------------------


@jit
def _replace(p, g, state, h, flags):
    """The gradient is the new master; the old master is kept as a state."""
    return g, (p,)


REPLACE = Rule(update=_replace, hyper=("unused",), state=(State("old", dtype=torch.float32),))


def backends():
    by_name = {"eager": Eager(), "cpu": Eager(host_sees=True), "compiled": Compiled()}
    if HAS_TRITON:
        from ampopt_kernels.triton.backend import Triton

        by_name["triton"] = Triton()
    return by_name


BACKENDS = backends()
EDGES = [0.0, -0.0, INF, -INF, NAN, 65504.0, 65519.9, 65520.0, -65536.0, 3.3895e38, 3.4e38, 1e-45]
EDGES += [2.0**-13, -(2.0**-14), 2.0**-24, 2.0**-25, 2.0**-33, 1 + 2.0**-9, 1 - 2.0**-10]


def bits_of(numbers: list[float]) -> list[int]:
    return torch.tensor(numbers, dtype=torch.float32).view(torch.int32).tolist()


@settings(max_examples=10)
@given(
    HALF,
    st.lists(st.tuples(*(st.integers(-(2**n), 2**n - 1) for n in (31, 15, 7))), min_size=1),
    st.integers(0, 1 << 40),
)
@example(torch.bfloat16, [(x, x >> 16, x % 128) for x in bits_of(EDGES)], 7)
@example(torch.float16, [(x, x >> 16, x % 128) for x in bits_of(EDGES)], 7)
def test_backends_read_and_store_the_same_bits(dtype, elements, key):
    """Of any float32 that is the new master, and of any parameter with any low bits."""
    columns = list(zip(*elements, strict=True))
    results: dict[str, Any] = {}
    for name, backend in BACKENDS.items():
        grad = torch.tensor(columns[0], dtype=torch.int32).view(torch.float32)
        param = torch.tensor(columns[1], dtype=torch.int16).view(dtype)
        low = torch.tensor(columns[2], dtype=LOW_BITS)
        old = torch.zeros(len(elements))
        # Triton's interpreter reads bfloat16 numbers below 2**-126 as 0.
        readable = (param.float().abs() >= 2.0**-126) | (dtype == torch.float16)
        row = ParamRow(torch.float32, param, (old,), low=low, random_key=torch.tensor(key))
        work = Work(CPU, [row], [grad], REPLACE, [[0.5]])
        run(lambda _, backend=backend: backend, [work], Request(check=False))
        masters = torch.where(readable, old, 0.0)
        results[name] = [fingerprint(t.nan_to_num(1.5)) for t in (param, masters)], low.tolist()
    assert results == dict.fromkeys(results, results["eager"])
