"""A training step under ``torch.compile`` gives the results of the uncompiled one."""

from typing import Any

import pytest
import torch
from support.optimizers import Plain

import ampopt

OPTIMIZERS = [
    lambda params: ampopt.AdamW(params, lr=0.1),
    lambda params: ampopt.Adafactor(params),
    lambda params: Plain(params),
]
NAMES = ["AdamW", "Adafactor", "ordinary"]
STEPS = 5
without_the_compilers_warning = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor:UserWarning"
)
GROWN = 16.0
"""The scale after the steps."""


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Graphs:
    """A backend of ``torch.compile`` that runs graphs uncompiled, and counts graphs and runs."""

    def __init__(self) -> None:
        self.compiled = self.runs = 0

    def __call__(self, graph: Any, example: Any) -> Any:
        self.compiled += 1

        def run(*args: Any) -> Any:
            self.runs += 1
            return graph(*args)

        return run


class Loop:
    """A model, its optimizer, and functions that take one step in different ways."""

    def __init__(self, make: Any) -> None:
        self.weight = torch.nn.Parameter(torch.linspace(-1, 1, 12).reshape(3, 4))
        self.optimizer = make([self.weight])
        self.second = ampopt.SGD([torch.nn.Parameter(torch.ones(2))])
        self.scaler: Any = ampopt.GradScaler("cpu", init_scale=4.0, growth_interval=2)

    def loss(self, batch: Any) -> Any:
        return (batch @ self.weight).square().mean()

    def plain(self, batch: Any, scale: Any) -> Any:
        self.optimizer.zero_grad()
        self.loss(batch).backward()
        self.optimizer.step()
        return scale

    def joined(self, batch: Any, scale: Any) -> Any:
        self.optimizer.zero_grad()
        ampopt.scale_outputs(self.loss(batch), scale).backward()
        return self.optimizer.unscale_and_step(grads_scaled_by=scale, max_norm=1.0).scale

    def split(self, batch: Any, scale: Any) -> Any:
        self.optimizer.zero_grad()
        ampopt.scale_outputs(self.loss(batch), scale).backward()
        self.optimizer.unscale(grads_scaled_by=scale)
        torch.nn.utils.clip_grad_norm_([self.weight], 1.0)
        return self.optimizer.step_after_unscale().scale

    def several(self, batch: Any, scale: Any) -> Any:
        self.optimizer.zero_grad()
        ampopt.scale_outputs(self.loss(batch), scale).backward()
        both = [self.optimizer, self.second]
        return ampopt.unscale_and_step(both, grads_scaled_by=scale).scale

    def replayed(self, batch: Any, scale: Any) -> Any:
        def closure(scale: Any) -> Any:
            self.optimizer.zero_grad()
            loss = self.loss(batch)
            ampopt.scale_outputs(loss, scale).backward()
            return loss

        return self.optimizer.unscale_and_step(closure, grads_scaled_by=scale).scale

    def scaled(self, batch: Any, scale: Any) -> Any:
        self.optimizer.zero_grad()
        self.scaler.scale(self.loss(batch)).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return scale


FORMS = ("plain", "joined", "split", "several", "replayed", "scaled")
"""The methods of a loop that are one training step each."""


def trained(loop: Loop, step: Any) -> list[Any]:
    scale: Any = ampopt.DynamicLossScale(init_scale=4.0, growth_interval=2)
    batch = torch.linspace(-2, 1, 6).reshape(2, 3)
    for number in range(STEPS):
        scale = step(batch * (number + 1), scale)
    state = loop.optimizer.state_dict()["state"]
    return [loop.weight.detach(), state, scale.item(), loop.scaler.get_scale()]


@pytest.mark.parametrize(
    "make, form",
    [
        *((OPTIMIZERS[0], form) for form in FORMS),
        *((make, form) for make in OPTIMIZERS[1:] for form in ("joined", "scaled")),
    ],
    ids=[*FORMS, *(f"{name}-{form}" for name in NAMES[1:] for form in ("joined", "scaled"))],
)
def test_a_compiled_training_step_gives_the_same(make, form):
    loop, twin = Loop(make), Loop(make)
    expected = trained(loop, getattr(loop, form))
    graphs = Graphs()
    actual = trained(twin, torch.compile(getattr(twin, form), backend=graphs))
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert form == "plain" or GROWN in expected[2:]
    # A closure belongs to what is left to Python; its model may be compiled for itself, see below.
    assert form == "replayed" or graphs.runs >= STEPS


@pytest.mark.parametrize("make", OPTIMIZERS, ids=NAMES)
def test_a_compiled_step_gives_the_same(make):
    loop, twin = Loop(make), Loop(make)
    expected = trained(loop, loop.plain)
    twin.optimizer.step = torch.compile(twin.optimizer.step, backend="eager")
    torch.testing.assert_close(trained(twin, twin.plain), expected, rtol=0, atol=0)


@pytest.mark.parametrize("make", OPTIMIZERS, ids=NAMES)
def test_a_compiled_step_under_torchs_scaler_gives_the_same(make):
    def step(scaler: Any, optimizer: Any) -> None:
        scaler.step(optimizer)
        scaler.update()

    results = []
    for how in (step, torch.compile(step, backend="eager")):
        loop = Loop(make)
        loop.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)

        def scaled(batch: Any, scale: Any, loop: Loop = loop, how: Any = how) -> Any:
            loop.optimizer.zero_grad()
            loop.scaler.scale(loop.loss(batch)).backward()
            how(loop.scaler, loop.optimizer)
            return scale

        results.append(trained(loop, scaled))
    torch.testing.assert_close(*results, rtol=0, atol=0)
    assert loop.scaler.get_scale() == GROWN


@without_the_compilers_warning
@pytest.mark.parametrize("form", ["function", "step"])
@pytest.mark.parametrize("cls", [ampopt.SparseAdam, ampopt.Adafactor, ampopt.AdamW, ampopt.LBFGS])
def test_a_closure_may_be_given_to_a_compiled_step(cls, form):
    """With nested graph breaks, too, as the tests of torch's compiler have them."""

    def losses(compiled: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Embedding(5, 3, sparse=cls is ampopt.SparseAdam)
        optimizer = cls(model.parameters(), lr=0.1)
        step = compiled(optimizer.step) if form == "step" else optimizer.step

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.tensor([1, 2, 2])).square().sum()
            loss.backward()
            return loss

        def train() -> torch.Tensor:
            return step(closure)

        train_one = compiled(train) if form == "function" else train
        return [train_one().detach() for _ in range(3)] + list(model.parameters())

    expected = losses(lambda function: function)
    # Torch 2.11 goes on behind such an end with the globals of another function.
    nested = torch.__version__ >= "2.13"
    with torch._dynamo.config.patch(nested_graph_breaks=nested):  # pyright: ignore
        actual = losses(lambda function: torch.compile(function, backend="eager"))
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@without_the_compilers_warning
def test_a_line_search_rounds_as_where_nothing_is_compiled():
    """Torch, too, does not compile the step of LBFGS, so results are those without a compiler."""

    def trained(cls: Any, compiled: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Linear(5, 10)
        batch = torch.randn(4, 5)
        optimizer = cls(model.parameters(), lr=0.1, max_iter=5, line_search_fn="strong_wolfe")

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(batch).square().sum()
            loss.backward()
            return loss

        step = compiled(optimizer.step)
        for _ in range(6):
            step(closure)
        return list(model.parameters())

    expected = trained(torch.optim.LBFGS, lambda step: step)
    actual = trained(ampopt.LBFGS, lambda step: torch.compile(step, backend="eager"))
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_a_new_scale_compiles_nothing_again():
    loop, graphs = Loop(OPTIMIZERS[0]), Graphs()
    step = torch.compile(loop.joined, backend=graphs)
    trained(loop, step)
    compiled = graphs.compiled
    trained(loop, step)
    assert graphs.compiled == compiled


def test_a_model_that_is_compiled_stays_so_in_a_closure_and_in_a_train_step():
    graphs = Graphs()
    loop = Loop(OPTIMIZERS[0])
    loop.loss = torch.compile(loop.loss, backend=graphs)
    trained(loop, loop.replayed)
    assert graphs.runs == STEPS
    model = torch.nn.Linear(3, 2)
    optimizer = ampopt.SGD(model.parameters())
    compiled = torch.compile(model, backend=graphs)
    step = ampopt.TrainStep(compiled, torch.nn.functional.mse_loss, optimizer, 4.0)
    for _ in range(STEPS):
        step(torch.ones(4, 3), torch.ones(4, 2))
    assert graphs.runs == 2 * STEPS


def test_scale_outputs_is_part_of_a_graph():
    scale, graphs = ampopt.DynamicLossScale(init_scale=4.0), Graphs()
    scaled = torch.compile(ampopt.scale_outputs, backend=graphs, fullgraph=True)
    loss = torch.ones((), requires_grad=True)
    assert scaled(loss, scale).item() == 4.0
    assert scaled(loss, scale.next(True)).item() == 2.0
    assert graphs.compiled == 1
