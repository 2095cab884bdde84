"""Loops of C++ over Python objects, for tests of what they answer."""

import pytest

from ampopt_kernels.cpu.build import cpp_compiler
from ampopt_kernels.cpu.objects import loops


def need_object_loops() -> None:
    """Have them compiled, which is waited for; skip without a compiler."""
    if cpp_compiler() is None:
        pytest.skip("there is no C++ compiler here")
    loops.want()
    assert loops.asked(wait=True) is not None
