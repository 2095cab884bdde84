"""Small blocks and chunks, so that a few hundred elements have every edge case."""

import pytest
from support.kernel_rows import BLOCK, CHUNK

from ampopt_kernels import eager
from ampopt_kernels.language import HAS_TRITON


@pytest.fixture(autouse=True, scope="module")
def small_chunks():
    """Chunk sizes change speed, not results; Triton's interpreter is slow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eager, "CHUNK", CHUNK)
        if HAS_TRITON:
            from ampopt_kernels.triton import passes, table

            patch.setattr(passes, "AHEAD", passes.AHEAD * BLOCK // table.BLOCK)
            patch.setattr(table, "BLOCK", BLOCK)
            patch.setattr(table, "CHUNK", CHUNK)
        yield
