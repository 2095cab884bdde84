"""The state machine's calls between steps: scales, learning rates, checkpoints, copies, groups."""

import copy
import functools
import inspect
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import rule

import ampopt
from ampopt.testing.bits import assert_same, bits, everything, state_of
from ampopt.testing.blueprints import Blueprint
from ampopt.testing.state_machine.machine import by_machine, call, precondition
from ampopt.testing.state_machine.records import BEGIN, kinds, some_shape
from ampopt.testing.state_machine.reference_training import add_group, set_learning_rate
from ampopt.testing.state_machine.steps import MOST, Steps, bad_gradients, some_gradients

__all__ = ["Changes"]


class Changes(Steps):
    """The state machine with all of its calls."""

    @precondition(lambda self: not any(self.gradients) and self.is_idle)
    @rule(kind=kinds, number=st.sampled_from([2.0, 4.0]))
    @call
    def scale_by(self, kind: str, number: float) -> None:
        """Continue with another scale."""
        self.use_scale(kind, number)

    @rule(lr=st.sampled_from([0.25, 0.03125]))
    @call
    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of all groups, as schedulers do."""
        set_learning_rate(self.optimizer, lr)
        self.reference_training.tell("set_learning_rate", lr)

    @precondition(lambda self: self.takes_tensors)
    @rule(lr=st.sampled_from([0.5, 0.125]))
    @call
    def set_learning_rate_tensor(self, lr: float) -> None:
        """Set a new tensor as the learning rate of all groups.

        The reference training gets the number.
        """
        tensor = torch.tensor(lr)
        for group in self.optimizer.param_groups:
            group["lr"] = tensor
        self.reference_training.tell("set_learning_rate", lr)

    @property
    def takes_tensors(self) -> bool:
        """Whether the optimizer takes tensors as learning rates."""
        claim = self.claims.tensor_learning_rates
        is_rule = isinstance(self.optimizer, ampopt.ElementwiseOptimizer)
        return is_rule if claim is None else claim

    # --- further methods -------------------------------------------------------------------------

    @precondition(lambda self: bool(self.claims.modes) and self.is_idle)
    @rule(mode=by_machine(lambda self: st.sampled_from(self.claims.modes)))
    @call
    def switch(self, mode: str) -> None:
        """Call the optimizer's method that switches to ``mode``."""
        before = torch.get_rng_state()
        unchanged = everything(self.optimizer) if mode == self.mode else None
        getattr(self.optimizer, mode)()
        if unchanged is not None:
            now = everything(self.optimizer)
            assert_same(now, unchanged, f"changed by {mode}(), though it was the mode already")
        self.mode = mode
        self.reference_training.tell("call", mode, random_state=before)

    @precondition(lambda self: bool(self.claims.calls) and self.is_idle)
    @rule(
        name=by_machine(lambda self: st.sampled_from(self.claims.calls)),
        numbers=st.none() | some_gradients,
        bad=bad_gradients,
    )
    @call
    def call_it(self, name: str, numbers: Any, bad: Any) -> None:
        """Call a method of ``Claims.calls``, with the present gradients if it takes a scale."""
        if numbers is not None:
            self.backward(numbers=numbers, bad=bad)
        method, before = getattr(self.optimizer, name), torch.get_rng_state()
        if "grads_scaled_by" not in inspect.signature(method).parameters:
            method()
            self.reference_training.tell("call", name, random_state=before)
            return
        if self.kind == "none" and (self.overflows or not any(self.gradients)):
            return  # without a scale nothing is checked, and the result would be undefined
        self.use_gradients(functools.partial(method, grads_scaled_by=self.scale), name)

    # --- checkpoints -----------------------------------------------------------------------------

    @precondition(lambda self: self.is_idle and self.claims.checkpoints)
    @rule(go_on_with_it=st.booleans())
    @call
    def save(self, go_on_with_it: bool) -> None:
        """Save a checkpoint; with ``go_on_with_it``, load it into a new optimizer at once."""
        self.last_checkpoint = self.checkpoint()
        if go_on_with_it:
            groups = [{"params": group["params"]} for group in self.optimizer.param_groups]
            self.optimizer = self.make(groups if len(groups) > 1 else groups[0]["params"])
            self.restore(self.last_checkpoint)

    @precondition(lambda self: self.may_load)
    @rule()
    @call
    def load(self) -> None:
        """Load the checkpoint into the present optimizer and the reference training."""
        assert self.last_checkpoint is not None
        with torch.no_grad():
            for p, old in zip(self.params, self.last_checkpoint.params, strict=True):
                p.copy_(old)
        self.restore(self.last_checkpoint)
        self.reference_training.back_to(self.last_checkpoint.moment)
        self.drop()

    @property
    def may_load(self) -> bool:
        """Whether there is a checkpoint with as many groups as the optimizer has now."""
        checkpoint = self.last_checkpoint
        return (
            checkpoint is not None and len(checkpoint.params) == len(self.params) and self.is_idle
        )

    # --- copies and groups -----------------------------------------------------------------------

    @precondition(lambda self: self.is_idle and self.claims.deepcopies)
    @rule()
    @call
    def deepcopy(self) -> None:
        """Continue with a deep copy of parameters and optimizer; gradients are carried over."""
        gradients = [p.grad for p in self.params]
        self.params, self.optimizer = copy.deepcopy((self.params, self.optimizer))
        for p, grad in zip(self.params, gradients, strict=True):
            p.grad = grad

    @precondition(lambda self: self.claims.several_groups and self.is_idle)
    @precondition(lambda self: len(self.params) < MOST)
    @rule(shape=some_shape, lr=st.sampled_from([0.5, 0.0625]))
    @call
    def add_group(self, shape: tuple[int, ...], lr: float) -> None:
        """Add a parameter in a group of its own, with learning rate ``lr``."""
        param = Blueprint(shape, BEGIN, self.dtype)
        before = {"parameters": bits(self.params), "states": state_of(self.optimizer)}
        self.params.append(param.parameter())
        add_group(self.optimizer, self.params[-1], lr)
        after = {"parameters": bits(self.params[:-1]), "states": state_of(self.optimizer)[:-1]}
        assert_same(after, before, "adding a group has changed others")
        self.reference_training.tell("add", param, lr)
        self.gradients = [*self.gradients, None]
