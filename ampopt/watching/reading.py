"""The statistics of a watch as users get them: later, and as a dict."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ampopt.watching.background_copy import BackgroundCopy
from ampopt_kernels.watch_statistics import CAUSES, COUNTS, NOT_GIVEN, Statistics

__all__ = ["Reading", "RankStatistics", "as_dict", "merge"]

_SQUARES = 3
"""Index of the sum of squares among the numbers of a step."""


@dataclass(frozen=True)
class RankStatistics:
    """The statistics of one rank after some step, in Python numbers.

    Attributes:
        steps: the number of steps so far.
        parameters: by name, the numbers of a parameter; see :class:`Statistics`.
        totals: skips in a row, then skips by cause.
        recent: the last steps, shape (steps, RING), oldest first.
        by_rank: in how many steps each rank found an overflow; empty without other ranks.
    """

    steps: int
    parameters: dict[str, list[float]]
    totals: list[float]
    recent: list[list[float]]
    by_rank: dict[int, int] = field(default_factory=dict)


class Reading:
    """The result of :meth:`ampopt.Watch.read_later`: statistics that may still be on their way."""

    def __init__(
        self,
        names: Sequence[str],
        statistics: Statistics,
        copies: Sequence[BackgroundCopy],
        *,
        alone: bool,
    ) -> None:
        """Take what was recorded, and what is on its way.

        Args:
            names: the names of the parameters.
            statistics: the statistics, which nothing else changes.
            copies: what is not in ``statistics`` yet.
            alone: whether the norm of this rank's gradients is that of all gradients.
        """
        self._names, self._alone = names, alone
        self._statistics, self._copies = statistics, copies

    def done(self) -> bool:
        """Whether everything has arrived. Does not synchronize."""
        return all(copy.done() for copy in self._copies)

    def _complete(self) -> Statistics:
        """The statistics, on the host. Waits until everything has arrived."""
        for copy in self._copies:
            copy.add_to(self._statistics)
        self._copies, self._statistics = [], self._statistics.mapped(Tensor.cpu)
        return self._statistics

    def result(self) -> dict[str, Any]:
        """The numbers, as of :meth:`ampopt.Watch.read`. Waits until everything has arrived."""
        return as_dict(self.snapshot(), alone=self._alone)

    def snapshot(self) -> RankStatistics:
        """The statistics of this rank. Waits until everything has arrived."""
        statistics = self._complete()
        steps, ring = statistics.steps, statistics.ring.tolist()
        last = [ring[number % len(ring)] for number in range(steps - len(ring), steps)]
        return RankStatistics(
            steps,
            dict(zip(self._names, statistics.parameters.tolist(), strict=True)),
            statistics.totals.tolist(),
            [entry for entry in last if entry[0] != NOT_GIVEN],
            {
                rank: int(n)
                for ranks, counts in statistics.by_rank.items()
                for rank, n in zip(ranks, counts.tolist(), strict=True)
            },
        )

    def latest(self) -> dict[str, Any]:
        """The last step and the totals. Waits until everything has arrived."""
        statistics = self._complete()
        steps, ring = statistics.steps, statistics.ring
        entry = ring[(steps - 1) % len(ring)].tolist()
        in_a_row, *by_cause = statistics.totals.tolist()
        stats = {**_step(steps, entry, alone=self._alone), "skips": int(sum(by_cause))}
        return {**stats, "skips_in_a_row": int(in_a_row)}

    def worst_underflow(self) -> tuple[float, str]:
        """The largest ``underflow``, and the name of its parameter."""
        table = self._complete().parameters
        shares = (table[:, 3] / table[:, 2].clamp(min=1)).tolist()
        return max(zip(shares, self._names, strict=True), default=(0.0, ""))


def as_dict(snapshot: RankStatistics, *, alone: bool) -> dict[str, Any]:
    """The result of :meth:`ampopt.Watch.read`; for ``alone`` see :class:`Reading`."""
    in_a_row, *by_cause = snapshot.totals
    first = snapshot.steps - len(snapshot.recent) + 1
    return {
        "steps": snapshot.steps,
        "skips": int(sum(by_cause)),
        "skips_in_a_row": int(in_a_row),
        "skipped_by": {cause: int(n) for cause, n in zip(CAUSES, by_cause, strict=True)},
        "parameters": {name: _parameter(row) for name, row in snapshot.parameters.items()},
        "recent": [_step(first + i, entry, alone=alone) for i, entry in enumerate(snapshot.recent)],
        "overflows_by_rank": {rank: n for rank, n in snapshot.by_rank.items() if n},
    }


def _parameter(row: Sequence[float]) -> dict[str, Any]:
    """The statistics of one parameter, by name, from its numbers."""
    largest, overflows, n_used, n_flushed, _, *lately = row
    return {
        "overflows": int(overflows),
        "last_overflow": int(max(lately)) or None,
        "largest": max(largest, 0.0),
        "underflow": n_flushed / n_used if n_used else 0.0,
        "only_zeros": largest == 0 and not overflows,
    }


def _step(number: int, entry: Sequence[float], *, alone: bool) -> dict[str, Any]:
    """The entry of one of the last steps in ``read()["recent"]``, from its entry in the ring."""
    cause, scale, norm, squares, loss = (None if x == NOT_GIVEN else x for x in entry)
    if norm is None and squares is not None and alone:
        norm = math.sqrt(squares)
    elif norm is not None and not alone and math.isnan(norm):
        norm = None  # other ranks have no watch, and computed no norm
    return {"step": number, "skipped": bool(cause), "scale": scale, "norm": norm, "loss": loss}


def merge(ranks: Sequence[RankStatistics]) -> RankStatistics:
    """The statistics of all ranks as one.

    A step in which several shards, or copies, of a parameter overflowed is counted once. Squared
    norms of ranks are added up. Losses are those of the first rank.
    """
    rows: dict[str, list[list[float]]] = {}
    for snapshot in ranks:
        for name, row in snapshot.parameters.items():
            rows.setdefault(name, []).append(row)
    first = ranks[0]
    recent = [list(entry) for entry in first.recent]
    for snapshot in ranks[1:]:
        for entry, other in zip(recent, snapshot.recent, strict=True):
            squares = [x for x in (entry[_SQUARES], other[_SQUARES]) if x >= 0]
            entry[_SQUARES] = sum(squares) if squares else NOT_GIVEN
    parameters = {name: _joined_row(shards) for name, shards in rows.items()}
    return RankStatistics(first.steps, parameters, first.totals, recent, first.by_rank)


def _joined_row(shards: Sequence[Sequence[float]]) -> list[float]:
    """The statistics of one parameter, from those of its shards.

    A shard keeps the steps of its last overflows. Of steps before the first that all shards keep,
    the count is that of the shard with the most overflows: a lower bound.
    """
    first_known = max(min(shard[COUNTS:]) for shard in shards)  # 0 if no shard has dropped any
    lately = [{step for step in shard[COUNTS:] if step >= max(first_known, 1)} for shard in shards]
    before = max(shard[1] - len(steps) for shard, steps in zip(shards, lately, strict=True))
    every = set().union(*lately)
    largest = max(shard[0] for shard in shards)
    n_used, n_flushed = (sum(shard[i] for shard in shards) for i in (2, 3))
    norm = math.hypot(*(shard[4] for shard in shards))
    return [largest, before + len(every), n_used, n_flushed, norm, *every, 0.0]
