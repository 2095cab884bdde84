"""Packages that some tests are about, and the suite can do without."""

import importlib
import importlib.util
import warnings
from typing import Any

import pytest

__all__ = ["needs"]


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
