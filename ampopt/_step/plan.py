"""The plan of a step: the tensors and groups that the kernels need, kept from step to step.

To traverse every parameter, state and layout in Python costs more than the whole step of a small
network, and between steps usually nothing changes but gradients and hyperparameters. So a plan is
made once, and reused until something else changes, which the two guards of :mod:`plan_guards` find
out in a few calls. Then another plan is made. A plan has a row for every parameter that has ever
had a gradient. In a step in which such a parameter has none, its row is masked.
"""

from dataclasses import replace
from itertools import compress
from typing import Any

import torch

from ampopt._step import ranks
from ampopt._step.gradient_rows import GradientRows, works_of
from ampopt._step.gradients import device_of
from ampopt._step.hyperparameters import Variants
from ampopt._step.masters import Masters
from ampopt._step.overflow import check_and_unscale, decided_elsewhere, make_writable
from ampopt._step.param_checks import PlannedParam
from ampopt._step.param_rows import RuleRows
from ampopt._step.plan_guards import GradientsNow, GroupGuard, TensorGuard
from ampopt._step.rank_agreement import Agreement, decision_all_reduce
from ampopt._step.rank_sums import LinesOfRanks, RankSums
from ampopt._step.sharding import dtensor
from ampopt.backend import backend_for
from ampopt_kernels.memory import may_overlap, turns_of
from ampopt_kernels.native.objects import addresses, bump_versions
from ampopt_kernels.rule import Rule
from ampopt_kernels.step import run
from ampopt_kernels.step_data import Coefficients, Decision, Request
from ampopt_kernels.step_tensors import Work
from ampopt_kernels.uploads import Uploads

__all__ = ["Plan"]


class Plan:
    """Runs the step of every parameter that has a gradient.

    Attributes:
        works: the rows of each device, apart for each turn in which parameters that share memory
            are updated; empty if no parameter has ever had a gradient.
        present: as :attr:`Work.present`, for the rows of all devices.
        tensor_guard: compares the tensors with those of the last step.
        reusable: whether later steps may use the plan; False if it works on copies of tensors.
    """

    def __init__(
        self,
        optimizer: Any,
        rule: Rule,
        masters: Masters,
        uploads: dict[torch.device, Uploads],
        planned: list[PlannedParam],
        variants: Variants,
        *,
        needs_agreement: bool,
    ) -> None:
        """Make missing states, and collect the tensors of each parameter.

        Args:
            optimizer: the optimizer to step.
            rule: the update rule to run.
            masters: the master weights of the optimizer.
            uploads: constants that are on a device already, by device; kept from plan to plan.
            planned: what :meth:`ampopt._step.param_checks.Checks.check_plannable` returned.
            variants: the same.
            needs_agreement: whether the first step checks gradients or clips, which takes an
                all-reduce over the ranks.

        Raises:
            RuntimeError: see :func:`ampopt._step.ranks.agreement`; nothing has changed then.
        """
        groups = optimizer.param_groups
        self._device = device_of(groups)
        self._rule, self._uploads = rule, uploads
        # If the ranks have no common process group, steps that need no all-reduce still run; the
        # error is raised by the first one that does.
        self._agreement: Agreement | None = None
        self._no_common_group: ranks.NoCommonGroupError | None = None
        try:
            self._agreement = optimizer._ampopt.agreement()
        except ranks.NoCommonGroupError as error:
            if needs_agreement or rule.sums_up:
                raise
            self._no_common_group = error
        self._rank_sums: RankSums | None = None
        if rule.reduces and self._agreement is not None:
            n_terms = rule.widths(len(rule.hyper_values(groups[0]))).terms
            self._rank_sums = RankSums(self._agreement, groups, n_terms)
        self._lines_of_ranks: LinesOfRanks | None = None
        if rule.averages is not None and self._agreement is not None:
            self._lines_of_ranks = LinesOfRanks(self._agreement, groups, rule.all_averages)
        rule_rows = RuleRows(optimizer, rule, masters, self._agreement, planned)
        self._params = [one.tensor for one in rule_rows.stepped_params]
        # Threads, and programs of a GPU, write to all rows of a work at the same time.
        turns = turns_of(dtensor.local_of_each(self._params))
        self.works: list[Work] = works_of(
            rule_rows.rows, rule_rows.grads, uploads, rule_rows.rule, turns
        )
        self._group_guard = GroupGuard(rule, variants, groups)
        order = {id(row): place for place, row in enumerate(rule_rows.rows)}
        self._places = [[order[id(row)] for row in work.rows] for work in self.works]
        self._stepped_params = rule_rows.stepped_params
        self._copies = rule_rows.copies
        self.reusable = not rule_rows.copies
        # Unscaling in place rounds gradients of a narrower dtype than the arithmetic.
        self._writes_gradients = not masters.holders and all(
            row.grad_dtype == dtype
            for work in self.works
            for row, dtype in zip(work.rows, work.compute_dtypes, strict=True)
        )
        self.tensor_guard = TensorGuard(optimizer, masters, rule_rows)
        grads = rule_rows.grads
        present = bytearray(grad is not None for grad in grads)
        self._set_gradients(GradientsNow(grads, addresses(grads), present))

    # --- whether a plan still fits ----------------------------------------------------------------

    def revalidate(self, optimizer: Any, rule: Rule) -> bool:
        """Update gradients and hyperparameters for this step, if nothing else has changed.

        Args:
            optimizer: the optimizer that the plan was made for.
            rule: its rule now.

        Returns:
            Whether this plan can run the step. If not, the runner makes another.
        """
        if rule is not self._rule or not self.reusable:
            return False
        if not self._group_guard.revalidate(optimizer.param_groups):
            return False
        now = self.tensor_guard.gradients(optimizer)
        if now is None:
            return False
        self._set_gradients(now)
        return True

    def fits(self, optimizer: Any, rule: Rule) -> bool:
        """Whether a step could use the plan now, so that all that it needs has been checked.

        ``False`` for ``DTensor`` parameters, as to read their gradients may take a collective.

        Args:
            optimizer: the optimizer that the plan was made for.
            rule: its rule now.
        """
        fits = self.tensor_guard.is_plain and self.revalidate(optimizer, rule)
        self._release_gradients()
        return fits

    def reason(self, optimizer: Any, rule: Rule) -> str:
        """Why :meth:`revalidate` has just returned ``False``, in words.

        Args:
            optimizer: the optimizer that the plan was made for.
            rule: its rule now.
        """
        if rule is not self._rule:
            return "the rule was replaced"
        of_groups = self._group_guard.reason(optimizer.param_groups)
        if of_groups is not None:
            return of_groups
        if not self.reusable:
            return "the step works on copies, of tensors that are not dense"
        return self.tensor_guard.reason(optimizer)

    # --- the step ---------------------------------------------------------------------------------

    def _set_gradients(self, now: GradientsNow) -> None:
        """Set the gradients of this step."""
        self._works_now, self._params_now, self.present = self.works, self._params, None
        if 0 in now.present:
            self._params_now, self.present = list(compress(self._params, now.present)), now.present
        hyper = self._group_guard.hyper
        if len(self.works) == 1:
            self.works[0].refresh(now.grads, hyper, self.present, now.addresses)
        else:
            grads = now.grads() if callable(now.grads) else now.grads
            for work, places in zip(self.works, self._places, strict=True):
                present = bytearray(now.present[i] for i in places)
                of_work = present if 0 in present else None
                work.refresh([grads[i] for i in places], hyper, of_work)
        if self.present is not None:  # as works_of orders the works of these rows
            first = {
                next((i for i in places if now.present[i]), len(now.present)): work
                for work, places in zip(self.works, self._places, strict=True)
            }
            self._works_now = [first[i] for i in sorted(first) if i < len(now.present)]

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
        if self._agreement is not None and (request.needs_agreement or self._rule.sums_up):
            extended_request = replace(
                extended_request,
                agree=decision_all_reduce(self._agreement, request, has_gradients=True),
                agree_on_sums=self._rank_sums,
                agree_on_lines=self._lines_of_ranks,
            )
        if request.write and not (self._writes_gradients and self._can_write()):
            extended_request = replace(extended_request, write=False)
        try:
            decision = run(backend_for, self._works_now, extended_request)
        finally:
            self._release_gradients()
        coeffs = decision.coefficients  # numbers from a backend on the CPU, else a tensor
        self.finish(skipped=isinstance(coeffs, Coefficients) and coeffs.skip > 0)
        if request.write and not extended_request.write:  # in place, after the update has read them
            unscale = Request(scale=request.scale, check=False)
            with_grads = [one for one in self._stepped_params if one.tensor.grad is not None]
            make_writable(with_grads)
            rows = GradientRows.of(with_grads, with_grads, None, self._uploads)
            check_and_unscale(rows, unscale, None, self._device, write=True)
        return decision

    def _can_write(self) -> bool:
        """Whether no gradient of this step is a copy, or shares memory with another.

        What two gradients have would be divided twice. Nor are there gradients on the CPU, which
        the update unscales, beside those of an accelerator, which are unscaled before.
        """
        if self.tensor_guard.has_copied or len({w.device.type for w in self._works_now}) > 1:
            return False
        return not may_overlap([grad for work in self._works_now for grad in work.present_grads])

    def _decided_elsewhere(self, request: Request) -> Decision | None:
        """On a rank without gradients: take part in the all-reduces of the other ranks."""
        all_reduce = decision_all_reduce(self._agreement, request, has_gradients=False)
        decision = decided_elsewhere(request, all_reduce, self._device)
        for sums in (self._lines_of_ranks, self._rank_sums):
            if sums is not None:
                sums.join_without_gradients(self._device)
        return decision

    def finish(self, *, skipped: bool = False) -> None:
        """Finish a step: write copies back, and record the writes with autograd.

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

    def _release_gradients(self) -> None:
        """Drop the references to gradients, so that zero_grad can free their memory."""
        for work in self.works:
            work.release()
