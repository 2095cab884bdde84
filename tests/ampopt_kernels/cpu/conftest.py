"""Tests of the C++ that is generated compile it with the optimizations that users get."""

import pytest

from ampopt_kernels.native.build import cpp_compiler


@pytest.fixture(autouse=True)
def all_optimizations(monkeypatch):
    """Take the optimizations out of ``CXX``."""
    if compiler := cpp_compiler():
        monkeypatch.setenv("CXX", compiler)
