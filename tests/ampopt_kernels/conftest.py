"""Blocks and chunks small enough that a few hundred elements have every edge there is."""

import pytest
from passes import BLOCK, CHUNK

from ampopt_kernels import cpu, eager, pieces
from ampopt_kernels.language import HAS_TRITON


@pytest.fixture(autouse=True, scope="module")
def small_chunks():
    """What is a matter of speed, not of meaning: Triton's interpreter takes its time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eager, "CHUNK", CHUNK)
        patch.setattr(cpu, "CHUNK", CHUNK)
        patch.setattr(pieces, "SMALL", CHUNK)
        if HAS_TRITON:
            from ampopt_kernels import multi_tensor

            patch.setattr(multi_tensor, "AHEAD", multi_tensor.AHEAD * BLOCK // multi_tensor.BLOCK)
            patch.setattr(multi_tensor, "BLOCK", BLOCK)
            patch.setattr(multi_tensor, "CHUNK", CHUNK)
        yield
