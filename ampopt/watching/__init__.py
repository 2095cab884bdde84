"""Statistics of a run, without synchronizing: which layer overflows, since when, what to do."""

from ampopt.watching.alarm import Alarm
from ampopt.watching.reading import Reading
from ampopt.watching.watch import Watch

__all__ = ["Alarm", "Reading", "Watch"]
