"""The scalars of a rule by C++, in place of ``scalars_on_host``."""

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from ampopt_kernels import Rule
from ampopt_kernels.cpu.bundles import Numbers
from ampopt_kernels.cpu.scalars import CompiledScalars, ScalarRows, scalars_source
from ampopt_kernels.native.build import Library, cpp_compiler

__all__ = ["by_cpp", "needs_compiler"]

needs_compiler = pytest.mark.skipif(cpp_compiler() is None, reason="there is no C++ compiler here")


def by_cpp(rule: Rule, flags: tuple[bool, ...], rows: ScalarRows, h: Sequence[float]) -> Numbers:
    """What ``scalars_on_host`` computes and stores, by C++."""
    dtypes = tuple(None if s is None else s.dtype for s in rows.states)
    return _compiled(rule, flags, dtypes, len(h))(rows, h)


@functools.cache
def _compiled(
    rule: Rule, flags: tuple[bool, ...], dtypes: tuple[torch.dtype | None, ...], width: int
) -> Any:
    """The compiled scalars of ``rule``."""
    source = scalars_source(rule, flags, dtypes, width)
    assert source.exact
    return CompiledScalars(Library(source.text, source.options).load())
