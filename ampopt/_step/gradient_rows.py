"""The rows of a pass over gradients alone, which are kept for the next call.

A *row* has the tensors of one parameter that a pass reads and writes. Passes over gradients alone
are those of ``accumulate``, of ``unscale``, and of optimizers that step together. To check hundreds
of small gradients, and to make a row for each, takes longer than the pass. Usually the next call
has gradients of the same parameters, with the same layouts, so the kept rows fit. A step keeps a
:class:`~ampopt._step.plan.Plan` for the same reason.
"""

import functools
import operator
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ampopt._step import gradients
from ampopt._step.gradients import ParamWithGrad, grad_of, params_of
from ampopt._step.rank_agreement import Agreement
from ampopt.options import MASTER_WEIGHTS
from ampopt_kernels.memory import may_overlap
from ampopt_kernels.native.objects import IdentityGuard, LayoutGuard, addresses
from ampopt_kernels.rule import MASTER, Rule
from ampopt_kernels.step_tensors import ParamRow, Work
from ampopt_kernels.tensors import dense_like
from ampopt_kernels.uploads import Uploads

__all__ = ["GradientRows", "works_of"]

States = Mapping[Any, dict[str, Any]]
"""The state of each parameter, which may have its master."""


class GradientRows:
    """The rows of the gradients of one call.

    Attributes:
        present: the parameters that have gradients.
        holders: the tensor whose gradient each row has: the parameter, or its master.
        works: the rows, by device, with the gradients of this call.
        copies: original and copy of each gradient that is not dense in memory: its row has the
            copy.
    """

    def __init__(
        self,
        present: Sequence[ParamWithGrad],
        holders: Sequence[ParamWithGrad],
        works: list[Work],
        agreement: Agreement | None = None,
        copies: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> None:
        """Store the rows; see the attributes, and :meth:`of`."""
        self.present, self.holders, self.works, self.copies = present, holders, works, copies
        self._agreement = agreement
        self._guard: _Guard | None = None

    @classmethod
    def of(
        cls,
        present: Sequence[ParamWithGrad],
        holders: Sequence[ParamWithGrad],
        agreement: Agreement | None,
        uploads: dict[torch.device, Uploads],
    ) -> "GradientRows":
        """Make the rows of gradients that are checked and unscaled.

        Args:
            present: as the attribute.
            holders: as the attribute.
            agreement: the ranks whose norm counts replicated gradients once; ``None`` for one rank.
            uploads: constants that earlier calls have copied to a device, by device.
        """
        rows, grads, copies = [], [], []
        for _, tensor, owner in holders:
            values = gradients.values_of(tensor)
            grad = dense_like(values, values)
            if grad is not values:
                copies.append((values, grad))
            grads.append(grad)
            in_norm = agreement is None or agreement.in_norm[owner.key]
            rows.append(ParamRow(grad.dtype, in_norm=in_norm, owner=owner))
        return cls(present, holders, works_of(rows, grads, uploads), agreement, copies)

    def kept(
        self, groups: list[dict[str, Any]], states: States | None = None
    ) -> "GradientRows | None":
        """These rows, for :meth:`take_gradients` of the next call; ``None`` if they cannot be kept.

        Rows can be kept if all are of one device and one kind of sum, and all gradients are of
        plain parameters or float32 masters, without copies or shards.

        Args:
            groups: the param groups.
            states: the state of each parameter, if it may have its master.
        """
        if len(self.works) != 1 or len({row.flags for row in self.works[0].rows}) != 1:
            return None
        each = zip(self.present, self.holders, self.works[0].grads, strict=True)
        if not all(
            type(param) in (Tensor, torch.nn.Parameter)
            and holder.grad is grad
            and (holder is param or (states or {}).get(param, {}).get(MASTER) is holder)
            for (_, param, _), (_, holder, _), grad in each
        ):
            return None
        self._guard = _Guard(groups, self, states)
        return self

    def take_gradients(
        self,
        groups: list[dict[str, Any]],
        agreement: Agreement | None = None,
        states: States | None = None,
        *,
        are_written: bool = False,
    ) -> bool:
        """Replace the gradients by those that the parameters have in this call.

        Args:
            groups: the param groups.
            agreement: as for :meth:`of`.
            states: as for :meth:`kept`, which has returned these rows.
            are_written: whether the gradients are written to, so that none may share memory.

        Returns:
            Whether the rows fit: the same parameters have gradients, with the same layouts, and the
            same masters.
        """
        guard = self._guard
        if guard is None or agreement is not self._agreement:
            return False
        found, params = guard.addresses_now(groups, states), guard.params
        if found is None or (are_written and may_overlap(list(map(grad_of, params)))):
            return False
        self.works[0].refresh(lambda: list(map(grad_of, params)), (), None, found)
        return True

    @functools.cached_property
    def by_id(self) -> dict[int, ParamWithGrad]:
        """The elements of :attr:`present`, by the ``id`` of the parameter."""
        return {one.owner.key: one for one in self.present}

    def read_holders(self) -> None:
        """Replace the gradients of parameters by those of the holders."""
        self.works[0].refresh([one.tensor.grad for one in self.holders], ())

    def release(self) -> None:
        """Drop the references to the gradients, so that their memory can be freed."""
        for work in self.works:
            work.release()


class _Guard:
    """What has to stay alike, so that rows fit the gradients of another call.

    Attributes:
        params: the parameter of each row.
    """

    def __init__(
        self, groups: list[dict[str, Any]], rows: GradientRows, states: States | None
    ) -> None:
        """Record what :meth:`addresses_now` compares.

        Args:
            groups: the param groups.
            rows: the rows, of one device.
            states: the state of each parameter, if it may have its master.
        """
        self._groups, self._states = list(groups), states
        self.params = [one.tensor for one in rows.present]
        ids = set(map(id, self.params))
        self._others = [param for param in params_of(groups) if id(param) not in ids]
        entries: list[tuple[Any, Any]] = [(group, ("params",)) for group in groups]
        pairs = zip(self.params, rows.holders, strict=True)
        masters = {param: one.tensor for param, one in pairs if one.tensor is not param}
        if states is not None:
            entries += [(states, masters.keys()), *((states[p], (MASTER,)) for p in masters)]
        self._identities = IdentityGuard([group["params"] for group in groups], entries)
        self._have_masters = list(map(MASTER_WEIGHTS.of, groups))
        # A step reads sums in ``p.grad``, where users may give them other memory.
        sums = [row.param for row in rows.works[0].rows if row.param is not None]
        self._tensors = [*sums, *self.params, *masters.values()]
        self._addresses, self._layouts = addresses(self._tensors), LayoutGuard(self._tensors)
        self._grad_layouts = LayoutGuard(list(map(grad_of, self.params)))

    def addresses_now(self, groups: list[dict[str, Any]], states: States | None) -> array | None:
        """The address of the gradient of each row; ``None`` if the rows do not fit."""
        if len(groups) != len(self._groups) or not all(map(operator.is_, groups, self._groups)):
            return None
        if states is not self._states or not self._identities.unchanged():
            return None
        if list(map(MASTER_WEIGHTS.of, groups)) != self._have_masters:
            return None
        if any(param.grad is not None for param in self._others):
            return None
        found, fits = self._layouts.read(self._tensors)
        grads_at, grads_fit = self._grad_layouts.read(self.params, of_gradients=True)
        return grads_at if {*fits, *grads_fit} == {1} and found == self._addresses else None


def works_of(
    rows: Sequence[ParamRow],
    grads: Sequence[Any],
    uploads: dict[torch.device, Uploads],
    rule: Rule | None = None,
    turns: Sequence[int] = (),
) -> list[Work]:
    """Group rows and their gradients by device, the device of the first parameter first.

    Args:
        rows: the rows.
        grads: the gradient of each.
        uploads: constants that are on a device already, by device.
        rule: the rule of the works.
        turns: for each row, in which turn it is updated; empty if all are at once. The rows of a
            later turn are another work of their device, which comes later.
    """
    parts: dict[tuple[torch.device, int], tuple[list[ParamRow], list[Any]]] = {}
    for row, grad, turn in zip(rows, grads, turns or [0] * len(rows), strict=True):
        device = (grad if row.param is None else row.param).device
        own_rows, own_grads = parts.setdefault((device, turn), ([], []))
        own_rows.append(row)
        own_grads.append(grad)
    works: list[Work] = []
    for (device, turn), part in parts.items():
        own = Uploads() if turn else uploads.setdefault(device, Uploads())
        works.append(Work(device, *part, rule, uploads=own))
    return works
