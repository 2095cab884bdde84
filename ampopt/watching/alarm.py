"""``Watch.alarm``: warn, a few steps late, that a run no longer trains."""

from dataclasses import dataclass, field

from ampopt._argument_checks import check_bool, check_count, check_number
from ampopt._warnings import warn_user
from ampopt.watching.reading import Reading

__all__ = ["Alarm", "Condition"]


class Alarm(RuntimeWarning):
    """The warning, or error, of :meth:`ampopt.Watch.alarm`."""


@dataclass
class Condition:
    """Limits that are checked against readings; see :meth:`ampopt.Watch.alarm`.

    A limit warns once, and again only after a reading within it.

    Attributes:
        skips_in_a_row: the number of skipped steps in a row to warn of; ``None`` for never.
        scale_below: the loss scale below which to warn.
        zero_share_above: the ``underflow`` of a parameter above which to warn.
        raises: raise an :class:`Alarm` in place of a warning.
    """

    skips_in_a_row: int | None = None
    scale_below: float | None = None
    zero_share_above: float | None = None
    raises: bool = False
    _passed_limits: set[str] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        """Check the limits.

        Raises:
            TypeError: a limit is of the wrong type.
            ValueError: a limit is out of range, or no limit was passed.
        """
        if self.skips_in_a_row is not None:
            check_count("skips_in_a_row", self.skips_in_a_row)
        for name, most in (("scale_below", float("inf")), ("zero_share_above", 1.0)):
            value = getattr(self, name)
            if value is not None and not 0 <= check_number(name, value) <= most:
                raise ValueError(f"{name} must be from 0 to {most:g}, got {value!r}")
        check_bool("raises", self.raises)
        if (self.skips_in_a_row, self.scale_below, self.zero_share_above) == (None,) * 3:
            raise ValueError(
                "alarm needs a limit: give skips_in_a_row, scale_below or zero_share_above"
            )

    def check(self, reading: Reading) -> None:
        """Warn of each limit that ``reading`` has passed since the last call.

        Raises:
            Alarm: a limit is passed, and :attr:`raises` is true.
        """
        now = self._now(reading)
        self._passed_limits &= now.keys()
        for kind, text in now.items():
            if kind in self._passed_limits:
                continue
            self._passed_limits.add(kind)
            if self.raises:  # the next reading raises the others
                raise Alarm(text)
            warn_user(text, Alarm)

    def _now(self, reading: Reading) -> dict[str, str]:
        """The warning for each limit that ``reading`` exceeds, by a name of the limit."""
        latest, texts = reading.latest(), {}
        step, row, scale = latest["step"], latest["skips_in_a_row"], latest["scale"]
        if self.skips_in_a_row is not None and row >= self.skips_in_a_row:
            texts["skips"] = (
                f"at step {step}, {row} steps in a row have been skipped: nothing is being "
                "trained. print(watch.report()) says why"
            )
        if self.scale_below is not None and scale is not None and scale < self.scale_below:
            texts["scale"] = (
                f"at step {step}, the loss scale is {scale:.3g}, below {self.scale_below:.3g}: "
                "float16 gradients are 0 under such a scale, while weight decay continues. Resume "
                "from a checkpoint, scale included; print(watch.report()) says what overflowed"
            )
        if (most := self.zero_share_above) is not None:
            share, name = reading.worst_underflow()
            if share > most:
                texts["zero"] = (
                    f"at step {step}, without a scale {share:.0%} of the gradients of {name} would "
                    f"have underflowed in float16, more than {most:.0%}: keep the scale from "
                    "falling, or run that module in float32 with ampopt.run_in"
                )
        return texts
