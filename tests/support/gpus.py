"""Tests that need a GPU: ``pytest -m gpu``, or ``-m "gpu and ..."``, makes Triton compile kernels.

All other tests run Triton's interpreter; one process can do only one of the two.

Most of these tests also run on a simulated card (``pytest --simulated-card -m gpu``). A
test that needs more of CUDA than its kernels names it, as in ``@needs_gpu(with_real="streams")``.
"""

import functools
from contextlib import AbstractContextManager
from typing import Any

import pytest
import simulated_card
import torch

from ampopt._synchronization import sync_debug_mode
from ampopt.testing.no_sync import assert_no_sync
from ampopt_kernels.language import HAS_TRITON, INTERPRETED

__all__ = ["DEVICE", "ON_A_GPU", "needs_gpu", "no_waiting", "skip_without_gpu"]

DEVICE = "cpu" if simulated_card.STATE.installed else "cuda"


def _missing() -> str | None:
    if simulated_card.STATE.installed:
        return None
    if not torch.cuda.is_available():
        return "needs a CUDA device"
    if not HAS_TRITON:
        return "needs Triton"
    return "needs compiled kernels: select it with pytest -m gpu" if INTERPRETED else None


def skip_without_gpu() -> None:
    """Skip the test if it cannot run on a GPU, and name what is missing."""
    if (missing := _missing()) is not None:
        pytest.skip(missing)


def needs_gpu(test: Any = None, *, with_real: str = "") -> Any:
    """Mark ``test`` as ``gpu``, and skip it where it cannot run, naming what is missing.

    Args:
        test: the test; without it a decorator is returned.
        with_real: what the test needs that only CUDA itself has, besides compiled kernels.
    """
    if test is None:
        return functools.partial(needs_gpu, with_real=with_real)
    missing = _missing()
    if with_real and not torch.cuda.is_available():
        missing = f"needs a CUDA device with real {with_real}"
    skip = pytest.mark.skipif(missing is not None, reason=str(missing))
    return pytest.mark.gpu(skip(test))


ON_A_GPU = pytest.param("triton on a GPU", marks=pytest.mark.gpu)
"""Parameter of the fixture ``backend``: the test runs with its tensors on the GPU."""


def no_waiting() -> AbstractContextManager[None]:
    """Raise if the host waits for the device, as far as torch detects it."""
    return assert_no_sync() if simulated_card.STATE.installed else sync_debug_mode("error")
