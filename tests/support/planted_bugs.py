"""Bugs, one at a time, in otherwise correct optimizers.

Every one is a bug that a library had, or that is easily made. ``BUGS`` says which invariant of
``ampopt.testing.OptimizerContract`` is meant for it.
"""
# A bug may well be in the signature of a method.
# pyright: reportIncompatibleMethodOverride=false, reportOptionalMemberAccess=false
# pyright: reportOptionalOperand=false, reportCallIssue=false

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

import ampopt
from ampopt.testing import strategies
from ampopt_kernels import Rule, State, jit, tl
from support.authored_optimizers import EVEN, Coded, Decayed, OwnHooks, Selecting
from support.optimizers import Plain

__all__ = ["BUGS", "Bug", "planted"]


class Bug(NamedTuple):
    """A bug in an otherwise correct optimizer.

    Attributes:
        cls: the optimizer.
        what: the bug, in words.
        caught_by: the invariant meant for it, without ``test_``.
        claims: claims of its contract that differ from the defaults.
    """

    cls: type[Any]
    what: str
    caught_by: str
    claims: dict[str, Any]


BUGS: list[Bug] = []


def planted(what: str, caught_by: str, **claims: Any) -> Callable[[type[Any]], type[Any]]:
    """Add a class to the bugs."""

    def enter(cls: type[Any]) -> type[Any]:
        BUGS.append(Bug(cls, what, caught_by, claims))
        return cls

    return enter


# Which elements are stepped.


@planted("leaves out the last element of each parameter", "elements_train_alike")
class LeavesOut(Decayed):
    def one(self, p, g, state, lr, group):
        before = p.clone()
        super().one(p, g, state, lr, group)
        if p.numel():
            p[(-1,) * p.ndim] = before[(-1,) * p.ndim]


# Which steps are skipped.


@planted("skips on a flag of exactly 1 (torch's fused kernels)", "a_sum_of_flags_skips")
class FlagOfOne(Selecting):
    def skips(self, flag, p):
        return flag == 1


@planted(
    "each group looks at its own gradients only (apex, Transformer Engine)",
    "a_skipped_step_changes_nothing",
)
class FlagOfGroup(Selecting):
    def skips(self, flag, p):
        group = next(g for g in self.param_groups if any(q is p for q in g["params"]))
        grads = [q.grad for q in group["params"] if q.grad is not None]
        finite = torch.stack([g.isfinite().all() for g in grads]).all()
        return (flag > 0) & ~finite


@planted(
    "looks at the first gradient only (the placements of ``grads[0]``, for DTensors in torch)",
    "a_skipped_step_changes_nothing",
)
class FirstGradient(Selecting):
    def skips(self, flag, p):
        grads = [q.grad for g in self.param_groups for q in g["params"] if q.grad is not None]
        return (flag > 0) & ~grads[0].isfinite().all()


@planted(
    "combines the flags of gradients by XOR, so that two of them cancel",
    "a_skipped_step_changes_nothing",
)
class FlagsThatCancel(Selecting):
    def skips(self, flag, p):
        grads = [q.grad for g in self.param_groups for q in g["params"] if q.grad is not None]
        bad = torch.stack([~g.isfinite().all() for g in grads])
        return (flag > 0) & (bad.sum() % 2 == 1)


class Judging(OwnHooks):
    """Tests gradients itself; ``judge`` says whether one, still scaled, is finite."""

    def unscale(self, grads_scaled_by=None):
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        fit = all(bool(self.judge(g)) for g in grads)
        result = super().unscale(grads_scaled_by)
        if grads_scaled_by is not None and grads:
            result.found_inf.fill_(0.0 if fit else 1.0)
        return result

    def judge(self, grad):
        raise NotImplementedError


@planted("looks for infinities, not for NaN", "a_skipped_step_changes_nothing")
class NotNan(Judging):
    def judge(self, grad):
        return not grad.isinf().any()


@planted("judges scaled gradients (GradScaler)", "gradients_are_judged_after_unscaling")
class JudgedScaled(Judging):
    def judge(self, grad):
        return grad.isfinite().all()


@planted("finds overflows by a sum, which overflows itself", "a_finite_gradient_is_never_skipped")
class BySum(Judging):
    def judge(self, grad):
        return grad.square().sum().isfinite()


@planted(
    "does not test the scale; an infinite one makes gradients a finite 0",
    "a_scale_on_the_device_that_is_no_scale_skips",
)
class ScaleUnseen(OwnHooks):
    def unscale(self, grads_scaled_by=None):
        result = super().unscale(grads_scaled_by)
        if isinstance(grads_scaled_by, Tensor):
            result.found_inf.fill_(0.0)
        return result


@planted(
    "hands out a copy of its flag, so a sum over ranks is lost",
    "ranks_that_add_up_their_flags_agree",
)
class FlagCopied(OwnHooks):
    def unscale(self, grads_scaled_by=None):
        result = super().unscale(grads_scaled_by)
        return result._replace(found_inf=result.found_inf.clone())


# What a skipped step leaves behind.


@planted(
    "leaves its buffer uninitialised in a skipped step (torch's fused SGD)",
    "training_goes_on_as_if_skipped_steps_had_never_been",
)
class Uninitialised(Selecting):
    def state_of(self, p):
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros(())
            state["buffer"] = torch.empty_like(p)
            state["first"] = torch.ones(())
        return state

    def one(self, p, g, skip, lr):
        state = self.state_of(p)
        old = torch.where(state["first"] > 0, 0.0, state["buffer"])
        state["first"].zero_()
        state["step"] += (~skip).to(torch.float32)
        new = old * 0.5 + g
        state["buffer"].copy_(torch.where(skip, state["buffer"], new))
        p.copy_(torch.where(skip, p, p - lr * new))


@planted("counts a skipped step", "a_skipped_step_changes_nothing")
class CountedSkip(Selecting):
    def one(self, p, g, skip, lr):
        super().one(p, g, skip, lr)
        self.state[p]["step"] += skip.to(torch.float32)


@planted(
    "advances the step count by the flag of the step before (apex, Transformer Engine)",
    "a_skipped_step_changes_nothing",
)
class LateCount(Selecting):
    def one(self, p, g, skip, lr):
        state = self.state_of(p)
        before = state["step"].clone()
        super().one(p, g, skip, lr)
        last = state.setdefault("last", torch.zeros(()))
        state["step"].copy_(before + (1 - last))
        last.copy_(skip.to(torch.float32))


@planted(
    "zeroes gradients in place of skipping, so momentum and decay go on (an RFC of PyTorch/XLA)",
    "a_skipped_step_changes_nothing",
)
class Zeroed(Selecting):
    def one(self, p, g, skip, lr):
        super().one(p, torch.where(skip, 0.0, g), torch.zeros_like(skip), lr)


@planted("draws random numbers before it knows whether it skips", "a_skipped_step_changes_nothing")
class DrawsFirst(Selecting):
    def one(self, p, g, skip, lr):
        torch.rand(())
        super().one(p, g, skip, lr)


@planted("runs no hooks in a step that it skips", "step_hooks_run_on_every_attempt")
class NoHooks(OwnHooks):
    def step_after_unscale(self, closure=None, *args, **keywords):
        pending = self.pending
        if closure is None and pending is not None and pending.found_inf > 0:
            self._ampopt.phase.end()
            return ampopt.StepResult(None, *pending)
        return super().step_after_unscale(closure, *args, **keywords)


@planted("raises an error if no parameter has a gradient", "no_gradients_is_no_step")
class NeedsGradients(OwnHooks):
    def unscale(self, grads_scaled_by=None):
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        torch.stack([g.isfinite().all() for g in grads])
        return super().unscale(grads_scaled_by)


@planted("counts a step without gradients towards growth", "no_gradients_is_no_step")
class GrowsOnNothing(OwnHooks):
    def unscale(self, grads_scaled_by=None):
        found_inf, scale = super().unscale(grads_scaled_by)
        if scale is grads_scaled_by and isinstance(scale, ampopt.DynamicLossScale):
            scale = scale.next(0.0)
            self._ampopt.phase.pending = replace(self._ampopt.phase.pending, next_scale=scale)
        return ampopt.Unscaled(found_inf, scale)


# What scaling changes.


@planted("adds its epsilon to gradients while they are scaled", "a_power_of_two_changes_no_bit")
class EpsilonFirst(OwnHooks):
    def unscale(self, grads_scaled_by=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.add_(2.0**-8)
        return super().unscale(grads_scaled_by)

    @torch.no_grad()
    def step(self, closure=None):
        if self.pending is None and closure is None:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.add_(2.0**-8)
        return super().step(closure)


@planted("unscales twice if a step is two calls (GradScaler, given a wrapper)", "split_is_joined")
class Twice(Plain):
    def step_after_unscale(self, closure=None, *args, **keywords):
        pending = self._ampopt.phase.pending
        if closure is None and pending is not None and pending.scale is not None:
            scale = float(pending.scale.value)
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.div_(scale)
        return super().step_after_unscale(closure, *args, **keywords)


@planted(
    "multiplies by the reciprocal in float16, which is 0 for a large scale",
    "unscale_divides_gradients_by_the_scale",
)
class HalfReciprocal(OwnHooks):
    def unscale(self, grads_scaled_by=None):
        if grads_scaled_by is None:
            return super().unscale(None)
        inverse = (1 / torch.tensor(float(grads_scaled_by))).half()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(inverse * float(grads_scaled_by))
        return super().unscale(grads_scaled_by)


@planted("clips gradients that are still scaled", "clipping_does_not_depend_on_the_scale")
class ClipsScaled(Plain):
    def unscale_and_step(self, closure=None, grads_scaled_by=None, *, max_norm=None, **keywords):
        if max_norm is None or closure is not None:
            return super().unscale_and_step(closure, grads_scaled_by, max_norm=max_norm, **keywords)
        params = [p for group in self.param_groups for p in group["params"]]
        self.grad_norm = torch.nn.utils.clip_grad_norm_(params, max_norm)
        return super().unscale_and_step(None, grads_scaled_by)


@planted("lengthens gradients that are shorter than ``max_norm``", "max_norm_is_clip_grad_norm")
class Lengthens(OwnHooks):
    def unscale_and_step(self, closure=None, grads_scaled_by=None, *, max_norm=None, **keywords):
        if max_norm is None or closure is not None:
            return super().unscale_and_step(closure, grads_scaled_by, max_norm=max_norm, **keywords)
        self.unscale(grads_scaled_by)
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        self.grad_norm = torch.nn.utils.get_total_norm(grads)
        for grad in grads:
            grad.mul_(max_norm / self.grad_norm)
        return self.step_after_unscale()


@planted(
    "returns a next scale that has lost its floor (jmp)",
    "the_scale_follows_its_schedule_within_its_bounds",
    shapes=st.just(()),  # nothing about shapes and groups has to do with it
    several_groups=False,
)
class NoFloor(Plain):
    def unscale_and_step(self, *args, **keywords):
        result = super().unscale_and_step(*args, **keywords)
        if isinstance(result.scale, ampopt.DynamicLossScale):
            state = {**result.scale.state_dict(), "min_scale": 2.0**-126}
            result.scale.load_state_dict(state)
        return result


# Where state is kept.


@planted("keeps a buffer in an attribute", "saving_and_loading_at_any_point_changes_nothing")
class InAttribute(Plain):
    def update(self):
        buffers = self.__dict__.setdefault("buffers", {})
        for index, p in enumerate(p for group in self.param_groups for p in group["params"]):
            if p.grad is not None:
                buffer = buffers.setdefault(index, torch.zeros_like(p))
                buffer.mul_(0.5).add_(p.grad)
                p.sub_(0.125 * buffer)


@planted("shares its buffers with its copies", "a_deepcopy_goes_its_own_way")
class SharedBuffers(Plain):
    def __deepcopy__(self, memo):
        other = type(self)(copy.deepcopy([dict(g) for g in self.param_groups], memo))
        for group, copied in zip(self.param_groups, other.param_groups, strict=True):
            for p, q in zip(group["params"], copied["params"], strict=True):
                other.state[q] = self.state[p]
        return other


@planted("has one step count for all parameters", "a_parameter_trains_as_if_alone")
class SharedCount(Plain):
    def update(self):
        params = [p for group in self.param_groups for p in group["params"]]
        count = self.state[params[0]]
        count["count"] = count.get("count", 0) + 1
        for p in params:
            if p.grad is not None:
                p.sub_(p.grad / count["count"])


@planted(
    "turns off ``requires_grad`` to write to parameters, and leaves it off", "no_scale_is_step"
)
class TurnsOffGradients(Plain):
    def update(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.requires_grad_(False).sub_(group["lr"] * p.grad)


@planted("moves parameters by momentum without a gradient", "parameters_without_gradients_stay")
class MovesOn(Plain):
    def update(self):
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("buffer", torch.zeros_like(p))
                buffer.mul_(0.5)
                if p.grad is not None:
                    buffer.add_(p.grad)
                p.sub_(group["lr"] * buffer)


@planted(
    "lets one parameter's numbers leak into the next one's",
    "order_and_groups_of_parameters_do_not_matter",
)
class CarriesOver(Plain):
    def update(self):
        ratio = 1.0
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(ratio * group["lr"] * p.grad)
                    ratio = 0.5 if bool((p.grad > 0).any()) else 1.0


@planted(
    "writes to ``p.reshape(-1)``, a copy where ``p`` is not contiguous",
    "layout_does_not_matter",
    shapes=strategies.shapes(6, min_dims=2, max_dims=2, min_side=1),
)
class Reshapes(Plain):
    def update(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.detach().reshape(-1).sub_(group["lr"] * p.grad.reshape(-1))


@planted("takes the largest element, which an empty parameter lacks", "no_scale_is_step")
class NeedsElements(Plain):
    def update(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad / (p.grad.abs().max() + 1))


@planted(
    "divides by the norm of a gradient, which may be 0",
    "finite_gradients_leave_finite_parameters",
)
class Normalizes(Plain):
    def update(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.numel():
                    p.sub_(group["lr"] * p.grad / p.grad.norm())


@planted(
    "keeps its momentum in float16, which large gradients overflow",
    "finite_gradients_leave_finite_parameters",
)
class HalfMomentum(Plain):
    def update(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                old = state.get("buffer", torch.zeros_like(p, dtype=torch.float16))
                state["buffer"] = old * group["momentum"] + p.grad.half()
                p.sub_(group["lr"] * state["buffer"].to(p.dtype))


# What runs on CPUs alone.


@jit
def _squares(p, g, state, h, flags):
    mean = state[0] + 0.5 * (g**2 - state[0])
    return p - h[0] * g, (mean,)


@planted("writes ``g ** 2`` in a rule, which no GPU backend compiles", "its_rule_compiles_for_gpus")
class Squares(ampopt.ElementwiseOptimizer):
    rule = Rule(update=_squares, hyper=("lr",), state=(State("mean"),))

    def __init__(self, params):
        super().__init__(params, {"lr": 0.125})


# How states are kept in few bits.


@planted(
    "stores small second moments as 0 (FlashOptim, torchao)", "small_states_are_near_full_ones"
)
class EvenSquares(Coded):
    rule = replace(Coded.rule, state=(State("mean"), State("square", positive=True, codec=EVEN)))


@jit
def _cut_off(x, u):
    return tl.floor(x * 127.0)


@planted("cuts its codes off, where it should round them", "small_states_are_near_full_ones")
class CutsOff(Coded):
    codec = replace(EVEN, encode=_cut_off)
    rule = replace(Coded.rule, state=(State("mean", codec=codec), State("square", positive=True)))


@planted("declares a mean as positive", "small_states_are_near_full_ones")
class PositiveMean(Coded):
    rule = replace(Coded.rule, state=(State("mean", positive=True), State("square", positive=True)))


@planted(
    "leaves the scales of its codes out of checkpoints",
    "saving_and_loading_at_any_point_changes_nothing",
)
class Unscaled(Coded):
    def state_dict(self):
        state_dict = super().state_dict()
        states = {
            key: {name: value for name, value in state.items() if not name.endswith("_scale")}
            for key, state in state_dict["state"].items()
        }
        return {**state_dict, "state": states}


@planted(
    "advances the random numbers of its rounding in a skipped step",
    "a_skipped_step_changes_nothing",
)
class DrawsAnyway(Coded):
    skip_by = "step"

    def step(self, closure=None):
        loss = super().step(closure)
        for state in self.state.values():
            if "rounding_key" in state:
                state["rounding_key"] += 1
        return loss


# What calls do.


@planted(
    "keeps an unscale that ``zero_grad`` should discard", "zero_grad_discards_what_was_unscaled"
)
class KeepsPending(Plain):
    def zero_grad(self, set_to_none=True):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.zero_()


@planted("lets gradients be unscaled twice", "calls_out_of_order_are_refused")
class UnscalesAgain(Plain):
    def unscale(self, grads_scaled_by=None):
        self._ampopt.phase.pending = None
        return super().unscale(grads_scaled_by)


@planted("adds weight decay to ``p.grad`` in place", "a_step_leaves_gradients_alone")
class DecaysGradient(Decayed):
    def gradient(self, p, group):
        return p.grad.add_(p, alpha=0.25)


@planted("keeps ``p.grad`` itself as the last gradient", "a_step_leaves_gradients_alone")
class KeepsLastGradient(Decayed):
    def one(self, p, g, state, lr, group):
        last = state.get("last", g)
        super().one(p, g + (g - last) / 2, state, lr, group)
        state["last"] = g


@planted(
    "keeps the learning rate that it was made with", "a_new_learning_rate_is_that_of_the_next_step"
)
class KeepsRate(Decayed):
    def __init__(self, params, lr=0.125, decay=0.25):
        super().__init__(params, lr, decay)
        self.lrs = [group["lr"] for group in self.param_groups]

    def lr_of(self, group):
        return self.lrs[[g is group for g in self.param_groups].index(True)]


@planted(
    "uses the learning rate of the first group for all groups",
    "each_group_has_its_own_learning_rate",
)
class FirstRate(Decayed):
    def lr_of(self, group):
        return self.param_groups[0]["lr"]


@planted(
    "decays by a rate of its own, not by the learning rate", "a_learning_rate_of_zero_moves_nothing"
)
class OwnDecay(Decayed):
    def one(self, p, g, state, lr, group):
        p.mul_(1 - 2.0**-6)
        super().one(p, g, state, lr, group)


@planted(
    "ignores the scale that a GradScaler leaves to it", "a_loop_for_grad_scaler_gives_the_same"
)
class LeavesScaled(Plain):
    _step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure=None):
        if getattr(self, "found_inf", None) is not None and self.found_inf > 0:
            return None
        self.update()
        return None


@planted("looks at a tensor in its step", "no_control_point_waits_for_the_device", sync_free=True)
class Looks(Selecting):
    def one(self, p, g, skip, lr):
        if not skip.item():
            super().one(p, g, skip, lr)


# Closures.


@planted(
    "evaluates a closure after the check, and only once (GradScaler, with a closure by position)",
    "a_replay_is_a_start_with_the_smaller_scale",
)
class ClosureUnchecked(OwnHooks):
    def unscale_and_step(self, closure=None, grads_scaled_by=None, **keywords):
        if closure is None:
            return super().unscale_and_step(None, grads_scaled_by, **keywords)
        loss = closure(grads_scaled_by)
        number = float(grads_scaled_by)
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.div_(number)
        self.step()
        return ampopt.StepResult(loss, torch.zeros(()), grads_scaled_by)


@planted(
    "runs a closure with gradients disabled, as they are in its step",
    "a_scale_changes_nothing_for_a_closure",
)
class WithoutGradients(Plain):
    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else closure()
        self.update()
        return loss


@planted("returns no loss from ``step(closure)``", "a_scale_changes_nothing_for_a_closure")
class ReturnsNoLoss(Plain):
    def step(self, closure=None):
        super().step(closure)


@planted(
    "without a closure, steps with the gradients of the last one",
    "a_closure_is_gradients_and_a_step",
)
class KeepsGradients(Plain):
    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        params = [p for group in self.param_groups for p in group["params"]]
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            self.last_grads = {p: p.grad for p in params}
        for p in params:
            p.grad = self.__dict__.get("last_grads", {}).get(p, p.grad)
        self.update()
        return loss


@planted(
    "moves parameters before the closure, and leaves them there if it fails (SAM)",
    "a_failed_closure_changes_nothing",
)
class Perturbs(Plain):
    def unscale_and_step(self, closure=None, grads_scaled_by=None, **keywords):
        if closure is None:
            return super().unscale_and_step(None, grads_scaled_by, **keywords)
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(0.5)
        return super().unscale_and_step(closure, grads_scaled_by, **keywords)


@planted("replays a closure for ever (the sketch of an RFC)", "replays_end")
class Endless(Plain):
    def unscale_and_step(self, closure=None, grads_scaled_by=None, *, max_replays=100, **keywords):
        # For ever, but for a test's patience.
        return super().unscale_and_step(
            closure, grads_scaled_by, max_replays=max_replays + 5, **keywords
        )


@planted("returns the scaled loss", "a_scale_changes_nothing_for_a_closure")
class ScaledLoss(Plain):
    def unscale_and_step(self, closure=None, grads_scaled_by=None, **keywords):
        result = super().unscale_and_step(closure, grads_scaled_by, **keywords)
        if closure is None or grads_scaled_by is None:
            return result
        return result._replace(loss=result.loss * float(grads_scaled_by))


# What not every optimizer takes.


@planted(
    "judges the real parts of complex gradients only",
    "complex_parameters",
    complex_parameters=True,
)
class RealPart(Judging):
    def judge(self, grad):
        return (grad.real if grad.is_complex() else grad).isfinite().all()


# What one call after another does. Sequences take long to shrink, so there is little to them else.

FEW: dict[str, Any] = {
    "shapes": st.just(()),
    "dtypes": (torch.float32,),
    "on_device": (False,),
    "several_groups": False,
    "accumulates": False,
    "checkpoints": False,
    "deepcopies": False,
}
"""Claims of fewer kinds of calls, of which those that show a bug come together sooner."""


@planted(
    "keeps the groups that it has seen, which ``load_state_dict`` replaces",
    "any_sequence_of_calls",
    **{**FEW, "checkpoints": True, "deepcopies": True},
)
class KeepsGroups(Plain):
    def update(self):
        if len(self.__dict__.get("groups", ())) != len(self.param_groups):
            self.groups = list(self.param_groups)
        for group in self.groups:
            for p in group["params"]:
                if p.grad is not None:
                    buffer = self.state[p].setdefault("buffer", torch.zeros_like(p))
                    buffer.mul_(0.5).add_(p.grad)
                    p.sub_(group["lr"] * buffer)


@planted("uses the scale of the last step if it gets none", "any_sequence_of_calls", **FEW)
class LastScale(OwnHooks):
    def unscale_and_step(self, closure=None, grads_scaled_by=None, **keywords):
        if closure is not None:
            return super().unscale_and_step(closure, grads_scaled_by, **keywords)
        if grads_scaled_by is not None:
            self.last = float(grads_scaled_by)
            return super().unscale_and_step(None, grads_scaled_by, **keywords)
        result = super().unscale_and_step(None, self.__dict__.get("last"), **keywords)
        return result._replace(scale=None)


@planted("ignores edits of gradients that it has unscaled", "any_sequence_of_calls", **FEW)
class Unedited(Plain):
    def unscale(self, grads_scaled_by=None):
        result = super().unscale(grads_scaled_by)
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.unscaled = {p: p.grad.clone() for p in params}
        return result

    def step_after_unscale(self, *args, **keywords):
        if self.pending is not None:
            for p, grad in self.unscaled.items():
                p.grad = grad
        return super().step_after_unscale(*args, **keywords)


@planted(
    "keeps the constant scale that it was given first",
    "any_sequence_of_calls",
    **FEW,
)
class FirstScale(OwnHooks):
    def unscale(self, grads_scaled_by=None):
        if isinstance(grads_scaled_by, (float, ampopt.StaticLossScale)):
            grads_scaled_by = self.__dict__.setdefault("constant", grads_scaled_by)
        return super().unscale(grads_scaled_by)


@planted(
    "adds up gradients that still carry their scale",
    "any_sequence_of_calls",
    **{**FEW, "accumulates": True},
)
class AddsUpScaled(Plain):
    def accumulate(self, grads_scaled_by=None, **keywords):
        return super().accumulate(None, **keywords)._replace(scale=grads_scaled_by)


@planted(
    "moves parameters in a second call, even after an overflow",
    "any_sequence_of_calls",
    **FEW,
    calls=("look_ahead",),
)
class MovesOnAnything(OwnHooks):
    @torch.no_grad()
    def look_ahead(self, grads_scaled_by=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / float(grads_scaled_by or 1.0))
        result = self.unscale(grads_scaled_by)
        self.zero_grad()
        return result


@planted(
    "steps in evaluation mode",
    "any_sequence_of_calls",
    **FEW,
    modes=("train", "eval"),
)
class StepsInAnyMode(Plain):
    def train(self):
        self.trains = True

    def eval(self):
        self.trains = False


@planted(
    "keeps its mode although a checkpoint has another",
    "any_sequence_of_calls",
    **{**FEW, "checkpoints": True},
    modes=("train", "eval"),
)
class KeepsMode(StepsInAnyMode):
    @torch.no_grad()
    def step(self, closure=None):
        if not self.__dict__.get("trains", True):
            raise RuntimeError("call train() first")
        return super().step(closure)


@planted(
    "moves its parameters again when switched to the mode that it is in",
    "any_sequence_of_calls",
    **FEW,
    modes=("train", "eval"),
)
class SwitchesAgain(KeepsMode):
    @torch.no_grad()
    def eval(self):
        super().eval()
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.5)

    @torch.no_grad()
    def train(self):
        super().train()
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(2.0)


@planted(
    "uses its first learning rate if that of a group is a tensor",
    "any_sequence_of_calls",
    **FEW,
    tensor_learning_rates=True,
)
class TakesNumbers(Decayed):
    def lr_of(self, group):
        return self.defaults["lr"] if isinstance(group["lr"], Tensor) else group["lr"]


@planted(
    "ignores ``max_norm`` under a scale",
    "any_sequence_of_calls_is_near_float64",
    **FEW,
    reference=lambda self, params: Decayed(params),
)
class ForgetsToClip(Decayed):
    def unscale_and_step(self, closure=None, grads_scaled_by=None, *, max_norm=None, **keywords):
        if grads_scaled_by is not None:
            max_norm = None
        return super().unscale_and_step(closure, grads_scaled_by, max_norm=max_norm, **keywords)


@planted(
    "begins an added group at the step count of the others",
    "any_sequence_of_calls_is_near_float64",
    **{**FEW, "several_groups": True},
    reference=lambda self, params: Decayed(params),
)
class CountsOn(Decayed):
    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        counts = [state["step"] for state in self.state.values()]
        if counts:
            for p in self.param_groups[-1]["params"]:
                self.state_of(p)["step"] += counts[0]


@planted(
    "forgets all states when a group is added",
    "any_sequence_of_calls",
    **{**FEW, "several_groups": True},
)
class BeginsAgain(Decayed):
    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        self.state.clear()


@planted(
    "divides by its bias correction in bfloat16",
    "any_sequence_of_calls_is_near_float64",
    **FEW,
    reference=lambda self, params: Decayed(params),
)
class CoarseCorrection(Decayed):
    def one(self, p, g, state, lr, group):
        state["step"] += 1
        state["mean"].lerp_(g, 0.25)
        state["square"].mul_(0.5).addcmul_(g, g, value=0.5)
        size = (lr / (1 - 0.75 ** state["step"])).bfloat16()
        p.mul_(1 - lr * group["decay"])
        p.sub_(size * state["mean"] / (state["square"].sqrt() + 2.0**-20))


@planted(
    "reads the learning rate of float64 parameters as a float32",
    "any_sequence_of_calls_is_near_float64",
    **{**FEW, "dtypes": (torch.float64,)},
    reference=lambda self, params: Decayed(params, lr=0.1),
)
class SingleRate(Decayed):
    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)

    def lr_of(self, group):
        return torch.tensor(group["lr"], dtype=torch.float32).item()
