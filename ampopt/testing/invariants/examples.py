"""What the examples of an invariant are drawn from: ways to step, scales, and trainings."""

from dataclasses import replace
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from ampopt.testing import strategies
from ampopt.testing.blueprints import History
from ampopt.testing.claims import Claims
from ampopt.testing.invariants.training import WAYS

__all__ = ["ending_in_overflow", "ending_well", "finite", "scales", "ways"]

ways = st.sampled_from(tuple(WAYS))
"""The two ways to take a step; see :data:`WAYS`."""

scales = strategies.loss_scales(off=False)
"""Loss scales of every kind but ``None``."""


def finite(cls: type[Claims], **changes: Any) -> st.SearchStrategy[History]:
    """Strategy of trainings without overflows, in which every step has a gradient."""
    return cls.histories(overflows=False, **changes).filter(
        lambda history: all(map(any, history.steps))
    )


@st.composite
def ending_in_overflow(draw: st.DrawFn, cls: type[Claims], **changes: Any) -> History:
    """Strategy of trainings with any number of finite steps, and a last step that overflows."""
    history = draw(cls.histories(overflows=False, max_steps=3, absent=False, **changes))
    *before_last, last = history.steps
    assume(strategies.spoilable(last))
    return replace(history, steps=(*before_last, draw(strategies.spoiled(last))))


@st.composite
def ending_well(draw: st.DrawFn, cls: type[Claims], **changes: Any) -> History:
    """Strategy of trainings that may overflow, but end in a finite step with all gradients."""
    history = draw(cls.histories(**changes))
    sparse = changes.get("sparse", not cls.dense_gradients)
    layouts = changes.get("layouts", cls.any_layout)
    last = draw(strategies.gradients(history.params, absent=False, layouts=layouts, sparse=sparse))
    return replace(history, steps=(*history.steps, last))
