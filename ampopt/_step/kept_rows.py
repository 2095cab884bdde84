"""The rows of a pass over gradients alone, kept from call to call.

Such passes are those of ``accumulate``, of ``unscale``, and of optimizers that step together. To
check every gradient, and to make a row for it, takes longer than the pass over hundreds of small
ones. Usually the next call has gradients of the same parameters, with the same layouts, so that the
rows of the last one fit. A step keeps a :class:`~ampopt._step.plan.Plan` for the same reason.
"""

import operator
from collections.abc import Callable
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
from ampopt_kernels.step_data import Decision, Request
from ampopt_kernels.step_tensors import Work
from ampopt_kernels.uploads import Uploads

__all__ = ["KeptRows", "RowsOfGradients"]


class KeptRows:
    """The rows of one call.

    Attributes:
        present: the parameters that have gradients.
        ids: their ``id``.
        work: the rows, with the gradients of this call.
    """

    def __init__(
        self, groups: list[dict[str, Any]], present: list[ParamWithGrad], work: Work
    ) -> None:
        """Record what :meth:`take_gradients` compares later.

        Args:
            groups: the param groups.
            present: the parameters that have gradients.
            work: the rows; see :meth:`fit`.
        """
        self.present, self.work = present, work
        self.ids = {id(one.tensor) for one in present}
        self._params = [one.tensor for one in present]
        self._others = [param for param in params_of(groups) if id(param) not in self.ids]
        self._groups = list(groups)
        self._identities = IdentityGuard(
            [group["params"] for group in groups],
            [(group, ("params",)) for group in groups],
        )
        self._have_masters = list(map(MASTER_WEIGHTS.of, groups))
        # A step reads sums in ``p.grad``, where users may give them other memory.
        sums = [row.param for row in work.rows if row.param is not None]
        self._tensors, self._sums_at = [*self._params, *sums], addresses(sums)
        self._layouts = LayoutGuard(self._tensors)
        self._grad_layouts = LayoutGuard(work.grads)

    @staticmethod
    def fit(present: list[ParamWithGrad], works: list[Work]) -> bool:
        """Whether the rows ``works`` can be kept.

        They can if they are of one device and one kind of sum, and their gradients are those of
        plain parameters: no copies, shards, or gradients of masters.
        """
        if len(works) != 1 or len({row.flags for row in works[0].rows}) != 1:
            return False
        return all(
            type(one.tensor) in (Tensor, torch.nn.Parameter)
            and one.tensor.grad is grad
            and one.owner.key == id(one.tensor)
            for one, grad in zip(present, works[0].grads, strict=True)
        )

    def take_gradients(self, groups: list[dict[str, Any]], *, are_written: bool = False) -> bool:
        """Replace the gradients by those of this call.

        Args:
            groups: the param groups.
            are_written: whether the gradients are written to, so that none may share memory.

        Returns:
            Whether the rows fit: the same parameters have gradients, with the same layouts.
        """
        if len(groups) != len(self._groups) or not all(map(operator.is_, groups, self._groups)):
            return False
        if not self._identities.unchanged():
            return False
        if list(map(MASTER_WEIGHTS.of, groups)) != self._have_masters:
            return False
        if any(param.grad is not None for param in self._others):
            return False
        found, fits = self._layouts.read(self._tensors)
        grads_at, grads_fit = self._grad_layouts.read(self._params, of_gradients=True)
        if not {*fits, *grads_fit} <= {1} or found[len(self._params) :] != self._sums_at:
            return False
        self.work.refresh(lambda: [param.grad for param in self._params], (), None, grads_at)
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
        *,
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
                those to make rows of, which may be those of masters; ``None`` to take them all.
            write: whether to unscale the gradients in place.
            edits: whether the caller writes to them afterwards.

        Returns:
            The gradients that were checked, and the decision: ``None`` if no rank has any.
        """
        made_for = agreement, write
        kept = self._kept if self._made_for == made_for else None
        self._kept, self._made_for = None, made_for  # a call that raises keeps no gradients
        if kept is not None and kept.take_gradients(groups, are_written=write or edits):
            with_grads, works = kept.present, GradientWorks([kept.work])
        else:
            with_grads = gradients.params_with_grads(groups)
            if prepare is not None:
                with_grads = prepare(with_grads)
            works, kept = GradientWorks.of(with_grads, agreement, uploads), None
            if KeptRows.fit(with_grads, works.works):
                kept = KeptRows(groups, with_grads, works.works[0])
        all_reduce = decision_all_reduce(agreement, request, len(with_grads))
        if not with_grads:
            return with_grads, decided_elsewhere(request, all_reduce, device_of(groups))
        decision = works.check(request, all_reduce, write=write)
        self._kept = kept
        return with_grads, decision
