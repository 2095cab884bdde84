"""Invariants of closures, and of running them again when gradients overflow."""

import math
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

import ampopt
from ampopt.testing.bits import assert_bitwise_unchanged, assert_same, bits, everything
from ampopt.testing.blueprints import History
from ampopt.testing.claims import Claims
from ampopt.testing.invariant import invariant
from ampopt.testing.invariants.training import Trained, assert_same_training, start

__all__ = ["Closures"]


def problems(cls: type[Claims]) -> st.SearchStrategy[History]:
    """Strategy of parameters and, in place of gradients, targets for them."""
    return cls.histories(overflows=False, absent=False, max_steps=1)


class Problem:
    """A training whose loss is half the squared distance from given targets.

    Its gradients are exact, so a power of two as the scale changes none of their bits. A scaled
    gradient above ``limit`` becomes infinite, as those of float16 activations do.
    """

    def __init__(self, make: Any, history: History, limit: float = math.inf) -> None:
        """Start a training on the parameters of ``history``, with its gradients as targets.

        Args:
            make: makes the optimizer from parameters.
            history: the parameters, and in its first step the targets.
            limit: the largest finite magnitude of a scaled gradient.
        """
        self.trained: Trained = start(make, history)
        self.targets = [g.tensor().to_dense() for g in history.steps[0] if g is not None]
        self.sparse = [g and g.layout in ("sparse", "duplicated") for g in history.steps[0]]
        self.limit, self.scales, self.losses = limit, [], []
        self.nan_at: int | None = None

    def closure(self, scale: Any = None) -> torch.Tensor:
        """Set scaled gradients, and return the unscaled loss."""
        assert torch.is_grad_enabled(), (
            "step(closure) disables gradients: call the closure within `with torch.enable_grad():`"
        )
        self.trained.optimizer.zero_grad()
        self.scales.append(1.0 if scale is None else float(scale))
        loss = torch.zeros((), dtype=torch.float64)
        for p, target, sparse in zip(self.trained.params, self.targets, self.sparse, strict=True):
            away = p.detach() - target
            grad = away * self.scales[-1]
            grad = torch.where(grad.abs() > self.limit, math.inf, grad)
            p.grad = grad.to_sparse(1) if sparse else grad
            loss += away.double().square().sum() / 2
        if len(self.scales) == self.nan_at:
            loss = loss * math.nan
        self.losses.append(loss)
        return loss

    def split_closure(self, scale: Any) -> Any:
        """The closure for ``step_after_unscale``, which returns ``(loss, found_inf, scale)``."""
        loss = self.closure(scale)
        return (loss, *self.trained.optimizer.unscale(grads_scaled_by=scale))

    def step(self, scale: Any, split: bool, **keywords: Any) -> Any:
        """Take one step with a closure, in one call or split in two."""
        optimizer = self.trained.optimizer
        with self.trained.at_work():
            if split:
                return optimizer.step_after_unscale(
                    self.split_closure, current_grad_scale=scale, **keywords
                )
            return optimizer.unscale_and_step(self.closure, grads_scaled_by=scale, **keywords)


class Closures(Claims):
    """A closure is run again with a smaller scale until its gradients are finite."""

    @invariant(
        claim="closures", history=problems, exponent=st.integers(-20, 20), split=st.booleans()
    )
    def test_a_scale_changes_nothing_for_a_closure(
        self, make: Any, history: History, exponent: int, split: bool
    ) -> None:
        """Under a power of two as scale, steps with a closure equal those of ``step(closure)``.

        The closure runs with gradients enabled, though ``step`` has disabled them, and the returned
        loss is the closure's, unscaled.
        """
        plain, scaled = Problem(make, history), Problem(make, history)
        for _ in range(2):
            with plain.trained.at_work():
                loss = plain.trained.optimizer.step(plain.closure)
            assert loss is not None, "step(closure) returned None: return the loss of the closure"
            result = scaled.step(2.0**exponent, split)
            assert_same(bits(result.loss), bits(loss), "the loss")
            assert not result.found_inf > 0
        assert_same_training(scaled.trained, plain.trained, "a scaled closure")

    @invariant(claim=("closures", "plain_steps"), history=problems, exponent=st.integers(-20, 20))
    def test_a_closure_is_gradients_and_a_step(
        self, make: Any, history: History, exponent: int
    ) -> None:
        """A step with a closure equals computing its gradients first and stepping without one.

        Steps with and without a closure may alternate.
        """
        scale = 2.0**exponent
        mixed, plain = Problem(make, history), Problem(make, history)
        for takes_closure in (True, False, True):
            for problem in (mixed, plain):
                if problem is mixed and takes_closure:
                    problem.step(scale, False)
                    continue
                problem.closure(scale)
                with problem.trained.at_work():
                    problem.trained.optimizer.unscale_and_step(grads_scaled_by=scale)
        assert_same_training(mixed.trained, plain.trained, "a closure")

    @invariant(
        claim="closures",
        history=problems,
        limit=st.integers(0, 6),
        exponent=st.integers(2, 8),
        split=st.booleans(),
    )
    def test_a_replay_is_a_start_with_the_smaller_scale(
        self, make: Any, history: History, limit: int, exponent: int, split: bool
    ) -> None:
        """After an overflow the closure runs again, and the step is that of the smaller scale.

        A scaler that runs the closure after its check, or only once, passes infinities to the step
        (``torch.amp.GradScaler`` does so for a closure passed by position).
        """
        replayed = Problem(make, history, 2.0**limit)
        result = replayed.step(ampopt.DynamicLossScale(init_scale=2.0**exponent), split)
        assert not result.found_inf > 0
        last_scale = replayed.scales[-1]
        direct = Problem(make, history)  # without a limit nothing overflows
        direct.step(last_scale, split)
        assert_same_training(replayed.trained, direct.trained, f"replayed until {last_scale}")
        assert float(result.scale) == last_scale, "the scale to use next is the one that worked"

    @invariant(claim="closures", history=problems, nan_at=st.integers(1, 3), split=st.booleans())
    def test_a_failed_closure_changes_nothing(
        self, make: Any, history: History, nan_at: int, split: bool
    ) -> None:
        """If the loss is NaN, the call raises and leaves everything as it was before.

        That includes parameters, which line searches and sharpness-aware steps have moved by then:
        a loop that catches the error and continues with the next batch must not start from there.
        """
        problem = Problem(make, history)
        problem.step(2.0, split)
        problem.nan_at = len(problem.scales) + nan_at
        before = everything(problem.trained.optimizer)
        try:
            problem.step(2.0, split)
        except ampopt.NonFiniteGradientError as error:
            assert error.reason == "loss"
            assert len(problem.scales) == problem.nan_at, "a NaN loss was replayed"
            after = everything(problem.trained.optimizer)
            assert_same(after, before, "a closure that failed left something behind")
        else:
            assert len(problem.scales) < problem.nan_at, "a NaN loss was stepped with"

    @invariant(claim="closures", history=problems, replays=st.integers(0, 3), split=st.booleans())
    def test_replays_end(self, make: Any, history: History, replays: int, split: bool) -> None:
        """A closure that always overflows is run ``max_replays`` times again, then the call raises.

        Without a bound the run hangs, and so do all other ranks of a cluster.
        """
        problem = Problem(make, history, limit=-1.0)  # every element overflows
        if not any(target.numel() for target in problem.targets):
            return
        with (
            assert_bitwise_unchanged(problem.trained.optimizer),
            pytest.raises(ampopt.NonFiniteGradientError) as caught,
        ):
            problem.step(ampopt.DynamicLossScale(init_scale=8.0), split, max_replays=replays)
        assert caught.value.reason == "replays"
        assert len(problem.scales) == 1 + replays
