"""Steps that users capture by ``torch.cuda.graph``, with uncaptured ones in between.

The graphs are a stand-in for CUDA's (see ``support.fake_cuda_graphs``), as in ``test_cuda_graphs``.
"""

import gc
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from support.fake_cuda_graphs import FakeGraphs
from torch import Tensor
from torch.nn import Parameter

import ampopt
from ampopt.testing.bits import bits, state_of
from ampopt_kernels.language import HAS_TRITON

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton cannot be imported here")


@pytest.fixture(autouse=True, scope="module")
def triton() -> Iterator[None]:
    ampopt.set_backend("triton")
    yield


class Training:
    """Parameters whose gradients keep their memory, except where a test replaces them."""

    def __init__(self, cls: Any, **options: Any) -> None:
        self.params = [Parameter(torch.linspace(-1.0, 2.0, 6).view(3, 2)) for _ in range(2)]
        self.grads = [torch.ones(3, 2), torch.full((3, 2), 0.5)]
        self.optimizer = cls(self.params, **options)
        self.place(self.grads)

    def place(self, grads: Sequence[Tensor | None]) -> None:
        for p, grad in zip(self.params, grads, strict=True):
            p.grad = grad

    def step(self, scale: Any = 2.0, max_norm: float | None = 1.0) -> None:
        self.optimizer.unscale_and_step(grads_scaled_by=scale, max_norm=max_norm)

    @property
    def now(self) -> Any:
        return [bits(p) for p in self.params], state_of(self.optimizer)


def moved(training: Training) -> None:
    """Take a step with gradients in other memory, another scale, and another norm to clip by."""
    training.place([grad.clone() for grad in training.grads])
    training.step(4.0, max_norm=0.5)


def fewer(training: Training) -> None:
    """Take a step with one gradient less, which needs another plan."""
    training.place([training.grads[0], None])
    training.step(max_norm=None)


def accumulated(training: Training) -> None:
    training.optimizer.accumulate(grads_scaled_by=2.0)
    training.place([grad.clone() for grad in training.grads])
    training.step()


@pytest.mark.parametrize(
    ("cls", "between"),
    [
        (ampopt.AdamW, moved),
        (ampopt.AdamW, accumulated),
        (ampopt.NovoGrad, moved),
        (ampopt.Adafactor, fewer),
    ],
)
def test_a_graph_is_replayed_after_steps_that_were_not_captured(cls, between):
    """The memory that the graph reads still exists, and results are those without a graph."""
    graphs, plain, captured = FakeGraphs(), Training(cls), Training(cls)
    captured.step()
    with graphs.capture() as replay:
        captured.step()
    for training, step in ((plain, plain.step), (captured, replay)):
        if training is plain:
            step()
        for _ in range(2):
            step()
            between(training)
            training.place(training.grads)
        step()
    assert captured.now == plain.now
    assert graphs.replays == 3


@pytest.mark.parametrize("cls", [ampopt.AdamW, ampopt.NovoGrad])
def test_graphs_of_steps_with_different_sets_of_gradients_take_turns(cls):
    graphs, plain, captured = FakeGraphs(), Training(cls), Training(cls)
    sets = [captured.grads, [captured.grads[0], None], [None, captured.grads[1]]]
    plain.step()
    captured.step()
    replays = []
    for grads in sets:
        for training in (plain, captured):
            training.place(grads)
            training.step()
        with graphs.capture() as replay:
            captured.step()
        replays.append(replay)
    for turn in (0, 1, 0, 2, 2, 1, 0):
        plain.place(sets[turn])
        plain.step()
        replays[turn]()
    assert captured.now == plain.now


def test_a_graph_of_unscale_outlives_the_rows_that_unscale_kept():
    params = [Parameter(torch.ones(8)) for _ in range(2)]
    both = [ampopt.SGD([param], lr=0.25) for param in params]
    optimizer, grad, scale = both[0], torch.ones(8), torch.tensor(2.0)

    def unscale(values: Tensor) -> None:
        params[0].grad = values
        optimizer.unscale(scale)
        optimizer.step_after_unscale()

    for _ in range(2):
        unscale(grad)
    params[1].grad = torch.ones(8)
    ampopt.unscale_and_step(both, scale)  # sends other tables for gradients
    unscale(grad)
    with FakeGraphs().capture() as replay:
        unscale(grad)
    for _ in range(2):
        unscale(torch.ones(8, 2)[:, 0])  # other rows, and so other tables
    gc.collect()
    before = params[0].detach().clone()
    grad.fill_(2.0)
    replay()
    assert grad.tolist() == [1.0] * 8 and torch.equal(params[0].detach(), before - 0.25)


@pytest.mark.parametrize("before", [0, 1])
def test_a_capture_with_gradients_of_other_parameters_than_the_step_before_is_refused(before):
    training = Training(ampopt.AdamW)
    sets = [training.grads, [training.grads[0], None]]
    for grads in (sets[0], sets[before]):
        training.place(grads)
        training.step()
    before_capture = training.now
    training.place(sets[1 - before])
    with pytest.raises(RuntimeError, match="gradients of other parameters.*of the same parameters"):
        with FakeGraphs().capture():
            training.step()
    assert training.now == before_capture


@pytest.mark.parametrize("masters", [False, True])
def test_a_first_step_is_refused_inside_a_capture_and_leaves_nothing(masters):
    params = [Parameter(torch.ones(3, dtype=torch.bfloat16))]
    optimizer = ampopt.AdamW(params, master_weights=masters)
    params[0].grad = torch.ones(3, dtype=torch.bfloat16)
    scale = ampopt.StaticLossScale(2.0)
    calls = [optimizer.step, lambda: optimizer.unscale_and_step(grads_scaled_by=scale)]
    calls += [lambda: optimizer.unscale(grads_scaled_by=scale)] if masters else []
    for call in calls:
        with pytest.raises(RuntimeError, match="capture .*Take the same step once before"):
            with FakeGraphs().capture():
                call()
    assert not any(optimizer.state.values())


def test_a_watch_is_refused_inside_a_capture():
    training = Training(ampopt.AdamW)
    watch = ampopt.Watch(training.optimizer)
    training.step()
    with pytest.raises(RuntimeError, match=r"each replay would record.*TrainStep\(cuda_graph"):
        with FakeGraphs().capture():
            training.step()
    assert watch.read()["steps"] == 1


@pytest.mark.parametrize(
    "changed",
    [{"max_norm": 0.25}, {"scale": 8.0}, {"scale": ampopt.DynamicLossScale()}],
    ids=["norm", "scale", "schedule"],
)
def test_copies_from_the_host_are_refused_inside_a_capture(changed):
    training = Training(ampopt.AdamW)
    training.step()
    before = training.now
    with pytest.raises(RuntimeError, match="a CUDA graph cannot capture this step"):
        with FakeGraphs().capture():
            training.step(**changed)
    assert training.now == before
