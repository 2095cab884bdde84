"""The plan of a step: the tensors and groups that the kernels need, kept from step to step.

To traverse every parameter, state and layout in Python costs more than the whole step of a small
network, and between steps usually nothing changes but gradients and hyperparameters. So a plan is
made once, and reused until something else changes, which two guards find out in a few calls, like
those of ``torch.compile``. A plan has the rows of every parameter that has had a gradient: in a
step without it, the row is masked.
"""

import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, compress, cycle
from typing import Any

import torch
from torch import Tensor

from ampopt._step import ranks
from ampopt._step.all_reduce import Agreement, FlagAllReduce
from ampopt._step.gradients import ParamWithGrad, name_of, params_of
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
from ampopt._step.rows import KeptRows, RuleRows
from ampopt._step.rule_state import StateCompleter
from ampopt._step.sharding import dtensor
from ampopt.options import MASTER_BITS, PARAM_ROUNDING, STATE_BITS
from ampopt_kernels.decision import Coefficients, Decision, Request
from ampopt_kernels.native.objects import IdentityGuard, LayoutGuard, addresses, bump_versions
from ampopt_kernels.rule import Rule
from ampopt_kernels.uploads import Uploads
from ampopt_kernels.work import Work

__all__ = ["Plan"]

_OPTIONS = ("master_weights", PARAM_ROUNDING, STATE_BITS, MASTER_BITS, REPLICATED, "fused")
"""Entries of param groups, besides those of the rule, on which a plan depends."""


class Plan:
    """Runs the step of every parameter that has a gradient.

    Attributes:
        works: the rows of each device; empty if no parameter has ever had a gradient.
        present: as :attr:`Work.present`, for the rows of all devices.
        reusable: whether a later step may use the plan; False if it works on copies of tensors.
        reusable_rows: the rows that the next plan may use, unless something changes; see
            :meth:`unchanged_rows`.
    """

    def __init__(
        self,
        optimizer: Any,
        rule: Rule,
        masters: Masters,
        uploads: dict[torch.device, Uploads],
        reusable_rows: KeptRows,
        with_grads: list[ParamWithGrad],
        *,
        complete_state: StateCompleter | None,
        needs_agreement: bool,
    ) -> None:
        """Make missing states, and collect the tensors of each parameter.

        Args:
            optimizer: the optimizer to step. Its gradients, options and states have passed
                :meth:`ampopt._step.checks.Checks.check_plannable`.
            rule: the update rule to run.
            masters: the master weights of the optimizer.
            uploads: constants that are on a device already, by device; kept from plan to plan.
            reusable_rows: what :meth:`unchanged_rows` of the last plan returned.
            with_grads: what :func:`ampopt._step.gradients.params_with_grads` returned.
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
        rule_rows = RuleRows(
            optimizer, rule, masters, self._agreement, complete_state, reusable_rows, with_grads
        )
        self.works: list[Work] = works_of(rule_rows.rows, rule_rows.grads, uploads, rule_rows.rule)
        self._group_guard = GroupGuard(rule, rule_rows.variants, groups)
        order = {id(row): place for place, row in enumerate(rule_rows.rows)}
        self._places = [[order[id(row)] for row in work.rows] for work in self.works]
        self._stepped_params, self.reusable_rows = rule_rows.stepped_params, rule_rows.reusable_rows
        self._params = [one.tensor for one in rule_rows.stepped_params]
        self._copies = rule_rows.copies
        self._writes_gradients = rule_rows.gradients_are_written()
        self.reusable = not rule_rows.copies and not any(p.is_complex() for p in self._params)
        self._tensor_guard = TensorGuard(optimizer, masters, rule_rows)
        self._set_gradients(
            rule_rows.grads, bytearray(grad is not None for grad in rule_rows.grads)
        )

    def revalidate(self, optimizer: Any, rule: Rule) -> bool:
        """Update gradients and hyperparameters for this step, if nothing else has changed.

        Args:
            optimizer: the optimizer that the plan was made for.
            rule: its rule now.

        Returns:
            Whether this plan can run the step. If not, the runner makes another plan.
        """
        same = self.reusable and rule is self._rule
        if not (same and self._group_guard.revalidate(optimizer.param_groups)):
            return False
        grads_and_presence = self._tensor_guard.gradients(optimizer)
        if grads_and_presence is None:
            return False
        self._set_gradients(*grads_and_presence)
        return True

    def unchanged_rows(self, optimizer: Any, rule: Rule) -> KeptRows:
        """The rows that the next plan may use. Their parameters and states need no checks.

        Args:
            optimizer: the optimizer that the plan was made for.
            rule: its rule now.
        """
        if rule is not self._rule or not self._group_guard.has_kept(optimizer.param_groups):
            return {}
        unchanged_ids = self._tensor_guard.unchanged_ids(optimizer)
        return {key: row for key, row in self.reusable_rows.items() if key in unchanged_ids}

    def reason(self, optimizer: Any, rule: Rule) -> str:
        """Why :meth:`revalidate` has just returned ``False``, in words."""
        if rule is not self._rule:
            return "the rule was replaced"
        if not self.reusable:
            return "the step works on copies, of tensors that are complex or not dense"
        of_groups = self._group_guard.reason(optimizer.param_groups)
        return of_groups or self._tensor_guard.reason(optimizer)

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
        if request.write and not (self._writes_gradients and self._gradients_differ()):
            extended_request = replace(extended_request, write=False)
        decision = decide(self._works_now, extended_request)
        coeffs = decision.coefficients  # numbers from a backend on the CPU, else a tensor
        self.finish(skipped=isinstance(coeffs, Coefficients) and coeffs.skip > 0)
        if request.write and not extended_request.write:  # in place, after the update has read them
            unscale = Request(scale=request.scale, check=False)
            with_grads = [one for one in self._stepped_params if one.tensor.grad is not None]
            check_and_unscale_params(
                with_grads, unscale, None, None, write=True, uploads=self._uploads
            )
        return decision

    def _gradients_differ(self) -> bool:
        """Whether no gradient of this step is that of two parameters, and would be divided twice.

        Only where gradients start is compared.
        """
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
        if len(groups) != len(self._members):
            return False
        for group, members in zip(groups, self._members, strict=True):
            if group["params"] is not members:
                return False
        hyper = self._variants.hyper(groups)
        if self._fixed_values(groups, hyper) != self._values_at_plan:
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
        members = [group["params"] for group in groups[: len(self._members)]]
        flags, options, _ = self._fixed_values(groups, self.hyper)
        return (
            len(members) == len(self._members)
            and all(map(operator.is_, members, self._members))
            and (flags, options[: len(members)]) == self._values_at_plan[:2]
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


class TensorGuard:
    """The tensors of a plan, as they were when it was made.

    That is: the identity of each parameter, its group, and its states; the addresses of parameters,
    masters and states; the layouts of parameters and gradients; which parameters have never had a
    gradient.
    """

    def __init__(self, optimizer: Any, masters: Masters, rows: RuleRows) -> None:
        """Record what :meth:`gradients` compares later.

        Args:
            optimizer: the optimizer of the plan.
            masters: its master weights.
            rows: the rows of the plan.
        """
        groups = optimizer.param_groups
        self._masters = masters
        self._stepped_params = [one.tensor for one in rows.stepped_params]
        self._indexed_masters = rows.masters
        self._params = list(chain.from_iterable(group["params"] for group in groups))
        self._dtensors = any(map(dtensor.is_dtensor, self._params))
        planned_params = set(self._stepped_params)
        self._unplanned_params = [p for p in self._params if p not in planned_params]
        self._process_group, self._state = optimizer.process_group, optimizer.state
        # Users may store other things in optimizer.state than states of parameters.
        param_states = [state for state in self._state.values() if isinstance(state, dict)]
        members = [group["params"] for group in groups]
        self._identities = IdentityGuard([*members, self._state, *param_states])
        # `param.data = ...` keeps the object and changes its memory.
        masters_of_params = [master for _, master in rows.masters]
        self._tensors = [*self._params, *masters_of_params, *rows.states]
        tensors, params = self._tensors, self._params
        if self._dtensors:  # kernels work on the local shards
            tensors, params = dtensor.local_of_each(tensors), dtensor.local_of_each(params)
        self._addresses, self._param_layouts = addresses(tensors), LayoutGuard(params)
        self._tensor_layouts = LayoutGuard(tensors)
        self._states = list(map(self._state.get, self._stepped_params))
        self._param_placements = dtensor.placements(self._params)
        self._grad_layouts = LayoutGuard(rows.layouts)
        grads = list(map(_grad_of, self._stepped_params))
        self._placements = dtensor.placements(grads) if self._dtensors else []

    def gradients(self, optimizer: Any) -> tuple[list[Tensor | None], bytearray] | None:
        """The gradients of this step, as kernels read them; ``None`` if anything else changed.

        Returns:
            For each row its gradient, or ``None`` without one; and whether it has one.
        """
        for param in self._unplanned_params:
            if param.grad is not None:
                return None
        tensors, params = self._tensors, self._params
        if self._dtensors:
            tensors, params = dtensor.local_of_each(tensors), dtensor.local_of_each(params)
        if not (
            optimizer.state is self._state
            and optimizer.process_group is self._process_group
            and self._identities.unchanged()
            and addresses(tensors) == self._addresses
            and self._param_layouts.present(params) is not None
        ):
            return None
        grads: list[Any] = list(map(_grad_of, self._stepped_params))
        if self._dtensors:
            self._redistribute(grads)
        if self._masters.grads_at_unscale:
            for place, _ in self._indexed_masters:
                if grads[place] is not None:
                    grads[place] = self._masters.unscaled_gradient(self._stepped_params[place])
        if self._dtensors:
            grads = dtensor.local_of_each(grads)
        present = self._grad_layouts.present(grads)
        return None if present is None else (grads, present)

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

    # --- what the next plan may use ---------------------------------------------------------------

    def unchanged_ids(self, optimizer: Any) -> set[int]:
        """The ``id`` of each parameter of the plan that is as it was, with all of its states."""
        tensors = self._tensors
        if self._dtensors:
            tensors = dtensor.local_of_each(tensors)
        if not (
            optimizer.state is self._state
            and addresses(tensors) == self._addresses
            and self._tensor_layouts.present(tensors) is not None
            and dtensor.placements(self._params) == self._param_placements
        ):
            return set()
        changed_containers = self._identities.changed()
        if any(isinstance(container, list) for container in changed_containers):
            return set()
        changed_states = set(map(id, changed_containers))
        return {
            id(param)
            for param, state in zip(self._stepped_params, self._states, strict=True)
            if self._state.get(param) is state and id(state) not in changed_states
        }

    # --- why a plan cannot be reused --------------------------------------------------------------

    def reason(self, optimizer: Any) -> str:
        """The change in words; call this after :meth:`gradients` has returned ``None``."""
        groups = optimizer.param_groups
        for param in self._unplanned_params:
            if param.grad is not None:
                return f"{name_of(groups, param)} has a gradient for the first time"
        if optimizer.state is not self._state:
            return "optimizer.state was replaced"
        if optimizer.process_group is not self._process_group:
            return "optimizer.process_group was replaced"
        container = next(iter(self._identities.changed()), None)
        if container is self._state:
            return "states were added to optimizer.state, or removed"
        if isinstance(container, dict):
            return f"a state of {self._owner_of(container, groups)} was replaced"
        if container is not None:
            return "the parameters of a group were replaced, or are in another order"
        tensors, params = self._tensors, self._params
        if self._dtensors:
            tensors, params = dtensor.local_of_each(tensors), dtensor.local_of_each(params)
        is_moved = map(operator.ne, addresses(tensors), self._addresses)
        if (tensor := next(compress(self._tensors, is_moved), None)) is not None:
            if any(tensor is param for param in self._params):
                return f"{name_of(groups, tensor)} was moved to other memory"
            states = (s for s in self._state.values() if isinstance(s, dict))
            state = next(s for s in states if any(value is tensor for value in s.values()))
            return f"a state of {self._owner_of(state, groups)} was moved to other memory"
        if self._param_layouts.present(params) is None:
            return "a parameter has another shape, dtype or layout"
        return "a gradient has another dtype or layout"

    def _owner_of(self, state: dict[str, Any], groups: list[dict[str, Any]]) -> str:
        """The name of the parameter that has ``state``."""
        return name_of(groups, next(p for p, own in self._state.items() if own is state))


_grad_of: Any = operator.attrgetter("grad")  # over hundreds, half the time of a comprehension
