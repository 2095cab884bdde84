"""The matrix that ranks all-reduce for a decision, and the check that they make the same request.

The matrix has a row for each rank. A rank fills its own row and leaves the others 0, so that the
sum has every row as its rank wrote it, NaN and infinity too.
"""

import enum
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ampopt._step.rank_settings import UNKNOWN, RankSettings, digest
from ampopt.backend import backend_for
from ampopt_kernels.devices import Copying, captures, copied_to_host, to_device
from ampopt_kernels.gradient_reports import named_ranks
from ampopt_kernels.step_data import Partials, Request

__all__ = [
    "ControlPoint",
    "Column",
    "Comparison",
    "RankRow",
    "difference",
    "local_results",
    "row_of",
]


RankRow = list[float]
"""The numbers of one rank, in the order of :class:`Column`."""


class ControlPoint(enum.IntEnum):
    """The control point in which a rank takes part in the all-reduce."""

    NONE = 0
    """The closure of this rank raised before its control point, in which the others are."""
    CHECK = 1
    ACCUMULATE = 2
    MICRO_BATCH = 3
    LAST_MICRO_BATCH = 4
    CYCLE = 5
    SUMS_OF_CYCLE = 6
    CLOSURE = 7
    FLAG = 8


class Column:  # ints, by which tensors are indexed faster than by members of an enum
    """Indices into a row. From ``OPTIONS`` on, the rows of all ranks have to be equal.

    The numbers of all ranks in ``HELD`` have to add up to 0.
    """

    OVERFLOW = 0  # more than 0 if a gradient of this rank is not finite; for CLOSURE, its loss
    SQUARES = 1  # squared norm of this rank; NaN if not requested
    PRESENT = 2  # 1 if this rank has gradients
    LOSS = 3
    GIVES_LOSS = 4  # 1 if LOSS was passed
    MUST_SKIP = 5  # 1 if the accumulation cycle of this rank must be skipped
    RAISED = 6  # 1 if the closure of this rank raised
    NEEDS_LOSS = 7  # 1 if a cause needs the loss
    LEFT_OUT = 8  # of RankSettings; equal where it is not UNKNOWN
    HELD = 9  # a sum over RankSettings.held, by its weights
    OPTIONS = 10  # this and the next one are of RankSettings.shared
    COPIES = 11
    CALL = 12
    PARAMS = 13  # this and the next two are digests of RankSettings
    CLASSES = 14
    CAUSES = 15
    EVALUATION = 16  # number of the closure's evaluation, from 1; 0 before the first
    MAX_REPLAYS = 17  # of a closure
    DROPS = 18  # 1 if an overflow skips the step
    MAX_NORM = 19
    SCALE = 20
    COUNT = 21


NOT_GIVEN = -1.0
"""Stands for ``None`` in columns of numbers that are 0 or more."""
_NOT_ASKED = float("nan")


def row_of(request: Request, call: ControlPoint, settings: RankSettings) -> RankRow:
    """A new row with what the arguments say, and 0 where they say nothing."""
    row = [0.0] * Column.COUNT
    row[Column.SQUARES] = _NOT_ASKED
    row[Column.GIVES_LOSS] = float(request.loss is not None)
    row[Column.NEEDS_LOSS] = float(any(cause.needs_loss for cause in request.causes))
    row[Column.CALL] = float(call)
    row[Column.PARAMS] = float(settings.params)
    row[Column.CLASSES] = float(settings.classes)
    row[Column.CAUSES] = float(digest(settings.causes()))
    row[Column.DROPS] = float(request.drop)
    row[Column.MAX_NORM] = NOT_GIVEN if request.max_norm is None else float(request.max_norm)
    row[Column.SCALE] = NOT_GIVEN
    return row


def local_results(
    request: Request,
    partials: Partials,
    flag: Tensor | None,
    must_skip: Tensor | None,
    settings: RankSettings,
    device: torch.device,
) -> dict[int, float | Tensor]:
    """The columns that may change with every call, some of them on ``device``.

    Does not synchronize. Arguments as for :class:`~ampopt._step.rank_agreement.DecisionAllReduce`.
    """
    flags = partials.flags
    if isinstance(flags, list):
        overflow: float | Tensor = float(any(flags))
    else:
        overflow = flags.amax() if flags.numel() else 0.0
    if flag is not None:
        overflow = overflow + (flag.reshape(()) > 0)
    results: dict[int, float | Tensor] = {Column.OVERFLOW: overflow}
    results[Column.OPTIONS], results[Column.COPIES] = settings.shared.numbers(device)
    for weight, options in settings.held:
        number = sum(options.numbers(device))
        results[Column.HELD] = results.get(Column.HELD, 0) + weight * number
    if partials.squares is not None:
        results[Column.SQUARES] = partials.squares.sum()
    if must_skip is not None:
        results[Column.MUST_SKIP] = must_skip.reshape(()) > 0
    if request.scale is not None:
        results[Column.SCALE] = to_device(request.scale.reshape(()), device)
    if request.loss is not None:
        results[Column.LOSS] = to_device(request.loss.detach().reshape(()), device)
    return results


class Comparison:
    """Reads what ranks have all-reduced, and raises if they differ.

    On a CPU at once. On an accelerator it synchronizes for the first tensor; later ones are copied
    to the host in the background, ``_EVERY`` at a time, and read when the copy has arrived. A rank
    that read any of these at once, for a request that is new to this rank alone, would raise, and
    leave the others waiting for its next call.
    """

    def __init__(self) -> None:
        """Start without tensors to read."""
        self._is_first = True
        self._waiting: dict[torch.device, list[Tensor]] = defaultdict(list)
        self._coming: list[Copying] = []

    def compare(
        self,
        reduced: Tensor,
        difference_of: Callable[[list[Any]], str | None],
        *,
        at_once: bool = False,
    ) -> None:
        """Read ``reduced``, now or in a later call.

        Args:
            reduced: the all-reduced tensor, of one shape in all calls.
            difference_of: ``difference_of(reduced.tolist())`` says in which way ranks differ, or
                returns ``None``.
            at_once: whether to read it now, though that may synchronize.

        Raises:
            RuntimeError: ranks differ, in this call or in an earlier one.
        """
        device = reduced.device
        if captures(device):
            return
        if at_once or self._is_first or backend_for(device).host_sees:
            self._is_first = False
            _refuse(difference_of(reduced.tolist()), "nothing has been stepped")
            return
        waiting = self._waiting[device]
        waiting.append(reduced)
        if len(waiting) == _EVERY:
            self._coming.append(copied_to_host(torch.stack(waiting)))
            waiting.clear()
        while self._coming and self._coming[0].done():
            for earlier in self._coming.pop(0).tensor.tolist():
                late = "this was found some steps later, and steps since then may have been wrong"
                _refuse(difference_of(earlier), late)


_EVERY = 8
"""The number of tensors that are copied to the host together."""


def _refuse(text: str | None, consequence: str) -> None:
    """Raise ``RuntimeError`` with a text from ``difference_of``, if there is one."""
    if text is not None:
        raise RuntimeError(f"{text}; {consequence}")


def difference(
    rows: Sequence[Sequence[float]], ranks: Sequence[int], settings: RankSettings
) -> str | None:
    """The difference between the requests of ranks, as a message; ``None`` if they are equal.

    Args:
        rows: the rows of all ranks.
        ranks: the rank of each row.
        settings: the settings of this rank, which the message may show.
    """
    compared = [(row[Column.LEFT_OUT], *row[Column.OPTIONS :]) for row in rows]
    are_equal = compared.count(compared[0]) == len(rows)
    calling = {rank: row for rank, row in zip(ranks, rows, strict=True) if row[Column.CALL]}
    for column, (text, to_text) in () if are_equal else _COMPARED.items():
        ranks_by_number: dict[str, list[int]] = defaultdict(list)
        for rank, row in calling.items():
            if column != Column.LEFT_OUT or row[column] != UNKNOWN:
                ranks_by_number[repr(row[column])].append(rank)  # repr, since NaN != NaN
        if len(ranks_by_number) > 1:
            named = {named_ranks(ranks): float(n) for n, ranks in ranks_by_number.items()}
            if to_text is None:
                return text.format(" against ".join(named), **settings.as_texts())
            return text.format("; ".join(f"{who}: {to_text(n)}" for who, n in named.items()))
    if len(calling) == len(rows) and sum(row[Column.HELD] for row in rows):
        holders = [rank for rank, row in calling.items() if row[Column.HELD]]
        return _HELD.format(named_ranks(holders), **settings.as_texts())
    needs, gives = (any(row[c] for row in calling.values()) for c in _OF_LOSS)
    if needs and not gives:
        return (
            "skip_when(loss=...) needs the loss of the step, and no rank has given one: call "
            "optimizer.unscale_and_step(grads_scaled_by=scale, loss=loss), or use ampopt.TrainStep"
        )
    return None


def _number(number: float) -> str:
    """``number`` as a message shows it: ``None`` if it was not passed."""
    return "None" if number == NOT_GIVEN else repr(number)


_CALLS = {
    ControlPoint.CHECK: "unscale, unscale_and_step or a scaler's step",
    ControlPoint.ACCUMULATE: 'accumulate(drop="window")',
    ControlPoint.MICRO_BATCH: 'accumulate(drop="micro_batch")',
    ControlPoint.LAST_MICRO_BATCH: 'the step after accumulate(drop="micro_batch")',
    ControlPoint.CYCLE: "the step after accumulate",
    ControlPoint.SUMS_OF_CYCLE: "the step after accumulate, with skip_when or max_norm",
    ControlPoint.CLOSURE: "a step with a closure",
    ControlPoint.FLAG: "a scaler's step after unscale_",
}
_COMPARED: dict[int, tuple[str, Any]] = {
    Column.LEFT_OUT: (
        "some ranks have left out a call: they called zero_grad() after a backward pass, without a "
        "step and without a call with a scale or max_norm in between ({}), so their later calls "
        "were matched with earlier calls of the other ranks. Make every call on all ranks of the "
        "process group",
        "{:.0f} times".format,
    ),
    Column.PARAMS: (
        "ranks have different parameters ({}), but all of them must have shards or copies of the "
        "same ones: make the optimizer of the same parameters, in the same order, on every rank. "
        "If plain tensors differ from rank to rank, give the optimizer the process_group, and omit "
        "replicated=True in their param group",
        None,
    ),
    Column.CALL: (
        "ranks of one process group make different calls ({}): let all of them make the same "
        "calls, in the same order",
        lambda number: _CALLS[ControlPoint(int(number))],
    ),
    Column.CLASSES: (
        "ranks of one process group step by optimizers of different classes or rules ({}): make "
        "them of the same class on all ranks",
        None,
    ),
    Column.OPTIONS: (
        "options of the optimizer differ between ranks ({}), for parameters that all of them have; "
        "this rank has {options}: set the same ones on all ranks, and step schedulers "
        "on all of them, with the same metric",
        None,
    ),
    Column.COPIES: (
        "several ranks have copies of a parameter, and only some of them have its gradient ({}): "
        "give the gradient on all ranks that have a copy, zeros if need be, or on none. If plain "
        "tensors differ from rank to rank, give the optimizer the process_group, and omit "
        "replicated=True in their param group",
        None,
    ),
    Column.MAX_REPLAYS: (
        "max_replays differs between ranks ({}): pass the same number on all of them",
        "{:.0f}".format,
    ),
    Column.EVALUATION: (
        "some ranks evaluate the closure more often than others ({}): let all of them evaluate it "
        "equally often",
        "evaluation {:.0f}".format,
    ),
    Column.DROPS: (
        "drop_overflow_update of the scale differs between ranks ({}): pass the same kind of scale "
        "on all of them",
        lambda number: repr(bool(number)),
    ),
    Column.MAX_NORM: (
        "max_norm differs between ranks ({}): pass the same number on all ranks of the process "
        "group, or on none",
        _number,
    ),
    Column.CAUSES: (
        "skip_when differs between ranks ({}); this rank has {causes}: call skip_when with the "
        "same arguments on all ranks of the process group, before the same step",
        None,
    ),
    Column.SCALE: (
        "the scale of the gradients differs between ranks ({}): multiply the loss by the same "
        "scale on all of them, and continue with the scale that the step returns; load a saved "
        "scale on all of them",
        _number,
    ),
}
_HELD = (
    "the ranks in replicated=[...] of a param group have copies of its parameters, but that list, "
    "shapes or dtypes, the options, or which parameters have gradients differ between some of {}; "
    "this rank has {options}: set the same ones on all ranks of a list, step schedulers on all of "
    "them, with the same metric, and give the gradient of a copy on all of them, zeros if need be, "
    "or on none"
)
_OF_LOSS = Column.NEEDS_LOSS, Column.GIVES_LOSS
