"""Tests that need a GPU: ``pytest -m gpu``, or ``-m "gpu and ..."``, has Triton compile for them.

All other tests have Triton interpret its kernels, and one process can do only one of the two.
"""

from contextlib import AbstractContextManager

import pytest
import torch

from ampopt._synchronization import sync_debug_mode
from ampopt_kernels.language import HAS_TRITON, INTERPRETED

__all__ = ["DEVICE", "ON_A_GPU", "needs_gpu", "no_waiting", "skip_without_gpu"]

DEVICE = "cuda"


def _missing() -> str | None:
    if not torch.cuda.is_available():
        return "needs a CUDA device"
    if not HAS_TRITON:
        return "needs Triton"
    return "needs compiled kernels: select it with pytest -m gpu" if INTERPRETED else None


def skip_without_gpu() -> None:
    """Skip, and say what is missing."""
    if (missing := _missing()) is not None:
        pytest.skip(missing)


def needs_gpu(test):
    """Mark ``test``, and skip it visibly where it cannot run."""
    skip = pytest.mark.skipif(_missing() is not None, reason=str(_missing()))
    return pytest.mark.gpu(skip(test))


ON_A_GPU = pytest.param("triton on a GPU", marks=pytest.mark.gpu)
"""For the fixture ``backend``: the same test, whose tensors are made on the GPU."""


def no_waiting() -> AbstractContextManager[None]:
    """An operation that makes the host wait for the device is an error, as far as torch knows."""
    return sync_debug_mode("error")
