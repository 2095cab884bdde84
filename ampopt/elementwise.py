"""Optimizers whose update is a rule: a step is a few kernel launches, and never synchronizes."""

import functools
import inspect
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from ampopt._step import torch_scaler
from ampopt._step.closures import call_closure
from ampopt._step.declared_states import DeclaredStates
from ampopt._step.descriptors import StrategyAttribute
from ampopt._step.handwritten_step import HandwrittenStep
from ampopt._step.hyperparameters import check_like
from ampopt._step.loading import check_loaded, convert_loaded
from ampopt._step.param_checks import check_rule
from ampopt._step.rule_state import complete
from ampopt._step.rule_step import RuleRunner, RuleStep
from ampopt._step.sharding.dtensor import is_dtensor
from ampopt._step.small_states import with_saved_names
from ampopt._step.step_hooks import beneath_hooks
from ampopt._step.torch_private import INIT_GROUP, uncompiled
from ampopt.loss_scale.step_scale import next_scale_of, request_for
from ampopt.optimizer import Optimizer
from ampopt.options import (
    DEFAULTS,
    GROUP_OPTIONS,
    MASTER_BITS,
    MASTER_WEIGHTS,
    check_options,
    show_in_signature,
)
from ampopt.results import Unscaled
from ampopt_kernels.low_bits import LOW_BITS
from ampopt_kernels.rule import MASTER, Rule
from ampopt_kernels.step_data import Request

__all__ = ["ElementwiseOptimizer"]


def _by_rule(optimizer: Any) -> RuleStep:
    """The strategy that runs the rule."""
    runner = RuleRunner(optimizer, _torchs_step)
    return RuleStep(optimizer, runner, beneath_hooks(ElementwiseOptimizer.step))


def _around_rule(optimizer: Any) -> HandwrittenStep:
    """The strategy of a class that overrides ``ElementwiseOptimizer.step``.

    Only the inherited step passes the overflow flag to the rule; any other is skipped like a
    hand-written step.
    """
    return HandwrittenStep(optimizer, runner=RuleRunner(optimizer, _torchs_step))


def _torchs_step(optimizer: Any) -> Any:
    """The ``step`` that ``optimizer`` inherits from a torch optimizer."""
    behind: Any = super(ElementwiseOptimizer, optimizer)
    return behind.step


class ElementwiseOptimizer(Optimizer):
    """An optimizer whose update is an :class:`ampopt_kernels.Rule`, run by every backend.

    A subclass names its rule, and puts the values that the rule reads into ``defaults``::

        from ampopt_kernels import Rule, State, jit

        @jit
        def update(p, g, state, h, flags):
            (lr, momentum), (buf,) = h, state
            buf = momentum * buf + g
            return p - lr * buf, (buf,)

        class Momentum(ampopt.ElementwiseOptimizer):
            rule = Rule(update=update, hyper=("lr", "momentum"), state=(State("momentum_buffer"),))

            def __init__(self, params, lr=0.1, momentum=0.9, **options):
                super().__init__(params, {"lr": lr, "momentum": momentum}, **options)

    Stepping, scaling, skipping, replay, clipping and state are inherited. With a torch optimizer as
    a second base class, its constructor is used. No control point synchronizes, except with a
    closure or sparse gradients. Parameters are float32, float64, float16, bfloat16, complex64 or
    complex128; arithmetic is float32, or float64 for float64 parameters. A state tensor has the
    dtype of its parameter or master weight; step counts are 0-d tensors on its device.

    Traps: with ``master_weights=True`` a step overwrites other changes of a parameter, such as by
    ``model.load_state_dict()``, unless ``state[p]["master_param"]`` is deleted, or is kept in 24
    bits. If a subclass overrides ``step``, a skip needs a rollback or a synchronization: to refuse
    a step, override :meth:`check_step` instead.

    See also :doc:`/guides/your_own_optimizer`, :doc:`/guides/rule_language`,
    :doc:`/guides/precision` and :doc:`/guides/less_memory` (``state_bits``, ``master_bits``).

    Attributes:
        rule: the update; may be assigned, to the class or an instance, between steps.
    """

    rule: ClassVar[Rule]
    sparse_gradients: ClassVar[bool] = False
    """Whether sparse gradients are stepped by the step of the torch base class, or refused."""

    _ampopt = StrategyAttribute(_by_rule, for_another_step=_around_rule)
    _step_supports_amp_scaling = (
        torch_scaler.SupportsAmpScaling()
    )  # `step` below uses the flag of a scaler

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse a class that changes how torch's step makes states, as a rule's step does not."""
        super().__init_subclass__(**kwargs)
        of_rule = beneath_hooks(cls.step) is beneath_hooks(ElementwiseOptimizer.step)
        if of_rule and INIT_GROUP in vars(cls):
            raise TypeError(
                f"{cls.__name__} overrides {INIT_GROUP}, which a step by a rule does not call: "
                "derive the class from torch's optimizer, and use ampopt.extend of it"
            )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Create the optimizer. For its other arguments, see the class.

        Args:
            *args: the positional arguments of the optimizer, such as ``params``. An author's
                constructor passes ``params`` and ``defaults``.
            **kwargs: the keyword arguments of the optimizer, with those of
                :class:`ampopt.options.RuleOptions`.

        Raises:
            TypeError: ``master_weights`` is not a bool; or an author's class has no ``rule``.
            ValueError: ``param_rounding``, ``state_bits`` or ``master_bits`` is unknown, or set
                together with ``differentiable``; or ``master_bits`` is 24 without
                ``master_weights``.
        """
        check_rule(getattr(self, "rule", None), type(self).__name__)
        options = {name: kwargs.pop(name) for name in GROUP_OPTIONS if name in kwargs}
        check_options(options)
        _check_arguments(self, args, kwargs)
        super().__init__(*args, **kwargs)
        options = {key: value for key, value in options.items() if value != DEFAULTS[key]}
        # In the defaults they also apply to groups that are added later.
        self.defaults = {**self.defaults, **options}
        for group in self.param_groups:
            group.update({**options, **group})
        for option in GROUP_OPTIONS.values():
            if self.defaults.get("differentiable") and any(map(option.is_set, self.param_groups)):
                raise ValueError(
                    f"{option.usage} cannot be combined with differentiable=True, which takes "
                    "torch's own step: leave one of them out"
                )
        of_24_bits = list(filter(MASTER_BITS.is_set, self.param_groups))
        if of_24_bits and not any(map(MASTER_WEIGHTS.of, of_24_bits)):
            raise ValueError(
                "master_bits=24 is how many bits a master weight has: pass master_weights=True too"
            )

    @uncompiled
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Perform one step, as torch's ``step`` does. Does not synchronize.

        Args:
            closure: a function that reevaluates the model and returns the loss.

        Returns:
            The loss that the closure returned; ``None`` without a closure.
        """
        ours = self._ampopt
        handoff = torch_scaler.take_handoff(self, (closure,), {})
        try:
            self.check_step()
            if ours.accumulation.cycle is not None:
                ours.end_cycle_in_plain_step(has_closure=closure is not None)
            if closure is not None and ours.step_request is None:
                ours.phase.refuse_pending("step(closure)")
            loss = call_closure(closure)
            request = ours.step_request if handoff is None else handoff.request
            if request is None and (pending := ours.phase.pending) is not None:
                request = pending.request
        finally:
            # The request is for this step alone, even if the closure raised. An overridden step may
            # call this method again.
            if not ours.is_stepping:
                ours.step_request = None
        if request is None:
            ours.missing_scale.warn()
            request = Request(check=False)
        decision = ours.runner.step(ours.observers.extend(request))
        ours.note_norm(request, decision)
        if handoff is not None:
            handoff.leave_for_scaler(self, decision)
        return loss

    def check_step(self) -> None:
        """Raise an error if no step is allowed now. For subclasses to override; does nothing here.

        Called before anything changes: by ``step``, by :meth:`unscale`, and by the control points
        that step.
        """

    @uncompiled
    @torch.no_grad()
    def run_rule(self, rule: Rule, grads_scaled_by: Any = None) -> Unscaled:
        """Run another rule on the present gradients, in addition to the rule of ``step``.

        For a second method of an optimizer, such as ``update_hessian`` of :class:`ampopt.Sophia`.
        Gradients are unscaled and checked, and an overflow changes nothing, as in a step. Step
        hooks do not run. The two rules share a state if both declare one of the same name. Does not
        synchronize.

        Args:
            rule: the rule to run.
            grads_scaled_by: the scale of the loss that the gradients come from.

        Returns:
            ``Unscaled(found_inf, scale)``, as :meth:`unscale`. ``p.grad`` is not changed.

        Raises:
            RuntimeError: an unscale is pending; an earlier step has used the scale; gradients are
                sparse, or the optimizer is ``differentiable``.
            TypeError: ``rule`` is not a rule, or ``grads_scaled_by`` not a scale.
            ValueError: ``grads_scaled_by`` is a number out of range, or a tensor of the wrong shape
                or device.
        """
        if not isinstance(rule, Rule):
            raise TypeError(f"run_rule takes an ampopt_kernels.Rule, got {rule!r}")
        ours = self._ampopt
        ours.phase.refuse_pending("run_rule")
        scale = ours.scale(grads_scaled_by)
        steps = ours.runner.second(rule)
        if steps.checks.need_torch():
            raise RuntimeError(
                "run_rule: gradients are sparse, or the optimizer has differentiable=True, so "
                "torch's own step runs instead of a rule: make gradients dense, or leave "
                "differentiable out"
            )
        if scale is None:
            ours.missing_scale.warn()
        decision = steps.step(request_for(scale))
        next_scale = next_scale_of(scale, decision)
        ours.phase.mark_stepped(scale, next_scale)
        return Unscaled(ours.flag(decision), next_scale)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, as torch does, maybe with options of its own.

        A parameter that a group has twice, of which torch warns, is updated once in each step.

        Args:
            param_group: a dict as torch takes it, in which ``master_weights``, ``param_rounding``,
                ``state_bits`` and ``master_bits`` may be set for this group alone.

        Raises:
            TypeError: ``param_group`` is not a dict, ``master_weights`` not a bool, or a
                hyperparameter of another type than its default.
            ValueError: ``param_group`` has no ``"params"``; ``param_rounding`` is neither
                ``"nearest"`` nor ``"stochastic"``, ``state_bits`` not 8, 16 or 32, or
                ``master_bits`` not 24 or 32; or a hyperparameter is NaN.
        """
        if isinstance(param_group, dict):  # torch refuses anything else
            if "params" not in param_group:
                raise ValueError(
                    f"a param group has only {sorted(param_group)}, and must have its parameters: "
                    'add "params"'
                )
            check_options(param_group)
            # Of torch's classes the defaults of the constructor: eps of Adafactor may have None.
            torchs = _torchs_signature(type(self)).parameters
            likes = {**self.defaults, **{name: each.default for name, each in torchs.items()}}
            for name in {*self.rule.hyper, *self.rule.flags} & param_group.keys() & likes.keys():
                check_like(name, param_group[name], likes[name])
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this or of torch's optimizer.

        States that a step would convert, such as a count that is a Python number, are converted
        now, so that a skipped step changes no dtype. A state that no step can use, for example one
        whose shape does not fit its parameter, is refused at the next step.

        This optimizer, and not the checkpoint, decides whether there are master weights, how
        parameters are rounded, and how many bits a state or a master has. States that have more
        bits are rounded to nearest. Masters are converted at the next step: load the parameters
        before it, too.

        Raises:
            TypeError: ``state_dict`` is not a dict, or a state is neither a tensor nor a number.
                Nothing has changed then.
            ValueError: ``state_dict`` is not of such an optimizer, or has a hyperparameter that the
                constructor refuses (``lr``, which schedules change, is not checked). Nothing has
                changed then.
        """
        self._ampopt.phase.refuse_unfinished("load_state_dict")
        if not isinstance(state_dict, Mapping):  # torch copies it before it calls hooks
            raise TypeError(f"load_state_dict takes what state_dict() returned, got {state_dict!r}")
        options_of_groups = [
            {k: group[k] for k in GROUP_OPTIONS if k in group} for group in self.param_groups
        ]
        before = self.state, self.param_groups
        check = self.register_load_state_dict_pre_hook(check_loaded)
        try:
            super().load_state_dict(state_dict)
            for group, options in zip(self.param_groups, options_of_groups, strict=True):
                for name in GROUP_OPTIONS:
                    group.pop(name, None)
                group.update(options)
            convert_loaded(self)
        except BaseException:  # half of it may have been loaded
            self.state, self.param_groups = before
            raise
        finally:
            check.remove()

    def state_dict(self) -> dict[str, Any]:
        """The state, as torch's. A parameter that never had a gradient has no entry.

        Codes of 8 bits are saved as ``exp_avg_codes`` and the like, and the low bits of a 24-bit
        master as ``master_param_codes``, so that no other program takes them for values.

        A parameter may have a master, or states of :meth:`run_rule`, but not yet the states of its
        rule. Then the initial values of the rule's states are saved as well, because torch expects
        a parameter to have all of its states, or none. A master alone that equals the parameter is
        not saved (the comparison synchronizes).
        """
        state_dict, runner = super().state_dict(), self._ampopt.runner
        states, every = state_dict["state"], (*self.rule.state, *self.rule.scalar_state)
        always = [part.name for part in every if part.when is None]
        for group, saved_group in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for param, key in zip(group["params"], saved_group["params"], strict=True):
                state = states.get(key)
                if not isinstance(state, dict) or not state:
                    continue
                is_alone = state.keys() == {MASTER}
                if not is_alone and all(state.get(name) is not None for name in always):
                    continue
                declared = DeclaredStates.of(self.rule, group, param)
                if not (declared.tensors or declared.scalars):
                    continue
                if is_alone and _is_as_made(state[MASTER], param):
                    del states[key]
                else:
                    states[key] = state.copy()
                    complete(declared, states[key])
        parts = (*self.rule.state, *runner.second_states)
        for key, state in states.items():
            if isinstance(state, dict):  # users may keep other values under their own keys
                states[key] = with_saved_names(state, parts)
        return state_dict

    def _prepare_torchs_step(self) -> None:
        """Leave the states that torch's own step expects, before it; does nothing here."""

    def _complete_states(self) -> None:
        """Add states that torch's own step and its checkpoints lack; does nothing here."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Support loading, copying and pickling."""
        states = state["state"]
        # torch's optimizers take a state with any entry, such as a master alone, to be complete.
        unstepped = {p: s for p, s in states.items() if isinstance(s, dict) and "step" not in s}
        for param in unstepped:
            del states[param]
        super().__setstate__(state)
        self.state.update(unstepped)


def _check_arguments(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise for arguments of torch's constructor of another type than their defaults, or NaN.

    Raises:
        TypeError: see :func:`ampopt._step.hyperparameters.check_like`, as for ``ValueError``.
    """
    signature = _torchs_signature(type(optimizer))
    kwargs = {name: value for name, value in kwargs.items() if name in signature.parameters}
    try:
        given = signature.bind_partial(optimizer, *args, **kwargs).arguments
    except TypeError:  # the constructor says what is wrong
        return
    for name, value in given.items():
        check_like(name, value, signature.parameters[name].default)


@functools.lru_cache(maxsize=256)  # every param group is checked by it
def _torchs_signature(cls: type) -> inspect.Signature:
    """The signature of torch's constructor; an empty one if ``cls`` is of none of torch's."""
    classes = vars(torch.optim).values()
    theirs = next((base for base in cls.__mro__ if base in classes), None)
    return inspect.Signature() if theirs is None else inspect.signature(theirs.__init__)


def _is_as_made(master: Tensor, param: Tensor) -> bool:
    """Whether ``master`` is what would be made from ``param`` now, so that it need not be saved.

    ``False`` for a ``DTensor``, without a comparison, because all ranks have to save alike.
    """
    if is_dtensor(param):
        return False
    if master.dtype == LOW_BITS:
        return master.is_meta or not master.any()
    return master.is_meta or torch.equal(master, param.detach().to(master.dtype))


show_in_signature(ElementwiseOptimizer.__init__, GROUP_OPTIONS)

# torch.amp.GradScaler asks for the signature of ``step`` in each step; torch's hooks copy this.
vars(ElementwiseOptimizer.step)["__signature__"] = inspect.signature(ElementwiseOptimizer.step)
