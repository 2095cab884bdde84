"""The card computes as PTX says, refuses what a card would not bear, and runs ampopt's kernels."""

import os
import shutil
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.readme import ROOT

from ampopt_kernels.language import HAS_TRITON
from simulated_card.ptx import Fault, Kernel

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("g++") is None, reason="needs Linux and g++"
)

HEADER = """
.visible .entry example(
	.param .u64 .ptr .global .align 1 example_param_0,
	.param .u64 .ptr .global .align 1 example_param_1,
	.param .u32 example_param_2
)
.reqntid 64
{
	.local .align 8 .b8 	__local_depot0[8];
	.reg .pred %p<9>;
	ld.param.b64 	%rd1, [example_param_0];
	ld.param.b64 	%rd2, [example_param_1];
	ld.param.b32 	%r9, [example_param_2];
	mov.u32 	%r1, %tid.x;
	mul.wide.u32 	%rd3, %r1, 8;
	add.s64 	%rd4, %rd1, %rd3;
	add.s64 	%rd5, %rd2, %rd3;
	ld.global.b64 	%rd6, [ %rd4 + 0 ];
"""
FOOTER = "	st.global.b64 	[ %rd5 + 0 ], %rd7;\n	ret;\n}\n"


def run(body: str, inputs: Any, order: int = 0, number: int = 0, **memory: Any) -> np.ndarray:
    """What each of 64 threads writes: 64 bits, made of its own 64 bits of ``inputs``."""
    given_, out = np.zeros(64, np.uint64), np.zeros(64, np.uint64)
    given_[: len(inputs)] = inputs
    spans = sorted((a.ctypes.data, a.ctypes.data + a.nbytes) for a in (given_, out))
    kernel = Kernel(HEADER + body + FOOTER)
    arguments = [given_.ctypes.data, out.ctypes.data, number]
    kernel.launch(1, arguments, np.array(spans, np.uint64), order=order, **memory)
    return out


words = st.lists(st.integers(0, 2**64 - 1), min_size=64, max_size=64).map(
    lambda values: np.array(values, np.uint64)
)
few = settings(max_examples=20)


@given(words)
@few
def test_conversions_to_8_bits(x):
    signed = run("cvt.u16.u64 %rs1, %rd6; cvt.s8.s16 %rs2, %rs1; cvt.s64.s16 %rd7, %rs2;", x)
    assert np.array_equal(signed.view(np.int64), x.astype(np.int8).astype(np.int64))
    unsigned = run("cvt.u16.u64 %rs1, %rd6; cvt.u8.u16 %rs2, %rs1; cvt.u64.u16 %rd7, %rs2;", x)
    assert np.array_equal(unsigned, x.astype(np.uint8))
    extended = run("cvt.u16.u64 %rs1, %rd6; cvt.s64.s8 %rd7, %rs1;", x)
    assert np.array_equal(extended.view(np.int64), x.astype(np.int8).astype(np.int64))


@given(words)
@few
def test_products_of_16_bits_are_added_to_32(x):
    halves = x.view(np.int16).reshape(-1, 4).astype(np.int64)
    expected = (halves[:, 0] * halves[:, 1] + (x >> 32).astype(np.int64)) % 2**32
    body = """mov.b64 {%rs1, %rs2, %rs3, %rs4}, %rd6; mov.b64 {%r2, %r3}, %rd6;
        mad.wide.s16 %r4, %rs1, %rs2, %r3; cvt.u64.u32 %rd7, %r4;"""
    assert np.array_equal(run(body, x), expected.astype(np.uint64))


@given(words)
@few
def test_pairs_of_halves(x):
    absolute = run("cvt.u32.u64 %r2, %rd6; abs.f16x2 %r3, %r2; cvt.u64.u32 %rd7, %r3;", x)
    assert np.array_equal(absolute, x & 0x7FFF7FFF)
    low, high, bound, _ = x.view(np.float16).reshape(-1, 4).T
    body = """mov.b64 {%rs1, %rs2, %rs3, %rs4}, %rd6; mov.b32 %r2, {%rs1, %rs2};
        mov.b32 %r3, {%rs3, %rs3}; setp.ltu.f16x2 %p1|%p2, %r2, %r3;
        selp.b64 %rd8, 1, 0, %p1; selp.b64 %rd9, 2, 0, %p2; or.b64 %rd7, %rd8, %rd9;"""
    with np.errstate(invalid="ignore"):
        expected = ~(low >= bound) * 1 + ~(high >= bound) * 2  # also where one is not a number
    assert np.array_equal(run(body, x), expected)


@given(st.lists(st.floats(width=32), min_size=64, max_size=64))
@few
def test_floats_are_rounded_once(values):
    x = np.array(values, np.float32)
    body = """cvt.u32.u64 %r2, %rd6; mul.rn.f32 %r3, %r2, %r2; add.rn.f32 %r4, %r3, %r2;
        cvt.rn.bf16.f32 %rs1, %r4; mov.b32 %r5, {%rs1, 0}; shl.b32 %r5, %r5, 16;
        cvt.u64.u32 %rd7, %r4;"""
    with np.errstate(all="ignore"):
        expected = x * x + x
    got = run(body, x.view(np.uint32)).astype(np.uint32).view(np.float32)
    assert np.array_equal(got, expected, equal_nan=True)


@given(words, st.integers(0, 3))
@few
def test_local_memory_is_of_each_thread(x, order):
    body = """mov.b64 %rd8, __local_depot0; st.local.b64 [ %rd8 + 0 ], %rd6;
        ld.local.v2.b32 {%r2, %r3}, [ %rd8 + 0 ]; mov.b64 %rd7, {%r3, %r2};"""
    assert np.array_equal(run(body, x, order), x << 32 | x >> 32)


@given(words)
@few
def test_lanes_that_part_meet_again(x):
    body = """setp.lt.s64 %p1, %rd6, 0; mov.b64 %rd7, 1; @%p1 bra $L__A; mov.b64 %rd7, 2;
        bra.uni $L__B; $L__A: add.s64 %rd7, %rd7, 4; $L__B: bar.sync 0; add.s64 %rd7, %rd7, 8;"""
    assert np.array_equal(run(body, x), np.where(x >= 2**63, 13, 10))


SHARED = "mul.wide.u32 %rd8, %r1, 8; mov.b64 %rd9, global_smem; add.s64 %rd8, %rd9, %rd8;"
REFUSED = {
    "is not aligned": "ld.global.b64 %rd7, [ %rd4 + 4 ];",
    "in no live tensor": "ld.global.b64 %rd7, [ %rd4 + 512 ];",
    "local memory at 8 of 8": "mov.b64 %rd8, __local_depot0; st.local.b64 [ %rd8 + 8 ], %rd6;",
    "shared memory at 512 of 512": f"{SHARED} st.shared.b64 [ %rd8 + 8 ], %rd6;",
    "reads shared 256 that another warp wrote": f"""{SHARED} st.shared.b64 [ %rd8 + 0 ], %rd6;
        ld.shared.b64 %rd7, [ %rd9 + 256 ];""",
    "a barrier that the lanes ffff": "setp.lt.u32 %p1, %r1, 16; @%p1 bar.sync 0;",
    "some warps wait at a barrier": "setp.lt.u32 %p1, %r1, 32; @%p1 ret; bar.sync 0;",
    "lanes ffffffff are to take part": """setp.lt.u32 %p1, %r1, 16;
        @%p1 shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;""",
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_a_card_would_not_bear(message):
    inputs = np.arange(1, 65, dtype=np.uint64)
    with pytest.raises(Fault, match=f"example: .*{message}"):
        # Warps run backwards where the first is to read what the second wrote.
        run(REFUSED[message], inputs, order=int("another warp" in message), shared_bytes=512)


def test_programs_that_use_what_others_write():
    out = np.zeros(65, np.uint64)
    body = "mov.u32 %r2, %ctaid.x; mul.wide.u32 %rd8, %r2, 8; add.s64 %rd5, %rd5, %rd8;"
    kernel = Kernel(HEADER + body + FOOTER)
    spans = np.array([[out.ctypes.data, out.ctypes.data + out.nbytes]], np.uint64)
    with pytest.raises(Fault, match="programs 0 and 1 both write"):
        kernel.launch(2, [out.ctypes.data, out.ctypes.data], spans)


def test_an_unknown_operation_is_named():
    with pytest.raises(NotImplementedError, match=r"no operation frob\.b32"):
        Kernel(HEADER + "frob.b32 %r2, %r1;" + FOOTER)


@pytest.mark.skipif(not HAS_TRITON, reason="Triton cannot be imported here")
def test_each_kind_of_kernel_gives_what_torch_operations_give_and_faults_are_found():
    """Takes half a minute of CPU time, most of which Triton's compiler takes, once."""
    path = os.pathsep.join([str(ROOT / "tests"), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-m", "simulated_card", "--faults"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "7 equal, 1 within rounding, 10 found"
