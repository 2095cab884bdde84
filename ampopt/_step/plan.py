"""The plan of a step: the tensors and groups that the kernels need, kept from step to step.

To traverse every parameter, state and layout in Python costs more than the whole step of a small
network, and between steps usually nothing changes but gradients and hyperparameters. So a plan is
made once, and reused until something else changes (see ``guards``). It has the rows of every
parameter that has had a gradient: in a step without it, the row is masked.
"""

from dataclasses import replace
from itertools import compress
from typing import Any

import torch

from ampopt._step import ranks
from ampopt._step.all_reduce import Agreement, FlagAllReduce
from ampopt._step.guards import GroupGuard, TensorGuard
from ampopt._step.masters import Masters
from ampopt._step.overflow import (
    check_and_unscale_held,
    decide,
    decided_elsewhere,
    works_of,
)
from ampopt._step.rank_sums import LinesOfRanks, RankSums
from ampopt._step.rows import KeptRows, RuleRows
from ampopt._step.rule_state import StateCompleter
from ampopt_kernels.decision import Coefficients, Decision, Request
from ampopt_kernels.native.objects import bump_versions
from ampopt_kernels.rule import Rule
from ampopt_kernels.uploads import Uploads
from ampopt_kernels.work import Work

__all__ = ["Plan"]


class Plan:
    """Runs the step of every parameter that has a gradient.

    Attributes:
        works: the rows of each device; empty if no parameter has ever had a gradient.
        present: for each row, whether its parameter has a gradient in this step; ``None`` if every
            one has.
        reusable: whether a later step may use the plan; False if it works on copies of tensors.
        kept: the rows that the next plan may use.
    """

    def __init__(
        self,
        optimizer: Any,
        rule: Rule,
        masters: Masters,
        uploads: dict[torch.device, Uploads],
        kept: KeptRows,
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
            kept: the rows of an earlier plan; see :func:`ampopt._step.rows.unchanged`.
            complete_state: see :data:`ampopt._step.rule_state.StateCompleter`.
            needs_agreement: whether the first step checks gradients or clips, which takes an
                all-reduce over the ranks.

        Raises:
            RuntimeError: see :func:`ampopt._step.ranks.agreement`; nothing has changed then.
        """
        groups = optimizer.param_groups
        first = next((param for group in groups for param in group["params"]), None)
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
        rule_rows = RuleRows(optimizer, rule, masters, self._agreement, complete_state, kept)
        self.works: list[Work] = works_of(rule_rows.rows, rule_rows.grads, uploads, rule_rows.rule)
        self._group_guard = GroupGuard(rule, rule_rows.variants, groups)
        order = {id(row): place for place, row in enumerate(rule_rows.rows)}
        self._places = [[order[id(row)] for row in work.rows] for work in self.works]
        self._stepped, self.kept = rule_rows.stepped, rule_rows.kept
        self._params = [one.tensor for one in rule_rows.stepped]
        self._copies = rule_rows.copies
        self._writes_gradients = rule_rows.gradients_are_written()
        self.reusable = not rule_rows.copies and not any(p.is_complex() for p in self._params)
        self._tensor_guard = TensorGuard(optimizer, masters, rule_rows)
        self._set_gradients(rule_rows.grads, sum(grad is None for grad in rule_rows.grads))

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
        found = self._tensor_guard.gradients(optimizer)
        if found is None:
            return False
        self._set_gradients(*found)
        return True

    def reason(self, optimizer: Any, rule: Rule) -> str:
        """Why :meth:`revalidate` has just returned ``False``, in words."""
        if rule is not self._rule:
            return "the rule was replaced"
        if not self.reusable:
            return "the step works on copies, of tensors that are complex or not dense"
        of_groups = self._group_guard.reason(optimizer.param_groups)
        return of_groups or self._tensor_guard.reason(optimizer)

    def _set_gradients(self, grads: list[Any], missing: int) -> None:
        """Set the gradients of this step: one for each row, of which some are ``None``.

        Args:
            grads: the gradients.
            missing: how many are ``None``.
        """
        self._works_now, self._params_now, present = self.works, self._params, None
        if missing:
            present = [grad is not None for grad in grads]
            self._params_now = list(compress(self._params, present))
        self.present = present
        hyper = self._group_guard.hyper
        for work, places in zip(self.works, self._places, strict=True):
            if len(places) == len(grads):
                work.refresh(grads, hyper, present)
                continue
            of_work = None if present is None else [present[i] for i in places]
            of_work = None if of_work is None or all(of_work) else of_work
            work.refresh([grads[i] for i in places], hyper, of_work)
        if present is not None:  # as works_of orders the works of these rows
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
        extended = request
        if self._agreement is not None:
            flag_all_reduce = None
            if request.needs_agreement:
                flag_all_reduce = FlagAllReduce(self._agreement, request, len(self._params_now))
            extended = replace(
                extended,
                agree=flag_all_reduce,
                agree_on_sums=self._rank_sums,
                agree_on_lines=self._lines_of_ranks,
            )
        if request.write and not self._writes_gradients:
            extended = replace(extended, write=False)
        decision = decide(self._works_now, extended)
        coeffs = decision.coefficients  # numbers from a backend on the CPU, else a tensor
        self.finish(skipped=isinstance(coeffs, Coefficients) and coeffs.skip > 0)
        if request.write and not extended.write:  # in place, after the update has read them
            unscale = Request(scale=request.scale, check=False)
            held = [one for one in self._stepped if one.tensor.grad is not None]
            check_and_unscale_held(held, unscale, None, None, write=True, uploads=self._uploads)
        return decision

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
