"""Invariants of single calls: order, learning rates, gradients, and use under a GradScaler."""

import copy
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume
from hypothesis import strategies as st

import ampopt
from ampopt.testing.bits import assert_bitwise_unchanged, assert_same, bits, state_of
from ampopt.testing.blueprints import History, Scale, set_gradients
from ampopt.testing.claims import Claims
from ampopt.testing.invariant import invariant
from ampopt.testing.invariants.examples import ending_well, finite, ways
from ampopt.testing.invariants.training import WAYS, assert_same_training, start, step_by, train
from ampopt.testing.no_sync import assert_no_sync
from ampopt.testing.pretended_device import as_on_a_device

__all__ = ["Calls"]


class Calls(Claims):
    """Order of calls, learning rates, gradients, and loops written for a GradScaler."""

    @invariant(history=ending_well)
    def test_calls_out_of_order_are_refused(self, make: Any, history: History) -> None:
        """Unscaling twice, stepping with nothing unscaled and saving in between raise errors.

        They change nothing. Gradients that are unscaled twice are 65536 times too small, and look
        like a bad learning rate.
        """
        trained = start(make, history)
        *before_last, last = history.steps
        for step in before_last:
            step_by(trained, step, 2.0)
        optimizer = trained.optimizer
        set_gradients(trained.params, last, 2.0)
        with assert_bitwise_unchanged(optimizer), pytest.raises(RuntimeError, match="unscale"):
            optimizer.step_after_unscale()
        optimizer.unscale(grads_scaled_by=2.0)
        gradients = bits([p.grad for p in trained.params])
        with assert_bitwise_unchanged(optimizer):
            for call in (
                lambda: optimizer.unscale(grads_scaled_by=2.0),
                lambda: optimizer.unscale_and_step(grads_scaled_by=2.0),
                optimizer.state_dict,
                lambda: copy.deepcopy(optimizer),
            ):
                with pytest.raises(RuntimeError, match="pending"):
                    call()
        assert_same(bits([p.grad for p in trained.params]), gradients, "a refused call")
        optimizer.step_after_unscale()
        assert optimizer.pending is None

    @invariant(history=ending_well, way=ways)
    def test_zero_grad_discards_what_was_unscaled(
        self, make: Any, history: History, way: str
    ) -> None:
        """After ``zero_grad()``, a pending unscale and its overflow flag are forgotten.

        So a step can be dropped on purpose. If the flag stayed, the next batch would be skipped for
        the overflow of the last one; if the pending state stayed, the next iteration would raise.
        """
        dropped = start(make, history)
        for step in history.steps:
            set_gradients(dropped.params, step, 4.0)
            dropped.optimizer.unscale(grads_scaled_by=4.0)
            dropped.optimizer.zero_grad()
            assert dropped.optimizer.pending is None
            step_by(dropped, step, ampopt.StaticLossScale(2.0), way)
        assert_same_training(
            dropped, train(make, history, Scale("static", 2.0), way), "after dropped gradients"
        )

    @invariant(history=ending_well)
    def test_step_after_unscale_may_be_step(self, make: Any, history: History) -> None:
        """Plain ``step()`` after ``unscale`` steps or skips, and ends the pending state.

        Those who have written loops for a GradScaler type ``unscale``, clip, and type ``step()``.
        If that stepped whatever ``unscale`` found, an overflow would make every parameter NaN.
        """
        trained = start(make, history)
        for step in history.steps:
            set_gradients(trained.params, step, 4.0)
            trained.optimizer.unscale(grads_scaled_by=4.0)
            trained.optimizer.step()
            assert trained.optimizer.pending is None
        expected = train(make, history, Scale("static", 4.0), "unscale, step")
        assert_same_training(trained, expected, "step() after unscale")

    @invariant(history=finite, way=ways)
    def test_a_dynamic_scale_is_used_once(self, make: Any, history: History, way: str) -> None:
        """Stepping twice with the same dynamic scale raises: the loop ignored the returned scale.

        The scale of such a loop never changes, so it either skips every step or lets gradients
        underflow.
        """
        trained = start(make, history)
        step, scale = history.steps[0], ampopt.DynamicLossScale(init_scale=2.0)
        step_by(trained, step, scale, way)
        with (
            assert_bitwise_unchanged(trained.optimizer),
            pytest.raises(RuntimeError, match="scale"),
        ):
            step_by(trained, step, scale, way)

    @invariant(claim="leaves_gradients", history=ending_well)
    def test_a_step_leaves_gradients_alone(self, make: Any, history: History) -> None:
        """``step_after_unscale`` writes to no ``p.grad``, and keeps none as a state.

        Gradients are logged and accumulated after the step. A step that adds weight decay to them
        in place adds it again with the next micro-batch. And the next gradients may be written to
        the same tensors, after ``zero_grad(set_to_none=False)`` or by a data-parallel wrapper: they
        would replace a momentum that is ``p.grad`` and not a copy of it.
        """
        trained = start(make, history)
        for step in history.steps:
            set_gradients(trained.params, step, 2.0)
            trained.optimizer.unscale(grads_scaled_by=2.0)
            before = bits([p.grad for p in trained.params])
            trained.optimizer.step_after_unscale()
            after = bits([p.grad for p in trained.params])
            assert_same(after, before, "the step wrote to p.grad")
            states = state_of(trained.optimizer)
            trained.optimizer.zero_grad(set_to_none=False)
            kept = "zeroing p.grad changed a state that is p.grad: keep p.grad.clone()"
            assert_same(state_of(trained.optimizer), states, kept)

    # --- learning rates --------------------------------------------------------------------------

    @invariant(
        claim="checkpoints",
        history=lambda cls: cls.histories(overflows=False, max_steps=3),
        at=st.integers(0, 3),
        lr=st.sampled_from([0.25, 0.03125]),
        way=ways,
    )
    def test_a_new_learning_rate_is_that_of_the_next_step(
        self, make: Any, history: History, at: int, lr: float, way: str
    ) -> None:
        """After a change of ``group["lr"]`` the next step uses the new value.

        Schedulers write there. An optimizer that keeps the rate of its constructor neither warms up
        nor decays, and only the loss curve shows it.
        """
        at %= len(history.steps)
        changed, remade = start(make, history), start(make, history)
        for trained in (changed, remade):
            for index, step in enumerate(history.steps):
                if index == at and trained is changed:
                    for group in trained.optimizer.param_groups:
                        group["lr"] = lr
                elif index == at:
                    state_dict = trained.optimizer.state_dict()
                    for group in state_dict["param_groups"]:
                        group["lr"] = lr
                    groups = history.grouped(trained.params)
                    if not history.groups:
                        groups = [{"params": groups}]
                    trained.optimizer = make([{**group, "lr": lr} for group in groups])
                    trained.optimizer.load_state_dict(state_dict)
                step_by(trained, step, ampopt.StaticLossScale(2.0), way)
        assert_same_training(changed, remade, f"a learning rate set to {lr} before step {at}")

    @invariant(
        claim=("independent_parameters", "several_groups"),
        history=lambda cls: cls.histories(overflows=False, max_steps=3),
        lrs=st.permutations([0.5, 0.125, 0.03125]),
    )
    def test_each_group_has_its_own_learning_rate(
        self, make: Any, history: History, lrs: list[float]
    ) -> None:
        """A parameter in a group of its own trains with that group's learning rate.

        A step that reads the first group's rate for all parameters ignores the lower rates that
        fine-tuning sets for pretrained layers.
        """
        params = history.build()
        together = make([{"params": [p], "lr": lr} for p, lr in zip(params, lrs, strict=False)])
        for step in history.steps:
            set_gradients(params, step, 2.0)
            together.unscale_and_step(grads_scaled_by=2.0)
        for i, p in enumerate(params):
            single = history.params[i].parameter()
            alone = make([{"params": [single], "lr": lrs[i]}])
            for step in history.steps:
                set_gradients([single], [step[i]], 2.0)
                alone.unscale_and_step(grads_scaled_by=2.0)
            assert_same(bits(p), bits(single), f"group {i}, whose learning rate is {lrs[i]}")

    @invariant(claim="zero_lr_is_still", history=finite, way=ways)
    def test_a_learning_rate_of_zero_moves_nothing(
        self, make: Any, history: History, way: str
    ) -> None:
        """With ``group["lr"] = 0``, as in the first step of a warm-up, no parameter changes."""
        trained = start(make, history)
        for group in trained.optimizer.param_groups:
            group["lr"] = 0.0
        # Compared as numbers, not bitwise: 0 becoming -0 is not a move.
        before = [p.detach().clone() for p in trained.params]
        for step in history.steps:
            step_by(trained, step, 2.0, way)
        for i, (p, old) in enumerate(zip(trained.params, before, strict=True)):
            moved = p.detach() != old
            assert not moved.any(), (
                f"{moved.sum().item()} of the {p.numel()} elements of parameter {i} moved, the "
                f"first from {old[moved][0].item()} to {p[moved][0].item()}"
            )

    # --- other loops -----------------------------------------------------------------------------

    @invariant(
        claim=("grad_scaler", "dense_gradients"),
        history=lambda cls: ending_well(cls, absent=False),
        unscale_first=st.booleans(),
        exponent=st.integers(-4, 8),
    )
    def test_a_loop_for_grad_scaler_gives_the_same(
        self, make: Any, history: History, unscale_first: bool, exponent: int
    ) -> None:
        """``torch.amp.GradScaler`` and the optimizer's own methods give the same bits.

        So a loop can be ported line by line, and a framework that brings its own scaler needs no
        change.
        """
        # torch's scaler also counts steps whose gradients have no elements, and has no min_scale.
        assume(all(any(g and g.numel for g in step) for step in history.steps))
        settings: Any = {"init_scale": 2.0**exponent, "growth_interval": 2}
        scaled = start(make, history)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's warnings are not the subject of this test
            scaler = torch.amp.GradScaler("cpu", **settings)
            scaler.scale(torch.zeros(()))
        scale: Any = ampopt.DynamicLossScale(**settings)
        own = start(make, history)
        for step in history.steps:
            set_gradients(scaled.params, step, scaler.get_scale())
            if unscale_first:
                scaler.unscale_(scaled.optimizer)
            with scaled.at_work():
                scaler.step(scaled.optimizer)
            scaler.update()
            scale = step_by(own, step, scale).scale
            assert scaler.get_scale() == float(scale)
        assert_same_training(scaled, own, "a GradScaler's loop")

    @invariant(claim="sync_free", history=ending_well, way=ways)
    def test_no_control_point_waits_for_the_device(
        self, make: Any, history: History, way: str
    ) -> None:
        """From the second step on, an optimizer's methods never synchronize.

        A synchronization stalls the host until the device is done, and then the device until the
        host has queued more work.
        """
        with as_on_a_device():
            trained = start(make, replace(history, steps=history.steps[:1]))
            set_gradients(trained.params, history.steps[-1])  # the step with all gradients
            WAYS[way](trained.optimizer, 2.0)
            scale: Any = ampopt.DynamicLossScale(init_scale=2.0)
            for step in history.steps:
                set_gradients(trained.params, step, 2.0)
                with assert_no_sync():
                    scale = WAYS[way](trained.optimizer, scale).scale

    @invariant(history=ending_well, way=ways)
    def test_a_static_scale_may_let_overflows_pass(
        self, make: Any, history: History, way: str
    ) -> None:
        """``StaticLossScale(drop_overflow_update=False)`` steps whatever the gradients are.

        The result reports that the gradients were non-finite, and that the step was not skipped.
        """
        trained = start(make, history)
        scale = ampopt.StaticLossScale(2.0, drop_overflow_update=False)
        for step, overflows in zip(history.steps, history.overflows, strict=True):
            result = step_by(trained, step, scale, way)
            assert bool(result.found_inf > 0) is overflows
            assert not result.skipped
            assert result.scale is scale
