"""Watching a run without waiting for it: which layer overflows, since when, and what to do."""

from ampopt.watching.alarm import Alarm
from ampopt.watching.reading import Reading
from ampopt.watching.watch import Watch

__all__ = ["Alarm", "Reading", "Watch"]
