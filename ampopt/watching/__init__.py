"""``Watch``: statistics of the overflows of a run, by layer, without synchronizing."""

from ampopt.watching.alarm import Alarm
from ampopt.watching.reading import Reading
from ampopt.watching.watch import Watch

__all__ = ["Alarm", "Reading", "Watch"]
