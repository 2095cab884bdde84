"""What a step of a rule works on, kept from one step to the next.

Going through every parameter, state and layout in Python costs more than a small network's whole
step, and next to nothing changes between steps but the gradients. A plan is made once and holds
until something else changes. That it does hold is asked at every step, of its guards: like those of
``torch.compile``, they cost less than preparing by far.
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
from ampopt._step.rank_sums import RankSums
from ampopt._step.rows import RuleRows
from ampopt._step.rule_state import StateCompleter
from ampopt._step.settings import Settings
from ampopt._step.sharding import dtensor
from ampopt._step.sharding.line_sums import LinesOfRanks
from ampopt_kernels.decision import Coefficients, Decision, Request
from ampopt_kernels.native.objects import IdentityGuard, LayoutGuard, addresses, bump_versions
from ampopt_kernels.rule import Rule
from ampopt_kernels.uploads import Uploads
from ampopt_kernels.work import Work

__all__ = ["Plan"]


class Plan:
    """A step of every parameter that has a gradient, ready to be taken.

    Attributes:
        works: what to run, the first parameter's device first; empty without gradients.
        reusable: whether it may serve a second step; not where it works on copies.
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
        self._home = device_of(groups)
        self._rule, self._uploads = rule, uploads
        # Of the ranks that decide together, or why they cannot, where a step that asks them for
        # nothing can be taken all the same.
        self._agreement: Agreement | None = None
        self._apart: ranks.NoCommonGroupError | None = None
        try:
            self._agreement = optimizer._ampopt.agreement()
        except ranks.NoCommonGroupError as error:
            if needs_agreement or rule.reduces:
                raise
            self._apart = error
        self._rank_sums: RankSums | None = None
        if rule.reduces and self._agreement is not None:
            n_terms = rule.widths(len(rule.hyper_values(groups[0]))).terms
            self._rank_sums = RankSums(self._agreement, groups, n_terms)
        self._lines_of_ranks: LinesOfRanks | None = None
        if rule.averages is not None and self._agreement is not None:
            self._lines_of_ranks = LinesOfRanks(self._agreement, groups, rule.state)
        made = RuleRows(optimizer, rule, masters, self._agreement, complete_state)
        self.works: list[Work] = works_of(made.rows, made.grads, uploads, made.rule)
        self._settings = Settings(rule, made.variants, groups)
        for work in self.works:
            work.hyper = self._settings.hyper
        order = {id(row): place for place, row in enumerate(made.rows)}
        self._places = [[order[id(row)] for row in work.rows] for work in self.works]
        self._present, self._held, self._copies = made.present, made.held, made.copies
        self._writes_gradients = made.gradients_are_written()
        self.reusable = not made.copies and not any(p.is_complex() for p in made.present)
        self._guards = _Guards(optimizer, masters, made)

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
            own = grads if len(places) == len(grads) else [grads[i] for i in places]
            work.take(own, self._settings.hyper)
        return True

    def run(self, request: Request) -> Decision | None:
        """Step, or skip, all parameters that have gradients; ``None`` if no rank has any."""
        if request.needs_agreement and self._apart is not None:
            raise self._apart
        if not self.works:
            return self._decided_elsewhere(request) or request.earlier_decision
        asked = request
        if self._agreement is not None:
            vote = None
            if request.needs_agreement:
                vote = FlagAllReduce(self._agreement, request, len(self._present))
            asked = replace(
                asked,
                agree=vote,
                agree_on_sums=self._rank_sums,
                agree_on_lines=self._lines_of_ranks,
            )
        if request.write and not self._writes_gradients:
            asked = replace(asked, write=False)
        decision = decide(self.works, asked)
        seen = decision.coefficients  # by the host, if these are numbers
        self.finish(skipped=isinstance(seen, Coefficients) and seen.skip > 0)
        if request.write and not asked.write:  # in their own dtype, now that they were used
            unscale = Request(scale=request.scale, check=False)
            check_and_unscale_held(
                self._held, unscale, None, None, write=True, uploads=self._uploads
            )
        return decision

    def _decided_elsewhere(self, request: Request) -> Decision | None:
        """Take part in what other ranks decide and sum up, on one without gradients."""
        decision = decided_elsewhere(request, self._agreement, self._home)
        for sums in (self._lines_of_ranks, self._rank_sums):
            if sums is not None and self._home is not None:
                sums.join_without_gradients(self._home)
        return decision

    def finish(self, *, skipped: bool = False) -> None:
        """What follows a step: copies go where they belong, and gradients are let go of.

        Autograd is told of the writes, which kernels make behind its back, so that a backward pass
        through a graph that needs the old values is refused, as after a step of torch's.

        Args:
            skipped: whether the host knows that nothing was written; such a pass is right then. On
                an accelerator the host does not know of a skip, and autograd is told of a write.
        """
        if not skipped:
            for original, copy in self._copies:
                original.copy_(copy)
            bump_versions(self._present)
        for work in self.works:
            work.grads = []  # whose memory the next backward pass may need


class _Guards:
    """What a plan takes for granted.

    That is the very parameters, each in its group, and states; where all of them are in memory and
    how parameters and gradients are laid out in it; which parameters have gradients.
    """

    def __init__(self, optimizer: Any, masters: Masters, made: RuleRows) -> None:
        """Record what :meth:`gradients` compares later.

        Args:
            optimizer: the optimizer of the plan.
            masters: its master weights.
            made: the rows of the plan.
        """
        groups = optimizer.param_groups
        self._keeper = masters
        self._present, self._masters = made.present, made.masters
        self._params = list(chain.from_iterable(group["params"] for group in groups))
        self._spread = any(map(dtensor.is_spread, self._params))  # over ranks
        kept = set(made.present)
        self._absent = [p for p in self._params if p not in kept]
        self._process_group, self._state = optimizer.process_group, optimizer.state
        # Users may keep other things there than the state of a parameter.
        of_params = [state for state in self._state.values() if isinstance(state, dict)]
        members = [group["params"] for group in groups]
        self._contents = IdentityGuard([*members, self._state, *of_params])
        # An object may stay and what it refers to be exchanged, as by an assignment to its data.
        self._held = [*self._params, *(master for _, master in made.masters), *made.states]
        held, params = self._held, self._params
        if self._spread:  # of such a tensor, the part that is here counts
            held, params = dtensor.local_of_each(held), dtensor.local_of_each(params)
        self._addresses, self._params_laid_out = addresses(held), LayoutGuard(params)
        self._grads_laid_out = LayoutGuard(made.grads)
        grads = list(map(_grad_of, self._present))
        self._placements = dtensor.placements(grads) if self._spread else []

    def gradients(self, optimizer: Any) -> list[Tensor] | None:
        """The gradients of this step as kernels see them; ``None`` if anything else has changed."""
        for param in self._absent:
            if param.grad is not None:
                return None
        held, params = self._held, self._params
        if self._spread:
            held, params = dtensor.local_of_each(held), dtensor.local_of_each(params)
        if not (
            optimizer.state is self._state
            and optimizer.process_group is self._process_group
            and self._contents.unchanged()
            and addresses(held) == self._addresses
            and self._params_laid_out.fit(params)
        ):
            return None
        grads = list(map(_grad_of, self._present))
        if self._spread and dtensor.placements(grads) != self._placements:
            for param in self._present:
                dtensor.settle(param)
            grads = list(map(_grad_of, self._present))
            self._placements = dtensor.placements(grads)
        if self._keeper.unscaled:
            for place, master in self._masters:
                if grads[place] is not None:
                    grads[place] = master.grad
        if self._spread:
            grads = dtensor.local_of_each(grads)
        return grads if self._grads_laid_out.fit(grads) else None


_grad_of: Any = operator.attrgetter("grad")  # over hundreds, half the time of a comprehension
