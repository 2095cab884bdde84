"""Tests of the C++ that is generated compile it with the optimizations that users get."""

import pytest

from ampopt_kernels.native import build


@pytest.fixture(autouse=True)
def all_optimizations(monkeypatch):
    """Compile as for users; see ``support.fixtures``."""
    monkeypatch.setitem(build.SPEED, "-O", "-O3")
