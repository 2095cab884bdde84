"""The property suite of an optimizer, by inheritance."""

import pytest

from ampopt.testing.calls import Calls
from ampopt.testing.closures import Closures
from ampopt.testing.compilation import Compilation
from ampopt.testing.finiteness import Finiteness
from ampopt.testing.scaling import Scaling
from ampopt.testing.sequences import Sequences
from ampopt.testing.skipping import Skipping
from ampopt.testing.storage import Storage

__all__ = ["OptimizerContract"]


# Who claims float16 parameters is told what their states lose by the optimizer, in a training.
@pytest.mark.filterwarnings("ignore:.* in float16, as torch's:UserWarning")
# Overflows are drawn in any number.
@pytest.mark.filterwarnings("ignore:the loss scale has fallen:UserWarning")
class OptimizerContract(
    Skipping, Scaling, Finiteness, Storage, Calls, Closures, Sequences, Compilation
):
    """Every invariant that loss scaling needs of an optimizer, as tests of pytest's.

    Subclass it in a test file under a name that pytest collects, and say how to make yours::

        from ampopt.testing import OptimizerContract

        class TestMyOptimizer(OptimizerContract):
            def make(self, params):
                return MyOptimizer(params, lr=0.1)

    Each test is one invariant: its name says what is promised, its docstring why a training would
    break without. Examples are drawn by Hypothesis under the caller's profile (but for deadlines,
    of which there are none), and shrink; a failure prints code that runs its example again. For
    any :class:`ampopt.Optimizer`, with an ordinary ``step()`` or a rule.

    **Is the mathematics right?** Nothing here knows, unless ``reference`` returns another
    implementation to compare with: without one, the optimizer is its own measure.

    What the optimizer does beyond the ordinary, or does not do, is said by attributes: see
    :class:`~ampopt.testing.claims.Claims`. What is not claimed is skipped, and in the report.
    """
