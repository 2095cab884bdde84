"""Optimizers that are a rule: one step is a few launches, and no host waits for any of them."""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from ampopt_kernels.layout import real
from ampopt_kernels.rule import Rule, State
from ampopt_kernels.work import Decision, Request, Row, run
from torch import Tensor

from ampopt import gradients
from ampopt.backend import backend_for
from ampopt.optimizer import Optimizer
from ampopt.plan import Plan
from ampopt.snapshot import Snapshot

__all__ = ["ElementwiseOptimizer"]


class ElementwiseOptimizer(Optimizer):
    """An optimizer whose step is a :class:`ampopt_kernels.Rule`.

    A subclass names its rule and has a constructor that puts the rule's hyperparameters and flags
    into ``defaults``; stepping, scaling, skipping, replay, clipping and state are inherited. With
    a torch optimizer as a second base, the constructor is torch's.

    No control point waits for the device, except with a closure. On a skip, ``p.grad`` and all
    else are untouched; ``unscale_and_step`` leaves ``p.grad`` as the backward pass left it, and
    applies unscaling and clipping on the fly.

    Parameters may be float32, float64, float16, bfloat16, and complex64 or complex128 as pairs of
    reals; arithmetic is float32, or float64 for float64. State has the dtype of its parameter and
    torch's names; step counts and other scalars are float32 on the parameter's device.

    ``torch.amp.GradScaler`` finds what it needs (``grad_scale`` and ``found_inf`` attributes, with
    ``found_inf > 0`` meaning skip), so ``scaler.step(optimizer)`` does not wait either.

    Attributes:
        rule: the mathematics; see :class:`ampopt_kernels.Rule`.
    """

    rule: ClassVar[Rule]
    sparse_gradients: ClassVar[bool] = False
    """Whether the torch base class takes sparse gradients, in whose case its step is used."""

    _step_supports_amp_scaling = True  # read by torch.amp.GradScaler
    _request: Request | None = None
    _decision: Decision | None = None
    _plan: Plan | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Perform one step, as torch's ``step`` does. Does not synchronize.

        Args:
            closure: reevaluates the model and returns the loss.

        Returns:
            What the closure returned, or ``None``.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        request, self._request = self._request, None
        if request is None:
            request = self._from_grad_scaler()
        plan = self._planned()
        if plan is None:
            self._decision = self._step_as_torch(request)
        else:
            self._decision = self._run(plan, request)
        return loss

    # --- what Optimizer does in two passes and a look, in one and none -------------------------

    def _attempt(self, request: Request) -> Decision | None:
        self._request, self._decision = request, None
        try:
            self.step()
        finally:
            self._request = None
        return self._decision

    @torch.no_grad()
    def _judge(self, request: Request) -> Decision | None:
        if self._needs_torch():
            decision = super()._judge(request)
            self._request = Request(check=False)
            return decision
        gradients.check(self.param_groups)
        rows = gradients.rows(self.param_groups, gradients.Staged(), written=False)
        if not rows:
            return None
        works = self._works(rows)
        judged = replace(request, apply=False, max_norm=None)
        decision = run(backend_for(works[0].device), works, judged)
        # The gradients stay scaled; the step that follows unscales and clips as it reads them.
        self._request = Request(scale=request.scale, check=False, max_norm=request.max_norm)
        return decision

    def _unchanged_until_done(self) -> Snapshot | None:
        # A closure is evaluated before anything is updated.
        return None

    # --- the parts ---------------------------------------------------------------------------

    def _planned(self) -> Plan | None:
        """What this step works on; ``None`` if torch's own step has to do it."""
        plan = self._plan
        if plan is not None and plan.renew(self):
            return plan
        if self._needs_torch():
            return None
        self._plan = plan = Plan(self)
        return plan

    def _run(self, plan: Plan, request: Request) -> Decision | None:
        """One step over all parameters with gradients. ``None`` if there are none."""
        if not plan.works:
            return None
        hyper = [self.rule.hyper_values(group) for group in self.param_groups]
        for work in plan.works:
            work.hyper = hyper
        decision = run(backend_for(plan.works[0].device), plan.works, request)
        plan.staged.store()
        if request.max_norm is not None:
            self.grad_norm = decision.norm
        return decision

    def _state_of(self, param: Tensor, flags: tuple[bool, ...]) -> dict[str, Any]:
        """The state of ``param``, made where it is missing, and on the device where it is not."""
        state = self.state[param]
        for part in self.rule.state_for(flags):
            if state.get(part.name) is None:
                state[part.name] = torch.empty_like(param, memory_format=torch.preserve_format)
                real(state[part.name]).fill_(self._initial(part, param))
        for part in self.rule.scalar_state_for(flags):
            value = state.get(part.name)
            if value is None:
                value = torch.zeros((), device=param.device).fill_(self._initial(part, param))
            state[part.name] = _scalar(value, param.device)
        return state

    def _initial(self, part: State, param: Tensor) -> Any:
        """The value of ``part`` before the first step. Reads no device tensor."""
        if not isinstance(part.init, str):
            return part.init
        group = next(g for g in self.param_groups if any(p is param for p in g["params"]))
        value = group[part.init]
        return value.detach().reshape(()) if isinstance(value, Tensor) else value

    def _needs_torch(self) -> bool:
        """Whether this step has to be torch's own: differentiable, or of sparse gradients.

        Raises:
            RuntimeError: gradients are sparse, and neither the rule nor torch takes them.
        """
        if self.defaults.get("differentiable"):
            return True
        for _, param in gradients.present(self.param_groups):
            assert param.grad is not None
            if param.grad.layout != torch.strided:
                if self.sparse_gradients:
                    return True
                raise RuntimeError(
                    f"{type(self).__name__} does not support sparse gradients, which "
                    f"{gradients.name_of(self.param_groups, param)} has; make the layer with "
                    "sparse=False, or choose an optimizer that takes them"
                )
        return False

    def _step_as_torch(self, request: Request) -> Decision | None:
        """Take torch's own step, unless the request says to skip it, for which the host looks."""
        decision = self._unscale_in_place(request)
        if decision is None or not bool(decision.factors[0] > 0):
            step: Any = super().step
            # If torch's class has been used, its step has hooks, which have run around ours.
            step = getattr(step.__func__, "__wrapped__", step.__func__)
            step(self)
        return decision

    def _from_grad_scaler(self) -> Request:
        """What ``torch.amp.GradScaler`` left on the optimizer, if a scaler is stepping it."""
        found_inf = getattr(self, "found_inf", None)
        if found_inf is None:
            return Request(check=False)
        # The scaler judged scaled gradients, which may still overflow where they are unscaled.
        return Request(scale=getattr(self, "grad_scale", None), found_inf=found_inf)


def _scalar(value: Any, device: torch.device) -> Tensor:
    """A scalar state, from wherever a checkpoint of torch's may keep it."""
    if not isinstance(value, Tensor):
        return torch.full((), float(value), dtype=torch.float32, device=device)
    if value.device == device and value.dtype == torch.float32 and value.ndim == 0:
        return value
    return value.detach().reshape(()).to(device, torch.float32, non_blocking=True)
