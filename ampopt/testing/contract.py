"""The property suite of an optimizer, to be inherited by a test class."""

import pytest

from ampopt.testing.invariants.calls import Calls
from ampopt.testing.invariants.closures import Closures
from ampopt.testing.invariants.compilation import Compilation
from ampopt.testing.invariants.finiteness import Finiteness
from ampopt.testing.invariants.scaling import Scaling
from ampopt.testing.invariants.sequences import Sequences
from ampopt.testing.invariants.skipping import Skipping
from ampopt.testing.invariants.small_states import SmallStates
from ampopt.testing.invariants.storage import Storage

__all__ = ["OptimizerContract"]


# The optimizer warns that states of float16 parameters lose precision: no concern of a test.
@pytest.mark.filterwarnings("ignore:.* in float16, as torch's:UserWarning")
# Many overflows in a row are drawn on purpose.
@pytest.mark.filterwarnings("ignore:the loss scale has fallen:UserWarning")
class OptimizerContract(
    Skipping, Scaling, Finiteness, Storage, SmallStates, Calls, Closures, Sequences, Compilation
):
    """Every invariant that an optimizer must keep to be safe under loss scaling, as pytest tests.

    Subclass it in a test file, under a name that pytest collects, and define ``make``::

        from ampopt.testing import OptimizerContract

        class TestMyOptimizer(OptimizerContract):
            def make(self, params):
                return MyOptimizer(params, lr=0.1)

    The optimizer may be any :class:`ampopt.Optimizer`, with a hand-written ``step()`` or an update
    rule.

    Each test is one invariant. Its name states the promise, and its docstring says how training
    breaks without it. Hypothesis draws the examples under the active profile, except that there is
    no deadline, and shrinks failures. A failure prints code that runs its example again.

    **Claims.** A claim is a class attribute that says what the optimizer supports, such as
    ``closures = False`` or ``half_precision = (torch.bfloat16,)``. Invariants that depend on a
    false claim are skipped and reported. :class:`~ampopt.testing.claims.Claims` lists every claim
    with its default.

    **Is the mathematics right?** The tests do not know, unless ``reference`` returns another
    implementation to compare with. By default the optimizer is compared with itself in float64.
    """
