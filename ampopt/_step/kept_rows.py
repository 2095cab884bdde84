"""The rows of a pass over gradients alone, kept from call to call.

Such passes are those of ``accumulate``, of ``unscale``, and of optimizers that step together. To
check every gradient, and to make a row for it, takes longer than the pass over hundreds of small
ones. Usually the next call has gradients of the same parameters, with the same layouts, so that the
rows of the last one fit. A step keeps a :class:`~ampopt._step.plan.Plan` for the same reason.
"""

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ampopt._step import gradients
from ampopt._step.gradients import ParamWithGrad, params_of
from ampopt._step.overflow import GradientWorks, decided_elsewhere, device_of
from ampopt._step.rank_agreement import Agreement, decision_all_reduce
from ampopt.options import MASTER_WEIGHTS
from ampopt_kernels.memory import may_overlap
from ampopt_kernels.native.objects import IdentityGuard, LayoutGuard, addresses
from ampopt_kernels.rule import MASTER
from ampopt_kernels.step_data import Decision, Request
from ampopt_kernels.step_tensors import Work
from ampopt_kernels.uploads import Uploads

__all__ = ["KeptRows", "RowsOfGradients"]

Copy = Callable[[list[Tensor], list[ParamWithGrad]], None]
"""Copies the gradients of parameters to the tensors that have gradients in their place."""


class KeptRows:
    """The rows of one call.

    Attributes:
        present: the parameters that have gradients.
        holders: the tensor whose gradient each row has: the parameter, or its master.
        ids: the ``id`` of each parameter.
        work: the rows, with the gradients of this call.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        present: list[ParamWithGrad],
        work: Work,
        holders: list[ParamWithGrad] | None = None,
        states: Mapping[Any, dict[str, Any]] | None = None,
    ) -> None:
        """Record what :meth:`take_gradients` compares later.

        Args:
            groups: the param groups.
            present: the parameters that have gradients.
            work: the rows; see :meth:`fit`.
            holders: as the attribute; ``None`` for the parameters.
            states: the state of each parameter, which has its master.
        """
        self.present, self.work = present, work
        self.holders = present if holders is None else holders
        self.params = [one.tensor for one in present]
        self.ids = set(map(id, self.params))
        self._others = [param for param in params_of(groups) if id(param) not in self.ids]
        self._groups, self._states = list(groups), states
        entries: list[tuple[Any, Any]] = [(group, ("params",)) for group in groups]
        pairs = zip(self.params, self.holders, strict=True)
        masters = {param: one.tensor for param, one in pairs if one.tensor is not param}
        if masters and states is not None:
            entries += [(states, masters.keys()), *((states[p], (MASTER,)) for p in masters)]
        self._identities = IdentityGuard([group["params"] for group in groups], entries)
        self._have_masters = list(map(MASTER_WEIGHTS.of, groups))
        # A step reads sums in ``p.grad``, where users may give them other memory.
        sums = [row.param for row in work.rows if row.param is not None]
        self._tensors, self._sums_at = [*sums, *self.params, *masters.values()], addresses(sums)
        self._layouts = LayoutGuard(self._tensors)
        self._grad_layouts = LayoutGuard([param.grad for param in self.params])

    @staticmethod
    def fit(
        present: list[ParamWithGrad],
        works: list[Work],
        holders: list[ParamWithGrad] | None = None,
        states: Mapping[Any, dict[str, Any]] | None = None,
    ) -> bool:
        """Whether the rows ``works`` can be kept.

        They can if they are of one device and one kind of sum, and their gradients are those of
        plain parameters or of float32 masters: no copies or shards. For the arguments, see the
        constructor.
        """
        if len(works) != 1 or len({row.flags for row in works[0].rows}) != 1:
            return False
        each = zip(present, present if holders is None else holders, works[0].grads, strict=True)
        return all(
            type(param) in (Tensor, torch.nn.Parameter)
            and holder.grad is grad
            and owner.key == id(param)
            and (holder is param or (states or {}).get(param, {}).get(MASTER) is holder)
            for (_, param, owner), (_, holder, _), grad in each
        )

    def take_gradients(
        self,
        groups: list[dict[str, Any]],
        states: Mapping[Any, dict[str, Any]] | None = None,
        *,
        are_written: bool = False,
    ) -> bool:
        """Replace the gradients by those that the parameters have in this call.

        Args:
            groups: the param groups.
            states: as for the constructor.
            are_written: whether the gradients are written to, so that none may share memory.

        Returns:
            Whether the rows fit: the same parameters have gradients, with the same layouts, and the
            same masters.
        """
        if len(groups) != len(self._groups) or not all(map(operator.is_, groups, self._groups)):
            return False
        if states is not self._states or not self._identities.unchanged():
            return False
        if list(map(MASTER_WEIGHTS.of, groups)) != self._have_masters:
            return False
        if any(param.grad is not None for param in self._others):
            return False
        found, fits = self._layouts.read(self._tensors)
        grads_at, grads_fit = self._grad_layouts.read(self.params, of_gradients=True)
        if not {*fits, *grads_fit} <= {1} or found[: len(self._sums_at)] != self._sums_at:
            return False
        self.work.refresh(lambda: [param.grad for param in self.params], (), None, grads_at)
        return not (are_written and may_overlap(self.work.grads))


class RowsOfGradients:
    """The rows of the gradients of some param groups, which are checked and unscaled."""

    def __init__(self) -> None:
        """Keep no rows yet."""
        self._kept: KeptRows | None = None
        self._made_for: Any = None  # what the rows, and what `prepare` does, depend on

    @torch.no_grad()
    def check(
        self,
        groups: list[dict[str, Any]],
        request: Request,
        agreement: Agreement | None,
        uploads: dict[torch.device, Uploads],
        prepare: Callable[[list[ParamWithGrad]], list[ParamWithGrad]] | None = None,
        copy: Copy | None = None,
        *,
        states: Mapping[Any, dict[str, Any]] | None = None,
        write: bool = False,
        edits: bool = False,
    ) -> tuple[list[ParamWithGrad], Decision | None]:
        """Check the present gradients, by the rows of the last call if they fit.

        Args:
            groups: the param groups.
            request: see :func:`~ampopt._step.overflow.check_and_unscale`.
            agreement: the ranks that all-reduce the overflow flag; ``None`` for this rank alone.
            uploads: see :func:`~ampopt._step.overflow.check_and_unscale`.
            prepare: called unless the rows of the last call fit: checks the gradients, and returns
                the tensors whose gradients the rows have, which may be masters; ``None`` for the
                parameters.
            copy: copies the gradients of parameters to these tensors; ``None`` if they are the
                parameters.
            states: the state of each parameter, which may have its master.
            write: whether to unscale the gradients in place.
            edits: whether the caller writes to them afterwards.

        Returns:
            The gradients that were checked, and the decision: ``None`` if no rank has any.
        """
        made_for = agreement, write
        kept = self._kept if self._made_for == made_for else None
        self._kept, self._made_for = None, made_for  # a call that raises keeps no gradients
        if kept is not None and kept.take_gradients(groups, states, are_written=write or edits):
            holders, works = kept.holders, GradientWorks([kept.work])
            if copy is not None:
                copy(kept.params, holders)
                kept.work.refresh([one.tensor.grad for one in holders], ())
        else:
            holders = present = gradients.params_with_grads(groups)
            if prepare is not None:
                holders = prepare(present)
            if copy is not None:
                copy([one.tensor for one in present], holders)
            works, kept = GradientWorks.of(holders, agreement, uploads), None
            if KeptRows.fit(present, works.works, holders, states):
                kept = KeptRows(groups, present, works.works[0], holders, states)
        all_reduce = decision_all_reduce(agreement, request, len(holders))
        if not holders:
            return holders, decided_elsewhere(request, all_reduce, device_of(groups))
        decision = works.check(request, all_reduce, write=write)
        self._kept = kept
        return holders, decision
