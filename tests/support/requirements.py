"""Skips for tests of optional packages and of backends that need a compiler or Triton."""

import importlib
import importlib.util
import warnings
from typing import Any

import pytest

from ampopt_kernels.language import HAS_TRITON
from ampopt_kernels.native.build import cpp_compiler

__all__ = ["needs", "skip_unless_it_runs"]


def needs(name: str) -> Any:
    """Import the package ``name``, or skip the whole test file and say why.

    Warnings during the import are ignored: they are about the installed package.
    """
    if importlib.util.find_spec(name) is None:
        pytest.skip(
            f"{name} is not installed: python -m pip install '.[frameworks]'",
            allow_module_level=True,
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


def skip_unless_it_runs(backend: str) -> None:
    """Skip a test of a backend that cannot run here, and say why."""
    if backend == "triton" and not HAS_TRITON:
        pytest.skip("Triton cannot be imported here")
    if backend == "compiled" and cpp_compiler() is None:
        pytest.skip("there is no C++ compiler here")
