"""FlashOptim's kernels, in Triton's interpreter, beside what the bench transcribes of them."""

# The extra may not be installed.
# pyright: reportMissingImports=false

from typing import Any

import pytest
import torch
from support.requirements import needs

from ampopt_kernels.language import tl
from evidence.peers_in_8_bits import FlashOptimStates

flashoptim: Any = needs("flashoptim")
kernels: Any = pytest.importorskip("flashoptim.optimizers")


def stored_and_read(x: torch.Tensor, *, signed: bool) -> torch.Tensor:
    """The values of ``x`` after FlashOptim's kernels have stored and read it."""
    codes = torch.empty(x.shape, dtype=torch.int8 if signed else torch.uint8)
    scales = torch.empty(len(x) // 32, dtype=torch.float16)
    found, most = torch.empty_like(x), 127.0 if signed else 255.0
    kind = {"GROUP_SIZE": 32, "SQRT": not signed, "SOFTSIGN": signed, "BLOCK_SIZE_N": 1024}
    # `fn` is the kernel without its tuning, which needs a GPU.
    kernels._triton_quantize_kernel.fn[(1,)](
        x, codes, scales, len(x), most, tl.int8 if signed else tl.uint8, **kind
    )
    kernels._triton_dequantize_kernel.fn[(1,)](codes, scales, found, len(x), most, **kind)
    return found


@pytest.mark.parametrize("size", [1e-2, 1e-6])
def test_the_transcribed_states_are_those_of_their_kernels(size):
    x = size * torch.randn(8192, generator=torch.Generator().manual_seed(0))
    first, second = stored_and_read(x, signed=True), stored_and_read(x * x, signed=False)
    assert torch.equal(first, FlashOptimStates.first_moment(x))
    assert torch.equal(second, FlashOptimStates.second_moment(x * x))
