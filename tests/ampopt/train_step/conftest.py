"""What tests of captured steps share."""

import gc

import pytest


@pytest.fixture(autouse=True, scope="module")
def small_heap():
    """Exclude what exists already from garbage collection.

    Each capture of a stand-in (``support.fake_cuda_graphs``) collects and searches all objects,
    those of thousands of earlier tests among them. It need not know their tensors.
    """
    gc.collect()
    gc.freeze()
