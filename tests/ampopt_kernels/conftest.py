"""Small blocks and chunks, so that a few hundred elements have every edge case."""

import pytest
from support.kernel_rows import BLOCK, CHUNK

from ampopt_kernels import eager
from ampopt_kernels.cpu import bundles, torch_functions
from ampopt_kernels.language import HAS_TRITON


@pytest.fixture(autouse=True, scope="module")
def small_chunks():
    """What is a matter of speed, not of meaning: Triton's interpreter takes its time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eager, "CHUNK", CHUNK)
        patch.setattr(torch_functions, "CHUNK", CHUNK)
        patch.setattr(bundles, "SMALL", CHUNK)
        if HAS_TRITON:
            from ampopt_kernels.triton import backend as triton_backend
            from ampopt_kernels.triton import table

            patch.setattr(
                triton_backend, "AHEAD", triton_backend.AHEAD * BLOCK // triton_backend.BLOCK
            )
            patch.setattr(triton_backend, "BLOCK", BLOCK)
            patch.setattr(table, "CHUNK", CHUNK)
        yield
