"""What is compiled into kernels about rows, by which Triton's cache on disk knows them."""

import pytest
import torch

from ampopt_kernels.codecs import Codec
from ampopt_kernels.language import HAS_TRITON, jit, tl
from ampopt_kernels.step_tensors import ParamRow
from ampopt_kernels.triton.compiler import compilable

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")


def row_with(encode):
    codec = Codec(compilable(encode), compilable(decode), torch.int8)
    state = torch.zeros(128, dtype=torch.int8), (torch.zeros(1),)
    return ParamRow(torch.float32, torch.zeros(128), state[:1], codecs=(codec,), scales=state[1])


@jit
def decode(code):
    return code / 127.0


def first_version():
    @jit
    def encode(x, u):
        return tl.floor(x * 127.0 + u)

    return encode


def edited_version():
    @jit
    def encode(x, u):
        return tl.floor(x * 126.0 + u)

    return encode


def test_an_edited_codec_or_rule_is_compiled_again():
    from ampopt_kernels.triton.launch import sources_of
    from ampopt_kernels.triton.row_layout import layout_of

    before, after = first_version(), edited_version()

    def sources(encode):
        return layout_of(row_with(encode), (16,) * 3, 1, torch.float32).sources

    assert sources(before) == sources(before) != sources(after)
    assert sources_of(compilable(before)) != sources_of(compilable(after))


def test_a_layout_has_one_entry_for_each_stream():
    from ampopt_kernels.triton.row_layout import layout_of

    row = row_with(first_version())
    row.copy = torch.zeros(128, dtype=torch.bfloat16)
    layout = layout_of(row, (16,) * 4, 1, torch.float32)
    assert layout.dtypes == (tl.float32, tl.float32, tl.int8, tl.bfloat16)
    assert layout.codecs == (None, None, row.codecs[0], None)
    assert layout.has_copy and not layout.has_low_bits
    gradient = layout_of(ParamRow(torch.bfloat16), (16,), 16, torch.float32)
    assert gradient.dtypes == (tl.bfloat16,) and gradient.even == 1
