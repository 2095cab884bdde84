"""What a step of a rule works on, kept from one step to the next.

Going through every parameter, state and layout in Python costs more than a small network's whole
step, and next to nothing changes between steps but the gradients. A plan is made once and holds
until something else changes; that it does hold is checked at every step (see ``guards``).
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ampopt._step import dtensor, gradients, ranks
from ampopt._step.guards import Guards
from ampopt._step.overflow import decide, decided_elsewhere, device_of, judge_held, works_of
from ampopt._step.param_rounding import keys_of, position_of
from ampopt._step.rank_sums import RankSums
from ampopt._step.rule_state import lay_end_to_end, state_of
from ampopt_kernels.cpu.objects import bump_versions
from ampopt_kernels.found import Owner
from ampopt_kernels.random_numbers import STREAM
from ampopt_kernels.rule import Rule
from ampopt_kernels.step import Decision, Request, Row, Work
from ampopt_kernels.tensors import dense_like

if TYPE_CHECKING:
    from ampopt._step.by_rule import RuleSteps

__all__ = ["Plan"]


class Plan:
    """The rows of every parameter that has a gradient, by device.

    Attributes:
        works: what to run, the first parameter's device first; empty without gradients.
        lasts: whether it may serve a second step; not where it works on copies.
    """

    def __init__(self, steps: "RuleSteps", *, asks: bool) -> None:
        """Make state where it is missing, and the rows.

        Args:
            steps: whose.
            asks: whether the first step asks other ranks for anything.

        Raises:
            RuntimeError: see :func:`ampopt._step.gradients.held`, and
                :func:`ampopt._step.ranks.agreement`; nothing has changed then.
        """
        optimizer, keeper = steps.optimizer, steps.masters
        groups, rule = optimizer.param_groups, steps.rule
        steps.checks.check_plannable()
        self._rule, self._uploads, self._home = rule, steps.uploads, device_of(groups)
        self._copies: list[tuple[Tensor, Tensor]] = []  # what steps write to copies of
        # Of the ranks that decide together, or why they cannot, where a step that asks them for
        # nothing can be taken all the same.
        self._agreement: ranks.Agreement | None = None
        self._apart: ranks.Apart | None = None
        try:
            self._agreement = ranks.agreement(groups, optimizer.process_group)
        except ranks.Apart as error:
            if asks or rule.reduces:
                raise
            self._apart = error
        self._rank_sums: RankSums | None = None
        if rule.reduces and self._agreement is not None:
            n_terms = rule.widths(len(rule.hyper_values(groups[0]))).terms
            self._rank_sums = RankSums(self._agreement, groups, n_terms)
        self._flags = flags = [rule.flag_values(group) for group in groups]
        present = [
            (group, p)
            for group, p in gradients.present(groups)
            if keeper.holder(groups[group], p).grad is not None
        ]
        self._present = [p for _, p in present]
        masters = [
            (place, master)
            for place, (group, p) in enumerate(present)
            if (master := keeper.of(groups[group], p)) is not None
        ]
        states = [state_of(steps, p, flags[group]) for group, p in present]
        if _widen_scalars(rule, states):
            rule = rule.with_float64_scalars
        for part in (*rule.state, *rule.scalar_state):
            lay_end_to_end([p for _, p in present], states, part.name)
        self._held = gradients.held(groups)
        whose = {one.owner.key: one.owner for one in self._held}
        everyone = [p for group in groups for p in group["params"]]
        place_of = {id(p): place for place, p in enumerate(everyone)}
        made = [
            self._row(steps, group, param, state, whose[id(param)], place_of[id(param)])
            for (group, param), state in zip(present, states, strict=True)
        ]
        rows, grads = [row for row, _ in made], [grad for _, grad in made]
        self.works: list[Work] = works_of(rows, grads, steps.uploads, rule)
        for work in self.works:
            work.hyper = list(map(rule.hyper_values, groups))
        order = {id(row): place for place, row in enumerate(rows)}
        self._places = [[order[id(row)] for row in work.rows] for work in self.works]
        parts = [(*rule.state_for(own), *rule.scalar_state_for(own)) for own in flags]
        held = [
            s[part.name] for (g, _), s in zip(present, states, strict=True) for part in parts[g]
        ]
        held += [row.keys for row in rows if row.keys is not None]
        spread = any(map(dtensor.is_spread, everyone))
        self._guards = Guards(
            optimizer, rule, flags, keeper, self._present, masters, held, grads, spread=spread
        )
        # Whether a step may unscale gradients before it uses them, and no bit of what it does
        # changes. Not those of a dtype that is narrower than the arithmetic, nor copies of them.
        self._writes_gradients = all(
            row.grad_dtype == row.compute_dtype and grad.data_ptr() == _address_of_grad(p)
            for (row, grad), p in zip(made, self._present, strict=True)
        )
        self.lasts = not self._copies and not any(p.is_complex() for p in self._present)

    def _row(
        self,
        steps: "RuleSteps",
        group: int,
        param: Tensor,
        state: dict[str, Any],
        owner: Owner,
        place: int,
    ) -> tuple[Row, Tensor]:
        """What a step does with ``param``, whose ``place`` is that among all, and its gradient."""
        optimizer, masters = steps.optimizer, steps.masters
        rule, flags, dense = steps.rule, self._flags[group], self._dense
        local, agreement = dtensor.local, self._agreement
        master = masters.of(optimizer.param_groups[group], param)
        holder = masters.holder(optimizer.param_groups[group], param)
        keys = keys_of(optimizer, optimizer.param_groups[group], param, place)
        position = place * STREAM if rule.draws else 0
        if keys is not None or rule.draws:
            position += position_of(param)
        p = gradients.real(local(param.detach() if master is None else master))
        copy = None if master is None else dense(local(param.detach()), p)
        grad = dense_like(gradients.values_of(holder), p)
        row = Row(
            grad.dtype,
            param=dense(p, p),
            copy=copy,
            state=tuple(
                dense(gradients.real(local(state[part.name])), p) for part in rule.state_for(flags)
            ),
            scalars=tuple(
                state[part.name] if part in rule.scalar_state_for(flags) else None
                for part in rule.scalar_state
            ),
            flags=flags,
            group=group,
            counted=agreement is None or agreement.counts(param, group),
            owner=owner,
            keys=keys,
            position=position,
        )
        return row, grad

    def _dense(self, tensor: Tensor, like: Tensor) -> Tensor:
        """``tensor`` laid out as ``like``: where it is not, a copy, which a step copies back."""
        copy = dense_like(tensor, like)
        if copy is not tensor:
            self._copies.append((tensor, copy))
        return copy

    def renew(self, optimizer: Any) -> bool:
        """Take up the gradients and hyperparameters of this step, if nothing else has changed.

        Returns:
            Whether nothing has; if not, another plan is needed.
        """
        grads = self._guards.gradients(optimizer) if self.lasts else None
        if grads is None:
            return False
        hyper = list(map(self._rule.hyper_values, optimizer.param_groups))
        for work, places in zip(self.works, self._places, strict=True):
            own = grads if len(places) == len(grads) else [grads[i] for i in places]
            work.take(own, hyper)
        return True

    def run(self, request: Request) -> Decision | None:
        """Step, or skip, all parameters that have gradients; ``None`` if no rank has any."""
        if request.asks and self._apart is not None:
            raise self._apart
        if not self.works:
            return self._decided_elsewhere(request)
        asked = request
        if self._agreement is not None:
            vote = ranks.Vote(self._agreement) if request.asks else None
            asked = replace(asked, agree=vote, agree_on_sums=self._rank_sums)
        if request.write and not self._writes_gradients:
            asked = replace(asked, write=False)
        decision = decide(self.works, asked)
        self.finish()
        if request.write and not asked.write:  # in their own dtype, now that they were used
            unscale = Request(scale=request.scale, check=False)
            judge_held(self._held, unscale, None, None, write=True, uploads=self._uploads)
        return decision

    def _decided_elsewhere(self, request: Request) -> Decision | None:
        """Take part in what other ranks decide and sum up, on one without gradients."""
        decision = decided_elsewhere(request, self._agreement, self._home)
        if self._rank_sums is not None and self._home is not None:
            self._rank_sums.abstain(self._home)
        return decision

    def finish(self) -> None:
        """What follows a step: copies go where they belong, and gradients are let go of.

        Autograd is told of the writes, which kernels make behind its back, so that a backward pass
        through a graph that needs the old values is refused, as after a step of torch's.
        """
        for original, copy in self._copies:
            original.copy_(copy)
        bump_versions(self._present)
        for work in self.works:
            work.grads = []  # whose memory the next backward pass may need


def _widen_scalars(rule: Rule, states: list[dict[str, Any]]) -> bool:
    """Make scalar states float64 if one is, but for those with a dtype of their own; if it is so.

    Backends want each alike in all rows.
    """
    names = [part.name for part in rule.scalar_state if part.dtype is None]
    kept = [(state, name) for state in states for name in names if name in state]
    if all(state[name].dtype == torch.float32 for state, name in kept):
        return False
    for state, name in kept:
        if state[name].dtype != torch.float64:
            state[name] = state[name].double()
    return True


def _address_of_grad(param: Tensor) -> int:
    return dtensor.local(param.grad).data_ptr()
