"""One step of a rule: planned once, run in a few launches, and torch's own where no rule can."""

import functools
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ampopt._step import gradients, ranks
from ampopt._step.masters import Masters, has_masters, needs_master
from ampopt._step.overflow import device_of
from ampopt._step.param_rounding import is_stochastic
from ampopt._step.plan import Plan, check_plannable
from ampopt._step.rule_state import state_of
from ampopt._step.step_hooks import beneath_hooks
from ampopt._step.transaction import Skipper, skipper_of
from ampopt_kernels.rule import Rule
from ampopt_kernels.step import Decision, Request
from ampopt_kernels.triton.uploads import Uploads

__all__ = ["RuleSteps"]


class RuleSteps:
    """The steps of one :class:`ampopt.ElementwiseOptimizer`.

    Attributes:
        complete_state: see the constructor.
        masters: of its parameters.
        uploads: what devices hold of earlier steps.
        plan: what the last step worked on; ``None`` before the first.
        decision: of the last step; ``None`` if it had no gradients, and while torch's step runs.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        torchs_step: Callable[[Any], Any],
        *,
        rule: Rule | None = None,
        complete_state: Callable[[dict[str, Any]], None] | None = None,
        torch_needs_state: bool = False,
    ) -> None:
        """Begin.

        Args:
            optimizer: to step, which is not kept alive.
            torchs_step: gives the method ``step`` of its class of torch's.
            rule: of the steps; ``None`` for that of the optimizer.
            complete_state: adds the scalar states that a checkpoint of torch's lacks to the state
                of a parameter, if the flags ask for any.
            torch_needs_state: whether torch's step has to find the state of each parameter.
        """
        self._optimizer = weakref.ref(optimizer)
        self._torchs_step, self._rule = torchs_step, rule
        self.complete_state, self._torch_needs_state = complete_state, torch_needs_state
        self.masters = Masters(optimizer)
        self.uploads: dict[torch.device, Uploads] = {}
        self.plan: Plan | None = None
        self.decision: Decision | None = None
        self._skipper: Skipper | None = None
        self._dtypes = WeakIdKeyDictionary()  # weak, for an identity is used again
        self._warned_of_float16 = False

    @property
    def optimizer(self) -> Any:
        """Whose steps these are."""
        return self._optimizer()

    @property
    def rule(self) -> Rule:
        """What a step does."""
        return self.optimizer.rule if self._rule is None else self._rule

    @property
    def skipper(self) -> Skipper:
        """How torch's own step is skipped; chosen before the first."""
        if self._skipper is None:
            optimizer = self.optimizer
            home = device_of(optimizer.param_groups) or torch.device("cpu")
            self._skipper = skipper_of(optimizer.skip_by, home)
        return self._skipper

    def step(self, request: Request) -> Decision | None:
        """Step, or skip, with what is in the gradients. ``None`` if no rank has any."""
        on_masters = bool(self.masters.unscaled)
        if on_masters:
            self.masters.check_unedited()
        self.decision = None  # torch's own step is not to see that of the last one
        plan = self.plan
        if plan is None or not plan.renew(self.optimizer):
            plan = self._planned(request.asks)
        self.decision = self._step_as_torch(request) if plan is None else plan.run(request)
        if on_masters:
            self.masters.drop_gradients()
        return self.decision

    def check_gradients(self) -> None:
        """Refuse gradients that no step can take, before anything changes."""
        held = gradients.held(self.optimizer.param_groups)
        self._warn_of_float16()
        if self.need_torch():
            self.check_dtypes()
            self.masters.check_float16(held)
        else:
            check_plannable(self)

    def need_torch(self) -> bool:
        """Whether this step has to be torch's own: differentiable, or sparse.

        Raises:
            RuntimeError: gradients are such, and neither the rule nor torch takes them.
        """
        optimizer = self.optimizer
        if optimizer.defaults.get("differentiable"):
            return True
        for index, param in gradients.present(optimizer.param_groups):
            assert param.grad is not None
            if param.grad.layout != torch.strided:
                group, how = optimizer.param_groups[index], ""
                if has_masters(group):
                    how = " with master_weights=True"
                elif is_stochastic(group):
                    how = " with param_rounding='stochastic'"
                if optimizer.sparse_gradients and not how:
                    return True
                how *= optimizer.sparse_gradients
                raise RuntimeError(
                    f"{type(optimizer).__name__}{how} does not support sparse gradients, which "
                    f"{gradients.name_of(optimizer.param_groups, param)} has; make the layer with "
                    "sparse=False, or choose an optimizer that takes them"
                )
        return False

    def remember_dtypes(self) -> None:
        """Remember the dtype of each parameter, to notice a model that is cast later."""
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                self._dtypes.setdefault(param, param.dtype)

    def check_dtypes(self) -> None:
        """Refuse parameters that were cast since the optimizer was made."""
        self.remember_dtypes()
        groups = self.optimizer.param_groups
        for group in groups:
            for param in group["params"]:
                made_with = self._dtypes[param]
                if param.dtype != made_with:
                    raise RuntimeError(
                        f"{gradients.name_of(groups, param)} was {made_with} when the "
                        f"optimizer was made and is {param.dtype} now: cast the model first and "
                        "make the optimizer then (with master_weights=True it keeps float32 "
                        "masters of half-precision parameters)"
                    )

    # --- by the rule ------------------------------------------------------------------------------

    def _planned(self, asks: bool) -> Plan | None:
        """What this step and the next work on; ``None`` if torch's own step has to do this one."""
        self._warn_of_float16()
        if self.need_torch():
            return None
        self.plan = Plan(self, asks=asks)
        return self.plan

    # --- as torch does ----------------------------------------------------------------------------

    def _step_as_torch(self, request: Request) -> Decision | None:
        """Take torch's own step, unless the request says to skip it; see ``skip_by``."""
        optimizer = self.optimizer
        if self._torch_needs_state:
            for group, param in gradients.present(optimizer.param_groups):
                if not optimizer.state.get(param):
                    flags = self.rule.flag_values(optimizer.param_groups[group])
                    state_of(self, param, flags)
        agreement = ranks.agreement(optimizer.param_groups, optimizer.process_group)
        decision = self.masters.unscale(request, agreement, self.uploads)
        # Hooks of torch's class have run around ours.
        step = beneath_hooks(self._torchs_step(optimizer).__func__)
        if decision is None:
            step(optimizer)
        else:
            call = functools.partial(step, optimizer)
            self.skipper.step(optimizer, call, decision)
        return decision

    def _warn_of_float16(self) -> None:
        """Warn once of a state that is to be kept in float16."""
        if self._warned_of_float16:
            return
        optimizer = self.optimizer
        for index, param in gradients.present(optimizer.param_groups):
            group = optimizer.param_groups[index]
            if param.dtype != torch.float16 or needs_master(group, param):
                continue
            states = self.rule.state_for(self.rule.flag_values(group))
            states = [part for part in states if part.dtype in (None, torch.float16)]
            if states:
                self._warned_of_float16 = True
                warnings.warn(
                    f"{type(optimizer).__name__} keeps {', '.join(part.name for part in states)} "
                    f"of {gradients.name_of(optimizer.param_groups, param)} in float16, as torch's "
                    "optimizers do: small values become zero there, such as squares of gradients "
                    "below 2**-12, and steps then are much too long. Pass master_weights=True, or "
                    "keep the parameters in float32 and run the model under torch.autocast",
                    UserWarning,
                    stacklevel=2,
                )
                return
