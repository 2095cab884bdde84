"""The comparisons of ``ampopt.testing``, under the name that the tests know them by."""

from ampopt.testing.bits import Bits, assert_close, bits, everything, group_entries, state_of

__all__ = ["Bits", "assert_close", "bits", "everything", "group_entries", "state_of"]
