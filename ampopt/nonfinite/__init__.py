"""Find the first module whose output, or gradient, is inf or NaN."""

from ampopt.nonfinite.result import FiniteOutput, FirstNonFinite, NonFiniteOutput
from ampopt.nonfinite.search import first_nonfinite, found_now, is_looking, look_again

__all__ = [
    "FiniteOutput",
    "FirstNonFinite",
    "NonFiniteOutput",
    "first_nonfinite",
    "found_now",
    "is_looking",
    "look_again",
]
