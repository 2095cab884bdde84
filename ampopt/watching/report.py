"""Statistics of a watch as text: a table, and sentences with advice."""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from ampopt.watching.divergence import of_learning_rate, of_spikes, unusual_losses

__all__ = ["in_words", "summary", "worst_first"]

WORST = 10
"""The number of parameters in a table."""
NAMED = 3
"""The largest number of parameters named in a sentence."""
UNDERFLOW = 0.05
"""The ``underflow`` above which a report advises to keep the scale up."""
COLLAPSE = 10
"""Overflows in a row after which the run counts as collapsed: a scale that starts too high causes
fewer."""


def worst_first(numbers: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The parameters, by most overflows, then latest overflow, then largest gradient."""

    def badness(item: tuple[str, dict[str, Any]]) -> tuple[float, ...]:
        stats = item[1]
        return stats["overflows"], stats["last_overflow"] or 0, stats["largest"], stats["underflow"]

    return sorted(numbers["parameters"].items(), key=badness, reverse=True)


def summary(numbers: dict[str, Any]) -> str:
    """The totals, and a line for each of the parameters that overflowed most."""
    worst = worst_first(numbers)
    width = max([len(name) for name, _ in worst[:WORST]], default=9)
    lines = [
        _totals(numbers),
        *_of_ranks(numbers),
        f"{'parameter':<{width}}  overflows  last  largest |g|  underflow",
    ]
    for name, stats in worst[:WORST]:
        last = stats["last_overflow"] or "-"
        lines.append(
            f"{name:<{width}}  {stats['overflows']:>9}  {last:>4}  {stats['largest']:>11.3g}  "
            f"{stats['underflow']:>9.1%}"
        )
    if len(worst) > WORST:
        lines.append(f"... and {len(worst) - WORST} more")
    return "\n".join(lines)


def in_words(
    numbers: dict[str, Any],
    *,
    float16: bool,
    norms: Mapping[str, tuple[float, float]],
    learning_rates: Sequence[float],
) -> str:
    """A report in sentences: what happened, and what to do about it.

    Args:
        numbers: what :meth:`ampopt.Watch.read` returned, and in each entry of ``"recent"`` whether
            it ``"overflowed"``.
        float16: whether parameters are float16.
        norms: of each parameter by name, its norm when the watch began, and now.
        learning_rates: of each group.
    """
    if not numbers["steps"]:
        return "No step has been attempted yet."
    recent = numbers["recent"]
    is_scaled = float16 or any(entry["scale"] not in (None, 1.0) for entry in recent)
    diverged = of_learning_rate(recent, norms, learning_rates)
    lowers = is_scaled and not (_has_collapsed(numbers) or _are_overflows_of_the_loss(recent))
    sentences = [
        _totals(numbers),
        *diverged,
        *_of_overflows(numbers, lowers=None if diverged else lowers),
        *_of_runs(numbers),
        *of_spikes(recent, "norm", "gradient norm"),
        *of_spikes(recent, "loss", "loss"),
        *_of_zeros(numbers, is_scaled=is_scaled),
        *(_of_underflow(numbers) if is_scaled else []),
        *_of_other_causes(numbers),
    ]
    if len(sentences) == 1:
        few = ", and few are too small for float16" if is_scaled else ""
        sentences.append(f"No gradient overflowed{few}: there is nothing to change.")
    return "\n".join(sentences)


def _totals(numbers: dict[str, Any]) -> str:
    """How many steps there were, how many were skipped, and the last scale."""
    scale = numbers["recent"][-1]["scale"] if numbers["recent"] else None
    under = "" if scale is None else f", the last under a scale of {_power(scale)}"
    row = f", {numbers['skips_in_a_row']} in a row up to now" if numbers["skips_in_a_row"] else ""
    return f"{_steps(numbers['steps'])}, {numbers['skips']} skipped{row}{under}."


def _of_overflows(numbers: dict[str, Any], *, lowers: bool | None) -> list[str]:
    """Which parameters overflowed, how often, and advice.

    Args:
        numbers: what :meth:`ampopt.Watch.read` returned.
        lowers: whether a lower scale may help; ``None`` for no advice.
    """
    bad = [(name, stats) for name, stats in worst_first(numbers) if stats["overflows"]]
    if not bad:
        return _of_ranks(numbers)
    first, stats = bad[0]
    counts = set(map(itemgetter("overflows", "last_overflow"), numbers["parameters"].values()))
    how_often = "once, at" if stats["overflows"] == 1 else f"{stats['overflows']} times, last at"
    when = f"{how_often} step {stats['last_overflow']}"
    if len(bad) > 1 and len(counts) == 1:
        found = f"All parameters overflowed together, {when}"
        if lowers is None:
            return [f"{found}."]
        return [
            f"{found}: the cause is the loss, the batch, or the first layer "
            "that overflows in the forward pass. Run such a step within "
            "ampopt.first_nonfinite(model), which names it."
        ]
    n = len(bad) - 1
    others = f"; {n} other parameter{'s' * (n > 1)} overflowed, too" if n else ""
    largest = f"its largest finite gradient was {stats['largest']:.3g}"
    found = f"`{first}` overflowed {when}; {largest}{others}."
    advice = {
        None: [],
        True: [
            "A few overflows are normal: the scale grows until one occurs. If there are too many, "
            f"limit the scale (max_scale=), or keep the module of `{first}` in float32, with "
            "ampopt.run_in(module, torch.float32)."
        ],
        False: [
            "Run such a step within ampopt.first_nonfinite(model), which names the module and "
            "the cause."
        ],
    }
    return [found, *advice[lowers]]


def _of_runs(numbers: dict[str, Any]) -> list[str]:
    """The overflows in a row up to now, or else the longest run of them among the last steps."""
    n, longest = _run_now(numbers), max(_runs(numbers), key=len, default=[])
    if n == 0 and len(longest) > 1:
        first, last = longest[0]["step"], longest[-1]["step"]
        return [
            f"The longest run of overflows is {len(longest)} steps long, from {first} to {last}."
        ]
    if n <= 1:
        return []
    first = numbers["steps"] - n + 1
    sentence = f"All steps from step {first} on have overflowed, {n} in a row."
    if not _has_collapsed(numbers):
        return [sentence]
    return [
        f"{sentence} Nothing is being trained any more: resume from a checkpoint older than step "
        f"{first}, scale included."
    ]


def _runs(numbers: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The overflows among the last steps, those of successive steps together."""
    runs = groupby(numbers["recent"], itemgetter("overflowed"))
    return [list(run) for is_run, run in runs if is_run]


def _run_now(numbers: dict[str, Any]) -> int:
    """The number of overflows in a row up to now."""
    runs = _runs(numbers)
    if not runs or runs[-1][-1]["step"] != numbers["steps"]:
        return 0
    if len(runs[-1]) < len(numbers["recent"]):
        return len(runs[-1])
    # The run may have begun before the last steps that a watch keeps.
    return min(numbers["skips_in_a_row"], numbers["skipped_by"]["overflow"])


def _has_collapsed(numbers: dict[str, Any]) -> bool:
    """Whether so many steps in a row have overflowed that the run no longer trains."""
    return _run_now(numbers) >= COLLAPSE


def _are_overflows_of_the_loss(recent: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the loss was a spike, or not finite, in each step that overflowed."""
    overflowed = {entry["step"] for entry in recent if entry["overflowed"]}
    return bool(overflowed) and overflowed <= unusual_losses(recent)


def _of_ranks(numbers: dict[str, Any]) -> list[str]:
    """The overflows of each rank, if there are several."""
    by_rank = numbers["overflows_by_rank"]
    if not by_rank:
        return []
    counts = ", ".join(f"{n} on rank {rank}" for rank, n in sorted(by_rank.items())[:WORST])
    more = f", and on {len(by_rank) - WORST} more ranks" if len(by_rank) > WORST else ""
    return [
        f"Overflows: {counts}{more}. Parameters are those of this rank's shards; "
        "watch.gather(), called on all ranks, has all."
    ]


def _of_zeros(numbers: dict[str, Any], *, is_scaled: bool) -> list[str]:
    """Which parameters had only gradients of 0, and advice."""
    stats = numbers["parameters"]
    zeros = [name for name in stats if stats[name]["only_zeros"]]
    if not zeros:
        return []
    names = ", ".join(f"`{name}`" for name in zeros[:NAMED])
    more = f" and {len(zeros) - NAMED} more" if len(zeros) > NAMED else ""
    nonzero = any(stats[name]["largest"] or stats[name]["overflows"] for name in stats)
    others = "while others did not" if nonzero else "like all others that have a gradient"
    remedy = (
        "raise the loss scale (init_scale=, or min_scale= if it has fallen)"
        if is_scaled
        else "scale the loss (grads_scaled_by=ampopt.DynamicLossScale())"
    )
    return [
        f"{names}{more} had only gradients of 0, {others}. If the model computes in half "
        f"precision, its gradients underflow: {remedy}. If a larger scale changes nothing, the "
        "loss does not depend on these parameters."
    ]


def _of_underflow(numbers: dict[str, Any]) -> list[str]:
    """Which parameter would lose most without a scale, if any loses much."""
    shares = [(stats["underflow"], name) for name, stats in numbers["parameters"].items()]
    share, name = max(shares, default=(0.0, ""))
    if share <= UNDERFLOW:
        return []
    return [
        f"Without a scale, {share:.0%} of the gradients of `{name}` would underflow in float16: "
        "keep the scale from falling (min_scale=), or keep that module in float32 with "
        "ampopt.run_in(module, torch.float32)."
    ]


def _of_other_causes(numbers: dict[str, Any]) -> list[str]:
    """How many steps ``skip_when`` has skipped, by cause."""
    causes = {cause: n for cause, n in numbers["skipped_by"].items() if n and cause != "overflow"}
    return [f"Skipped for the {cause}: {_steps(n)}." for cause, n in causes.items()]


def _steps(n: int) -> str:
    """``n`` and "step" or "steps"."""
    return f"{n} step" if n == 1 else f"{n} steps"


def _power(scale: float) -> str:
    """``scale`` as a power of two, if it is one."""
    exponent = math.log2(scale) if scale > 0 and math.isfinite(scale) else 0.5
    return f"2^{exponent:.0f}" if exponent == int(exponent) else f"{scale:.3g}"
