"""When to say, some steps later, that a run is not training any more."""

import warnings
from dataclasses import dataclass, field

from ampopt.loss_scale.arguments import check_bool, check_count
from ampopt.watching.reading import Reading

__all__ = ["Alarm", "Condition"]


class Alarm(RuntimeWarning):
    """What :meth:`ampopt.Watch.alarm` warns with, or raises."""


@dataclass
class Condition:
    """What is to be said, once each time that it comes about.

    Attributes:
        skips_in_a_row: so many, or more.
        scale_below: a scale less than this.
        zero_share_above: a parameter more of whose gradients float16 would flush.
        raises: raise it.
    """

    skips_in_a_row: int | None = None
    scale_below: float | None = None
    zero_share_above: float | None = None
    raises: bool = False
    _said: set[str] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        """Refuse what cannot come about.

        Raises:
            TypeError: an argument is of the wrong type.
            ValueError: it is out of range, or there is none.
        """
        if self.skips_in_a_row is not None:
            check_count("skips_in_a_row", self.skips_in_a_row)
        for name, most in (("scale_below", float("inf")), ("zero_share_above", 1.0)):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{name} must be a number or None, got {type(value).__name__}")
            if not 0 <= value <= most:
                raise ValueError(f"{name} must be from 0 to {most:g}, got {value!r}")
        check_bool("raises", self.raises)
        if (self.skips_in_a_row, self.scale_below, self.zero_share_above) == (None,) * 3:
            raise ValueError(
                "alarm needs something to be alarmed by: give skips_in_a_row, scale_below or "
                "zero_share_above"
            )

    def judge(self, reading: Reading) -> None:
        """Say what has come about, if it has not been said since.

        Raises:
            Alarm: if it is to be raised.
        """
        now = self._now(reading)
        new = [text for kind, text in now.items() if kind not in self._said]
        self._said = set(now)
        for text in new:
            if self.raises:
                raise Alarm(text)
            warnings.warn(Alarm(text), stacklevel=2)

    def _now(self, reading: Reading) -> dict[str, str]:
        latest, found = reading.latest(), {}
        step, row, scale = latest["step"], latest["skips_in_a_row"], latest["scale"]
        if self.skips_in_a_row is not None and row >= self.skips_in_a_row:
            found["skips"] = (
                f"at step {step}, {row} steps in a row have been skipped: nothing is being "
                "trained. print(watch.report()) says by which parameters"
            )
        if self.scale_below is not None and scale is not None and scale < self.scale_below:
            found["scale"] = (
                f"at step {step}, the loss scale is {scale:.3g}, below {self.scale_below:.3g}: "
                "float16 gradients are 0 under such a scale, while weight decay goes on. Go on "
                "from a checkpoint, scale included; print(watch.report()) says what overflowed"
            )
        share, name = reading.worst_share()
        if self.zero_share_above is not None and share > self.zero_share_above:
            found["zero"] = (
                f"at step {step}, float16 without a scale would have flushed {share:.0%} of the "
                f"gradients of {name} to zero, more than {self.zero_share_above:.0%}: keep the "
                "scale up, or that module in float32 with ampopt.run_in"
            )
        return found
