"""Plain accumulation: gradients of several micro-batches, added up under one scale."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.optimizers import CLOSURE_FREE, OWN
from support.strategies import fewer
from support.training_loops import INF, made, scaler_at

import ampopt
from ampopt import DynamicLossScale
from ampopt.testing.bits import bits, everything, state_of

DENSE = [cls for cls in (*CLOSURE_FREE, *OWN) if cls is not ampopt.SparseAdam]
"""Optimizers for dense gradients; another test is for sparse ones."""

Window = Sequence[Sequence[float]]
"""For each micro-batch, a number for each of the two parameters. Their sums are exact."""

numbers = st.integers(-64, 64).map(lambda n: n / 16)
windows = st.lists(st.lists(numbers, min_size=2, max_size=2), min_size=1, max_size=4)
trainings = st.lists(windows, min_size=1, max_size=3)
scales = st.integers(-4, 14).map(lambda n: 2.0**n)


def backward(params: Any, numbers: Sequence[float], scaled: Any) -> None:
    """Run the backward pass of a micro-batch: gradients are ``numbers`` times the scale."""
    scaled(sum((p * n).sum() for p, n in zip(params, numbers, strict=True))).backward()


def together(window: Window) -> list[float]:
    """The sums of all micro-batches, as one batch."""
    return [sum(numbers) for numbers in zip(*window, strict=True)]


def by_its_own_control_point(optimizer: Any, params: Any, training: Any, init: float) -> Any:
    scale: Any = DynamicLossScale(init_scale=init, growth_interval=2)
    for window in training:
        optimizer.zero_grad()
        for micro in window:
            backward(params, micro, lambda loss, scale=scale: ampopt.scale_outputs(loss, scale))
        scale = optimizer.unscale_and_step(grads_scaled_by=scale).scale
    return scale.item()


def by_unscaling_first(optimizer: Any, params: Any, training: Any, init: float) -> Any:
    scale: Any = DynamicLossScale(init_scale=init, growth_interval=2)
    for window in training:
        optimizer.zero_grad()
        for micro in window:
            backward(params, micro, lambda loss, scale=scale: ampopt.scale_outputs(loss, scale))
        scale = optimizer.unscale(grads_scaled_by=scale).scale
        optimizer.step_after_unscale()
    return scale.item()


def by_accumulating(optimizer: Any, params: Any, training: Any, init: float) -> Any:
    scale: Any = DynamicLossScale(init_scale=init, growth_interval=2)
    for window in training:
        optimizer.zero_grad()
        for micro in window:
            backward(params, micro, lambda loss, scale=scale: ampopt.scale_outputs(loss, scale))
            if micro is not window[-1] or len(window) % 2:
                optimizer.accumulate(grads_scaled_by=scale)
        scale = optimizer.unscale_and_step(grads_scaled_by=scale).scale
    return scale.item()


def by_scaler(scaler_class: Any) -> Any:
    def run(optimizer: Any, params: Any, training: Any, init: float) -> Any:
        scaler = scaler_class("cpu", init_scale=init, growth_interval=2)
        for window in training:
            optimizer.zero_grad()
            for micro in window:
                backward(params, micro, scaler.scale)
            scaler.step(optimizer)
            scaler.update()
        return scaler.get_scale()

    return run


LOOPS = {
    "own": by_its_own_control_point,
    "unscale": by_unscaling_first,
    "accumulate": by_accumulating,
    "torch": by_scaler(torch.amp.GradScaler),
    "ours": by_scaler(ampopt.GradScaler),
}
each_loop = pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)


@each_loop
@pytest.mark.parametrize("cls", DENSE)
@fewer(0.1)
@given(trainings, scales)
def test_an_accumulation_cycle_is_the_batch_that_it_adds_up_to(loop, cls, trainings, scale):
    """The bits are equal, as all sums and powers of two are exact; growth counts one step."""
    results = []
    for training in (trainings, [[together(window)] for window in trainings]):
        torch.manual_seed(0)
        optimizer, params = made(cls)
        after = loop(optimizer, params, training, scale)
        results.append((bits(params), state_of(optimizer), after))
    assert results[0] == results[1]
    assert results[0][2] == scale * 2 ** (len(trainings) // 2)


@pytest.mark.parametrize("cls", [ampopt.SparseAdam, ampopt.SGD, ampopt.Adagrad])
@fewer(0.2)
@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3), min_size=1, max_size=3))
def test_sparse_gradients_add_up_row_by_row(cls, lookups):
    results = []
    for window in (lookups, [[row for micro in lookups for row in micro]]):
        table = torch.nn.Embedding.from_pretrained(
            torch.arange(10.0).reshape(5, 2), freeze=False, sparse=True
        )
        optimizer = cls(table.parameters(), lr=0.25)
        for micro in window:
            ampopt.scale_outputs(table(torch.tensor(micro)).sum(), 4.0).backward()
        assert not optimizer.unscale_and_step(grads_scaled_by=4.0).skipped
        results.append((bits(table.weight), state_of(optimizer)))
    assert results[0] == results[1]


@each_loop
@pytest.mark.parametrize("cls", [ampopt.AdamW, *OWN, ampopt.Muon])
@fewer(0.3)
@given(st.data())
def test_an_overflow_in_any_micro_batch_skips_the_cycle(loop, cls, data):
    window = [list(micro) for micro in data.draw(windows)]
    at = data.draw(st.integers(0, len(window) - 1))
    for index in data.draw(st.sampled_from([(0,), (1,), (0, 1)])):
        window[at][index] = data.draw(st.sampled_from([INF, -INF, float("nan")]))
    if data.draw(st.booleans()):  # the opposite one, whose sum with it is NaN
        window.append([-n for n in window[at]])
    optimizer, params = made(cls)
    before = bits(params)
    assert loop(optimizer, params, [window], 4.0) == 2.0
    assert bits(params) == before
    after = loop(optimizer, params, [window, [[1.0, 1.0]], [[1.0, 2.0]]], 4.0)
    assert after == 4.0  # halved once, grown once: three windows, whatever is in them


@pytest.mark.parametrize("cls", [ampopt.AdamW, *OWN])
def test_an_accumulation_cycle_that_ends_early_is_dropped(cls):
    """Results are those of a run without the cycle and its overflow."""
    results = []
    for drops in (False, True):
        torch.manual_seed(0)
        optimizer, params = made(cls)
        scaler = scaler_at(4.0, ampopt.GradScaler)
        if drops:
            backward(params, [INF, 1.0], scaler.scale)
            scaler.unscale_(optimizer)
            scaler.discard(optimizer)
            backward(params, [INF, 1.0], scaler.scale)
            optimizer.zero_grad()
        for micro in ([1.0, 2.0], [3.0, -1.0]):
            backward(params, micro, scaler.scale)
        scaler.step(optimizer)
        scaler.update()
        results.append((everything(optimizer), scaler.state_dict()))
    assert results[0] == results[1]


@pytest.mark.parametrize("cls", [ampopt.SGD, ampopt.LBFGS, *OWN])
def test_a_closure_replays_its_whole_cycle(cls):
    results = []
    for init in (8.0, 2.0):
        torch.manual_seed(0)
        optimizer, params = made(cls)
        begun: list[float] = []

        def closure(
            scale: Any, optimizer: Any = optimizer, params: Any = params, begun: Any = begun
        ) -> float:
            optimizer.zero_grad()
            begun.append(float(scale))
            for micro in ([1.0, 2.0], [INF if begun[-1] > 2 else 3.0, -1.0], [1.0, 0.5]):
                backward(params, micro, lambda loss: ampopt.scale_outputs(loss, scale))
            return 1.0

        scale = DynamicLossScale(init_scale=init)
        result = optimizer.unscale_and_step(closure, grads_scaled_by=scale)
        if init == 8.0:
            assert begun[:3] == [8.0, 4.0, 2.0]
        assert set(begun[2:]) <= {2.0}
        results.append((bits(params), result.scale.item()))
    assert results[0] == results[1]
