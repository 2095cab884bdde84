"""Strategies of the tests: those of ``ampopt.testing``, and optimizers to draw."""

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
    """The caller's profile with ``factor`` times its examples; Triton's interpreter is slow.

    Two at least: the first is always the simplest there is.
    """
    profile = settings()
    return settings(
        max_examples=max(2, round(profile.max_examples * factor)),
        # To explain a failure, every line of torch that is run would be traced, for minutes.
        phases=[phase for phase in profile.phases if phase is not Phase.explain],
    )


@dataclass(frozen=True)
class Case:
    """An optimizer with its options."""

    cls: type[ampopt.Optimizer]
    options: dict[str, Any] = field(default_factory=dict)

    def make(self, params: Iterable[Any], **changed: Any) -> Any:
        """The optimizer of ``params``, tensors or groups."""
        return self.cls(params, **self._options(), **changed)

    def torch(self, params: Iterable[Any], **changed: Any) -> torch.optim.Optimizer:
        """The for-loop optimizer of torch's that it is a drop-in for."""
        options = {**self._options(), "foreach": False, "fused": False, **changed}
        return torch_twin(self.cls)(params, **options)

    def _options(self) -> dict[str, Any]:
        # A tensor among the options is the optimizer's own.
        return {k: v.clone() if isinstance(v, Tensor) else v for k, v in self.options.items()}


@st.composite
def cases(
    draw: st.DrawFn, classes: Sequence[type[ampopt.Optimizer]] = SOME_RULES, stateful: bool = False
) -> Case:
    """A rule-based optimizer with any of its options.

    Args:
        draw: of Hypothesis.
        classes: to choose from.
        stateful: only with options under which it keeps state.
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
        # Where decay is added to gradients that it cancels, a small eps makes noise of rounding.
        options["eps"] = 0.125 if options["weight_decay"] else draw(st.sampled_from([1e-8, 0.125]))
        if draw(st.booleans()):
            options["lr"] = torch.tensor(lr, dtype=torch.float64)
    return Case(cls, options)
