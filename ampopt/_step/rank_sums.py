"""All-reduces of the sums that a step takes over whole parameters, and over rows and columns.

All ranks must have gradients of the same parameters, which :class:`SameGradients` checks.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ampopt._step.gradients import named_params, params_of
from ampopt._step.rank_agreement import Agreement
from ampopt._step.rank_messages import Comparison
from ampopt._step.sharding.dtensor import is_dtensor
from ampopt_kernels.state import shape_of_lines
from ampopt_kernels.step_tensors import Work
from ampopt_kernels.sums import Sums
from ampopt_kernels.tensors import widest

__all__ = ["LinesOfRanks", "RankSums", "SameGradients"]


class SameGradients:
    """Checks that all ranks have gradients of the same parameters, by counts to be all-reduced.

    Attributes:
        size: the number of counts: the ranks with a gradient of each parameter, then all ranks.
    """

    def __init__(self, params: Sequence[Any], param_groups: Sequence[dict[str, Any]]) -> None:
        """Number the parameters.

        Args:
            params: the parameters to check, the same ones in the same order on each rank.
            param_groups: the param groups that they are in, for their names.
        """
        keys = set(map(id, params))
        self._names = {id(p): name for _, p, name in named_params(param_groups) if id(p) in keys}
        self._numbers = {key: number for number, key in enumerate(self._names)}
        self.size = len(self._numbers) + 1
        self._comparison = Comparison()

    def write_counts(self, counts: Tensor, keys: Iterable[int]) -> None:
        """Write the counts of this rank into ``counts``, which is zeros.

        Args:
            counts: a tensor of :attr:`size` elements.
            keys: the ``id`` of each parameter with a gradient.
        """
        numbers = (self._numbers[key] for key in keys if key in self._numbers)
        for number in (*numbers, self.size - 1):
            counts[number].fill_(1.0)

    def check(self, counts: Tensor) -> None:
        """Check the sums of the counts of all ranks; see :class:`.rank_messages.Comparison`.

        Raises:
            RuntimeError: some ranks have gradients that others lack, in this step or in an earlier
                one. Raised on every rank.
        """
        # A copy: they may wait to be read, and be a part of a large message.
        self._comparison.compare(counts.clone(), self._difference)

    def _difference(self, counts: list[float]) -> str | None:
        """The difference between the gradients of ranks, as a message; ``None`` without one."""
        *having, ranks = counts
        named = zip(self._names.values(), having, strict=True)
        lacking = [f"{name}: {n:.0f} of {ranks:.0f} ranks" for name, n in named if 0 < n < ranks]
        if not lacking:
            return None
        return (
            f"some ranks have gradients that others lack ({'; '.join(lacking[:4])}), but this step "
            "makes collectives for DTensor gradients: give every rank gradients of the same "
            "parameters, zeros if need be, or none"
        )


class RankSums:
    """Adds up, by one all-reduce, the sums of a rule (such as LAMB's norms) over ranks.

    The sums of each ``DTensor`` are added up over its shards. The sums of a plain tensor stay
    those of this rank. The totals have both; like the norm, they count a tensor of which several
    ranks have copies once.
    """

    def __init__(
        self, agreement: Agreement, param_groups: Sequence[dict[str, Any]], n_terms: int
    ) -> None:
        """Number the ``DTensor`` parameters.

        Args:
            agreement: the ranks to all-reduce over.
            param_groups: the param groups of the optimizer, with the same ``DTensor`` parameters on
                each rank.
            n_terms: the number of sums that the rule takes.
        """
        self._agreement, self._n_terms = agreement, n_terms
        sharded_params = filter(is_dtensor, params_of(param_groups))
        self._places = {id(param): place for place, param in enumerate(sharded_params)}

    def __call__(self, works: Sequence[Work], sums: Sums) -> Sums:
        """See :data:`ampopt_kernels.sums.AgreeOnSums`."""
        rows = [row for work in works for row in work.rows]
        places = [self._places.get(row.owner.key) for row in rows]
        spread = [(i, place) for i, place in enumerate(places) if place is not None]
        in_sums = self._agreement.in_sums
        counted = [(i, place) for i, place in spread if in_sums[rows[i].owner.key]]
        device, uploads = sums.each.device, works[0].uploads

        def indices(name: str, pairs: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
            flat = [n for pair in pairs for n in pair]
            table = uploads.get(name, flat, torch.int64, device).view(-1, 2)
            return table[:, 0], table[:, 1]

        from_rows, to_places = indices("sums that count", counted)
        each = sums.each.new_zeros(len(self._places), sums.totals.numel())
        each.index_copy_(0, to_places, sums.each.index_select(0, from_rows))
        each, totals = self._agreement.add_up_sums(each, sums.totals)
        to_rows, from_places = indices("sums of ranks", spread)
        whole = sums.each.index_copy(0, to_rows, each.index_select(0, from_places))
        return Sums(whole, totals)

    def join_without_gradients(self, device: torch.device) -> None:
        """Take part in the all-reduce of other ranks, without gradients on this one."""
        none = torch.zeros(len(self._places), self._n_terms, dtype=widest(device), device=device)
        self._agreement.add_up_sums(none, none.new_zeros(self._n_terms))


class LinesOfRanks:
    """Adds up, by one all-reduce, sums over rows and columns of local shards.

    A rank without gradients takes part. Every rank checks that all have the same gradients.
    """

    def __init__(
        self, agreement: Agreement, param_groups: Sequence[dict[str, Any]], over: Sequence[str]
    ) -> None:
        """Lay out the sums of all parameters, one after another, in one tensor.

        Args:
            agreement: the ranks to all-reduce over.
            param_groups: the param groups of the optimizer, with the same ``DTensor`` parameters on
                each rank.
            over: what each mean of the rule is over, ``"rows"`` or ``"columns"``.
        """
        self._agreement = agreement
        params = [p for p in params_of(param_groups) if is_dtensor(p) and p.ndim > 1]
        self._same = SameGradients(params, param_groups)
        self._sizes = [self._same.size]  # the counts come first, the sums after them
        self._first_parts: dict[int, int] = {}
        for param in params:
            self._first_parts[id(param)] = len(self._sizes)
            self._sizes += [math.prod(shape_of_lines(param.shape, lines)) for lines in over]

    def __call__(self, works: Sequence[Work]) -> None:
        """See :attr:`Request.agree_on_lines <ampopt_kernels.step_data.Request.agree_on_lines>`.

        Raises:
            RuntimeError: see :meth:`SameGradients.check`; nothing has changed then.
        """
        with_lines = (work for work in works if work.line_stacks)
        self._add_up(works, next(with_lines, works[0]).device)

    def join_without_gradients(self, device: torch.device) -> None:
        """Take part in the all-reduce of other ranks, without gradients on this one.

        Raises:
            RuntimeError: see :meth:`SameGradients.check`.
        """
        self._add_up([], device)

    def _add_up(self, works: Sequence[Work], device: torch.device) -> None:
        """Set the sums of whole parameters in the stacks of ``works``; all-reduce on ``device``."""
        if not self._first_parts:  # no parameter is a DTensor with rows and columns
            return
        keys = [row.owner.key for work in works for _, row, _ in work.present_rows()]
        message = torch.zeros(sum(self._sizes), dtype=widest(device), device=device)
        parts = message.split(self._sizes)
        self._same.write_counts(parts[0], keys)
        for work, stack in ((w, stack) for w in works for stack in w.line_stacks):
            index = stack.members[0]  # a shard is the only member
            row = work.rows[index]
            own: Any = row.row_column_means
            if own.shard is None or not work.is_present(index):
                continue
            stack.whole_sums = [
                parts[self._first_parts[row.owner.key] + i].view(
                    1, *shape_of_lines(own.whole_shape, over)
                )
                for i, over in enumerate(own.over)
            ]
            if self._agreement.in_sums[row.owner.key]:
                for over, sums, whole in zip(own.over, own.sums, stack.whole_sums, strict=True):
                    own.shard.put(over, sums, whole[0])
        self._agreement.add_up_parameters(message)
        self._same.check(parts[0])
