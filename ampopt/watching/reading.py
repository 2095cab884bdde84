"""What a watch has noted, on its way to the host, and as a dict once it is there."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ampopt_kernels.devices import Copying, copied_to_host
from ampopt_kernels.ledger import CAUSES, COUNTS, RING, Ledger

__all__ = ["Reading", "Taken", "described", "take"]


@dataclass(frozen=True)
class Taken:
    """All that a watch had noted at one moment, in the host's memory.

    Attributes:
        steps: attempts so far.
        parameters: the numbers of each by name; see :mod:`ampopt_kernels.ledger`.
        totals: skips in a row, and skips by cause.
        recent: shape (steps, RING), oldest first.
        by_rank: how many overflows each rank found, by its number; empty where one decides alone.
    """

    steps: int
    parameters: dict[str, list[float]]
    totals: list[float]
    recent: list[list[float]]
    by_rank: dict[int, int] = field(default_factory=dict)


class Reading:
    """What :meth:`ampopt.Watch.read_later` gives: a copy that is on its way."""

    def __init__(
        self,
        steps: int,
        forgotten: int,
        copies: "Sequence[tuple[list[str], Ledger]]",
        by_rank: "Mapping[tuple[int, ...], Copying]",
        events: Sequence[Any],
        *,
        alone: bool,
    ) -> None:
        """Hold on to the copies.

        Args:
            steps: attempts when it was taken.
            forgotten: how many of the first of them are in no ring.
            copies: of the ledgers, that of the steps first, with the names of their parameters.
            by_rank: how many overflows each of these ranks has found.
            events: that are done when the copies are there.
            alone: whether this rank has all gradients, and so their norm.
        """
        self._steps, self._forgotten = steps, forgotten
        self._copies, self._by_rank, self._alone = copies, by_rank, alone
        self._events = [*events, *(copy.event for copy in by_rank.values() if copy.event)]

    def done(self) -> bool:
        """Whether :meth:`result` need not wait for a device. Never waits."""
        return all(event.query() for event in self._events)

    def result(self) -> dict[str, Any]:
        """What :meth:`ampopt.Watch.read` would have given then. Waits until that is here."""
        return described(self.taken(), alone=self._alone)

    def taken(self) -> Taken:
        """The numbers of this rank. Waits until they are here."""
        for event in self._events:
            event.synchronize()
        _, steps = self._copies[0]
        ring = steps.ring
        first = max(self._forgotten, self._steps - len(ring))
        order = [number % len(ring) for number in range(first, self._steps)]
        return Taken(
            self._steps,
            {
                name: row
                for names, ledger in self._copies
                for name, row in zip(names, ledger.parameters.tolist(), strict=True)
            },
            steps.totals.tolist(),
            ring[order].tolist(),
            {
                rank: int(n)
                for ranks, copy in self._by_rank.items()
                for rank, n in zip(ranks, copy.tensor.tolist(), strict=True)
            },
        )

    def latest(self) -> dict[str, Any]:
        """The last step, and the totals, of this rank. Waits until they are here."""
        _, steps = self._copies[0]
        for event in self._events:
            event.synchronize()
        entry = steps.ring[(self._steps - 1) % len(steps.ring)].tolist()
        in_a_row, *by_cause = steps.totals.tolist()
        told = {**_step(self._steps, entry, alone=self._alone), "skips": int(sum(by_cause))}
        return {**told, "skips_in_a_row": int(in_a_row)}

    def worst_share(self) -> tuple[float, str]:
        """The largest share of flushed gradients, and the parameter whose it is."""
        shares = []
        for names, ledger in self._copies:
            table = ledger.parameters
            share = table[:, 3] / table[:, 2].clamp(min=1)
            if len(names):
                place = int(share.argmax())
                shares.append((float(share[place]), names[place]))
        return max(shares, default=(0.0, ""))


def take(ledger: Ledger) -> tuple[Ledger, Any]:
    """A copy of ``ledger`` in the host's memory, and the event after which it is there.

    Does not wait for an accelerator.
    """
    copy, event = copied_to_host(ledger.numbers)
    return Ledger(copy, ledger.places), event


def described(taken: Taken, *, alone: bool) -> dict[str, Any]:
    """What :meth:`ampopt.Watch.read` returns; for ``alone`` see :class:`Reading`."""
    in_a_row, *by_cause = taken.totals
    first = taken.steps - len(taken.recent) + 1
    return {
        "steps": taken.steps,
        "skips": int(sum(by_cause)),
        "skips_in_a_row": int(in_a_row),
        "skipped_by": {cause: int(n) for cause, n in zip(CAUSES, by_cause, strict=True)},
        "parameters": {name: _parameter(row) for name, row in taken.parameters.items()},
        "recent": [_step(first + i, entry, alone=alone) for i, entry in enumerate(taken.recent)],
        "overflows_by_rank": {rank: n for rank, n in taken.by_rank.items() if n},
    }


def _parameter(row: Sequence[float]) -> dict[str, Any]:
    largest, overflows, used, flushed, *lately = row
    return {
        "overflows": int(overflows),
        "last_overflow": int(max(lately)) or None,
        "largest": largest,
        "underflow": flushed / used if used else 0.0,
    }


def _step(number: int, entry: Sequence[float], *, alone: bool) -> dict[str, Any]:
    cause, scale, norm, squares = entry
    if norm < 0:
        norm = None if squares < 0 or not alone else math.sqrt(squares)
    elif not alone and math.isnan(norm):  # other ranks have no watch, and have not said theirs
        norm = None
    return {
        "step": number,
        "skipped": cause > 0,
        "scale": None if scale < 0 else scale,
        "norm": norm,
    }


def merged(ranks: Sequence[Taken]) -> Taken:
    """What ranks that decide together have noted, as one.

    Of a parameter that several have, in parts or alike, overflows in one step count once. Squares
    add up to the norm.
    """
    rows: dict[str, list[list[float]]] = {}
    for taken in ranks:
        for name, row in taken.parameters.items():
            rows.setdefault(name, []).append(row)
    first = ranks[0]
    recent = [list(entry) for entry in first.recent]
    for taken in ranks[1:]:
        for entry, other in zip(recent, taken.recent, strict=True):
            squares = [x for x in (entry[RING - 1], other[RING - 1]) if x >= 0]
            entry[RING - 1] = sum(squares) if squares else -1.0
    parameters = {name: _joined(parts) for name, parts in rows.items()}
    return Taken(first.steps, parameters, first.totals, recent, first.by_rank)


def _joined(parts: Sequence[Sequence[float]]) -> list[float]:
    """What ranks have noted of their parts of one parameter.

    Of steps before those that every rank still tells, overflows are those of the part that had most
    of them: at least so many there were.
    """
    known = max(min(part[COUNTS:]) for part in parts)  # 0 if all are told
    lately = [{step for step in part[COUNTS:] if step >= max(known, 1)} for part in parts]
    before = max(part[1] - len(steps) for part, steps in zip(parts, lately, strict=True))
    every = set().union(*lately)
    largest = max(part[0] for part in parts)
    used, flushed = (sum(part[i] for part in parts) for i in (2, 3))
    return [largest, before + len(every), used, flushed, *every, 0.0]
