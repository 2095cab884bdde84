"""A loss scale that has fallen to where no gradient survives it, which is said once."""

import warnings

__all__ = ["Collapse"]

_SMALLEST = 2.0**-24
"""float16's smallest number: what is 1 before it is scaled by less ends as 0 there."""


class Collapse:
    """What a scale and all its successors know of its end: whether it was said."""

    def __init__(self) -> None:
        """Begin unsaid."""
        self._said = False

    def say_once(self, value: float, start: float, floor: float) -> None:
        """Warn if ``value`` is at the floor, or of no use to float16, and was once above."""
        at_floor = value <= floor
        if self._said or value >= start or not (at_floor or value < _SMALLEST):
            return
        self._said = True
        where = f", its floor (min_scale={floor:g})" if at_floor else ""
        warnings.warn(
            f"the loss scale has fallen from {start:g} to {value:g}{where}: steps overflow again "
            "and again, as a rule from NaN in the data or the parameters, which no scale mends. "
            "float16 gradients may all be 0 under such a scale, and a step that is taken with them "
            "only decays the weights. Run a batch under ampopt.first_nonfinite(model) to see where "
            "it begins; mend that, and go on from a checkpoint, scale included",
            stacklevel=4,
        )
