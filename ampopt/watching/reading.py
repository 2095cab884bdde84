"""The statistics of a watch as users get them: later, and as a dict."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ampopt.watching.found import Found, StartingNorms, Statistics
from ampopt_kernels.watch_statistics import CAUSES, COUNTS, NOT_GIVEN, WatchStatistics

__all__ = ["Reading", "RankStatistics", "as_dict", "merge"]

_SQUARES = 3
"""Index of the sum of squares among the numbers of a step."""


@dataclass(frozen=True)
class RankStatistics:
    """The statistics of one rank after some step, in Python numbers.

    Attributes:
        steps: the number of steps so far.
        parameters: by name, the statistics of a parameter; see
            :mod:`ampopt_kernels.watch_statistics`.
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
        steps: int,
        n_forgotten: int,
        names: Sequence[tuple[torch.device, list[str]]],
        statistics: Statistics,
        found: Sequence[Found | StartingNorms],
        *,
        alone: bool,
    ) -> None:
        """Start to copy what is not on the host.

        Args:
            steps: the number of steps so far.
            n_forgotten: how many of the first steps are not in the ring, as a loaded state had
                them.
            names: the names of the parameters of each device; the device with the totals and the
                ring first.
            statistics: the statistics, which do not change any more.
            found: what is not in ``statistics`` yet.
            alone: whether the norm of this rank's gradients is that of all gradients.
        """
        self._steps, self._n_forgotten, self._names = steps, n_forgotten, names
        self._statistics, self._found, self._alone = statistics, list(found), alone

    def done(self) -> bool:
        """Whether everything has arrived. Does not synchronize."""
        return all(found.done() for found in self._found)

    def _complete(self) -> list[tuple[list[str], WatchStatistics]]:
        """By device, names and statistics. Waits until everything has arrived."""
        for found in self._found:
            found.add_to(self._statistics)
        self._found = []
        by_device = self._statistics.by_device
        return [
            (names, replace(by_device[device], numbers=by_device[device].numbers.cpu()))
            for device, names in self._names
        ]

    def result(self) -> dict[str, Any]:
        """The numbers, as of :meth:`ampopt.Watch.read`. Waits until everything has arrived."""
        return as_dict(self.snapshot(), alone=self._alone)

    def snapshot(self) -> RankStatistics:
        """The statistics of this rank. Waits until everything has arrived."""
        of_devices = self._complete()
        _, steps = of_devices[0]
        ring = steps.ring
        first = max(self._n_forgotten, self._steps - len(ring))
        order = [number % len(ring) for number in range(first, self._steps)]
        return RankStatistics(
            self._steps,
            {
                name: row
                for names, statistics in of_devices
                for name, row in zip(names, statistics.parameters.tolist(), strict=True)
            },
            steps.totals.tolist(),
            ring[order].tolist(),
            {
                rank: int(n)
                for ranks, counts in self._statistics.by_rank.items()
                for rank, n in zip(ranks, counts.cpu().tolist(), strict=True)
            },
        )

    def latest(self) -> dict[str, Any]:
        """The last step and the totals. Waits until everything has arrived."""
        _, steps = self._complete()[0]
        entry = steps.ring[(self._steps - 1) % len(steps.ring)].tolist()
        in_a_row, *by_cause = steps.totals.tolist()
        stats = {**_step(self._steps, entry, alone=self._alone), "skips": int(sum(by_cause))}
        return {**stats, "skips_in_a_row": int(in_a_row)}

    def worst_underflow(self) -> tuple[float, str]:
        """The largest ``underflow``, and the name of its parameter."""
        shares = []
        for names, statistics in self._complete():
            table = statistics.parameters
            share = table[:, 3] / table[:, 2].clamp(min=1)
            if len(names):
                place = int(share.argmax())
                shares.append((float(share[place]), names[place]))
        return max(shares, default=(0.0, ""))


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
    cause, scale, norm, squares, loss = entry
    if norm < 0:
        norm = None if squares < 0 or not alone else math.sqrt(squares)
    elif not alone and math.isnan(norm):  # other ranks have no watch, and computed no norm
        norm = None
    return {
        "step": number,
        "skipped": cause > 0,
        "scale": None if scale < 0 else scale,
        "norm": norm,
        "loss": None if loss == NOT_GIVEN else loss,
    }


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
