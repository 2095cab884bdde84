"""NNabla's updater and MindSpore's cell, in plain Python, compared with the code of their guides.

Losses are linear, so gradients are the inputs times the scale, in float16: it is known which of
them overflow.
"""

import math
from typing import Any

import pytest
import torch
from support.readme import run

import ampopt
from ampopt import DynamicLossScale

STEPS = 500


def gradients() -> list[float]:
    """Numbers of which some overflow under large scales, and a few under all but small scales."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(0, 100, (3 * STEPS,), generator=generator).tolist()
    return [(-1.0) ** n * (512.0 if n < 2 else 32.0 if n < 6 else n / 64) for n in sizes]


def times(number: float, scale: float) -> float:
    """``number * scale`` in float16."""
    return float(torch.tensor(number).half() * torch.tensor(scale).half())


class Weight(torch.nn.Module):
    """A model that multiplies its input by one parameter in float16."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.half() * self.w.half()).float()


def mean(outputs: torch.Tensor) -> torch.Tensor:
    return outputs.mean()


class TheirUpdater:
    """A transcription of NNabla's ``DynamicLossScalingUpdater``, for one weight."""

    def __init__(self, feed: Any, scale: float, n: int, weight_decay: float, lr: float) -> None:
        self.feed, self.scale, self.scaling_factor, self.n = feed, scale, 2.0, n
        self.weight_decay, self.lr = weight_decay, lr
        self.w, self.counter, self.recursive_count = 1.0, 0, 0

    def update(self) -> None:
        grad = times(next(self.feed), self.scale)
        if not math.isfinite(grad):
            self.scale /= self.scaling_factor
            self.counter = 0
            self.recursive_count += 1
            assert self.recursive_count <= 100
            return self.update()
        self.recursive_count = 0
        grad /= self.scale
        grad += self.weight_decay * self.w
        self.w -= self.lr * grad
        if self.counter > self.n:
            self.scale *= self.scaling_factor
            self.counter = 0
        self.counter += 1


def test_nnablas_updater(tmp_path, capsys):
    weight_decay = run("A step of your own", tmp_path)["weight_decay"]
    scale_of = run("The loss scale of a checkpoint", tmp_path)["scale_of"]
    theirs = TheirUpdater(iter(gradients()), 8.0, 20, 1e-4, 1e-4)
    model = Weight()
    optimizer = ampopt.SGD(model.parameters(), lr=1e-4)
    step: Any = ampopt.TrainStep(
        model,
        mean,
        optimizer,
        DynamicLossScale.like("nnabla", growth_interval=20),
        precision=ampopt.Precision.like("nnabla-half"),
        on_gradients=weight_decay,
        on_overflow="next_batch",
    )
    batches = (torch.tensor([number]) for number in gradients())
    scales = set()
    for at in range(STEPS):
        theirs.update()
        assert not step(batches).skipped
        assert step.scale.item() == theirs.scale, at
        scales.add(theirs.scale)
        assert model.w.item() == pytest.approx(theirs.w, rel=1e-5), at
        if at == STEPS // 2:  # the rest from what a checkpoint of theirs says
            step.scale = scale_of("nnabla", theirs.scale, theirs.counter, growth_interval=20)
    assert len(scales) > 5


class TheirCell:
    """A transcription of MindSpore's ``TrainOneStepWithLossScaleCell``, for one weight.

    Includes ``DynamicLossScaleUpdateCell``, and what the guide's cell does to gradient and loss.
    """

    def __init__(self, loss_scale: float, window: int, clip: float, lr: float) -> None:
        self.loss_scale, self.factor, self.window = loss_scale, 2.0, window
        self.cur_iter, self.last_overflow_iter = 1, 0
        self.w, self.clip, self.lr = 1.0, clip, lr

    def __call__(self, number: float) -> bool:
        sens = self.loss_scale
        grad = (times(number, sens) + 2e-4 * self.w * sens) / sens
        overflow = not math.isfinite(grad)
        self.process_loss_scale(overflow)
        if not overflow:
            grad *= min(1.0, self.clip / (abs(grad) + 1e-6))
            self.w -= self.lr * grad
        return overflow

    def process_loss_scale(self, overflow: bool) -> None:
        on_overflow = max(self.loss_scale / self.factor, 1.0) if overflow else self.loss_scale
        should_inc = self.window <= self.cur_iter - self.last_overflow_iter
        if overflow or should_inc:
            self.last_overflow_iter = self.cur_iter
        self.loss_scale = on_overflow * self.factor if should_inc and not overflow else on_overflow
        self.cur_iter += 1


def test_mindspores_cell(tmp_path, capsys):
    guide = run("A step of your own", tmp_path)
    scale_of = run("The loss scale of a checkpoint", tmp_path)["scale_of"]
    theirs = TheirCell(2.0**12, 20, 1.0, 1e-3)
    model = Weight()
    optimizer = ampopt.SGD(model.parameters(), lr=1e-3)
    start = DynamicLossScale.like("mindspore", init_scale=2.0**12, growth_interval=20)
    options = {"autocast": None, "on_gradients": guide["clip_each"]}
    cell = guide["OwnStep"](model, mean, optimizer, start, **options)
    skipped = 0
    for at, number in enumerate(gradients()[:STEPS]):
        overflow = theirs(number)
        result = cell(torch.tensor([number]))
        assert result.skipped == overflow, at
        assert result.scale.item() == theirs.loss_scale, at
        assert model.w.item() == pytest.approx(theirs.w, rel=1e-5), at
        skipped += overflow
        if at == STEPS // 2:  # the rest from what a checkpoint of theirs says
            finite = theirs.cur_iter - theirs.last_overflow_iter - 1
            cell.scale = scale_of("mindspore", theirs.loss_scale, finite, growth_interval=20)
    assert skipped > 5
