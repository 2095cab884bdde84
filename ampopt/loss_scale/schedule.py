"""The settings of a dynamic loss scale: checked, and as the constants that kernels take."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ampopt._argument_checks import check_count, check_number
from ampopt.loss_scale.arguments import LARGEST_SCALE, check_scale_number
from ampopt.loss_scale.base import LossScale
from ampopt_kernels.next_scale import PolicyConstants

__all__ = ["Schedule", "check_entries"]


_HYSTERESIS_MODES = {
    # mode: (refilled by any finite step, refilled by lowering the scale)
    "consecutive": (1.0, 0.0),
    "cumulative": (0.0, 0.0),
    "per_backoff": (1.0, 1.0),
}

_ENTRIES = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The checked arguments of a :class:`~ampopt.DynamicLossScale`, which describes them.

    Scales and their bounds are rounded to float32, so that the bounds hold exactly.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: an argument is out of range.
    """

    init_scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    hysteresis: int
    hysteresis_mode: str
    min_scale: float
    max_scale: float
    growth_offsets: tuple[int, int]

    def __post_init__(self) -> None:
        """Check every argument and convert it to a plain Python type."""
        growth = check_number("growth_factor", self.growth_factor)
        if not 1 < growth < math.inf:
            raise ValueError(
                f"growth_factor must be finite and more than 1, got {self.growth_factor!r}. For a "
                "scale that never grows, set max_scale to init_scale or use StaticLossScale."
            )
        backoff = check_number("backoff_factor", self.backoff_factor)
        if not 0 < backoff < 1:
            raise ValueError(
                f"backoff_factor must be more than 0 and less than 1, got {self.backoff_factor!r}. "
                "It multiplies the scale after an overflow; 0.5 is usual."
            )
        interval = check_count("growth_interval", self.growth_interval)
        hysteresis = check_count("hysteresis", self.hysteresis)
        if not isinstance(self.hysteresis_mode, str):
            raise TypeError(
                f"hysteresis_mode must be a str, got {self.hysteresis_mode!r} of type "
                f"{type(self.hysteresis_mode).__name__}"
            )
        if self.hysteresis_mode not in _HYSTERESIS_MODES:
            modes = ", ".join(map(repr, _HYSTERESIS_MODES))
            raise ValueError(
                f"hysteresis_mode must be one of {modes}, got {self.hysteresis_mode!r}"
            )

        init = check_scale_number(self.init_scale, "init_scale")
        low = check_scale_number(self.min_scale, "min_scale")
        high = check_number("max_scale", self.max_scale)
        if high != math.inf:
            if high > LARGEST_SCALE:
                raise ValueError(
                    f"max_scale must be at most {LARGEST_SCALE!r}, or math.inf for no ceiling, "
                    f"got {self.max_scale!r}"
                )
            high = check_scale_number(self.max_scale, "max_scale")
        if not low <= init <= high:
            raise ValueError(
                "min_scale <= init_scale <= max_scale must hold, got "
                f"min_scale={low!r}, init_scale={init!r}, max_scale={high!r}"
            )
        values = {
            "init_scale": init,
            "growth_factor": growth,
            "backoff_factor": backoff,
            "growth_interval": interval,
            "hysteresis": hysteresis,
            "hysteresis_mode": str(self.hysteresis_mode),
            "min_scale": low,
            "max_scale": high,
            "growth_offsets": _check_offsets(self.growth_offsets, interval),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @cached_property
    def policy(self) -> PolicyConstants:
        """The settings as constants for ``ampopt_kernels.next_scale.next_scale``."""
        on_finite, on_backoff = _HYSTERESIS_MODES[self.hysteresis_mode]
        first, period = (self.growth_interval + offset for offset in self.growth_offsets)
        return PolicyConstants(
            growth_factor=self.growth_factor,
            backoff_factor=self.backoff_factor,
            first_growth=float(first),
            growth_period=float(period),
            hysteresis=float(self.hysteresis),
            refill_on_finite=on_finite,
            refill_on_backoff=on_backoff,
            min_scale=self.min_scale,
            max_scale=self.max_scale,
        )

    @property
    def first_growth(self) -> int:
        """The finite step at which the scale first grows; the counter always stays below it."""
        return self.growth_interval + self.growth_offsets[0]


def _check_offsets(offsets: Any, interval: int) -> tuple[int, int]:
    """``offsets`` as a pair of ints, with which the growth counter stays positive and in int32."""
    if not isinstance(offsets, (tuple, list)):
        raise TypeError(
            f"growth_offsets must be a pair of ints, got {offsets!r} of type "
            f"{type(offsets).__name__}"
        )
    if len(offsets) != 2:
        raise ValueError(f"growth_offsets must be a pair of ints, got {offsets!r}")
    first, period = (check_count("growth_offsets", offset, least=None) for offset in offsets)
    # The first growth may not come sooner than the later ones, so that the counter never goes
    # below 0: ampopt.next_scale recognizes by a counter of 0 which of two scales overflowed.
    if first < period or interval + period < 1 or interval + first > 2**31 - 1:
        raise ValueError(
            "growth_offsets must be (first, period) with first >= period, "
            f"growth_interval + period >= 1 and growth_interval + first < 2**31, got {offsets!r} "
            f"with growth_interval={interval}"
        )
    return first, period


def check_entries(scale: LossScale, state_dict: Any, keys: tuple[str, ...]) -> dict[str, Any]:
    """The entries of ``state_dict`` without ``"type"``.

    Args:
        scale: the scale that loads the state.
        state_dict: what ``state_dict()`` of a scale or of a ``GradScaler`` returned.
        keys: the keys that the state of such a scale has, without ``"type"``.

    Raises:
        TypeError: ``state_dict`` is not a mapping.
        ValueError: the state is that of another class of scale; a key is missing or unknown.
    """
    kind = type(scale).__name__
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"state_dict must be a dict, got {type(state_dict).__name__}")
    if "type" not in state_dict:
        state_dict = _entries_of_scaler(scale, state_dict)
    entries = dict(state_dict)
    saved_kind = entries.pop("type", None)
    if saved_kind != kind:
        raise ValueError(
            f"this is not the state of a {kind}: its entry 'type' is {saved_kind!r}. Load what "
            f"state_dict() of a {kind} or of a GradScaler returned."
        )
    missing = [key for key in keys if key not in entries]
    unknown = [key for key in entries if key not in keys]
    if missing or unknown:
        raise ValueError(
            f"the state of a {kind} has exactly the entries {list(keys)}; missing: {missing}, "
            f"unknown: {unknown}"
        )
    return entries


def _entries_of_scaler(scale: LossScale, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state of a ``GradScaler``, of torch or of ampopt, as that of ``scale``, which loads it.

    Settings that torch's scaler lacks, such as ``min_scale``, are those of ``scale``.

    Raises:
        ValueError: an entry is missing, a setting is out of range, or the scale is static.
        TypeError: a setting is of the wrong type.
    """
    kind, settings = type(scale).__name__, scale._settings()
    if "loss_scale" in state_dict:  # ampopt.GradScaler saves its scale whole
        return state_dict["loss_scale"]
    if not state_dict:
        raise ValueError(
            "the state is empty, as that of a GradScaler with enabled=False: start with a new scale"
        )
    missing = [name for name in _ENTRIES if name not in state_dict]
    if missing:
        raise ValueError(
            f"the state of a GradScaler has the entries {list(_ENTRIES)}; missing: {missing}, "
            f"found: {list(state_dict)}"
        )
    if "growth_factor" not in settings:
        raise ValueError(
            f"a {kind} cannot load the state of a GradScaler with a dynamic scale. Load it into a "
            "DynamicLossScale, or into a GradScaler made without loss_scale"
        )
    settings = {**settings, **{name: state_dict[name] for name in _ENTRIES[1:4]}}
    return {
        "type": kind,
        "scale": state_dict["scale"],
        # torch compares with ==, so a counter beyond a shortened interval never grows the scale.
        "growth": min(state_dict["_growth_tracker"], Schedule(**settings).first_growth - 1),
        "budget": settings["hysteresis"],
        **settings,
    }
