"""Random programs: the compiled loops give the bits of the eager operations.

``.ci/sanitize`` runs this file under the address sanitizer.
"""

import pytest
from hypothesis import given
from support.random_programs import Program, programs
from support.strategies import fewer

import ampopt

pytestmark = pytest.mark.parametrize("backend", ["compiled"], indirect=True)


@fewer(1)
@given(programs())
def test_a_program_gives_the_same_bits_twice_and_with_eager_operations(backend, program: Program):
    compiled = program.run()
    if program.is_exact:  # else to rounding, which other tests compare
        ampopt.set_backend("eager")
    try:
        again = program.run()
    finally:
        ampopt.set_backend("compiled")
    for action, ours, theirs in zip(program.actions, compiled, again, strict=True):
        assert ours == theirs, action
