"""Hypothesis, as it is, but that it reads the source of a function once.

It tells tests apart by their source, which it reads and tokenizes twice in each, though the claims
of a contract are the same functions in every class.
"""

import functools
import inspect
import types
from typing import Any

from hypothesis.internal import reflection

__all__ = ["make_it_quick"]


def make_it_quick() -> None:
    """Have it remember sources, in this process."""
    own: Any = reflection
    own.inspect = types.SimpleNamespace(**{**vars(inspect), "getsource": _source})
    own._clean_source = functools.cache(own._clean_source)


def _source(function: Any) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return inspect.getsource(function) if code is None else _source_of(code)


_source_of = functools.cache(inspect.getsource)
