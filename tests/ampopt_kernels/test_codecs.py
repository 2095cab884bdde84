"""Codecs: what they store, and that all backends store the same bits."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_programs import Action, ParamSpec, Program

import ampopt
from ampopt_kernels import eager, rules
from ampopt_kernels.codecs import (
    BFLOAT16,
    NON_NEGATIVE,
    SIGNED,
    WIDE,
    Codec,
    decoded,
    encoded,
    uniform,
)
from ampopt_kernels.cpu.compiled import Compiled
from ampopt_kernels.eager import Eager
from ampopt_kernels.element_indices import ElementIndices, Jump
from ampopt_kernels.language import HAS_TRITON, jit, tl
from ampopt_kernels.native.build import cpp_compiler
from ampopt_kernels.step import run
from ampopt_kernels.step_data import Request
from ampopt_kernels.step_tensors import ParamRow, Work

KEY = 5 << 32 | 7
CHUNK = 512


@pytest.fixture(autouse=True, scope="module")
def chunks_of_whole_blocks(small_chunks):
    """Make chunks a multiple of a block, as they are outside of tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eager, "CHUNK", CHUNK)
        if HAS_TRITON:
            from ampopt_kernels.triton import table

            patch.setattr(table, "BLOCK", CHUNK)
            patch.setattr(table, "CHUNK", CHUNK)
        yield


@jit
def _encode_even(x, u):
    return tl.floor(x * 120.0 + u)


@jit
def _decode_even(code):
    return code * (1 / 120)


@jit
def _encode_half(x, u):
    return x


@jit
def _decode_half(code):
    return code


EVEN = Codec(_encode_even, _decode_even, torch.int8, block=32)
HALF = Codec(_encode_half, _decode_half, torch.float16, block=256)
BUILT_IN = {"signed": SIGNED, "wide": WIDE, "non-negative": NON_NEGATIVE}


# --- one codec ------------------------------------------------------------------------------------


def values(n, *, seed=0):
    """Numbers of many magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, generator=generator) * torch.exp(4 * torch.randn(n, generator=generator))


@pytest.mark.parametrize("codec", BUILT_IN.values(), ids=BUILT_IN)
def test_a_code_that_is_decoded_and_encoded_is_the_same_code(codec):
    low, high = codec.limits or (0, 0)
    codes = torch.arange(low + (low < 0), high + 1)
    for u in (2**-16, 0.5, 1 - 2**-16):
        again = codec.torch_encode(codec.torch_decode(codes), torch.full_like(codes, u))
        assert torch.equal(again, codes)


@settings(max_examples=10)
@given(st.integers(0, 9), st.floats(-30, 30))
def test_rounding_is_without_bias_and_within_the_spacing(seed, exponent):
    x = values(256, seed=seed) * 2.0**exponent
    for codec, added, steps in (
        (SIGNED, 18 * 2.0**-12, 16),
        (WIDE, 20 * 2.0**-20, 8),
        (NON_NEGATIVE, 18 * 2.0**-20, 16),
    ):
        y = x.abs() if codec is NON_NEGATIVE else x
        _, scales = encoded(y, codec, 0.5)
        assert scales is not None
        n = 64
        us = (2 * torch.arange(n) + 1) / (2 * n)  # stand in for all random numbers
        rounded = torch.stack([decoded(*with_codec(y, codec, float(u))) for u in us])
        size = scales.repeat_interleave(codec.block)
        mask = y >= 2.0**-20 * size if codec is NON_NEGATIVE else y == y
        gap = (y.abs() + added * size) / steps
        assert ((rounded - y).abs() <= 1.01 * gap)[:, mask].all()
        assert ((rounded.mean(0) - y).abs() <= gap * (1 / n + 1e-3))[mask].all()


def with_codec(x, codec, u):
    codes, scales = encoded(x, codec, u)
    return codes, codec, scales


@pytest.mark.parametrize("codec", [SIGNED, WIDE, NON_NEGATIVE, BFLOAT16, EVEN, HALF])
def test_zero_stays_zero_and_what_is_not_zero_is_never_zero_where_it_divides(codec):
    x = torch.tensor([0.0, 1e-30, 1e-45, 1.0] * 32)
    for u in (2**-16, 1 - 2**-16):
        back = decoded(*with_codec(x, codec, u))
        assert (back[::4] == 0).all()
        assert codec is not NON_NEGATIVE or (back[1::4] > 0).all()
    assert (decoded(*with_codec(torch.zeros(130), codec, 0.9)) == 0).all()


def test_nan_shows_in_its_block_and_infinity_is_the_largest_number():
    x = torch.ones(256)
    x[3], x[200] = float("nan"), float("inf")
    for codec in BUILT_IN.values():
        back = decoded(*with_codec(x, codec, 0.5))
        assert back[:128].isnan().all()
        assert back[200] > 1e37
        assert back[128:].isfinite().all()


def test_elements_steps_parameters_and_states_draw_different_numbers():
    indices = torch.arange(1 << 12)
    draws = [
        uniform(indices + first, key, state)
        for first, key, state in [
            (0, KEY, 0),
            (0, KEY, 1),
            (0, KEY, 2),
            (0, KEY + 1, 0),
            (0, KEY + (1 << 32), 0),
            (1 << 32, KEY, 0),
        ]
    ]
    for u in draws:
        assert 0 < u.min() and u.max() < 1
        assert abs(u.mean() - 0.5) < 0.02
    correlation = torch.corrcoef(torch.stack(draws)) - torch.eye(len(draws))
    assert correlation.abs().max() < 0.08


def test_a_codec_that_cannot_work_is_refused_where_it_is_written():
    with pytest.raises(TypeError, match="encode must be a function marked with"):
        Codec(lambda x, u: x, _decode_even, torch.int8)
    with pytest.raises(ValueError, match="dtype must be .* got torch.int32"):
        Codec(_encode_even, _decode_even, torch.int32)
    with pytest.raises(ValueError, match="block must be .* got 100"):
        Codec(_encode_even, _decode_even, torch.int8, block=100)


# --- backends -------------------------------------------------------------------------------------


def backends():
    by_name = {"eager": Eager(), "cpu": Eager(host_sees=True), "compiled": Compiled()}
    if HAS_TRITON:
        from ampopt_kernels.triton.backend import Triton

        by_name["triton"] = Triton()
    return by_name


def row_of(n, rule, codecs, *, low=None, indices=None):
    """A row of ``n`` elements, and its gradient."""
    param, flags = values(n, seed=n), (False,) * len(rule.flags)
    states = [
        encoded(torch.zeros(n), codec, 0.5) if codec is not None else (torch.zeros(n), None)
        for codec in codecs
    ]
    row = ParamRow(
        low or torch.float32,
        param=param,
        state=tuple(codes for codes, _ in states),
        copy=None if low is None else param.to(low),
        scalars=tuple(torch.zeros(()) for _ in rule.scalar_state),
        flags=flags,
        random_key=torch.tensor(KEY),
        indices=indices or ElementIndices(),
        codecs=codecs,
        scales=tuple(scales for _, scales in states),
    )
    return row, values(n, seed=n + 1).to(row.grad_dtype)


def bits_after_steps(backend, rule, hyper, make_rows, *, flag=0.0):
    """The bits of all tensors after three steps of the rows that ``make_rows()`` returns."""
    rows, grads = zip(*make_rows(), strict=True)
    work = Work(torch.device("cpu"), list(rows), [], rule, [hyper])
    for i in range(3):
        work.refresh([grad * (i + 1) for grad in grads], [hyper])
        found_inf = torch.tensor(flag)
        run(lambda _: backend, [work], Request(check=False, found_inf=found_inf))
    tensors = []
    for row in rows:
        tensors += [row.param, *row.state, row.copy, *row.scales, row.random_key]
    return [t for t in tensors if t is not None]


ADAM = (0.1, 0.9, 0.999, 1e-8, 0.01)
CASES = {
    "built in": (rules.adam, ADAM, (SIGNED, NON_NEGATIVE), {}),
    "bfloat16": (rules.adam, ADAM, (BFLOAT16, BFLOAT16), {}),
    "an index of 32 bits": (
        rules.adam,
        ADAM,
        (BFLOAT16, BFLOAT16),
        {"indices": ElementIndices((1 << 32) - 200)},
    ),
    "one of two": (rules.adam, ADAM, (None, NON_NEGATIVE), {}),
    "an author's": (rules.adam, ADAM, (EVEN, HALF), {}),
    "small blocks": (rules.lamb, (0.1, 0.9, 0.999, 1e-6, 0.01), (EVEN, None), {}),
    "masters": (rules.adam, ADAM, (SIGNED, NON_NEGATIVE), {"low": torch.bfloat16}),
    "shards": (
        rules.adam,
        ADAM,
        (SIGNED, NON_NEGATIVE),
        {"indices": ElementIndices(1 << 33, (Jump(128, 0, 256),))},
    ),
    "sums": (rules.lamb, (0.1, 0.9, 0.999, 1e-6, 0.01), (SIGNED, NON_NEGATIVE), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_backends_store_the_same_bits(case):
    rule, hyper, codecs, options = CASES[case]

    def make_rows():
        return [row_of(n, rule, codecs, **options) for n in (1, 1300, 256)]

    results = {name: bits_after_steps(b, rule, hyper, make_rows) for name, b in backends().items()}
    first = results.pop("eager")
    assert any((t != 0).any() for t in first[1:3])
    for name, others in results.items():
        for one, other in zip(first, others, strict=True):
            assert torch.equal(one, other), name


def test_a_skipped_step_changes_no_bit():
    rule, hyper, codecs, _ = CASES["built in"]

    def make_rows():
        return [row_of(300, rule, codecs)]

    ((row, _),) = make_rows()
    before = [row.param, *row.state, *row.scales, row.random_key]
    for name, backend in backends().items():
        after = bits_after_steps(backend, rule, hyper, make_rows, flag=1.0)
        assert all(map(torch.equal, before, after)), name


@pytest.mark.parametrize("name", ["eager", "cpu", "compiled"])
def test_a_block_does_not_depend_on_threads_or_the_rest_of_the_parameter(name):
    rule, hyper, codecs, _ = CASES["built in"]
    n = (1 << 16) + 384 if name == "compiled" else 1792  # more than one thread, or chunk, takes
    whole, grad = row_of(n, rule, codecs)
    assert whole.param is not None
    part = dataclasses.replace(
        whole,
        param=whole.param[256:].clone(),
        state=tuple(t[256:].clone() for t in whole.state),
        scales=tuple(t[2:].clone() for t in whole.scales if t is not None),
        scalars=tuple(torch.zeros(()) for _ in rule.scalar_state),
        random_key=torch.tensor(KEY),
        indices=ElementIndices(256),
    )
    backend = backends()[name]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        bits_after_steps(backend, rule, hyper, lambda: [(whole, grad)])
        torch.set_num_threads(1)
        bits_after_steps(backend, rule, hyper, lambda: [(part, grad[256:])])
    finally:
        torch.set_num_threads(threads)
    assert part.param is not None and torch.equal(part.param, whole.param[256:])
    for ours, theirs in zip(part.state, whole.state, strict=True):
        assert torch.equal(ours, theirs[256:])


@pytest.mark.skipif(not cpp_compiler(), reason="there is no C++ compiler here")
def test_blocks_of_32_and_256_elements_in_one_rule_have_the_eager_bits():
    """Loops with arrays for the block of one codec alone would write past their ends."""
    program = Program(
        "TwoBlocks",
        {},
        {"state_bits": 8},
        (ParamSpec((8193,), torch.float32, torch.float32),),
        second_group=0,
        any_size=False,
        actions=(Action("step", seed=1), Action("step", seed=2)),
    )
    results = []
    for backend in ("compiled", "eager"):
        ampopt.set_backend(backend)
        results.append(program.run())
    assert results[0] == results[1]
