"""The detector of ``ampopt.testing``, under the name that the tests know it by."""

from ampopt.testing.no_sync import ReadBack
from ampopt.testing.no_sync import assert_no_sync as no_read_back

__all__ = ["ReadBack", "no_read_back"]
