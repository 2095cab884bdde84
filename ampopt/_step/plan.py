"""The plan of a step: the tensors and groups that the kernels need, kept from step to step.

To traverse every parameter, state and layout in Python costs more than the whole step of a small
network, and between steps usually nothing changes but gradients and hyperparameters. So a plan is
made once, and reused until something else changes, which two guards find out in a few calls, like
those of ``torch.compile``. A plan has the rows of every parameter that has had a gradient: in a
step without it, the row is masked.

A change of a few parameters costs what it changes: the plan is *extended*. A parameter that has a
gradient for the first time gets a row at the end. If a tensor of a row was replaced, such as a
state, the row is *retired*: no step has a gradient for it any more, and the parameter gets another
row at the end. Such a plan runs slower than a whole one, so a whole one is made after many changes,
and after many steps without any.
"""

import operator
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, chain, compress, count, cycle, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampopt._step import ranks
from ampopt._step.all_reduce import Agreement, FlagAllReduce
from ampopt._step.gradients import (
    ParamWithGrad,
    check_gradient,
    name_of,
    params_of,
    values_of,
)
from ampopt._step.hyperparameters import Hyper, Variants, forms_of
from ampopt._step.masters import Masters
from ampopt._step.overflow import (
    check_and_unscale_params,
    decide,
    decided_elsewhere,
    works_of,
)
from ampopt._step.rank_sums import LinesOfRanks, RankSums
from ampopt._step.ranks import REPLICATED
from ampopt._step.rows import RuleRows, like_gradient
from ampopt._step.rule_state import StateCompleter
from ampopt._step.sharding import dtensor
from ampopt._step.state_checks import may_overlap
from ampopt.options import MASTER_BITS, PARAM_ROUNDING, STATE_BITS
from ampopt_kernels.decision import Coefficients, Decision, Request
from ampopt_kernels.gradient_reports import NOBODY
from ampopt_kernels.native.objects import IdentityGuard, LayoutGuard, addresses, bump_versions
from ampopt_kernels.rule import Rule
from ampopt_kernels.tensors import dense_like
from ampopt_kernels.uploads import Uploads
from ampopt_kernels.work import ParamRow, Work

__all__ = ["Change", "Plan"]

_OPTIONS = ("master_weights", PARAM_ROUNDING, STATE_BITS, MASTER_BITS, REPLICATED, "fused")
"""Entries of param groups, besides those of the rule, on which a plan depends."""


SHARE = 4
"""A whole plan is made once the rows that were appended or retired are more than one in so many.

If one parameter appears in each step, the least time is taken with 3 to 6, and up to twice as much
with 32.
"""

SETTLED = 500
"""Steps after which an extended plan is replaced by a whole one. A whole plan takes as long as some
hundred steps with an extended one lose."""


class Change(NamedTuple):
    """What has changed since the last step, that a plan can be extended by.

    Attributes:
        stale: the indices of the rows to retire, of which a tensor was replaced.
        ids: the ``id`` of each parameter to make a row for.
        is_large: whether a whole plan is to be made, of the same parameters.
        absent: if so, the dtype of the gradient of each parameter that has a row, but no gradient
            in this step, by ``id``.
        grads: the gradient of each row, as kernels read it, or ``None``.
        reason: the change in words.
    """

    stale: set[int]
    ids: set[int]
    is_large: bool
    absent: dict[int, torch.dtype]
    grads: list[Any]
    reason: str


class Plan:
    """Runs the step of every parameter that has a gradient.

    Attributes:
        works: the rows of each device; empty if no parameter has ever had a gradient.
        present: as :attr:`Work.present`, for the rows of all devices.
        reusable: whether a captured graph may replay the step; False if it works on copies of
            tensors, or on complex ones.
    """

    def __init__(
        self,
        optimizer: Any,
        rule: Rule,
        masters: Masters,
        uploads: dict[torch.device, Uploads],
        params: list[ParamWithGrad],
        absent: dict[int, torch.dtype],
        *,
        complete_state: StateCompleter | None,
        needs_agreement: bool,
    ) -> None:
        """Make missing states, and collect the tensors of each parameter.

        Args:
            optimizer: the optimizer to step.
            rule: the update rule to run.
            masters: the master weights of the optimizer.
            uploads: constants that are on a device already, by device; kept from plan to plan.
            params: what :meth:`ampopt._step.checks.Checks.check_plannable` returned.
            absent: as :attr:`Change.absent`.
            complete_state: see :data:`ampopt._step.rule_state.StateCompleter`.
            needs_agreement: whether the first step checks gradients or clips, which takes an
                all-reduce over the ranks.

        Raises:
            RuntimeError: see :func:`ampopt._step.ranks.agreement`; nothing has changed then.
        """
        groups = optimizer.param_groups
        first = next(params_of(groups), None)
        self._first_device = None if first is None else first.device
        self._rule, self._uploads = rule, uploads
        # If the ranks have no common process group, steps that need no all-reduce still run; the
        # error is raised by the first one that does.
        self._agreement: Agreement | None = None
        self._no_common_group: ranks.NoCommonGroupError | None = None
        try:
            self._agreement = optimizer._ampopt.agreement()
        except ranks.NoCommonGroupError as error:
            if needs_agreement or rule.reduces:
                raise
            self._no_common_group = error
        self._rank_sums: RankSums | None = None
        if rule.reduces and self._agreement is not None:
            n_terms = rule.widths(len(rule.hyper_values(groups[0]))).terms
            self._rank_sums = RankSums(self._agreement, groups, n_terms)
        self._lines_of_ranks: LinesOfRanks | None = None
        if rule.averages is not None and self._agreement is not None:
            self._lines_of_ranks = LinesOfRanks(self._agreement, groups, rule.state)
        self._variants = Variants(rule)
        rule_rows = RuleRows(
            optimizer,
            rule,
            masters,
            self._agreement,
            complete_state,
            self._variants,
            params,
            absent,
        )
        self.works: list[Work] = works_of(rule_rows.rows, rule_rows.grads, uploads, rule_rows.rule)
        self._group_guard = GroupGuard(rule, self._variants, groups)
        order = {id(row): place for place, row in enumerate(rule_rows.rows)}
        self._places = [[order[id(row)] for row in work.rows] for work in self.works]
        self._stepped_params = rule_rows.stepped_params
        self._params = [one.tensor for one in rule_rows.stepped_params]
        self._copies, self._for_one_step = rule_rows.copies, rule_rows.for_one_step
        self._writes_gradients = rule_rows.gradients_are_written()
        self.reusable = not rule_rows.copies and not any(p.is_complex() for p in self._params)
        self._n_changed_rows = self._n_steps = 0
        self._tensor_guard = TensorGuard(optimizer, masters, rule_rows)
        self._set_gradients(
            rule_rows.grads, bytearray(grad is not None for grad in rule_rows.grads)
        )

    # --- whether a plan still fits ----------------------------------------------------------------

    def revalidate(self, optimizer: Any, rule: Rule) -> bool:
        """Update gradients and hyperparameters for this step, if nothing else has changed.

        Args:
            optimizer: the optimizer that the plan was made for.
            rule: its rule now.

        Returns:
            Whether this plan can run the step. If not, the runner extends it or makes another.
        """
        if rule is not self._rule or self._for_one_step or self._is_settled():
            return False
        if not self._group_guard.revalidate(optimizer.param_groups):
            return False
        grads_and_presence = self._tensor_guard.gradients(optimizer)
        if grads_and_presence is None:
            return False
        self._set_gradients(*grads_and_presence)
        return True

    def _is_settled(self) -> bool:
        """Whether the plan was extended, and many steps have changed nothing since."""
        return self._n_changed_rows > 0 and self._n_steps >= SETTLED

    def reason(
        self, optimizer: Any, rule: Rule, containers: list[list[Any] | dict[Any, Any]] | None = None
    ) -> str:
        """Why :meth:`revalidate` has just returned ``False``, in words.

        Args:
            optimizer: the optimizer that the plan was made for.
            rule: its rule now.
            containers: as :attr:`StaleRows.containers`; ``None`` to find them.
        """
        if rule is not self._rule:
            return "the rule was replaced"
        of_groups = self._group_guard.reason(optimizer.param_groups)
        if of_groups is not None:
            return of_groups
        if self._for_one_step:
            return "the step works on copies, of tensors that are not dense"
        if self._is_settled():
            return f"the plan was extended, and {SETTLED} steps have changed nothing since"
        return self._tensor_guard.reason(optimizer, containers)

    # --- how a plan is extended -------------------------------------------------------------------

    def change(self, optimizer: Any, rule: Rule) -> Change | None:
        """What to extend the plan by, after :meth:`revalidate` has returned ``False``.

        Returns:
            The change; ``None`` if it is of another kind, so that a whole plan has to be made.
        """
        groups, guard = optimizer.param_groups, self._tensor_guard
        if rule is not self._rule or not (self.works and self._group_guard.has_kept(groups)):
            return None
        try:
            if optimizer._ampopt.agreement() is not self._agreement:
                return None
        except ranks.NoCommonGroupError:
            return None
        found = guard.stale_rows(optimizer)
        if found is None:
            return None
        stale, grads, containers = found
        stale.update(self._for_one_step)
        fresh = guard.fresh_params(optimizer, stale)
        if any(param.grad.layout != torch.strided for param in fresh):
            return None
        ids = set(map(id, fresh))
        n_changed = self._n_changed_rows + len(stale) + len(ids)
        is_large = SHARE * n_changed > len(self._params) + len(ids) or self._is_settled()
        absent = guard.absent(stale) if is_large else {}
        reason = self.reason(optimizer, rule, containers)
        return Change(stale, ids, is_large, absent, grads, reason)

    def extend(
        self,
        optimizer: Any,
        masters: Masters,
        change: Change,
        params: list[ParamWithGrad],
        complete_state: StateCompleter | None,
    ) -> bool:
        """Retire rows and append others, and take the gradients of this step.

        The rows that stay are not read.

        Args:
            optimizer: the optimizer that the plan was made for.
            masters: its master weights.
            change: what :meth:`change` returned.
            params: what :meth:`ampopt._step.checks.Checks.check_plannable` returned.
            complete_state: see :data:`ampopt._step.rule_state.StateCompleter`.

        Returns:
            Whether that was possible. If not, no step may use this plan, and a whole one has to be
            made, which also checks which tensors share memory.
        """
        devices = [work.device for work in self.works]
        if any(one.tensor.device not in devices for one in params):
            return False
        if self._tensor_guard.overlap(optimizer, params, change.stale):
            return False
        self._retire(change.stale)
        new = RuleRows(
            optimizer,
            self._rule,
            masters,
            self._agreement,
            complete_state,
            self._variants,
            params,
            {},
        )
        first, of_rows = len(self._params), [one.tensor.device for one in new.stepped_params]
        for work, places in zip(self.works, self._places, strict=True):
            of_work = [i for i, device in enumerate(of_rows) if device == work.device]
            rows = [new.rows[i] for i in of_work]
            columns = zip(*(row.scalars for row in rows), strict=True)
            dtypes = ({s.dtype for s in column if s is not None} for column in columns)
            if rows and not all(
                own <= {dtype} for own, dtype in zip(dtypes, work.scalar_dtypes, strict=False)
            ):
                return False
            work.extend(rows)
            places += [first + i for i in of_work]
        if new.rule is not self.works[0].rule:
            return False
        if not self._tensor_guard.extend(optimizer, new):
            return False
        self._stepped_params += new.stepped_params
        self._params += [one.tensor for one in new.stepped_params]
        self._copies, self._for_one_step = new.copies, [first + i for i in new.for_one_step]
        self._writes_gradients = self._writes_gradients and new.gradients_are_written()
        are_complex = any(one.tensor.is_complex() for one in new.stepped_params)
        self.reusable = self.reusable and not self._copies and not are_complex
        self._group_guard = GroupGuard(self._rule, self._variants, optimizer.param_groups)
        self._n_changed_rows += len(change.stale) + len(new.rows)
        self._n_steps = 0
        grads = [*change.grads, *new.grads]
        for index in change.stale:
            grads[index] = None
        self._set_gradients(grads, bytearray(map(operator.is_not, grads, repeat(None))))
        return True

    def _retire(self, stale: set[int]) -> None:
        """Take rows out of use, and let go of their parameters and states."""
        for index in stale:
            one = self._stepped_params[index]
            work, places = next(
                pair for pair in zip(self.works, self._places, strict=True) if index in pair[1]
            )
            work.retire(places.index(index))
            self._stepped_params[index] = ParamWithGrad(one.group, _NO_PARAM, NOBODY)
            self._params[index] = _NO_PARAM
        self._tensor_guard.retire(stale)

    # --- the step ---------------------------------------------------------------------------------

    def _set_gradients(self, grads: list[Any], present: bytearray) -> None:
        """Set the gradients of this step.

        Args:
            grads: the gradient of each row, or ``None``.
            present: for each row, whether it has a gradient.
        """
        self._works_now, self._params_now, self.present = self.works, self._params, None
        if 0 in present:
            self._params_now, self.present = list(compress(self._params, present)), present
        hyper = self._group_guard.hyper
        for work, places in zip(self.works, self._places, strict=True):
            if len(places) == len(grads):
                work.refresh(grads, hyper, self.present)
                continue
            of_work = bytearray(present[i] for i in places)
            work.refresh([grads[i] for i in places], hyper, of_work if 0 in of_work else None)
        if self.present is not None:  # as works_of orders the works of these rows
            first = {
                next((i for i in places if present[i]), len(grads)): work
                for work, places in zip(self.works, self._places, strict=True)
            }
            self._works_now = [first[i] for i in sorted(first) if i < len(grads)]

    def run(self, request: Request) -> Decision | None:
        """Run or skip a step of all parameters that have gradients.

        Returns:
            The decision; ``None`` if no rank has gradients.
        """
        if self._no_common_group is not None and request.needs_agreement:
            raise self._no_common_group
        if not self._works_now:
            return self._decided_elsewhere(request) or request.earlier_decision
        extended_request = request
        if self._agreement is not None:
            flag_all_reduce = None
            if request.needs_agreement:
                flag_all_reduce = FlagAllReduce(self._agreement, request, len(self._params_now))
            extended_request = replace(
                extended_request,
                agree=flag_all_reduce,
                agree_on_sums=self._rank_sums,
                agree_on_lines=self._lines_of_ranks,
            )
        if request.write and not (self._writes_gradients and self._can_write()):
            extended_request = replace(extended_request, write=False)
        decision = decide(self._works_now, extended_request)
        self._n_steps += 1
        coeffs = decision.coefficients  # numbers from a backend on the CPU, else a tensor
        self.finish(skipped=isinstance(coeffs, Coefficients) and coeffs.skip > 0)
        if request.write and not extended_request.write:  # in place, after the update has read them
            unscale = Request(scale=request.scale, check=False)
            with_grads = [one for one in self._stepped_params if one.tensor.grad is not None]
            check_and_unscale_params(
                with_grads, unscale, None, None, write=True, uploads=self._uploads
            )
        return decision

    def _can_write(self) -> bool:
        """Whether no gradient of this step is a copy, or that of two parameters.

        The latter would be divided twice. Only where gradients start is compared.
        """
        if self._tensor_guard.copied:
            return False
        starts = chain.from_iterable(addresses(work.present_grads) for work in self._works_now)
        return not any(n > 1 for start, n in Counter(starts).items() if start)

    def _decided_elsewhere(self, request: Request) -> Decision | None:
        """On a rank without gradients: take part in the all-reduces of the other ranks."""
        decision = decided_elsewhere(request, self._agreement, self._first_device)
        for sums in (self._lines_of_ranks, self._rank_sums):
            if sums is not None and self._first_device is not None:
                sums.join_without_gradients(self._first_device)
        return decision

    def finish(self, *, skipped: bool = False) -> None:
        """Finish a step: write copies back, record the writes with autograd, and release gradients.

        Kernels write to parameters without autograd. To increment the version counters lets
        autograd refuse a backward pass that needs the old values, as it does after a step of torch.

        Args:
            skipped: whether the CPU knows that nothing was written, so that such a pass is still
                right. On an accelerator the CPU does not know of a skip, and the counters are
                always incremented.
        """
        if not skipped:
            for original, copy in self._copies:
                original.copy_(copy)
            bump_versions(self._params_now)
        for work in self.works:
            work.grads = []  # so that zero_grad can free their memory before the next pass


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
        if len(groups) != len(self._members) or not self.has_kept(groups):
            return False
        hyper = self._variants.hyper(groups)
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
        earlier = groups[: len(self._members)]
        members = [group["params"] for group in earlier]
        return (
            len(members) == len(self._members)
            and all(map(operator.is_, members, self._members))
            and self._fixed_values(earlier, self._variants.hyper(earlier)) == self._values_at_plan
        )

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
        copied: whether :meth:`gradients` has copied a gradient to the layout of its parameter.
    """

    def __init__(self, optimizer: Any, masters: Masters, rows: RuleRows) -> None:
        """Record what :meth:`gradients` compares later.

        Args:
            optimizer: the optimizer of the plan.
            masters: its master weights.
            rows: the rows of the plan.
        """
        self._masters, self.copied = masters, False
        self._process_group, self._state = optimizer.process_group, optimizer.state
        self._stepped_params = [one.tensor for one in rows.stepped_params]
        self._owners = rows.stepped_params.copy()
        self._rows, self._states, self._written = rows.rows.copy(), rows.states, rows.written
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
        self._tensors = [*self._params, *chain.from_iterable(self._written)]
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
        self.copied = False
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
            self.copied = self.copied or grads[index] is not values
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
            ends = list(accumulate(map(len, self._written), initial=len(self._params)))
            for place in compress(count(), map(operator.ne, now, self._addresses)):
                if place >= len(self._params):
                    stale.add(bisect_right(ends, place) - 1)
                elif (index := rows.get(id(self._params[place]))) is not None:
                    stale.add(index)
        if self._dtensors and not (
            dtensor.placements(self._params) == self._param_placements
            and all(map(dtensor.has_placed_gradient, params_of(optimizer.param_groups)))
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
        kept = (written for i, written in enumerate(self._written) if i not in stale)
        others += chain.from_iterable(kept)
        return may_overlap(list(map(dtensor.local, fresh)), self._local(others))

    def retire(self, stale: set[int]) -> None:
        """Let go of the parameters and states of rows."""
        for index in stale:
            self._unplanned_params.append(self._stepped_params[index])
            self._stepped_params[index], self._states[index] = _NO_PARAM, None
            self._written[index] = []
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
        self._written += new.written
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

_NO_PARAM = torch.empty(0, device="cpu")
"""Stands for the parameter of a row that was retired; it has no gradient."""
