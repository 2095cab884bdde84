"""What each rank says in the all-reduce of a decision, and whether all ranks ask for the same.

The all-reduce adds up a matrix with a row for each rank. A rank fills its own row and leaves the
others 0, so that the sum has every row as its rank wrote it, NaN and infinity too.
"""

import enum
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ampopt.backend import backend_for
from ampopt_kernels.decision import Partials, Request
from ampopt_kernels.devices import Copying, captures, copied_to_host, to_device
from ampopt_kernels.found import named_ranks
from ampopt_kernels.tensors import widest

__all__ = [
    "Call",
    "Column",
    "Comparison",
    "RowsOnDevices",
    "SameGradients",
    "difference",
    "digest",
    "row_of",
    "with_found",
    "write_found",
]


Row = tuple[float, ...]
"""The numbers of :class:`Column`, as far as the host of a rank knows them."""


class Call(enum.IntEnum):
    """What a rank was called for."""

    ABSTAINS = 0
    """Its own call has failed: it takes part for the sake of the others, and asks for nothing."""
    JUDGES = 1
    MICRO_BATCH = 2
    RENORMALISES = 3
    CYCLE = 4
    CAUSES_OF_CYCLE = 5
    CLOSURE = 6
    FLAG = 7


class Column:  # ints, by which tensors are indexed faster than by members of an enum
    """What a row consists of. From ``CALL`` on, the rows of all ranks have to be the same."""

    OVERFLOW = 0  # more than 0 if this rank has found one; of a closure, if its loss is not finite
    SQUARES = 1  # of the gradients that count here; NaN if not asked. Of a closure, if it raised
    PRESENT = 2  # 1 if there are gradients
    LOSS = 3
    GIVES_LOSS = 4  # 1 if LOSS is one
    CALL = 5
    PARAMS = 6  # a digest
    EVALUATION = 7  # of a closure, counted from 1
    GRADIENTS = 8  # how many, where the step makes a collective for each
    DROPS = 9  # 1 if an overflow skips the step
    MAX_NORM = 10
    NORM = 11  # the smallest limit of this kind that skip_when was given, likewise the next three
    NORM_DEVIATIONS = 12
    LOSS_LIMIT = 13
    LOSS_DEVIATIONS = 14
    CAUSES = 15  # a digest of all that skip_when was given
    SCALE = 16
    COUNT = 17


NOT_GIVEN = -1.0
"""Stands for ``None`` where numbers are 0 or more."""
_NOT_ASKED = float("nan")


def digest(of: object) -> int:
    """A number of ``of``, the same on all ranks, that float32 holds exactly."""
    return zlib.crc32(repr(of).encode()) % 2**24


def row_of(
    request: Request,
    call: Call,
    *,
    params: int = 0,
    evaluation: int = 0,
    present: bool = False,
    gradients: int = 0,
) -> Row:
    """What the host of this rank has to say; see :class:`Column`. The scale is on the device."""
    limits, causes = (NOT_GIVEN,) * 4, 0
    if request.causes:
        given = [cause for cause, _ in request.causes]
        limits = tuple(map(_smallest, zip(*(cause.limits for cause in given), strict=True)))
        causes = digest(sorted(cause.settings for cause in given))
    return (
        0.0,
        _NOT_ASKED,
        float(present),
        0.0,
        float(any(loss is not None for _, loss in request.causes)),
        float(call),
        float(params),
        float(evaluation),
        float(gradients),
        float(request.drop),
        NOT_GIVEN if request.max_norm is None else float(request.max_norm),
        *limits,
        float(causes),
        NOT_GIVEN,
    )


def _smallest(limits: Iterable[float | None]) -> float:
    return min((limit for limit in limits if limit is not None), default=NOT_GIVEN)


def with_found(row: Row, request: Request, found: Partials, flag: Tensor | None) -> Row:
    """``row`` with what this rank has found, where the host sees it.

    Args:
        row: of :func:`row_of`.
        request: what this rank is asked.
        found: what it has.
        flag: a flag from elsewhere, more than 0 for overflow.
    """
    whole = list(row)
    overflows = any(found.flags if isinstance(found.flags, list) else found.flags.tolist())
    whole[Column.OVERFLOW] = float(overflows or (flag is not None and flag.item() > 0))
    if found.squares is not None:
        whole[Column.SQUARES] = found.squares.sum().item()
    if request.scale is not None:
        whole[Column.SCALE] = request.scale.item()
    for _, loss in request.causes:
        if loss is not None:
            whole[Column.LOSS] = loss.item()
    return tuple(whole)


def write_found(mine: Tensor, request: Request, found: Partials, flag: Tensor | None) -> None:
    """As :func:`with_found`, to the row of this rank on a device."""
    flags = found.flags
    if isinstance(flags, list):
        if any(flags):
            mine[Column.OVERFLOW] = 1.0
    elif flags.numel():
        mine[Column.OVERFLOW] = flags.amax()
    if flag is not None:
        mine[Column.OVERFLOW].add_(flag.reshape(()) > 0)
    if found.squares is not None:
        mine[Column.SQUARES] = found.squares.sum()
    if request.scale is not None:
        mine[Column.SCALE] = to_device(request.scale.reshape(()), mine.device, mine.dtype)
    for _, loss in request.causes:
        if loss is not None:
            mine[Column.LOSS] = to_device(loss.detach().reshape(()), mine.device, mine.dtype)


class RowsOnDevices:
    """Matrices that have the row of this rank already, kept so that a step copies one."""

    def __init__(self, ranks: int, place: int) -> None:
        """Keep none yet.

        Args:
            ranks: how many rows there are.
            place: the row of this rank.
        """
        self._ranks, self._place = ranks, place
        self._kept: dict[tuple[torch.device, Row], Tensor] = {}

    def matrix(self, row: Row, device: torch.device) -> Tensor:
        """A new matrix on ``device`` that is 0 but for ``row``. Waits for nothing."""
        if device.type == "cpu":
            made = torch.zeros(self._ranks, Column.COUNT, dtype=torch.float64, device=device)
            made[self._place].copy_(torch.tensor(row, dtype=torch.float64, device=device))
            return made
        if captures(device):  # what a graph reads has to outlast it
            return self._made(row, device)
        if (device, row) not in self._kept:
            if len(self._kept) >= _KEPT:
                self._kept.clear()
            self._kept[device, row] = self._made(row, device)
        return self._kept[device, row].clone()

    def _made(self, row: Row, device: torch.device) -> Tensor:
        made = torch.zeros(self._ranks, Column.COUNT, dtype=widest(device), device=device)
        for place, number in enumerate(row):
            if number:
                made[self._place, place] = number  # no copy from memory that is not pinned
        return made


_KEPT = 32


class Comparison:
    """Compares what ranks of one process group ask for: at once, or without waiting for a device.

    Where the host does not see the device, it looks at once where this rank is asked for something
    for the first time. All other matrices go to the host, ``_EVERY`` of them in one copy, and are
    looked at when the copy has arrived.
    """

    def __init__(self) -> None:
        """Have nothing to compare."""
        self._known: set[Row] = set()
        self._waiting: dict[tuple[torch.device, int], list[Tensor]] = defaultdict(list)
        self._coming: list[Copying] = []

    def compare(self, said: Tensor, row: Row, ranks: Sequence[int], *, at_once: bool) -> None:
        """Compare the rows of ``said``, now or in a later call.

        Args:
            said: shape (ranks, columns).
            row: that of this rank.
            ranks: whose the rows are.
            at_once: whether looking costs nothing.

        Raises:
            RuntimeError: ranks ask for different things, in this call or in one before it.
        """
        if at_once:
            _refuse(said.tolist(), ranks, "nothing has been stepped")
            return
        if captures(said.device):
            return
        kind = _kind(row)
        if kind not in self._known:
            self._known.add(kind)
            _refuse(said.tolist(), ranks, "nothing has been stepped")
            return
        waiting = self._waiting[said.device, len(ranks)]
        waiting.append(said)
        if len(waiting) == _EVERY:
            self._coming.append(copied_to_host(torch.stack(waiting)))
            waiting.clear()
        while self._coming and self._coming[0].done():
            for rows in self._coming.pop(0).tensor.tolist():
                late = "this was found some steps later, and steps since then may have been wrong"
                _refuse(rows, ranks, late)


_EVERY = 8
"""Decisions from one copy to the host to the next."""


def _kind(row: Row) -> Row:
    """What of ``row`` does not change from step to step."""
    clips = float(row[Column.MAX_NORM] != NOT_GIVEN)
    return (*row[Column.CALL : Column.MAX_NORM], clips, *row[Column.MAX_NORM + 1 :])


def _refuse(rows: list[Any], ranks: Sequence[int], then: str) -> None:
    text = difference(rows, ranks)
    if text is not None:
        raise RuntimeError(f"{text}; {then}")


def difference(rows: Sequence[Sequence[float]], ranks: Sequence[int]) -> str | None:
    """What ranks ask for that others do not, in words; ``None`` if all ask for the same.

    Args:
        rows: of all ranks.
        ranks: whose they are.
    """
    first = rows[0][Column.CALL :]
    if all(row[Column.CALL :] == first for row in rows) and not _lacks_loss(rows):
        return None
    said = {rank: row for rank, row in zip(ranks, rows, strict=True) if row[Column.CALL]}
    for column, (text, shown) in _COMPARED.items():
        ranks_by_number: dict[str, list[int]] = defaultdict(list)
        for rank, row in said.items():
            ranks_by_number[repr(row[column])].append(rank)  # of which NaN is the same
        if len(ranks_by_number) > 1:
            if shown is None:
                return text.format(" against ".join(map(named_ranks, ranks_by_number.values())))
            each = (f"{named_ranks(r)}: {shown(float(n))}" for n, r in ranks_by_number.items())
            return text.format("; ".join(each))
    if said and _lacks_loss(list(said.values())):
        return (
            "skip_when(loss=...) needs the loss of the step, and no rank has given one: give it to "
            "the control point, optimizer.unscale_and_step(grads_scaled_by=scale, loss=loss), or "
            "use ampopt.TrainStep"
        )
    return None


def _lacks_loss(rows: Sequence[Sequence[float]]) -> bool:
    if all(row[Column.LOSS_LIMIT] == row[Column.LOSS_DEVIATIONS] == NOT_GIVEN for row in rows):
        return False
    return not any(row[Column.GIVES_LOSS] for row in rows)


def _number(number: float) -> str:
    return "None" if number == NOT_GIVEN else repr(number)


_CALLS = {
    Call.JUDGES: "unscale, unscale_and_step or a scaler's step",
    Call.MICRO_BATCH: 'accumulate(drop="micro_batch")',
    Call.RENORMALISES: 'the step after accumulate(drop="micro_batch")',
    Call.CYCLE: "the step after accumulate",
    Call.CAUSES_OF_CYCLE: "the step after accumulate, with skip_when",
    Call.CLOSURE: "a step with a closure",
    Call.FLAG: "a scaler's step after unscale_",
}
_SKIP_WHEN = (
    "skip_when({0}=...) differs between ranks ({{}}): call skip_when with the same arguments on "
    "all ranks that decide together, before the same step"
)
_COMPARED: dict[int, tuple[str, Any]] = {
    Column.PARAMS: (
        "ranks have different parameters ({}), where all of them hold the same ones, in parts or "
        "in copies: make the optimizer of the same parameters, in the same order, on every rank, "
        "or leave replicated=True out of a param group whose parameters differ from rank to rank",
        None,
    ),
    Column.CALL: (
        "ranks that decide together make different calls ({}): let all of them make the same "
        "calls, in the same order",
        lambda number: _CALLS[Call(int(number))],
    ),
    Column.EVALUATION: (
        "some ranks evaluate the closure more often than others ({}): let all of them evaluate it "
        "equally often",
        "evaluation {:.0f}".format,
    ),
    Column.GRADIENTS: (
        "some ranks have gradients that others have not ({}), and all have to take part in this "
        "step, which works on whole DTensors: give every rank the same ones, zeros where need be, "
        "or none",
        "{:.0f} gradients".format,
    ),
    Column.DROPS: (
        "drop_overflow_update of the scale differs between ranks ({}): give all of them one scale",
        lambda number: repr(bool(number)),
    ),
    Column.MAX_NORM: (
        "max_norm differs between ranks ({}): give it on all that decide together, the same "
        "number, or on none",
        _number,
    ),
    Column.NORM: (_SKIP_WHEN.format("norm"), _number),
    Column.NORM_DEVIATIONS: (_SKIP_WHEN.format("norm_deviations"), _number),
    Column.LOSS_LIMIT: (_SKIP_WHEN.format("loss"), _number),
    Column.LOSS_DEVIATIONS: (_SKIP_WHEN.format("loss_deviations"), _number),
    Column.CAUSES: (
        "skip_when differs between ranks ({}) in warmup, in how often it was called, or in being "
        "like another system: call it with the same arguments on all that decide together",
        None,
    ),
    Column.SCALE: (
        "the scale of the gradients differs between ranks ({}): multiply the loss by the same "
        "scale on all of them, and go on with the one that the step returns; load a saved scale "
        "on all of them",
        _number,
    ),
}


class SameGradients:
    """What each rank says of its gradients, in numbers that are added up over ranks.

    Attributes:
        size: how many numbers those are.
    """

    def __init__(self, params: Sequence[Any]) -> None:
        """Number the parameters.

        Args:
            params: those that the step needs of all ranks, the same ones on each.
        """
        # One number for each, of ranks that have its gradient, and behind them that of all ranks.
        self._numbers = {id(param): number for number, param in enumerate(params)}
        self.size = len(params) + 1
        self._known: set[tuple[int, ...]] = set()

    def say(self, said: Tensor, keys: Iterable[int]) -> None:
        """Write what this rank has to say into ``said``, which is zeros.

        Args:
            said: of :attr:`size` elements.
            keys: the ``id`` of each parameter with a gradient.
        """
        for number in (*self._present(keys), self.size - 1):
            said[number].fill_(1.0)

    def check(self, said: Tensor, keys: Iterable[int]) -> None:
        """Refuse to go on if some ranks have gradients that others have not.

        Where the host would have to wait to see that, only the first time that this rank has these
        gradients.

        Args:
            said: of all ranks.
            keys: as for :meth:`say`.

        Raises:
            RuntimeError: they have; on every rank.
        """
        present = self._present(keys)
        seen = backend_for(said.device).host_sees
        if not seen and (present in self._known or captures(said.device)):
            return
        self._known.add(present)
        *having, ranks = said.tolist()
        if any(n not in (0, ranks) for n in having):
            raise RuntimeError(
                "some ranks have gradients that others have not, and all have to take part in this "
                "step, which works on whole DTensors: give every rank the same ones, zeros where "
                "need be, or none; nothing has been stepped"
            )

    def _present(self, keys: Iterable[int]) -> tuple[int, ...]:
        return tuple(self._numbers[key] for key in keys if key in self._numbers)
