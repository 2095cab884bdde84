"""How a step that is a rule is taken: unscaled, judged, clipped and skipped as it runs."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ampopt._step import gradients
from ampopt._step.overflow import judge_held
from ampopt._step.rule_steps import RuleSteps
from ampopt._step.step_hooks import is_watched
from ampopt._step.stepping import Attempt, Stepping
from ampopt._step.torch_private import mark_as_called
from ampopt._step.transaction import Skipper
from ampopt_kernels.step import Decision, Request

__all__ = ["ByRule"]


class ByRule(Stepping):
    """Does in one pass, and without a look, what :class:`Ordinary` does in two."""

    rule: RuleSteps

    def __init__(self, optimizer: torch.optim.Optimizer, rule: RuleSteps, step: Any) -> None:
        """Begin.

        Args:
            optimizer: to step.
            rule: its steps.
            step: the ``step`` of its class, which takes :attr:`asked` to ``rule``.
        """
        super().__init__(optimizer, rule)
        self._step = step

    @property
    def skipper(self) -> Skipper:
        """How torch's own step is skipped, where that is to be taken."""
        return self.rule.skipper

    def attempt(self, request: Request) -> Attempt:
        """See :class:`Stepping`."""
        optimizer = self.optimizer
        optimizer.check_step()
        if is_watched(optimizer, self._step):
            self.rule.decision = None
            self.asked = request
            try:
                optimizer.step()
            finally:
                self.asked = None
        else:
            with torch.no_grad():
                self.note_norm(request, self.rule.step(self.asking(request)))
            mark_as_called(optimizer)
        return Attempt(self.rule.decision)

    @torch.no_grad()
    def judge(self, request: Request) -> Decision | None:
        """See :class:`Stepping`. Gradients stay scaled, but for torch's own step."""
        if self.rule.need_torch():
            decision = self.unscale(request)
            self.asked = Request(check=False, found_inf=_other(decision), judged=decision)
            return decision
        judged = replace(self.asking(request), max_norm=None)
        decision = judge_held(
            gradients.held(self.optimizer.param_groups),
            judged,
            self.agreement(),
            self.home,
            write=False,
            uploads=self.uploads,
        )
        if decision is None:
            self.note_norm(request, None)
            return None
        # The step that follows unscales and clips as it reads the gradients.
        self.asked = Request(
            scale=request.scale,
            check=False,
            found_inf=_other(decision),
            max_norm=request.max_norm,
            write=request.write,
            judged=decision,
        )
        return decision

    def check_gradients(self) -> None:
        """See :class:`Stepping`."""
        self.rule.check_gradients()

    def snapshot(self) -> None:
        """Nothing: the step evaluates a closure before it updates anything."""
        return None

    @property
    def decided(self) -> Decision | None:
        """See :class:`Stepping`."""
        return self.rule.decision


def _other(decision: Decision | None) -> Tensor | None:
    """More than 0 if the step is to be skipped for something else than overflow."""
    return None if decision is None else decision.cause
