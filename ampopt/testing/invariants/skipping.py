"""Invariants: which steps are skipped, and that a skipped step has no effect."""

import math
from dataclasses import replace
from typing import Any

import torch
from hypothesis import assume
from hypothesis import strategies as st

import ampopt
from ampopt.testing.bits import assert_bitwise_unchanged, bits
from ampopt.testing.blueprints import History, Scale, elements, set_gradients
from ampopt.testing.claims import Claims
from ampopt.testing.invariant import invariant
from ampopt.testing.invariants.examples import ending_in_overflow, ending_well, scales, ways
from ampopt.testing.invariants.training import (
    WAYS,
    assert_goes_on,
    start,
    step_by,
    train,
)

__all__ = ["Skipping"]


class Skipping(Claims):
    """A step with a non-finite gradient is skipped, as if the batch did not exist."""

    @invariant(history=ending_in_overflow, scale=scales, way=ways)
    def test_a_skipped_step_changes_nothing(
        self, make: Any, history: History, scale: Scale, way: str
    ) -> None:
        """One non-finite gradient element anywhere leaves everything bitwise unchanged.

        That is: parameters, state, step counts, hyperparameters and random generators. An optimizer
        that updates its averages, or counts the step, drifts at every overflow, and a run has
        hundreds of them; one that applies the step turns the model to NaN.
        """
        *before_last, last = history.steps
        trained = train(make, replace(history, steps=tuple(before_last)), scale, way)
        with assert_bitwise_unchanged(trained.optimizer, "changed by a skipped step"):
            result = step_by(trained, last, trained.scale, way)
            assert result.found_inf > 0, "a gradient that is not finite was not found"
            assert result.skipped

    @invariant(history=ending_well, scale=scales, way=ways)
    def test_training_goes_on_as_if_skipped_steps_had_never_been(
        self, make: Any, history: History, scale: Scale, way: str
    ) -> None:
        """A training ends with the same bits with and without its overflowed steps.

        This includes the first step, which creates state: what a skipped step creates must equal
        fresh state. torch's fused SGD leaves its momentum buffer uninitialized there, and the next
        step uses it.
        """
        assume(any(history.overflows))
        assert_goes_on(make, history, scale.number, way)

    @invariant(history=ending_in_overflow, way=ways)
    def test_step_hooks_run_on_every_attempt(self, make: Any, history: History, way: str) -> None:
        """Step hooks run once for each attempt, skipped or not.

        The host does not know whether a step is skipped, so schedulers, profilers and weight
        averaging that use hooks must get the same calls on every rank and every device. If
        ``step()`` calls ``super().step()``, torch may run the hooks around both; that counts once.
        """
        trained, calls, within = start(make, history), [], []

        def before(*_: Any) -> None:
            if not within:
                calls.append("before")
            within.append("step")

        def after(*_: Any) -> None:
            within.pop()
            if not within:
                calls.append("after")

        trained.optimizer.register_step_pre_hook(before)
        trained.optimizer.register_step_post_hook(after)
        for attempts, step in enumerate(history.steps, start=1):
            step_by(trained, step, ampopt.StaticLossScale(2.0), way)
            expected = ["before", "after"] * attempts
            assert calls == expected, f"hooks were called {calls}, not {expected}"

    @invariant(
        history=lambda cls: cls.histories(overflows=False, absent=False, max_steps=2),
        number=st.sampled_from([0.0, -4.0, math.inf, math.nan]),
        way=ways,
    )
    def test_a_scale_on_the_device_that_is_no_scale_skips(
        self, make: Any, history: History, number: float, way: str
    ) -> None:
        """A scale tensor that is 0, negative, infinite or NaN skips the step.

        g / inf is a finite 0, so an optimizer that tests only gradients applies a step of zeros:
        averages and weights decay for the rest of the run.
        """
        trained = start(make, history)
        for step in history.steps[:-1]:
            step_by(trained, step, 1.0)
        set_gradients(trained.params, history.steps[-1])
        with assert_bitwise_unchanged(trained.optimizer, f"a scale of {number} stepped"):
            result = WAYS[way](trained.optimizer, torch.tensor(number))
            assert result.found_inf > 0, f"a scale of {number} did not skip the step"

    @invariant(
        history=lambda cls: cls.histories(overflows=False, absent=False, max_steps=1),
        exponent=st.integers(1, 20),
        way=ways,
        at=st.integers(0, 2),
    )
    def test_gradients_are_judged_after_unscaling(
        self, make: Any, history: History, exponent: int, way: str, at: int
    ) -> None:
        """A gradient that overflows when divided by a scale below 1 skips the step.

        ``torch.amp.GradScaler`` tests scaled gradients only, and applies the infinity.
        """
        (step,) = history.steps
        holders = [i for i, grad in enumerate(step) if grad and grad.numel]
        assume(holders)
        trained = start(make, history)
        set_gradients(trained.params, step, 0.0)
        values = elements(trained.params[holders[at % len(holders)]].grad)
        values.fill_(torch.finfo(values.dtype).max)
        with assert_bitwise_unchanged(trained.optimizer, "an overflow was applied"):
            result = WAYS[way](trained.optimizer, 2.0**-exponent)
            assert result.found_inf > 0, "a gradient that overflows when unscaled was not found"

    @invariant(
        history=lambda cls: cls.histories(
            overflows=False, max_steps=1, kind="edge" if cls.huge_gradients else "ordinary"
        ),
        way=ways,
    )
    def test_a_finite_gradient_is_never_skipped(
        self, make: Any, history: History, way: str
    ) -> None:
        """Finite gradients are applied, however large and however many.

        A detector that sums elements or squares may overflow by itself. Training then skips large
        gradients for ever, while the scale falls to its minimum.
        """
        trained = start(make, history)
        result = step_by(trained, history.steps[0], 1.0, way)
        assert not result.found_inf > 0, "found_inf is set, but all gradients are finite"
        assert not result.skipped

    @invariant(
        claim="grad_scaler",
        history=lambda cls: cls.histories(overflows=False, absent=False, max_steps=3),
        flags=st.sampled_from([1.0, 2.0, 3.0, 0.5]),
    )
    def test_a_sum_of_flags_skips(self, make: Any, history: History, flags: float) -> None:
        """Any flag above 0 skips, because flags of several devices and ranks are summed.

        torch's fused optimizers skip only if the flag is exactly 1, so when two devices overflow at
        once they apply the infinities.
        """
        trained = start(make, history)
        *before_last, last = history.steps
        for step in before_last:
            step_by(trained, step, 1.0)
        set_gradients(trained.params, last)
        with assert_bitwise_unchanged(trained.optimizer, f"a flag of {flags} stepped"):
            # torch.amp.GradScaler passes its flag in this attribute.
            trained.optimizer.grad_scale = None
            trained.optimizer.found_inf = torch.tensor(flags)
            trained.optimizer.step()
            del trained.optimizer.grad_scale, trained.optimizer.found_inf

    @invariant(history=ending_in_overflow, first=st.booleans())
    def test_ranks_that_add_up_their_flags_agree(
        self, make: Any, history: History, first: bool
    ) -> None:
        """The flag from ``unscale`` may be summed over ranks in place: all ranks skip, or none.

        One rank has an overflow in its shard of the gradients, the other has none. If one of them
        steps, their models differ from then on, and nothing reports it.
        """
        finite = tuple(grad and replace(grad, spots=()) for grad in history.steps[-1])
        ranks, flags = [start(make, history) for _ in range(2)], []
        steps = (history.steps[-1], finite)[:: 1 if first else -1]
        one, other = (
            assert_bitwise_unchanged(trained.optimizer, "a rank has stepped") for trained in ranks
        )
        with one, other:
            for trained, step in zip(ranks, steps, strict=True):
                set_gradients(trained.params, step, 4.0)
                flags.append(trained.optimizer.unscale(grads_scaled_by=4.0).found_inf)
            total = sum(map(float, flags))
            for trained, flag in zip(ranks, flags, strict=True):
                flag.fill_(total)  # stands for an all-reduce
                assert trained.optimizer.step_after_unscale().skipped

    @invariant(history=lambda cls: cls.histories(max_steps=2), way=ways)
    def test_no_gradients_is_no_step(self, make: Any, history: History, way: str) -> None:
        """A step without any gradient changes nothing, and does not count towards growth.

        It happens to the optimizer of a part of the model whenever a batch does not use that part.
        As an error it would end the run; counted as a finite step it would let the scale grow for
        no reason.
        """
        trained = train(make, history, Scale("static", 1.0), way)
        for p in trained.params:
            p.grad = None
        scale = ampopt.DynamicLossScale(init_scale=8.0, growth_interval=1)
        with assert_bitwise_unchanged(trained.optimizer, "a step without gradients"):
            result = WAYS[way](trained.optimizer, scale)
            assert not result.found_inf > 0
            assert float(result.scale) == 8.0, "a step without gradients let the scale grow"
        assert bits(result.found_inf).shape == ()
