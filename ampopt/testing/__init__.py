"""Property tests for optimizers under loss scaling; see ``README.md`` in this folder.

``contract`` has the class that users inherit, and ``claims`` the attributes that they may set.
``invariants`` has the properties, with the reason for each, and ``state_machine`` tests sequences
of calls. ``strategies`` draw examples, as ``blueprints``. ``invariant`` makes a test of a property,
and ``failures`` explains a test that fails.

Needs the extra ``testing``: ``python -m pip install "ampopt[testing]"``.
"""

try:
    import hypothesis as _hypothesis  # noqa: F401
    import pytest as _pytest
except ImportError as error:
    raise ImportError(
        f"ampopt.testing needs hypothesis and pytest, but {error.name} cannot be imported: install "
        "the extra 'testing', as in `python -m pip install \"ampopt[testing]\"`"
    ) from error

# pytest rewrites asserts in test files only, unless it is asked: without this, an assert that fails
# in one of these modules would not show its values.
_pytest.register_assert_rewrite("ampopt.testing.invariants", "ampopt.testing.state_machine")

from ampopt.testing import strategies  # noqa: E402
from ampopt.testing.bits import (  # noqa: E402
    Bits,
    assert_bitwise_unchanged,
    assert_close,
    assert_same,
    bits,
    everything,
    state_of,
)
from ampopt.testing.blueprints import Blueprint, History, Scale, set_gradients  # noqa: E402
from ampopt.testing.claims import QUICK  # noqa: E402
from ampopt.testing.contract import OptimizerContract  # noqa: E402
from ampopt.testing.no_sync import ReadBack, assert_no_sync  # noqa: E402
from ampopt.testing.overflow import inject_overflow  # noqa: E402
from ampopt.testing.pretended_device import as_on_a_device  # noqa: E402

__all__ = [
    "QUICK",
    "Bits",
    "Blueprint",
    "History",
    "OptimizerContract",
    "ReadBack",
    "Scale",
    "as_on_a_device",
    "assert_bitwise_unchanged",
    "assert_close",
    "assert_no_sync",
    "assert_same",
    "bits",
    "everything",
    "inject_overflow",
    "set_gradients",
    "state_of",
    "strategies",
]
