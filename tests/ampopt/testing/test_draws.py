"""The kit draws every class of examples within a few times the default number of them."""

from collections import Counter
from collections.abc import Iterator

import hypothesis
import torch
from hypothesis import given

import ampopt
from ampopt.testing import Blueprint, History, OptimizerContract
from ampopt.testing.invariants.examples import ending_in_overflow, ending_well, scales, ways

NUMBER = 150
"""Of each kind of training; of both, three times what Hypothesis draws by default.

What it draws depends on the modules that other tests have imported, and no class of examples may be
missed at random.
"""
CLASSES = {
    *("unscale_and_step", "unscale, step"),
    *(f"a scale of kind {kind}" for kind in ("number", "tensor", "vector", "static", "dynamic")),
    *("an empty parameter", "a large parameter", "a number", "two dtypes", "three groups"),
    *(f"layout {layout}" for layout in ("contiguous", "strided", "transposed", "channels_last")),
    *("inf", "-inf", "nan"),
    *(f"an overflow in {dtype}" for dtype in (torch.float32, torch.float64)),
    *("an overflow in the first step", "an overflow in a later step", "two overflows in a row"),
    *("several bad parameters at once", "all parameters bad at once"),
    *("the first group alone is bad", "the last group alone is bad", "several groups are bad"),
}


def bad_numbers(grad: Blueprint | None) -> list[float | complex]:
    return [] if grad is None else [number for _, number in grad.spots]


def classes(history: History) -> Iterator[str]:
    """The classes that an example belongs to."""
    params, bounds = history.params, [0, *history.groups, len(history.params)]
    for p in params:
        yield f"layout {p.layout}"
        if p.numel == 0:
            yield "an empty parameter"
        elif p.numel > 12:
            yield "a large parameter"
        elif p.shape == ():
            yield "a number"
    if len({p.dtype for p in params}) > 1:
        yield "two dtypes"
    if len(bounds) == 4:
        yield "three groups"
    for i, step in enumerate(history.steps):
        bad = [place for place, grad in enumerate(step) if bad_numbers(grad)]
        for place in bad:
            yield f"an overflow in {params[place].dtype}"
            yield from map(str, bad_numbers(step[place]))
        if not bad:
            continue
        yield f"an overflow in {'a later' if i else 'the first'} step"
        if i and history.overflows[i - 1]:
            yield "two overflows in a row"
        if len(bad) > 1:
            yield "several bad parameters at once"
        if len(bad) == len(params) > 1:
            yield "all parameters bad at once"
        groups = {sum(start <= place for start in bounds[1:]) for place in bad}
        if len(groups) > 1:
            yield "several groups are bad"
        elif len(bounds) > 2 and groups <= {0, len(bounds) - 2}:
            yield f"the {'last' if max(groups) else 'first'} group alone is bad"


def test_each_class_of_trainings_is_drawn_and_none_is_rare():
    class Contract(OptimizerContract):
        def make(self, params):
            return ampopt.SGD(params)

    drawn: Counter[str] = Counter()
    for trainings in (ending_in_overflow, ending_well):

        @hypothesis.settings(
            max_examples=NUMBER,
            derandomize=True,
            database=None,
            deadline=None,
            phases=[hypothesis.Phase.generate],
            suppress_health_check=tuple(hypothesis.HealthCheck),  # pyright: ignore
        )
        @given(trainings(Contract), ways, scales)
        def count(history, way, scale):
            drawn.update({way, f"a scale of kind {scale.kind}", *classes(history)})

        count()
    rare = {name: drawn[name] for name in CLASSES if drawn[name] < 2}
    assert not rare, rare
    assert set(drawn) <= CLASSES, set(drawn) - CLASSES
