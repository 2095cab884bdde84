"""Sums of a rule over sharded parameters: over all shards of each."""

from collections.abc import Sequence
from typing import Any

import torch

from ampopt._step.all_reduce import Agreement
from ampopt._step.sharding.dtensor import is_spread
from ampopt_kernels.sums import Sums
from ampopt_kernels.tensors import widest
from ampopt_kernels.work import Work

__all__ = ["RankSums"]


class RankSums:
    """Adds up, by one all-reduce, the sums of a rule (such as LAMB's norms) over ranks.

    The sums of each ``DTensor`` are added up over its shards. The sums of an ordinary tensor stay
    those of this rank. Both are added to the totals, as to the norm: a copy on several ranks once.
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
        sharded = [p for group in param_groups for p in group["params"] if is_spread(p)]
        self._places = {id(param): place for place, param in enumerate(sharded)}

    def __call__(self, works: Sequence[Work], sums: Sums) -> Sums:
        """See :data:`ampopt_kernels.sums.AgreeOnSums`."""
        rows = [row for work in works for row in work.rows]
        places = [self._places.get(row.owner.key) for row in rows]
        spread = [(i, place) for i, place in enumerate(places) if place is not None]
        in_norm = [(i, place) for i, place in spread if rows[i].in_norm]
        device, uploads = sums.each.device, works[0].uploads

        def sent(name: str, pairs: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
            flat = [n for pair in pairs for n in pair]
            table = uploads.get(name, flat, torch.int64, device).view(-1, 2)
            return table[:, 0], table[:, 1]

        from_rows, to_places = sent("sums that count", in_norm)
        each = sums.each.new_zeros(len(self._places), sums.totals.numel())
        each.index_copy_(0, to_places, sums.each.index_select(0, from_rows))
        each, totals = self._agreement.add_up_sums(each, sums.totals)
        to_rows, from_places = sent("sums of ranks", spread)
        whole = sums.each.index_copy(0, to_rows, each.index_select(0, from_places))
        return Sums(whole, totals)

    def join_without_gradients(self, device: torch.device) -> None:
        """Take part in the all-reduce of other ranks, without gradients on this one."""
        none = torch.zeros(len(self._places), self._n_terms, dtype=widest(device), device=device)
        self._agreement.add_up_sums(none, none.new_zeros(self._n_terms))
