"""Optimizers that are a rule: one step is a few launches, and no host waits for any of them."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from ampopt._step import torch_scaler
from ampopt._step.by_rule import ByRule, RuleSteps
from ampopt._step.checks import check_loaded, check_options, check_rule
from ampopt._step.closures import evaluated
from ampopt._step.dtensor import is_spread
from ampopt._step.masters import has_masters, needs_master
from ampopt._step.ordinary import Ordinary
from ampopt._step.param_rounding import PARAM_ROUNDING, is_stochastic
from ampopt._step.rule_state import shares_storage
from ampopt._step.step_hooks import beneath_hooks
from ampopt._step.stepping import Attached, Stepping
from ampopt._step.torch_private import uncompiled
from ampopt._step.variants import kind_of
from ampopt.loss_scale.arguments import request_for, successor_of
from ampopt.optimizer import Optimizer
from ampopt.results import Unscaled
from ampopt_kernels.rule import MASTER, Rule
from ampopt_kernels.step import Request

__all__ = ["ElementwiseOptimizer"]

_OPTIONS = {
    "master_weights": ("master_weights=True", has_masters),
    PARAM_ROUNDING: ("param_rounding='stochastic'", is_stochastic),
}
"""The options of param groups that torch's lack: how each is used, and whether a group does."""


def _stepping(optimizer: Any, *, own_step: bool = False, **facts: Any) -> Stepping:
    """How an optimizer steps that has a rule: by it, unless its class has a step around it.

    Args:
        optimizer: to step.
        own_step: whether the step of its class is another than that of ``ElementwiseOptimizer``.
            Only that one can be told to skip; any other is skipped around.
        facts: see :class:`RuleSteps`.
    """
    rule = RuleSteps(optimizer, _torchs_step, **facts)
    if own_step:
        return Ordinary(optimizer, rule=rule)
    return ByRule(optimizer, rule, beneath_hooks(ElementwiseOptimizer.step))


def _torchs_step(optimizer: Any) -> Any:
    """The ``step`` of the class of torch's that ``optimizer`` is of, too."""
    behind: Any = super(ElementwiseOptimizer, optimizer)
    return behind.step


class ElementwiseOptimizer(Optimizer):
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

    **Stochastic rounding.** With ``param_rounding="stochastic"``, a bfloat16 parameter without a
    master is rounded up or down by chance after each step, so that on average it moves by what the
    step says, where steps below half of its last place would be lost. States are rounded to the
    nearest, and so are parameters of other dtypes. The chances follow from the place of the
    parameter in the optimizer, that of the element in it, and how many steps were taken, which the
    state has as ``rounding_key``: a skipped step takes none, a run repeats itself bit for bit, on
    every backend, and on any number of ranks that have shards of the first dimension.

    **Layouts.** Parameters, gradients and states may be laid out in memory each in its own way;
    where they differ, a step makes copies. Parameters may share storage, one beside another or
    interleaved. Which of two updates an element of both of them gets is not defined.

    **Ranks.** Of a ``DTensor``, each rank steps its part, to the same bits as one process would the
    whole. Overflow and norm are those of all ranks of the meshes: an all-reduce in each control
    point that judges or clips, which every rank has to call, with gradients or without. What ranks
    hold alike, ordinary parameters beside DTensors too, counts once in the norm.

    **Modes, and a step of one's own.** What a step has to be refused for, such as a mode that it
    does not belong to, :meth:`check_step` says. A ``step`` that a subclass defines around this one
    may do anything, so it is taken and skipped as an ordinary one, as :attr:`skip_by` says, and
    ``unscale_and_step`` unscales gradients in place before it; where what it does besides need not
    be skipped, say ``skip_by = "step"``, and the rule alone is, on the device.

    Attributes:
        rule: the mathematics; see :class:`ampopt_kernels.Rule`. Another one, put on the class or an
            instance, is what the next step runs.
    """

    rule: ClassVar[Rule]
    sparse_gradients: ClassVar[bool] = False
    """Whether the torch base class takes sparse gradients, in whose case its step is used."""

    _ampopt = Attached(_stepping)
    _step_supports_amp_scaling = torch_scaler.LeftToStep()  # the step below heeds what is left

    def __init__(
        self,
        *args: Any,
        master_weights: bool = False,
        param_rounding: str = "nearest",
        **kwargs: Any,
    ) -> None:
        """Make the optimizer.

        Args:
            *args: what the base classes take: ``params`` and ``defaults``, or as torch's optimizer.
            master_weights: keep a float32 master of each float16 and bfloat16 parameter; see the
                class. Also an option of a param group.
            param_rounding: ``"nearest"``, or ``"stochastic"`` for bfloat16 parameters without
                masters; see the class. Also an option of a param group.
            **kwargs: what the base classes take.

        Raises:
            TypeError: the class has no ``rule``; ``master_weights`` is no bool.
            ValueError: ``param_rounding`` is another, or does not go with ``differentiable``.
        """
        check_rule(getattr(self, "rule", None), type(self).__name__)
        check_options({"master_weights": master_weights, PARAM_ROUNDING: param_rounding})
        super().__init__(*args, **kwargs)
        options: dict[str, Any] = {"master_weights": True} if master_weights else {}
        if param_rounding != "nearest":
            options[PARAM_ROUNDING] = param_rounding
        if options:
            # Of groups that are added later, too.
            self.defaults = {**self.defaults, **options}
            for group in self.param_groups:
                group.update({**options, **group})
        for said, used in _OPTIONS.values():
            if self.defaults.get("differentiable") and any(map(used, self.param_groups)):
                raise ValueError(
                    f"{said} does not go with differentiable=True, which takes torch's own step: "
                    "leave one of them out"
                )

    @uncompiled
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Perform one step, as torch's ``step`` does. Does not synchronize.

        Args:
            closure: reevaluates the model and returns the loss.

        Returns:
            What the closure returned, or ``None``.
        """
        ours = self._ampopt
        left = torch_scaler.take(self, (closure,), {})
        try:
            self.check_step()
            loss = evaluated(closure)
            judged = None if ours.pending is None else ours.pending.decision
            request = ours.asked or Request(check=False, judged=judged)
        finally:
            ours.asked = None  # whatever the closure does, it is for this step alone
        if left is not None:
            request = left.request
        decision = ours.rule.step(ours.asking(request))
        ours.note_norm(request, decision)
        if left is not None:
            left.put_back(self, decision)
        return loss

    def check_step(self) -> None:
        """Raise if there is to be no step now; for subclasses, here nothing is refused.

        Called before anything changes: by ``step``, whoever calls it, by :meth:`unscale`, and by
        the control points that step.
        """

    @uncompiled
    @torch.no_grad()
    def run_rule(self, rule: Rule, grads_scaled_by: Any = None) -> Unscaled:
        """Run another rule with the gradients that there are, beside those that ``step`` runs.

        For a second call that an optimizer has, such as ``update_hessian`` of
        :class:`ampopt.Sophia`: gradients are unscaled and judged, and nothing changes where one is
        not finite, as in a step; step hooks do not run. States are told by their names: what both
        rules declare under one name is one state. Does not synchronize.

        Args:
            rule: to run.
            grads_scaled_by: the scale of the loss that the gradients come from.

        Returns:
            ``Unscaled(found_inf, scale)``: as :meth:`unscale`. ``p.grad`` is left as it is.

        Raises:
            RuntimeError: an unscale is pending; the scale was stepped with before; gradients are
                sparse, or the optimizer is ``differentiable``.
            TypeError: not a rule, or not a scale.
            ValueError: a number that cannot be a scale, or a tensor of wrong shape or device.
        """
        if not isinstance(rule, Rule):
            raise TypeError(f"run_rule takes an ampopt_kernels.Rule, got {rule!r}")
        ours = self._ampopt
        ours.refuse_pending("run_rule")
        scale = ours.scale(grads_scaled_by)
        steps = ours.second_rules.get(rule)
        if steps is None:
            steps = ours.second_rules[rule] = RuleSteps(self, _torchs_step, rule=rule)
        if steps.checks.need_torch():
            raise RuntimeError("run_rule: a rule takes neither sparse nor differentiable steps")
        decision = steps.step(request_for(scale))
        successor = successor_of(scale, decision)
        ours.mark_stepped(scale, successor)
        return Unscaled(ours.flag(decision), successor)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, as torch does; ``master_weights`` may be one of its options.

        So may be ``param_rounding``.

        Raises:
            TypeError: ``master_weights`` is no bool.
            ValueError: ``param_rounding`` is no way to round.
        """
        check_options(param_group)
        super().add_param_group(param_group)
        self._ampopt.rule.checks.remember_dtypes()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, as torch does, of this or torch's optimizer. No digit is lost.

        What a step would convert, such as a count that is a Python number, is converted here, so
        that a skipped step changes no dtype either. What no step can take, such as a state of
        another shape than its parameter, is refused by the step that meets it.

        Raises:
            TypeError: a state is neither a tensor nor a number. Nothing has changed then.
            ValueError: a hyperparameter other than ``lr``, which schedules change, is one that the
                constructor refuses. Likewise.

        Whether there are master weights, and how parameters are rounded, is decided here, not by
        the checkpoint.
        """
        self._ampopt.refuse_unfinished("load_state_dict")
        check_loaded(self, state_dict)
        kept = [{k: group[k] for k in _OPTIONS if k in group} for group in self.param_groups]
        before = self.state, self.param_groups
        try:
            super().load_state_dict(state_dict)
        except BaseException:  # torch may have taken half of it
            self.state, self.param_groups = before
            raise
        for group, options in zip(self.param_groups, kept, strict=True):
            for name in _OPTIONS:
                group.pop(name, None)
            group.update(options)
            for param in group["params"]:
                if param in self.state and not needs_master(group, param):
                    self.state[param].pop(MASTER, None)
        self._ampopt.rule.convert_states()

    def state_dict(self) -> dict[str, Any]:
        """The state, as torch's. A parameter that never had a gradient has none.

        Where a parameter has a master and no other state yet, though its rule keeps some, the
        others are saved as they are before the first step, for torch takes a state that is there
        for complete; or none, if the master is what the parameter is, which synchronizes.
        """
        state_dict = super().state_dict()
        states = state_dict["state"]
        for group, packed in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for param, key in zip(group["params"], packed["params"], strict=True):
                if states.get(key, {}).keys() != {MASTER}:
                    continue
                if not self.rule.all_state_for(self.rule.flag_values(group, kind_of(group, param))):
                    continue
                if _is_as_made(states[key][MASTER], param):
                    del states[key]
                else:
                    states[key] = self._ampopt.rule.completed(states[key], group, param)
        return state_dict

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

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Support loading, copying and pickling."""
        states = state["state"]
        # A master alone torch would take for a state that is all there.
        alone = {p: s for p, s in states.items() if isinstance(s, dict) and s.keys() == {MASTER}}
        for param in alone:
            del states[param]
        super().__setstate__(state)
        self.state.update(alone)


def _is_as_made(master: Tensor, param: Tensor) -> bool:
    """Whether ``master`` holds nothing that making it of ``param`` again would lose.

    Of a ``DTensor`` that is left open, for ranks have to save alike.
    """
    if is_spread(param):
        return False
    return master.is_meta or torch.equal(master, param.detach().to(master.dtype))


def _on_its_own(value: Any) -> Any:
    """``value``; if a tensor that is part of a larger buffer, a copy."""
    return value.detach().clone() if isinstance(value, Tensor) and shares_storage(value) else value
