"""What a plan compares with the last step, to find out in a few calls whether it still fits.

Two guards, like those of ``torch.compile``: of the param groups, and of the tensors. If a guard
finds a change, it says what has changed, for a plan that is extended, and why, in words.
"""

import operator
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, chain, compress, count, cycle
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampopt._step.gradients import (
    ParamWithGrad,
    check_gradient,
    name_of,
    params_of,
    values_of,
)
from ampopt._step.hyperparameters import Hyper, Variants, forms_of
from ampopt._step.masters import Masters
from ampopt._step.ranks import REPLICATED
from ampopt._step.rows import RuleRows, like_gradient
from ampopt._step.sharding import dtensor
from ampopt._step.state_checks import may_overlap
from ampopt.options import MASTER_BITS, PARAM_ROUNDING, STATE_BITS
from ampopt_kernels.native.objects import IdentityGuard, LayoutGuard, addresses
from ampopt_kernels.rule import Rule
from ampopt_kernels.tensors import dense_like
from ampopt_kernels.work import ParamRow

__all__ = ["NO_PARAM", "GroupGuard", "StaleRows", "TensorGuard"]

_OPTIONS = ("master_weights", PARAM_ROUNDING, STATE_BITS, MASTER_BITS, REPLICATED, "fused")
"""Entries of param groups, besides those of the rule, on which a plan depends."""


class GroupGuard:
    """The flags and options of the param groups of a plan, and its hyperparameters.

    Flags and options must not change while a plan is reused; hyperparameters may change every step.

    Attributes:
        hyper: the hyperparameters of each variant, as ``rule.hyper_values`` returns them.
    """

    def __init__(self, rule: Rule, variants: Variants, groups: list[dict[str, Any]]) -> None:
        """Store the present entries.

        Args:
            rule: the rule of the plan.
            variants: the variants of ``groups``.
            groups: the param groups of the optimizer.
        """
        self._rule, self._variants = rule, variants
        self._members = [group["params"] for group in groups]
        self.hyper = variants.hyper(groups)
        self._values_at_plan = self._fixed_values(groups, self.hyper)
        self._groups, self._entries = groups, None
        # A tensor may change in place, and ``Rule.entries`` may read any entry of the group.
        of_numbers = not any(isinstance(value, Tensor) for value in chain(*self.hyper))
        self._by_identity = of_numbers and rule.entries is None

    def revalidate(self, groups: list[dict[str, Any]]) -> bool:
        """Update :attr:`hyper` for this step.

        Returns:
            Whether the plan is still valid: only hyperparameters have changed.
        """
        if self._entries is not None and groups is self._groups and self._entries.unchanged():
            return True
        hyper = self._hyper_of_kept(groups) if len(groups) == len(self._members) else None
        if hyper is None:
            return False
        # A guard would not pay if a scheduler changes numbers at every step.
        stays = self._by_identity and hyper == self.hyper and not self._has_lists(groups)
        self._entries = IdentityGuard([groups, *groups]) if stays else None
        self._groups, self.hyper = groups, hyper
        return True

    def reason(self, groups: list[dict[str, Any]]) -> str | None:
        """Why :meth:`revalidate` has returned ``False``; ``None`` if it has not."""
        if len(groups) != len(self._members):
            return "a param group was added or removed"
        for index, (group, members) in enumerate(zip(groups, self._members, strict=True)):
            if group["params"] is not members:
                return f"the list of parameters of group {index} was replaced"
        flags, options, forms = self._fixed_values(groups, self._variants.hyper(groups))
        old_flags, old_options, old_forms = self._values_at_plan
        if name := _first_that_differs(self._rule.flags, flags, old_flags):
            return f"{name} was turned on or off in a group"
        if name := _first_that_differs(_OPTIONS, options, old_options):
            return f"{name} of a group was changed"
        if forms == old_forms:
            return None
        return "a hyperparameter of a group has another type, such as a tensor in place of a float"

    def has_kept(self, groups: list[dict[str, Any]]) -> bool:
        """Whether the groups of the plan are as they were, except for hyperparameters.

        Groups may have been added behind them.
        """
        return self._hyper_of_kept(groups[: len(self._members)]) is not None

    def _hyper_of_kept(self, groups: list[dict[str, Any]]) -> Hyper | None:
        """The hyperparameters of each variant; ``None`` if anything else has changed."""
        members = [group["params"] for group in groups]
        if len(members) != len(self._members) or not all(map(operator.is_, members, self._members)):
            return None
        hyper = self._variants.hyper(groups)
        return hyper if self._fixed_values(groups, hyper) == self._values_at_plan else None

    def _fixed_values(self, groups: list[dict[str, Any]], hyper: Hyper) -> tuple[Any, ...]:
        """Flags, options and types of hyperparameters; a change of any requires a new plan."""
        options = [list(map(group.get, _OPTIONS)) for group in groups]
        return self._variants.flags(groups), options, forms_of(hyper)

    def _has_lists(self, groups: list[dict[str, Any]]) -> bool:
        """Whether a hyperparameter is a list, whose elements may change in place."""
        names = self._rule.hyper
        return any(isinstance(group.get(name), list) for group in groups for name in names)


def _first_that_differs(names: Sequence[str], values: Any, old_values: Any) -> str | None:
    """The name of an entry that has another value in one of the groups; ``None`` if all are equal.

    Args:
        names: the names of the entries.
        values: the values of the entries now, for each group.
        old_values: the values of the entries before.
    """
    pairs = zip(chain(*values), chain(*old_values), cycle(names))
    return next((name for value, old, name in pairs if value != old), None)


class StaleRows(NamedTuple):
    """The rows that a step cannot use any more, because a tensor of theirs was replaced.

    Attributes:
        indices: the indices of these rows.
        grads: the gradient of each row, as kernels read it, or ``None``.
        containers: the lists of parameters and the states of which a member was replaced.
    """

    indices: set[int]
    grads: list[Any]
    containers: list[list[Any] | dict[Any, Any]]


class TensorGuard:
    """The tensors of a plan, as they were when it was made.

    That is: the identity of each parameter, its group, and its states; the addresses of parameters,
    masters and states; the layouts of parameters and gradients; which parameters have never had a
    gradient.

    Attributes:
        has_copied: whether :meth:`gradients` has copied a gradient to the layout of its parameter.
    """

    def __init__(self, optimizer: Any, masters: Masters, rows: RuleRows) -> None:
        """Record what :meth:`gradients` compares later.

        Args:
            optimizer: the optimizer of the plan.
            masters: its master weights.
            rows: the rows of the plan.
        """
        self._masters, self.has_copied = masters, False
        self._process_group, self._state = optimizer.process_group, optimizer.state
        self._stepped_params = [one.tensor for one in rows.stepped_params]
        self._owners = rows.stepped_params.copy()
        self._rows, self._states = rows.rows.copy(), rows.states
        self._written_tensors = rows.written_tensors
        self._indexed_masters = rows.masters
        self._params = list(params_of(optimizer.param_groups))
        planned_ids = set(map(id, self._stepped_params))
        self._unplanned_params = [p for p in self._params if id(p) not in planned_ids]
        self._dtensors = any(map(dtensor.is_dtensor, self._params))
        self._param_layouts = LayoutGuard(self._local(self._params))
        self._grad_layouts = LayoutGuard(rows.layouts)
        self._record(optimizer)

    def _record(self, optimizer: Any) -> None:
        """Record identities and addresses; runs no Python for each parameter but a test."""
        members = [group["params"] for group in optimizer.param_groups]
        # Users may store other things in optimizer.state than states of parameters.
        param_states = [state for state in self._state.values() if isinstance(state, dict)]
        self._identities = IdentityGuard([*members, self._state, *param_states])
        # `param.data = ...` keeps the object and changes its memory.
        self._tensors = [*self._params, *chain.from_iterable(self._written_tensors)]
        self._addresses = addresses(self._local(self._tensors))
        grads = list(map(_grad_of, self._stepped_params)) if self._dtensors else []
        self._placements = dtensor.placements(grads)
        self._param_placements = dtensor.placements(self._params) if self._dtensors else []

    def _local(self, tensors: list[Any]) -> list[Any]:
        """The tensors that kernels work on: of ``DTensor``s their local shards."""
        return dtensor.local_of_each(tensors) if self._dtensors else tensors

    def gradients(self, optimizer: Any) -> tuple[list[Tensor | None], bytearray] | None:
        """The gradients of this step, as kernels read them; ``None`` if anything else changed.

        Returns:
            For each row its gradient, or ``None`` without one; and whether it has one.
        """
        for param in self._unplanned_params:
            if param.grad is not None:
                return None
        if not (
            optimizer.state is self._state
            and optimizer.process_group is self._process_group
            and self._identities.unchanged()
            and addresses(self._local(self._tensors)) == self._addresses
            and self._param_layouts.present(self._local(self._params)) is not None
        ):
            return None
        grads = self._grads_now()
        present = self._grad_layouts.present(grads)
        if present is None:
            if self._convert(optimizer, grads):
                return None
            present = bytearray(grad is not None for grad in grads)
        return grads, present

    def _grads_now(self) -> list[Any]:
        """The present gradient of each row, or ``None``; of a ``DTensor`` the local shard."""
        self.has_copied = False
        grads: list[Any] = list(map(_grad_of, self._stepped_params))
        if self._dtensors:
            self._redistribute(grads)
        if self._masters.grads_at_unscale:
            for place, _ in self._indexed_masters:
                if grads[place] is not None:
                    grads[place] = self._masters.unscaled_gradient(self._stepped_params[place])
        return self._local(grads)

    def _redistribute(self, grads: list[Any]) -> None:
        """Redistribute each of ``grads`` that has other placements than its parameter.

        A gradient that is placed as the last one of its parameter needs no test.
        """
        specs = dtensor.placements(grads)
        if specs == self._placements:
            return
        for place, (spec, known) in enumerate(zip(specs, self._placements, strict=True)):
            if spec is not None and spec is not known and spec != known:
                param = self._stepped_params[place]
                dtensor.redistribute_gradient(param)
                grads[place] = param.grad
                self._placements[place] = dtensor.placements([param.grad])[0]

    def _convert(self, optimizer: Any, grads: list[Any]) -> set[int]:
        """Convert gradients that have another layout than in the plan, as a whole plan would.

        Args:
            optimizer: the optimizer of the plan.
            grads: what :meth:`_grads_now` returned; converted in place.

        Returns:
            The indices of the rows that cannot take their gradients, which have another dtype or
            are sparse.
        """
        groups, others = optimizer.param_groups, set()
        for index in self._grad_layouts.changed(grads):
            one, row = self._owners[index], self._rows[index]
            check_gradient(one.tensor, one.owner.name)
            values = None
            if one.tensor.grad.layout == torch.strided:
                values = values_of(self._masters.holder(groups[one.group], one.tensor))
            if values is None or values.dtype != row.grad_dtype:
                others.add(index)
                continue
            assert row.param is not None
            grads[index] = dense_like(values, row.param)
            self.has_copied = self.has_copied or grads[index] is not values
        return others

    # --- what a plan is extended by ---------------------------------------------------------------

    def stale_rows(self, optimizer: Any) -> StaleRows | None:
        """Find the rows of which a tensor was replaced, or whose gradient has another dtype.

        Returns:
            ``None`` if something else has changed, so that a whole plan has to be made.
        """
        if not (
            optimizer.state is self._state
            and optimizer.process_group is self._process_group
            and self._param_layouts.present(self._local(self._params)) is not None
        ):
            return None
        stale: set[int] = set()
        containers = self._identities.changed()
        if any(isinstance(container, list) for container in containers):
            return None
        if containers:
            ids = set(map(id, containers))
            stale = {i for i, state in enumerate(self._states) if id(state) in ids}
        if id(self._state) in map(id, containers):
            states = map(self._state.get, self._stepped_params)
            stale |= set(compress(count(), map(operator.is_not, states, self._states)))
        now = addresses(self._local(self._tensors))
        if now != self._addresses:
            rows = {id(param): index for index, param in enumerate(self._stepped_params)}
            ends = list(accumulate(map(len, self._written_tensors), initial=len(self._params)))
            for place in compress(count(), map(operator.ne, now, self._addresses)):
                if place >= len(self._params):
                    stale.add(bisect_right(ends, place) - 1)
                elif (index := rows.get(id(self._params[place]))) is not None:
                    stale.add(index)
        if self._dtensors and not (
            dtensor.placements(self._params) == self._param_placements
            and all(dtensor.is_placed_as(p.grad, p) for p in params_of(optimizer.param_groups))
        ):
            return None
        grads = self._grads_now()
        if self._grad_layouts.present(grads) is None:
            others = self._convert(optimizer, grads)
            if any(_grad_of(self._stepped_params[i]).layout != torch.strided for i in others):
                return None
            stale |= others
        return StaleRows(stale, grads, containers)

    def fresh_params(self, optimizer: Any, stale: set[int]) -> list[Any]:
        """The parameters with a gradient that have no row, or only a stale one."""
        params = [*self._unplanned_params, *map(self._stepped_params.__getitem__, stale)]
        params += list(params_of(optimizer.param_groups))[len(self._params) :]
        return [param for param in params if param.grad is not None]

    def absent(self, stale: set[int]) -> dict[int, torch.dtype]:
        """The dtype of the gradients of parameters without one, as :attr:`Change.absent`."""
        return {
            id(param): row.grad_dtype
            for index, (param, row) in enumerate(zip(self._stepped_params, self._rows, strict=True))
            if param.grad is None and index not in stale and like_gradient(row) is not None
        }

    def overlap(self, optimizer: Any, params: list[ParamWithGrad], stale: set[int]) -> bool:
        """Whether parameters or their states may share memory with other tensors of the plan.

        A parameter that was there when the plan was made, and has no states yet, was compared then.

        Args:
            optimizer: the optimizer of the plan.
            params: the parameters to append.
            stale: the indices of the rows to retire.
        """
        added_params = list(params_of(optimizer.param_groups))[len(self._params) :]
        new_ids = set(map(id, added_params)) | {id(self._stepped_params[i]) for i in stale}
        fresh: list[Any] = [one.tensor for one in params if id(one.tensor) in new_ids]
        for one in params:
            values = (optimizer.state.get(one.tensor) or {}).values()
            fresh += (value for value in values if isinstance(value, Tensor))
        if not fresh:
            return False
        own_ids = {id(one.tensor) for one in params}
        others = [param for param in self._params if id(param) not in own_ids]
        for index, tensors in enumerate(self._written_tensors):
            others += tensors if index not in stale else []
        return may_overlap(list(map(dtensor.local, fresh)), self._local(others))

    def retire(self, stale: set[int]) -> None:
        """Let go of the parameters and states of rows."""
        for index in stale:
            self._unplanned_params.append(self._stepped_params[index])
            self._stepped_params[index], self._states[index] = NO_PARAM, None
            self._written_tensors[index] = []
            row = self._rows[index]
            self._rows[index] = ParamRow(row.grad_dtype)
        self._indexed_masters = [
            (index, master) for index, master in self._indexed_masters if index not in stale
        ]

    def extend(self, optimizer: Any, new: RuleRows) -> bool:
        """Record further rows, and param groups that were added.

        Returns:
            Whether that was possible.
        """
        first, n_known = len(self._rows), len(self._params)
        self._params = list(params_of(optimizer.param_groups))
        added_params = self._params[n_known:]
        self._dtensors = self._dtensors or any(map(dtensor.is_dtensor, added_params))
        fresh = [one.tensor for one in new.stepped_params]
        planned_ids = set(map(id, fresh))
        unplanned_params = [*self._unplanned_params, *added_params]
        self._unplanned_params = [p for p in unplanned_params if id(p) not in planned_ids]
        self._stepped_params += fresh
        self._owners += new.stepped_params
        self._rows += new.rows
        self._states += new.states
        self._written_tensors += new.written_tensors
        self._indexed_masters += [(first + index, master) for index, master in new.masters]
        if not self._grad_layouts.extend(new.layouts):
            return False
        if not self._param_layouts.extend(self._local(added_params)):
            return False
        self._record(optimizer)
        return True

    # --- why a plan cannot be reused --------------------------------------------------------------

    def reason(self, optimizer: Any, containers: list[Any] | None) -> str:
        """The change in words; call this after :meth:`gradients` has returned ``None``.

        Args:
            optimizer: the optimizer of the plan.
            containers: as :attr:`StaleRows.containers`; ``None`` to find them.
        """
        groups = optimizer.param_groups
        for param in self._unplanned_params:
            if param.grad is not None:
                return f"{name_of(groups, param)} has a gradient for the first time"
        if optimizer.state is not self._state:
            return "optimizer.state was replaced"
        if optimizer.process_group is not self._process_group:
            return "optimizer.process_group was replaced"
        container = next(
            iter(self._identities.changed() if containers is None else containers), None
        )
        if container is self._state:
            return "states were added to optimizer.state, or removed"
        if isinstance(container, dict):
            return f"a state of {self._owner_of(container, groups)} was replaced"
        if container is not None:
            return "parameters of a group were replaced or removed, or are in another order"
        is_moved = map(operator.ne, addresses(self._local(self._tensors)), self._addresses)
        if (tensor := next(compress(self._tensors, is_moved), None)) is not None:
            if any(tensor is param for param in self._params):
                return f"{name_of(groups, tensor)} was moved to other memory"
            states = (s for s in self._state.values() if isinstance(s, dict))
            state = next(s for s in states if any(value is tensor for value in s.values()))
            return f"a state of {self._owner_of(state, groups)} was moved to other memory"
        if self._param_layouts.present(self._local(self._params)) is None:
            return "a parameter has another shape, dtype or layout"
        return "a gradient has another dtype"

    def _owner_of(self, state: dict[str, Any], groups: list[dict[str, Any]]) -> str:
        """The name of the parameter that has ``state``."""
        return name_of(groups, next(p for p, own in self._state.items() if own is state))


_grad_of: Any = operator.attrgetter("grad")  # over hundreds, half the time of a comprehension

NO_PARAM = torch.empty(0, device="cpu")
"""Stands for the parameter of a row that was retired; it has no gradient."""
