"""A patch of Hypothesis that caches the source of each function.

Hypothesis identifies a test by its source, and reads and tokenizes it twice for each test. The
invariants of a contract are the same functions in every contract class.
"""

import functools
import inspect
import types
from typing import Any

from hypothesis.internal import reflection

__all__ = ["make_it_quick"]


def make_it_quick() -> None:
    """Apply the patch in this process."""
    own: Any = reflection
    own.inspect = types.SimpleNamespace(**{**vars(inspect), "getsource": _source})
    own._clean_source = functools.cache(own._clean_source)


def _source(function: Any) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return inspect.getsource(function) if code is None else _source_of(code)


_source_of = functools.cache(inspect.getsource)
