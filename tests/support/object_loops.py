"""The C++ helpers for loops over Python objects, for tests of their results."""

import pytest

from ampopt_kernels.native.build import cpp_compiler
from ampopt_kernels.native.objects import Loops, loops


def need_object_loops() -> None:
    """Compile the helpers and wait for them; skip the test without a C++ compiler."""
    if cpp_compiler() is None:
        pytest.skip("there is no C++ compiler here")
    loops.want()
    if loops.loaded is None:
        loops.load()
    assert loops.loaded is not None


def unavailable_loops() -> Loops:
    """A replacement of ``objects.loops`` without compiled code, so that checks run in Python."""
    unavailable = Loops()
    unavailable.want = lambda: None
    return unavailable
