"""Optimizers that are a rule: one step is a few launches, and no host waits for any of them."""

import functools
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ampopt._step import gradients, ranks, torch_scaler
from ampopt._step.ordinary import Attempt
from ampopt._step.overflow import agreement_on, decided_elsewhere, judge_held
from ampopt._step.plan import Plan, check_plannable
from ampopt._step.snapshot import Snapshot
from ampopt._step.state_buffers import shares_storage
from ampopt._step.step_hooks import beneath_hooks, is_watched
from ampopt._step.uncompiled import uncompiled
from ampopt.backend import backend_for
from ampopt.masters import MasterWeights, has_masters
from ampopt_kernels.rule import MASTER, Rule, State
from ampopt_kernels.step import Decision, Request, run
from ampopt_kernels.tensors import real, widest
from ampopt_kernels.transfers import carried

__all__ = ["ElementwiseOptimizer"]


class ElementwiseOptimizer(MasterWeights):
    """An optimizer whose step is a :class:`ampopt_kernels.Rule`.

    A subclass names its rule and has a constructor that puts the rule's hyperparameters and flags
    into ``defaults``; stepping, scaling, skipping, replay, clipping and state are inherited. With
    a torch optimizer as a second base, the constructor is torch's.

    No control point waits for the device, except with a closure. On a skip, ``p.grad`` and all
    else are untouched; ``unscale_and_step`` leaves ``p.grad`` as the backward pass left it, and
    applies unscaling and clipping on the fly. A step of a ``GradScaler``, torch's or ampopt's,
    leaves unscaled gradients there, at the price of writing them: rounded to their own dtype,
    while the step itself works with what they were. So those of float16 parameters without masters,
    which torch's scaler refuses but for fused steps, may become 0 there, and nowhere else.

    Parameters may be float32, float64, float16, bfloat16, and complex64 or complex128 as pairs of
    reals; arithmetic is float32, or float64 for float64. State has the dtype of its parameter and
    torch's names; step counts and other scalars are float32 on the parameter's device, or float64
    where that is torch's default dtype. State in float16 loses small values, as torch's does, which
    is warned of once: keep masters instead.

    **Master weights.** With ``master_weights=True``, a float16 or bfloat16 parameter has a float32
    master in its state (``master_param``), which steps update, the parameter being its rounded
    copy; its other states are float32 too. ``unscale`` then leaves ``p.grad`` alone and puts
    float32 unscaled gradients on the masters, where :meth:`master_params` finds them, until the
    next step or ``zero_grad``: clip or edit them there, for a step after ``p.grad`` was changed is
    a ``RuntimeError``. Made from the parameter at the first use, saved in ``state_dict``.
    Whatever else writes to the parameter from then on is lost to the next step, unless it writes
    to the master or drops it (``del optimizer.state[p]["master_param"]``).

    **Layouts.** Parameters, gradients and states may be laid out in memory each in its own way;
    where they differ, a step makes copies. Parameters may share storage, one beside another or
    interleaved. Which of two updates an element of both of them gets is not defined.

    **Ranks.** Of a ``DTensor``, each rank steps its part, to the same bits as one process would the
    whole. Overflow and norm are those of all ranks of the meshes: an all-reduce in each control
    point that judges or clips, which every rank has to call, with gradients or without. What ranks
    hold alike, ordinary parameters beside DTensors too, counts once in the norm.

    Attributes:
        rule: the mathematics; see :class:`ampopt_kernels.Rule`.
    """

    rule: ClassVar[Rule]
    sparse_gradients: ClassVar[bool] = False
    """Whether the torch base class takes sparse gradients, in whose case its step is used."""

    _step_supports_amp_scaling = torch_scaler.LeftToStep()  # the step below heeds what is left
    _has_own_step: bool = False
    _request: Request | None = None
    _decision: Decision | None = None
    _plan: Plan | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Treat a subclass that overrides ``step`` as one with an ordinary ``step``.

        Only the step below can be told to skip; any other is skipped around.
        """
        super().__init_subclass__(**kwargs)
        if beneath_hooks(cls.step) is not beneath_hooks(ElementwiseOptimizer.step):
            cls._has_own_step = True

    @uncompiled
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Perform one step, as torch's ``step`` does. Does not synchronize.

        Args:
            closure: reevaluates the model and returns the loss.

        Returns:
            What the closure returned, or ``None``.
        """
        loss = None
        left = torch_scaler.take(self, (closure,), {})
        try:
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            request = self._request or Request(check=False)
        finally:
            self._request = None  # whatever the closure does, it is for this step alone
        if left is not None:
            request = left.request
        self._step_as(request)
        if left is not None:
            left.put_back(self, self._decision)
        return loss

    def __getstate__(self) -> dict[str, Any]:
        """The state to copy or pickle, in which every tensor has memory of its own."""
        copied = super().__getstate__()
        copied["state"] = copied["state"].copy()
        for param, state in copied["state"].items():
            # Pickle would write the whole of the buffer that states of small parameters share
            # for each of them.
            if isinstance(state, dict):  # not what users keep there under other keys
                copied["state"][param] = {k: _on_its_own(v) for k, v in state.items()}
        return copied

    # --- what Optimizer does in two passes and a look, in one and none -------------------------

    def _attempt(self, request: Request) -> Attempt:
        if self._has_own_step:
            return super()._attempt(request)
        self._decision = None
        if is_watched(self, _STEP):
            self._request = request
            try:
                self.step()
            finally:
                self._request = None
        else:
            with torch.no_grad():
                self._step_as(request)
            self._opt_called = True  # where torch's schedulers look for a step before theirs
        return Attempt(self._decision)

    @torch.no_grad()
    def _judge(self, request: Request) -> Decision | None:
        if self._has_own_step:
            return super()._judge(request)
        if self._needs_torch():
            decision = super()._judge(request)
            self._request = Request(check=False)
            return decision
        gradients.check(self.param_groups)
        judged = replace(request, max_norm=None)
        agreement = agreement_on(judged, self.param_groups, self.process_group)
        holders, held = self._holders(written=False), self._held_by_devices
        if holders:
            decision = judge_held(holders, judged, agreement, write=False, uploads=held)
        else:
            decision = decided_elsewhere(judged, agreement, self._home)
        if decision is None:
            self._note_norm(request, None)
            return None
        # The gradients stay scaled; the step that follows unscales and clips as it reads them.
        self._request = Request(
            scale=request.scale, check=False, max_norm=request.max_norm, write=request.write
        )
        return decision

    def _refuse_gradients(self) -> None:
        gradients.check(self.param_groups)
        self._warn_of_float16()
        if not (self._needs_torch() or self._has_own_step):
            check_plannable(self)
        else:
            self._check_dtypes()
            self._refuse_float16()

    def _unchanged_until_done(self) -> Snapshot | None:
        # The step above evaluates a closure before it updates anything.
        return super()._unchanged_until_done() if self._has_own_step else None

    @property
    def _skip_flag(self) -> Tensor | None:
        if self._has_own_step or self._decision is None:
            return super()._skip_flag
        return self._decision.skip

    def _left_scaled_by(self) -> Tensor | None:
        return None if self._request is None else self._request.scale

    def _holders(self, *, written: bool) -> list[tuple[int, Tensor]]:
        if written:
            self._needs_torch()  # refuses sparse gradients where the step would
        return super()._holders(written=written)

    # --- the parts ---------------------------------------------------------------------------

    def _step_as(self, request: Request) -> None:
        """Step, or skip, with what is in the gradients."""
        self._refuse_edited()
        self._decision = None  # torch's own step is not to see that of the last one
        plan = self._planned()
        if plan is None:
            self._decision = self._step_as_torch(request)
        else:
            self._decision = self._run(plan, request)
        self._drop_master_gradients()

    def _planned(self) -> Plan | None:
        """What this step works on; ``None`` if torch's own step has to do it."""
        plan = self._plan
        if plan is not None and plan.renew(self):
            return plan
        self._warn_of_float16()
        if self._needs_torch():
            return None
        self._plan = plan = Plan(self)
        return plan

    def _run(self, plan: Plan, request: Request) -> Decision | None:
        """One step over all parameters with gradients. ``None`` if no rank has any."""
        agreement = plan.agreement if request.check or request.max_norm is not None else None
        if not plan.works:
            decision = decided_elsewhere(request, agreement, self._home)
            self._note_norm(request, decision)
            return decision
        if agreement is not None:
            request = replace(request, agree=ranks.Vote(agreement))
        plan.take_hyper(self)
        before = request.write and plan.writes_gradients
        decision = run(backend_for, plan.works, replace(request, write=before))
        plan.finish()
        if request.write and not before:
            self._unscale_used(request)
        self._note_norm(request, decision)
        return decision

    def _unscale_used(self, request: Request) -> None:
        """Unscale the gradients in place, in their own dtype: the step has read them already."""
        present = gradients.present(self.param_groups)
        unscale = Request(scale=request.scale, check=False)
        judge_held(present, unscale, None, write=True, uploads=self._held_by_devices)

    def _state_of(self, param: Tensor, flags: tuple[bool, ...]) -> dict[str, Any]:
        """The state of ``param``, made where it is missing, and on the device where it is not."""
        if not self.rule.has_state(flags):
            return self.state.get(param, {})  # as in torch's, where there is nothing to keep
        state = self.state[param]
        master = state.get(MASTER)
        like = param if master is None else master
        for part in self.rule.state_for(flags):
            value = state.get(part.name)
            if value is not None and ranks.is_spread(value) != ranks.is_spread(param):
                raise RuntimeError(
                    f"{part.name} of {gradients.name_of(self.param_groups, param)} is a "
                    f"{type(value).__name__}, which the parameter is not: load it with "
                    "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict, which "
                    "places states as their parameters"
                )
            if value is not None and master is not None:
                # From torch, or from a run without masters: in the parameter's dtype.
                state[part.name] = value.to(master.dtype)
            if value is None:
                mine = torch.empty_like(ranks.local(like), memory_format=torch.preserve_format)
                real(mine).fill_(self._initial(part, param))
                state[part.name] = ranks.spread_like(mine, like)
        scalars = self.rule.scalar_state_for(flags)
        dtype = _scalar_dtype([state.get(part.name) for part in scalars], param.device)
        for part in scalars:
            value = state.get(part.name)
            if value is None:
                value = torch.zeros((), dtype=dtype, device=param.device)
                value.fill_(self._initial(part, param))
            state[part.name] = _scalar(value, dtype, param.device)
        return state

    def _initial(self, part: State, param: Tensor) -> Any:
        """The value of ``part`` before the first step. Reads no device tensor."""
        if not isinstance(part.init, str):
            return part.init
        group = next(g for g in self.param_groups if any(p is param for p in g["params"]))
        value = group[part.init]
        return value.detach().reshape(()) if isinstance(value, Tensor) else value

    def _needs_torch(self) -> bool:
        """Whether this step has to be torch's own: differentiable, or sparse.

        Raises:
            RuntimeError: gradients are such, and neither the rule nor torch takes them.
        """
        if self.defaults.get("differentiable"):
            return True
        for index, param in gradients.present(self.param_groups):
            assert param.grad is not None
            if param.grad.layout != torch.strided:
                masters = has_masters(self.param_groups[index])
                if self.sparse_gradients and not masters:
                    return True
                how = " with master_weights=True" * (self.sparse_gradients and masters)
                raise RuntimeError(
                    f"{type(self).__name__}{how} does not support sparse gradients, which "
                    f"{gradients.name_of(self.param_groups, param)} has; make the layer with "
                    "sparse=False, or choose an optimizer that takes them"
                )
        return False

    def _step_as_torch(self, request: Request) -> Decision | None:
        """Take torch's own step, unless the request says to skip it; see ``skip_by``."""
        decision = self._unscale_in_place(request)
        step: Any = super().step
        # Hooks of torch's class have run around ours.
        step = functools.partial(beneath_hooks(step.__func__), self)
        if decision is None:
            step()
        else:
            self._skipper.step(self, step, decision.skip)
        return decision


_STEP = ElementwiseOptimizer.step


def _on_its_own(value: Any) -> Any:
    """``value``; if a tensor that is part of a larger buffer, a copy."""
    return value.detach().clone() if isinstance(value, Tensor) and shares_storage(value) else value


def _scalar_dtype(values: list[Any], device: torch.device) -> torch.dtype:
    """Of the scalar states of a parameter: torch's, float64 where that is the default dtype."""
    kept = [value.dtype for value in values if isinstance(value, Tensor)]
    wide = torch.float64 in (kept or [torch.get_default_dtype()])
    return widest(device) if wide else torch.float32


def _scalar(value: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A scalar state, from wherever a checkpoint of torch's may keep it."""
    if not isinstance(value, Tensor):
        return torch.full((), float(value), dtype=dtype, device=device)
    if value.device == device and value.dtype == dtype and value.ndim == 0:
        return value
    return carried(value.detach().reshape(()), device, dtype)
