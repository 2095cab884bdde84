"""What a watch has read, for people: a table of the worst, and what to do in words."""

import math
from typing import Any

__all__ = ["in_words", "table", "worst_first"]

WORST = 10
"""Parameters that a table shows."""
FLUSHES = 0.05
"""Share of flushed gradients that is worth a word."""


def worst_first(read: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The parameters, those that overflowed most and last before others, then the largest."""

    def badness(item: tuple[str, dict[str, Any]]) -> tuple[float, ...]:
        told = item[1]
        return told["overflows"], told["last_overflow"] or 0, told["largest"], told["underflow"]

    return sorted(read["parameters"].items(), key=badness, reverse=True)


def table(read: dict[str, Any]) -> str:
    """The worst parameters, one a line, under the totals."""
    worst = worst_first(read)
    width = max([len(name) for name, _ in worst[:WORST]], default=9)
    lines = [
        _totals(read),
        *_of_ranks(read),
        f"{'parameter':<{width}}  overflows  last  largest |g|  flushed",
    ]
    for name, told in worst[:WORST]:
        last = told["last_overflow"] or "-"
        lines.append(
            f"{name:<{width}}  {told['overflows']:>9}  {last:>4}  {told['largest']:>11.3g}  "
            f"{told['underflow']:>7.1%}"
        )
    if len(worst) > WORST:
        lines.append(f"... and {len(worst) - WORST} more")
    return "\n".join(lines)


def in_words(read: dict[str, Any]) -> str:
    """What happened, and what a person should do."""
    if not read["steps"]:
        return "No step has been attempted yet."
    sentences = [_totals(read), *_of_overflows(read), *_of_flushing(read), *_of_other_causes(read)]
    if len(sentences) == 1:
        sentences.append("No gradient overflowed, and few are near to nothing: leave it as it is.")
    return "\n".join(sentences)


def _totals(read: dict[str, Any]) -> str:
    scale = read["recent"][-1]["scale"] if read["recent"] else None
    under = "" if scale is None else f", the last under a scale of {_power(scale)}"
    row = f", {read['skips_in_a_row']} in a row up to now" if read["skips_in_a_row"] else ""
    return f"{_steps(read['steps'])}, {read['skips']} skipped{row}{under}."


def _of_overflows(read: dict[str, Any]) -> list[str]:
    bad = [(name, told) for name, told in worst_first(read) if told["overflows"]]
    if not bad:
        return _of_ranks(read)
    first, told = bad[0]
    most = [name for name, other in bad if other["overflows"] == told["overflows"]]
    every = read["steps"] / told["overflows"]
    how_often = (
        "once" if told["overflows"] == 1 else f"{told['overflows']} times, every {every:.3g} steps,"
    )
    if len(most) > 1 and len(most) == len(read["parameters"]):
        return [
            f"All parameters overflowed together, {how_often} last at step "
            f"{told['last_overflow']}: that is the loss, or the batch, or the first layer to "
            "overflow on the way forward. Run such a step within "
            "ampopt.first_nonfinite(model), which names it."
        ]
    others = "" if len(bad) == 1 else f"; {len(bad) - 1} other parameters overflowed, too"
    sentences = [
        f"`{first}` overflowed {how_often} last at step {told['last_overflow']}; its largest "
        f"finite gradient was {told['largest']:.3g}{others}."
    ]
    if read["skips_in_a_row"] > 1:
        sentences.append(
            "Nothing is being trained any more: go on from a checkpoint, scale included."
        )
    sentences.append(
        "Now and then that is how a scale finds its height. Where it is too often, keep the scale "
        f"below (max_scale=), or the module of `{first}` in float32, with "
        "ampopt.run_in(module, torch.float32)."
    )
    return sentences


def _of_ranks(read: dict[str, Any]) -> list[str]:
    """Where overflows were, if several ranks decide together."""
    by_rank = read["overflows_by_rank"]
    if not by_rank:
        return []
    counts = ", ".join(f"{n} on rank {rank}" for rank, n in sorted(by_rank.items())[:WORST])
    more = f", and on {len(by_rank) - WORST} more ranks" if len(by_rank) > WORST else ""
    return [
        f"Overflows: {counts}{more}. Parameters are told of as far as this rank has them; "
        "watch.gather(), called on all ranks, has all."
    ]


def _of_flushing(read: dict[str, Any]) -> list[str]:
    shares = [(told["underflow"], name) for name, told in read["parameters"].items()]
    share, name = max(shares, default=(0.0, ""))
    if share <= FLUSHES:
        return []
    return [
        f"Without a scale, float16 would flush {share:.0%} of the gradients of `{name}` to zero: "
        "keep the scale from falling (min_scale=), or keep that module in float32 with "
        "ampopt.run_in(module, torch.float32)."
    ]


def _of_other_causes(read: dict[str, Any]) -> list[str]:
    causes = {cause: n for cause, n in read["skipped_by"].items() if n and cause != "overflow"}
    return [f"Skipped for the {cause}: {_steps(n)}." for cause, n in causes.items()]


def _steps(n: int) -> str:
    return f"{n} step" if n == 1 else f"{n} steps"


def _power(scale: float) -> str:
    exponent = math.log2(scale) if scale > 0 and math.isfinite(scale) else 0.5
    return f"2^{exponent:.0f}" if exponent == int(exponent) else f"{scale:.3g}"
