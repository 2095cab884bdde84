"""What ``torch.amp.GradScaler`` and ours save, as the state of a loss scale."""

from collections.abc import Mapping
from typing import Any

from ampopt.loss_scale.schedule import Schedule

__all__ = ["entries_of_scaler"]

_ENTRIES = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


def entries_of_scaler(
    state_dict: Mapping[str, Any], kind: str, settings: dict[str, Any]
) -> Mapping[str, Any]:
    """What :meth:`LossScale.state_dict` would have in place of what a scaler saved.

    Args:
        state_dict: of a ``GradScaler``.
        kind: the class of the scale that is to go on from there.
        settings: of that scale. What torch's entries do not say, such as a floor, is as here.

    Raises:
        ValueError: an entry is missing, or a setting is out of range, or that scale is static.
        TypeError: a setting is of the wrong type.
    """
    if "loss_scale" in state_dict:  # of ours, whose schedule torch's entries cannot say
        return state_dict["loss_scale"]
    missing = [name for name in _ENTRIES if name not in state_dict]
    if missing:
        raise ValueError(
            f"the state of a GradScaler has the entries {list(_ENTRIES)}; missing: {missing}"
        )
    if "growth_factor" not in settings:
        raise ValueError(
            f"this is the state of a scaler with a dynamic scale, and this is a {kind}. Load it "
            "into a DynamicLossScale, or a GradScaler made without loss_scale, or do not load it"
        )
    settings = {**settings, **{name: state_dict[name] for name in _ENTRIES[1:4]}}
    return {
        "type": kind,
        "scale": state_dict["scale"],
        # Torch's counter passes an interval that was shortened; then its scale never grows.
        "growth": min(state_dict["_growth_tracker"], Schedule(**settings).first_growth - 1),
        "budget": settings["hysteresis"],
        **settings,
    }
