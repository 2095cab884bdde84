"""Signs in the last steps of a run that it diverges: spikes, and a learning rate that is too high.

The functions return sentences of :meth:`ampopt.Watch.report`. Their argument ``recent`` has the
last steps as in ``read()["recent"]``, and for each whether it ``"overflowed"``.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["of_learning_rate", "of_spikes", "unusual_losses"]

SPIKE = 10.0
"""A gradient norm of more than this many times the median of the norms before it is a spike. So is
a loss above the median by more than this many times the median of the deviations from it."""
RISE = 0.1
"""The least rise of a loss that is a spike, as a fraction of that median."""
BEFORE_A_SPIKE = 10, 100
"""How many steps these medians are taken over: at least, and at most."""
GROWTH = 2.0
"""The growth of a parameter's norm, as a factor, from which the learning rate is suspected."""


def unusual_losses(recent: Sequence[Mapping[str, Any]]) -> set[int]:
    """The numbers of the steps whose loss was a spike or was not finite."""
    nonfinite = {
        e["step"] for e in recent if e["loss"] is not None and not math.isfinite(e["loss"])
    }
    return nonfinite | {step for _, _, step, _ in _spikes(recent, "loss")}


def of_spikes(recent: Sequence[Mapping[str, Any]], key: str, what: str) -> list[str]:
    """The largest spike of those that were applied, and of those that overflowed too.

    Args:
        recent: the last steps.
        key: the value in their entries: ``"loss"`` or ``"norm"``.
        what: the value in words.
    """
    spikes, sentences = _spikes(recent, key), []
    for overflowed, outcome in (
        (
            False,
            f"the step was applied. ampopt.skip_when(optimizer, {key}_deviations=6.0) skips such "
            "steps.",
        ),
        (
            True,
            "the step overflowed and was skipped. A smaller loss scale does not help: look at the "
            "batch of that step.",
        ),
    ):
        of_kind = [spike for spike in spikes if spike[3] == overflowed]
        if of_kind:
            value, usual, step, _ = max(of_kind)
            others = f", the largest of {len(of_kind)} such spikes" if len(of_kind) > 1 else ""
            sentences.append(
                f"At step {step} the {what} rose from about {usual:.3g} to {value:.3g}{others}; "
                f"{outcome}"
            )
    return sentences


def of_learning_rate(
    recent: Sequence[Mapping[str, Any]],
    norms: Mapping[str, tuple[float, float]],
    learning_rates: Sequence[float],
) -> list[str]:
    """A sentence if the run diverged before its first overflow, as a high learning rate makes it.

    It did if the loss (without one, the gradient norm) had risen well above its lowest, and the
    norm of a parameter has grown.

    Args:
        recent: the last steps.
        norms: of each parameter by name, its norm when the watch began, and now.
        learning_rates: of each group.
    """
    growths = [(_ratio(*pair), name) for name, pair in norms.items() if pair[0] > 0]
    growth, name = max(growths, default=(0.0, ""))
    bad = (
        i for i, e in enumerate(recent) if e["overflowed"] or not math.isfinite(e["loss"] or 0.0)
    )
    first = next(bad, None)
    if first is None or growth < GROWTH:
        return []
    key, what = "loss", "the loss"
    values = _finite_values(recent[:first], key)
    if not values:
        key, what = "norm", "the gradient norm"
        values = _finite_values(recent[:first], key)
    elif len(values) < BEFORE_A_SPIKE[0]:  # too few to tell a spike from a rise
        last = recent[first][key]
        if last is not None and (math.isfinite(last) or len(values) == 1):
            values.append(last)
    lowest = _lowest_before_a_rise(values, key)
    if lowest is None:
        return []
    if math.isfinite(growth):
        grown = f"the norm of `{name}` is {growth:.3g} times what it was when the watch began"
    else:
        grown = f"`{name}` is no longer finite"
    rates = sorted(set(learning_rates))
    rate = f"the learning rate, {rates[0]:.3g} now, is" if rates else "the learning rate is"
    if len(rates) > 1:
        rate = f"the learning rates, up to {rates[-1]:.3g} now, are"
    return [
        f"Up to step {recent[first]['step']}, the first with inf or NaN, {what} rose from "
        f"{lowest:.3g} to {values[-1]:.3g}, and {grown}: {rate} too high. "
        "Lower it, or warm it up, and resume from a checkpoint older than that rise. A smaller "
        "loss scale does not help."
    ]


def _spikes(recent: Sequence[Mapping[str, Any]], key: str) -> list[tuple[float, float, int, bool]]:
    """Unusual values of the steps that were applied or overflowed.

    Returns:
        For each the value, the median of those before, the number of the step, and whether it
        overflowed.
    """
    least, most = BEFORE_A_SPIKE
    before, spikes = deque[float](maxlen=most), []
    for entry in recent:
        value, overflowed = entry[key], entry["overflowed"]
        if value is None or not math.isfinite(value) or (entry["skipped"] and not overflowed):
            continue
        if len(before) >= least:
            usual = statistics.median(before)
            if value > _limit(key, list(before), usual):
                spikes.append((value, usual, entry["step"], overflowed))
        if not overflowed:
            before.append(value)
    return spikes


def _limit(key: str, values: list[float], usual: float) -> float:
    """The largest usual norm or loss, from the values before it and their median."""
    if key == "norm":
        return SPIKE * usual
    deviation = statistics.median([abs(value - usual) for value in values])
    return usual + max(SPIKE * deviation, RISE * abs(usual))


def _lowest_before_a_rise(values: list[float], key: str) -> float | None:
    """The lowest of the running medians of ``values``; ``None`` unless the last is well above."""
    width = min(BEFORE_A_SPIKE[0], len(values) // 2)
    if not width:
        return None
    windows = [values[i : i + width] for i in range(len(values) - width + 1)]
    medians = [statistics.median(x if math.isfinite(x) else math.inf for x in w) for w in windows]
    lowest = min(medians)
    if medians[-1] > _limit(key, windows[medians.index(lowest)], lowest):
        return lowest
    return None


def _finite_values(entries: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """The finite values ``key`` of the steps that were applied."""
    values = [entry[key] for entry in entries if not entry["skipped"]]
    return [value for value in values if value is not None and math.isfinite(value)]


def _ratio(before: float, now: float) -> float:
    """``now / before``; infinite if ``now`` is not finite."""
    return now / before if math.isfinite(now) else math.inf
