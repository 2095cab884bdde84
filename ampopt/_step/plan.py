"""The plan of a step: the tensors and groups that the kernels need, kept from step to step.

To traverse every parameter, state and layout in Python costs more than the whole step of a small
network, and between steps usually nothing changes but gradients and hyperparameters. So a plan is
made once, and reused until something else changes. Each step checks that with guards, like those of
``torch.compile``, which cost far less than a new plan.
"""

import operator
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ampopt._step import ranks
from ampopt._step.all_reduce import Agreement, FlagAllReduce
from ampopt._step.masters import Masters
from ampopt._step.overflow import (
    check_and_unscale_held,
    decide,
    decided_elsewhere,
    device_of,
    works_of,
)
from ampopt._step.rank_sums import LinesOfRanks, RankSums
from ampopt._step.rows import RuleRows
from ampopt._step.rule_state import StateCompleter
from ampopt._step.settings import Settings
from ampopt._step.sharding import dtensor
from ampopt_kernels.decision import Coefficients, Decision, Request
from ampopt_kernels.native.objects import IdentityGuard, LayoutGuard, addresses, bump_versions
from ampopt_kernels.rule import Rule
from ampopt_kernels.uploads import Uploads
from ampopt_kernels.work import Work

__all__ = ["Plan"]


class Plan:
    """Runs the step of every parameter that has a gradient.

    Attributes:
        works: the rows of each device, with their gradients; empty without gradients. The first
            work is on the device where the decision is made.
        reusable: whether a later step may use the plan; False if it works on copies of tensors.
    """

    def __init__(
        self,
        optimizer: Any,
        rule: Rule,
        masters: Masters,
        uploads: dict[torch.device, Uploads],
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
            complete_state: see :data:`ampopt._step.rule_state.StateCompleter`.
            needs_agreement: whether the first step checks gradients or clips, which takes an
                all-reduce over the ranks.

        Raises:
            RuntimeError: see :func:`ampopt._step.ranks.agreement`; nothing has changed then.
        """
        groups = optimizer.param_groups
        self._decision_device = device_of(groups)
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
        rule_rows = RuleRows(optimizer, rule, masters, self._agreement, complete_state)
        self.works: list[Work] = works_of(rule_rows.rows, rule_rows.grads, uploads, rule_rows.rule)
        self._settings = Settings(rule, rule_rows.variants, groups)
        for work in self.works:
            work.hyper = self._settings.hyper
        order = {id(row): place for place, row in enumerate(rule_rows.rows)}
        self._places = [[order[id(row)] for row in work.rows] for work in self.works]
        self._present, self._held = rule_rows.present, rule_rows.held
        self._copies = rule_rows.copies
        self._writes_gradients = rule_rows.gradients_are_written()
        self.reusable = not rule_rows.copies and not any(p.is_complex() for p in rule_rows.present)
        self._guards = _Guards(optimizer, masters, rule_rows)

    def revalidate(self, optimizer: Any, rule: Rule) -> bool:
        """Update gradients and hyperparameters for this step, if nothing else has changed.

        Args:
            optimizer: the optimizer that the plan was made for.
            rule: its rule now.

        Returns:
            Whether this plan can run the step. If not, the runner makes another plan.
        """
        same = self.reusable and rule is self._rule
        if not (same and self._settings.revalidate(optimizer.param_groups)):
            return False
        grads = self._guards.gradients(optimizer)
        if grads is None:
            return False
        for work, places in zip(self.works, self._places, strict=True):
            work_grads = grads if len(places) == len(grads) else [grads[i] for i in places]
            work.refresh(work_grads, self._settings.hyper)
        return True

    def run(self, request: Request) -> Decision | None:
        """Run or skip a step of all parameters that have gradients.

        Returns:
            The decision; ``None`` if no rank has gradients.
        """
        if request.needs_agreement and self._no_common_group is not None:
            raise self._no_common_group
        if not self.works:
            return self._decided_elsewhere(request) or request.earlier_decision
        extended = request
        if self._agreement is not None:
            flag_all_reduce = None
            if request.needs_agreement:
                flag_all_reduce = FlagAllReduce(self._agreement, request, len(self._present))
            extended = replace(
                extended,
                agree=flag_all_reduce,
                agree_on_sums=self._rank_sums,
                agree_on_lines=self._lines_of_ranks,
            )
        if request.write and not self._writes_gradients:
            extended = replace(extended, write=False)
        decision = decide(self.works, extended)
        coeffs = decision.coefficients  # numbers from a backend on the CPU, else a tensor
        self.finish(skipped=isinstance(coeffs, Coefficients) and coeffs.skip > 0)
        if request.write and not extended.write:  # in place, after the update has read them
            unscale = Request(scale=request.scale, check=False)
            check_and_unscale_held(
                self._held, unscale, None, None, write=True, uploads=self._uploads
            )
        return decision

    def _decided_elsewhere(self, request: Request) -> Decision | None:
        """On a rank without gradients: take part in the all-reduces of the other ranks."""
        decision = decided_elsewhere(request, self._agreement, self._decision_device)
        for sums in (self._lines_of_ranks, self._rank_sums):
            if sums is not None and self._decision_device is not None:
                sums.join_without_gradients(self._decision_device)
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
            bump_versions(self._present)
        for work in self.works:
            work.grads = []  # so that zero_grad can free their memory before the next pass


class _Guards:
    """What must not change while a plan is reused.

    That is: the identity of each parameter, its group, and its states; the addresses of parameters,
    masters and states; the layouts of parameters and gradients; which parameters have a gradient.
    """

    def __init__(self, optimizer: Any, masters: Masters, rule_rows: RuleRows) -> None:
        """Record what :meth:`gradients` compares later.

        Args:
            optimizer: the optimizer of the plan.
            masters: its master weights.
            rule_rows: the rows of the plan.
        """
        groups = optimizer.param_groups
        self._masters = masters
        self._present, self._indexed_masters = rule_rows.present, rule_rows.masters
        self._params = list(chain.from_iterable(group["params"] for group in groups))
        self._dtensors = any(map(dtensor.is_dtensor, self._params))
        with_grad = set(rule_rows.present)
        self._absent = [p for p in self._params if p not in with_grad]
        self._process_group, self._state = optimizer.process_group, optimizer.state
        # Users may store other things in optimizer.state than states of parameters.
        param_states = [state for state in self._state.values() if isinstance(state, dict)]
        members = [group["params"] for group in groups]
        self._identities = IdentityGuard([*members, self._state, *param_states])
        # `param.data = ...` keeps the object and changes its memory.
        masters_of_params = [master for _, master in rule_rows.masters]
        self._held = [*self._params, *masters_of_params, *rule_rows.states]
        held, params = self._held, self._params
        if self._dtensors:  # kernels work on the local shards
            held, params = dtensor.local_of_each(held), dtensor.local_of_each(params)
        self._addresses, self._params_laid_out = addresses(held), LayoutGuard(params)
        self._grads_laid_out = LayoutGuard(rule_rows.grads)
        grads = list(map(_grad_of, self._present))
        self._placements = dtensor.placements(grads) if self._dtensors else []

    def gradients(self, optimizer: Any) -> list[Tensor] | None:
        """The gradients of this step, as kernels read them; ``None`` if anything else changed."""
        for param in self._absent:
            if param.grad is not None:
                return None
        held, params = self._held, self._params
        if self._dtensors:
            held, params = dtensor.local_of_each(held), dtensor.local_of_each(params)
        if not (
            optimizer.state is self._state
            and optimizer.process_group is self._process_group
            and self._identities.unchanged()
            and addresses(held) == self._addresses
            and self._params_laid_out.fit(params)
        ):
            return None
        grads = list(map(_grad_of, self._present))
        if self._dtensors and dtensor.placements(grads) != self._placements:
            for param in self._present:
                dtensor.redistribute_gradient(param)
            grads = list(map(_grad_of, self._present))
            self._placements = dtensor.placements(grads)
        if self._masters.unscaled:
            for place, master in self._indexed_masters:
                if grads[place] is not None:
                    grads[place] = master.grad
        if self._dtensors:
            grads = dtensor.local_of_each(grads)
        return grads if self._grads_laid_out.fit(grads) else None


_grad_of: Any = operator.attrgetter("grad")  # over hundreds, half the time of a comprehension
