"""What some tests are about, and the suite can do without: packages, and what backends need."""

import importlib
import importlib.util
import warnings
from typing import Any

import pytest

from ampopt_kernels.cpu.build import cpp_compiler
from ampopt_kernels.language import HAS_TRITON

__all__ = ["needs", "skip_unless_it_runs"]


def needs(name: str) -> Any:
    """Import ``name``, or skip the whole file and say why.

    What an installed package warns of while it is imported, no test could mend or expect.
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
    """Skip a test of that backend where it cannot run, and say why."""
    if backend == "triton" and not HAS_TRITON:
        pytest.skip("Triton cannot be imported here")
    if backend == "compiled" and cpp_compiler() is None:
        pytest.skip("there is no C++ compiler here")
