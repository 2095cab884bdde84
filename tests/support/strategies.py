"""The strategies of ``ampopt.testing``, and strategies of optimizers with options."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from torch import Tensor

import ampopt
from ampopt.testing.blueprints import Blueprint, History, Scale, set_gradients
from ampopt.testing.strategies import (
    gradients,
    histories,
    loss_scales,
    non_finite_steps,
    parameters,
    powers_of_two,
    shapes,
    spoiled,
    values,
)
from support.optimizers import SOME_RULES, torch_twin

__all__ = [
    "Blueprint",
    "Case",
    "History",
    "Scale",
    "cases",
    "fewer",
    "gradients",
    "histories",
    "loss_scales",
    "non_finite_steps",
    "parameters",
    "powers_of_two",
    "set_gradients",
    "shapes",
    "spoiled",
    "values",
]


def fewer(factor: float) -> settings:
    """The active profile with ``factor`` times its examples, for slow tests.

    At least two examples: the first one is always the simplest. Sequences of calls have at most
    three fifths of the length.
    """
    profile = settings()
    return settings(
        max_examples=max(2, round(profile.max_examples * factor)),
        stateful_step_count=profile.stateful_step_count * 3 // 5,
        # The explain phase would trace every executed line of torch, for minutes.
        phases=[phase for phase in profile.phases if phase is not Phase.explain],
    )


@dataclass(frozen=True)
class Case:
    """An optimizer class with options."""

    cls: type[ampopt.Optimizer]
    options: dict[str, Any] = field(default_factory=dict)

    def make(self, params: Iterable[Any], **changed: Any) -> Any:
        """Make the optimizer of ``params``, tensors or groups."""
        return self.cls(params, **self._options(), **changed)

    def torch(self, params: Iterable[Any], **changed: Any) -> torch.optim.Optimizer:
        """Make torch's for-loop optimizer with the same options."""
        options = {**self._options(), "foreach": False, "fused": False, **changed}
        return torch_twin(self.cls)(params, **options)

    def _options(self) -> dict[str, Any]:
        # Each optimizer gets its own copy of a tensor among the options.
        return {k: v.clone() if isinstance(v, Tensor) else v for k, v in self.options.items()}


@st.composite
def cases(
    draw: st.DrawFn, classes: Sequence[type[ampopt.Optimizer]] = SOME_RULES, stateful: bool = False
) -> Case:
    """Strategy of an optimizer with an update rule, and options.

    Args:
        draw: passed by Hypothesis.
        classes: the classes to choose from.
        stateful: whether to draw only options with which the optimizer keeps state.
    """
    cls = draw(st.sampled_from(tuple(classes)))
    lr = draw(st.sampled_from([0.5, 0.1, 2.0**-7]))
    options: dict[str, Any] = {"lr": lr}
    if not issubclass(cls, (ampopt.SGD, ampopt.Adam, ampopt.AdamW)):
        return Case(cls, options)
    options["maximize"] = draw(st.booleans())
    options["weight_decay"] = draw(st.sampled_from([0.0, 0.25]))
    if issubclass(cls, ampopt.SGD):
        momentum = draw(st.sampled_from([0.9, 0.5] if stateful else [0.0, 0.9, 0.5]))
        nesterov = bool(momentum) and draw(st.booleans())
        dampening = 0.0 if nesterov else draw(st.sampled_from([0.0, 0.5]))
        options.update(momentum=momentum, nesterov=nesterov, dampening=dampening)
    else:
        options["amsgrad"] = draw(st.booleans())
        options["betas"] = draw(st.sampled_from([(0.9, 0.999), (0.5, 0.75)]))
        # Decay may cancel a gradient to rounding noise, which a small eps would amplify.
        options["eps"] = 0.125 if options["weight_decay"] else draw(st.sampled_from([1e-8, 0.125]))
        if draw(st.booleans()):
            options["lr"] = torch.tensor(lr, dtype=torch.float64)
    return Case(cls, options)
