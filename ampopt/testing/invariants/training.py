"""Trainings that invariants compare."""

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import assume
from torch.nn import Parameter

from ampopt.testing.bits import assert_same, bits
from ampopt.testing.blueprints import Blueprint, History, Scale, set_gradients

__all__ = [
    "WAYS",
    "Trained",
    "assert_goes_on",
    "assert_same_training",
    "assert_scale_changes_nothing",
    "seed",
    "start",
    "step_by",
    "train",
]

UNSCALED = Scale("none")


def _step_at_once(optimizer: Any, scale: Any) -> Any:
    """Take a step by ``unscale_and_step``."""
    return optimizer.unscale_and_step(grads_scaled_by=scale)


def _step_in_two(optimizer: Any, scale: Any) -> Any:
    """Take a step by ``unscale`` and ``step_after_unscale``."""
    optimizer.unscale(grads_scaled_by=scale)
    return optimizer.step_after_unscale()


WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "unscale_and_step": _step_at_once,
    "unscale, step": _step_in_two,
}
"""The two ways to take a step under a scale: in one call, or in two."""


@dataclass
class Trained:
    """The state of a training.

    Attributes:
        params: parameters, in the order of the history.
        optimizer: the optimizer of ``params``.
        scale: the scale that the last step returned.
        scales: the scales that each step returned, as numbers.
        random: random state of torch and Python to continue from.
    """

    params: list[Parameter]
    optimizer: Any
    scale: Any = None
    scales: list[float | None] = field(default_factory=list)
    random: Any = None

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Context in which random numbers are this training's own, if several run alternately."""
        if self.random is not None:
            torch.set_rng_state(self.random[0])
            random.setstate(self.random[1])
        yield
        self.random = torch.get_rng_state(), random.getstate()

    def state(self, index: int) -> Any:
        """The state of one parameter, as bits."""
        return bits(dict(self.optimizer.state.get(self.params[index], {})))


def seed(number: int = 0) -> None:
    """Seed torch's generators, on the CPU and on CUDA if it is initialized.

    ``torch.manual_seed`` also formats a stack trace for each kind of device that is not
    initialized, which takes longer than a small training.
    """
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)


def start(make: Any, history: History) -> Trained:
    """Make fresh parameters and their optimizer, with fixed random state."""
    seed()
    random.seed(0)
    params = history.build()
    trained = Trained(params, make(history.grouped(params)))
    trained.random = torch.get_rng_state(), random.getstate()
    return trained


def step_by(
    trained: Trained,
    gradients: Iterable[Blueprint | None],
    scale: Any,
    way: str | None = "unscale_and_step",
) -> Any:
    """Take one step on ``gradients`` multiplied by ``scale``, and return its result.

    ``way`` is a key of :data:`WAYS`, or ``None`` for ``step()``. Raises ``AssertionError`` if a
    parameter no longer requires gradients.
    """
    set_gradients(trained.params, gradients, 1.0 if scale is None else float(scale))
    with trained.at_work():
        optimizer = trained.optimizer
        result = optimizer.step() if way is None else WAYS[way](optimizer, scale)
    off = [i for i, p in enumerate(trained.params) if not p.requires_grad]
    assert not off, (
        f"after the step, parameters {off} have requires_grad=False: the next backward pass would "
        "compute no gradients for them"
    )
    return result


def train(
    make: Any,
    history: History,
    scale: Scale = UNSCALED,
    way: str | None = "unscale_and_step",
) -> Trained:
    """Train on ``history``; each step gets the scale that the last one returned.

    Args:
        make: function from parameters to the optimizer.
        history: parameters and gradients.
        scale: the first scale.
        way: a key of ``WAYS``, or ``None`` for ``step()`` without a scale.
    """
    trained = start(make, history)
    trained.scale = scale.make()
    for gradients in history.steps:
        result = step_by(trained, gradients, trained.scale, way)
        if way is not None:
            trained.scale = result.scale
            trained.scales.append(None if result.scale is None else float(result.scale))
    return trained


def assert_same_training(one: Trained, other: Trained, what: str) -> None:
    """Check that parameters, and states that both trainings have, are bitwise equal.

    A skipped step may create state that the other training creates later. That such state equals
    fresh state shows in the steps that follow.

    Args:
        one: a training.
        other: a training on the same history.
        what: the first words of the error message.
    """
    for i, (p, own) in enumerate(zip(one.params, other.params, strict=True)):
        assert_same(bits(p), bits(own), f"{what}: parameter {i}")
        mine, theirs = one.state(i), other.state(i)
        if mine and theirs:
            assert_same(mine, theirs, f"{what}: state of parameter {i}")


def assert_goes_on(make: Any, history: History, number: float, way: str) -> None:
    """Check that ``history`` ends with the same bits with and without its overflows."""
    scale = Scale("static", number)  # a dynamic scale would differ between the two trainings
    assert_same_training(
        train(make, history, scale, way),
        train(make, history.without_overflows(), scale, way),
        "a training with overflows differs from one without",
    )


def assert_scale_changes_nothing(make: Any, history: History, scale: Scale, way: str) -> None:
    """Check that a training of the finite steps under ``scale`` equals one of plain steps."""
    history = history.without_overflows()
    assume(all(map(any, history.steps)))  # step() may act without gradients
    assert_same_training(
        train(make, history, scale, way),
        train(make, history, way=None),
        f"scaled by {scale.number} it differs from step() on unscaled gradients",
    )
