"""A captured step gives the results of an uncaptured one, whatever happens between replays.

The graphs are a stand-in for CUDA's (see ``support.fake_cuda_graphs``), and the kernels run in
Triton's interpreter; the tests marked ``gpu`` do the same with those of a device.
"""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from support.fake_cuda_graphs import FakeGraphs
from support.gpus import DEVICE, ON_A_GPU, needs_gpu, no_waiting, skip_without_gpu
from torch import Tensor

import ampopt
from ampopt import DynamicLossScale, StaticLossScale, TrainStep
from ampopt.backend import lacking
from ampopt.testing.bits import bits, state_of
from ampopt.testing.isolation import small_states_of_any_size
from ampopt.testing.no_sync import assert_no_sync
from ampopt.train_step import cuda_graphs
from ampopt_kernels.language import HAS_TRITON

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton cannot be imported here")

INF = float("inf")
MSE = torch.nn.MSELoss()
CAPTURED_AT = 3
"""The number of the call that captures; earlier calls warm up."""


@pytest.fixture(autouse=True, scope="module")
def triton() -> None:
    if (lacks := lacking("triton")) is not None:
        pytest.skip(lacks)
    ampopt.set_backend("triton")


class CountedGraphs(cuda_graphs.CudaGraphs):
    """The graphs of a real device, counted."""

    def __init__(self) -> None:
        super().__init__(torch.device(DEVICE, torch.cuda.current_device()))
        self.captures = self.replays = 0

    @contextmanager
    def capture(self) -> Iterator[Callable[[], None]]:
        def counted() -> None:
            self.replays += 1
            replay()

        with super().capture() as replay:
            yield counted
        self.captures += 1


STAND_IN = "stand-in"
stand_in_only = pytest.mark.parametrize("graphs", [STAND_IN], indirect=True)


@pytest.fixture(params=[STAND_IN, ON_A_GPU])
def graphs(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    if request.param == STAND_IN:
        made, device = FakeGraphs(), "cpu"
    else:
        skip_without_gpu()
        made, device = CountedGraphs(), DEVICE
    monkeypatch.setattr(cuda_graphs, "graphs_on", lambda device: made)
    with torch.device(device):
        yield made


def batch(first: float = 1.0, rows: int = 2, dtype: torch.dtype = torch.float32) -> Any:
    inputs = torch.linspace(-1.0, 1.0, rows * 2).reshape(rows, 2)
    inputs[0, 0] = first
    return inputs.to(dtype), torch.ones(rows, 1, dtype=dtype)


class Training:
    """A model, its optimizer, and the step that trains it."""

    def __init__(
        self,
        cuda_graph: bool,
        scale: Callable[[], Any] = lambda: DynamicLossScale(init_scale=8.0, growth_interval=3),
        cls: Any = ampopt.AdamW,
        dtype: torch.dtype = torch.float32,
        dropout: float = 0.0,
        optimizer_options: Any = (),
        kind: type[TrainStep] = TrainStep,
        **options: Any,
    ) -> None:
        self.model = torch.nn.Sequential(torch.nn.Dropout(dropout), torch.nn.Linear(2, 1))
        with torch.no_grad():
            for p in self.model.parameters():
                p.copy_(torch.linspace(-1.0, 0.75, p.numel()).reshape(p.shape))
        self.model.to(dtype)
        self.optimizer = cls(self.model.parameters(), **dict(optimizer_options))
        self.step = kind(self.model, MSE, self.optimizer, scale(), cuda_graph=cuda_graph, **options)
        self.dtype = dtype
        self.seen: list[Any] = []
        self.results: list[Any] = []

    def __call__(self, *firsts: float, rows: int = 2) -> Any:
        for first in firsts:
            result = self.step(*batch(first, rows, self.dtype))
            self.results.append(result)
            scale = result.scale and result.scale.state_dict()
            self.seen.append((result.loss, result.found_inf, self.optimizer.grad_norm, scale))
        return self

    @property
    def now(self) -> Any:
        parameters = [bits(p) for p in self.model.parameters()]
        overflowed = [result.overflowed for result in self.results]
        seen = bits(self.seen), overflowed
        return *seen, parameters, state_of(self.optimizer), bits(torch.get_rng_state())


def both(train: Callable[[Training], Any], **options: Any) -> Training:
    """Train without a graph and with one, check that both agree, and return the latter."""
    ends = []
    for captured in (False, True):
        torch.manual_seed(0)
        training = Training(captured, **options)
        train(training)
        ends.append(training)
    assert ends[1].now == ends[0].now
    return ends[1]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": lambda: None},
        {"scale": lambda: StaticLossScale(4.0), "max_norm": 0.5},
        {"max_norm": 1.0, "micro_batches": 2, "dropout": 0.25},
        {"cls": ampopt.NAdam, "autocast": None},
        {
            "dtype": torch.bfloat16,
            "optimizer_options": {"master_weights": True},
            "autocast": None,
            "max_norm": 1.0,
        },
        {
            "dtype": torch.bfloat16,
            "optimizer_options": {"master_weights": True, "master_bits": 24, "state_bits": 8},
            "autocast": None,
        },
    ],
    ids=["plain", "unscaled", "static", "all at once", "scalars", "masters", "small states"],
)
def test_through_overflow_and_growth(graphs, options):
    with small_states_of_any_size():
        both(lambda training: training(1.0, 2.0, 3.0, 1.5, 0.5, INF, 1.0, 2.0, 3.0), **options)
    assert (graphs.captures, graphs.replays) == (1, 6)


def test_gradients_are_changed_before_captured_steps(graphs):
    def halve(optimizer: Any) -> None:
        for p in optimizer.master_params():
            p.grad.mul_(0.5)

    both(lambda training: training(1.0, 2.0, 3.0, 1.5, INF, 1.0), on_gradients=halve)
    assert (graphs.captures, graphs.replays) == (1, 3)


class Accumulating(TrainStep):
    """Adds up micro-batches in float32."""

    def backward(self, loss: Tensor, scale: Any) -> None:
        super().backward(loss, scale)
        self.optimizer.accumulate(grads_scaled_by=scale)


class AllButTheLast(TrainStep):
    """Adds up micro-batches in float32, except the last one of each batch."""

    def backward(self, loss: Tensor, scale: Any) -> None:
        if self.optimizer._ampopt.accumulation.cycle is not None:
            super().backward(loss, scale)
        else:
            super().backward(loss, scale)
            self.optimizer.accumulate(grads_scaled_by=scale)


HALVES: dict[str, Any] = {
    "dtype": torch.bfloat16,
    "optimizer_options": {"master_weights": True},
    "autocast": None,
}


@stand_in_only
@pytest.mark.parametrize("options", [{}, HALVES], ids=["float32", "masters"])
@pytest.mark.parametrize("kind", [Accumulating, AllButTheLast])
def test_steps_that_accumulate(graphs, kind, options):
    both(
        lambda training: training(1.0, 2.0, 3.0, 1.5, INF, 1.0),
        kind=kind,
        micro_batches=2,
        **options,
    )
    # A graph needs a gradient to find where the last step had it, and of the dtype of the sums.
    captured = kind is AllButTheLast and not options
    assert (graphs.captures, graphs.replays) == ((1, 3) if captured else (0, 0))


@stand_in_only
@pytest.mark.parametrize("at", [1, 2, CAPTURED_AT])
def test_a_step_with_other_gradients_than_those_before_is_refused(graphs, at):
    training = Training(True)
    linear: Any = training.model[1]
    for _ in range(at):
        training(1.0)
    before = training.now[2:]
    linear.register_forward_hook(lambda _, inputs, __: inputs[0] @ linear.weight.t())
    with pytest.raises(RuntimeError, match=r"gradients of group 0, parameter 1, .* freeze"):
        training(1.0)
    if at == CAPTURED_AT:  # the capture computes nothing
        assert training.now[2:] == before
    assert graphs.replays == 0


@stand_in_only
@pytest.mark.parametrize("at", [1, 3, 5])
def test_a_parameter_is_frozen_and_used_again(graphs, at):
    def train(training: Training) -> None:
        for calls, trainable in ((at, False), (5, True), (5, True)):
            training(*[1.0, 2.0] * (calls // 2), *[3.0] * (calls % 2))
            training.model[1].bias.requires_grad_(trainable)

    both(train)
    assert graphs.captures == (at > CAPTURED_AT) + 2


def test_learning_rates_change_between_replays(graphs):
    def train(training: Training) -> None:
        group = training.optimizer.param_groups[0]
        scheduler = torch.optim.lr_scheduler.ExponentialLR(training.optimizer, 0.5)
        for _ in range(6):
            training(1.0)
            scheduler.step()
        group["betas"] = (0.5, 0.75)
        training(1.0)

    both(train)
    assert (graphs.captures, graphs.replays) == (1, 4)


@needs_gpu(with_real="memory: the host may read the CPU's")
@pytest.mark.parametrize("graphs", [ON_A_GPU], indirect=True)
def test_a_learning_rate_on_the_device_is_read_there(graphs):
    def train(training: Training) -> None:
        lr = training.optimizer.param_groups[0]["lr"] = torch.tensor(0.125)
        for _ in range(6):
            training(1.0)
            lr.mul_(0.5)
        training.optimizer.param_groups[0]["lr"] = torch.tensor(0.25)  # another tensor
        training(1.0)

    both(train)
    assert (graphs.captures, graphs.replays) == (1, 3)


@pytest.mark.parametrize("graphs", [ON_A_GPU], indirect=True)
def test_no_replay_synchronizes(graphs):
    training = Training(True, max_norm=1.0)
    batches = [batch(first) for first in (1.0, 2.0, 3.0, 1.0, INF, 2.0)]
    for inputs, targets in batches[: CAPTURED_AT + 1]:
        training.step(inputs, targets)
    with no_waiting():
        for inputs, targets in batches[CAPTURED_AT + 1 :]:
            training.step(inputs, targets)
    assert graphs.replays == 3


def test_gradients_dropped_and_steps_by_hand_in_between(graphs):
    def train(training: Training) -> None:
        training(1.0, 2.0, 3.0, 4.0)
        training.optimizer.zero_grad()
        training(1.0)
        training.optimizer.zero_grad()
        training.model(batch()[0]).sum().backward()
        training.optimizer.unscale_and_step(grads_scaled_by=1.0, max_norm=0.25)
        training(2.0, 3.0)

    both(train, max_norm=1.0)
    assert (graphs.captures, graphs.replays) == (1, 4)


def test_a_step_that_is_searched_for_overflow_is_taken_without_the_graph(graphs):
    found = []

    def train(training: Training) -> None:
        training(1.0, 2.0, 3.0, 4.0)
        with ampopt.first_nonfinite(training.model) as first:
            training(INF)
        found.append(first)
        training(2.0, 3.0)

    both(train)
    assert graphs.captures == 1
    assert [first.first.name for first in found] == ["0", "0"]


def test_a_batch_of_another_shape_is_taken_without_the_graph(graphs):
    def train(training: Training) -> None:
        training(1.0, 2.0, 3.0, 4.0)
        training(1.0, INF, rows=4)
        training(2.0, 3.0)

    both(train)
    assert (graphs.captures, graphs.replays) == (1, 3)


def test_loading_a_state_begins_again(graphs):
    def train(training: Training) -> None:
        training(1.0)
        saved = training.step.state_dict()
        training(2.0, 3.0, 4.0)
        training.step.load_state_dict(saved)
        training(1.0, 2.0, 3.0, 4.0)
        training.optimizer.load_state_dict(training.optimizer.state_dict())
        for param in training.model.parameters():
            param.grad = torch.ones_like(param)
        training.optimizer.step()  # by hand, after which a plan fits the new states
        training(1.0, 2.0, 3.0, 4.0)

    both(train)
    assert (graphs.captures, graphs.replays) == (3, 3)


@stand_in_only
def test_a_step_that_is_dropped_frees_its_graph_and_model_at_once(graphs):
    """Not when the garbage collector runs, which knows nothing of the memory of a GPU."""

    def train() -> list[Any]:
        training = Training(cuda_graph=True)
        for _ in range(CAPTURED_AT + 1):
            training.step(*batch())
        return [weakref.ref(x) for x in (training.model, training.optimizer, training.step)]

    train()  # what is imported and compiled first may keep its arguments
    gc.disable()
    try:
        assert [of() for of in train()] == [None] * 3
    finally:
        gc.enable()


@stand_in_only
@pytest.mark.parametrize("whole", [False, True])
def test_another_mode_of_a_module_is_captured_again(graphs, whole):
    def train(training: Training) -> None:
        training(1.0, 2.0, 3.0, 4.0)
        training.model.eval()
        training.model.train()  # a validation between two steps
        training(1.0)
        (training.model if whole else training.model[0]).eval()
        training(1.0, 2.0, 3.0, 4.0)

    both(train, dropout=0.5)
    assert (graphs.captures, graphs.replays) == (2, 3)


@stand_in_only
@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_scripted_model_is_captured(graphs):
    def train(training: Training) -> None:
        training.step.model = torch.jit.script(training.model)
        training(1.0, 2.0, 3.0, 4.0)
        training.step.model.eval()
        training(1.0)

    both(train, dropout=0.5)
    assert (graphs.captures, graphs.replays) == (1, 1)


@stand_in_only
@pytest.mark.parametrize("what", ["step by hand", "skip_when"])
def test_another_step_between_warm_up_and_capture_delays_the_capture(graphs, what):
    def train(training: Training) -> None:
        training(1.0, 2.0, 3.0)
        if what == "skip_when":
            ampopt.skip_when(training.optimizer, norm=100.0)
        else:
            inputs, targets = batch()
            training.optimizer.zero_grad()
            MSE(training.model(inputs), targets).backward()
            training.optimizer.unscale_and_step(grads_scaled_by=1.0)
        training(1.0, 2.0, 3.0)

    both(train)
    assert (graphs.captures, graphs.replays) == (1, 2)


@stand_in_only
def test_a_buffer_that_was_replaced_is_captured_again(graphs):
    def train(training: Training) -> None:
        model = training.model
        model.append(torch.nn.BatchNorm1d(1, affine=False))
        training(1.0, 2.0, 3.0, 4.0)
        model[-1].running_var = torch.full((1,), 2.0)
        training(1.0, 2.0)
        training.seen.append(list(model.buffers()))

    both(train)


@stand_in_only
def test_batches_may_contain_numbers_and_are_not_overwritten(graphs):
    class Weighted(TrainStep):
        def forward(self, inputs: Any, *targets: Any) -> Any:
            *others, weight = targets
            return super().forward(inputs, *others) * weight

    def train(training: Training) -> None:
        batches = [batch(first) for first in (1.0, 2.0, 3.0, 4.0, 5.0)]
        before = bits(batches)
        training.results = [training.step(*each, 2.0) for each in batches]
        assert bits(batches) == before

    both(train, kind=Weighted)
    assert (graphs.captures, graphs.replays) == (1, 2)


@stand_in_only
def test_a_batch_with_an_array_of_numpy_is_refused(graphs):
    training = Training(True)
    with pytest.raises(TypeError, match="a batch contains a ndarray"):
        training.step(*batch(), np.ones(2))


@stand_in_only
def test_a_model_that_replaces_its_buffers_is_refused(graphs):
    class Counting(torch.nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            self.register_buffer("seen", getattr(self, "seen", 0) + input.mean(0).detach())
            return super().forward(input)

    model = Counting(2, 1)
    optimizer = ampopt.SGD(model.parameters())
    step = TrainStep(model, MSE, optimizer, 1.0, cuda_graph=True, autocast=None)
    with pytest.raises(RuntimeError, match="the model replaces a buffer"):
        for _ in range(4):
            step(*batch())
    assert graphs.captures == 0


@stand_in_only
def test_a_model_may_make_its_buffers_in_its_first_step(graphs):
    class Counting(torch.nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            if not hasattr(self, "seen"):
                self.register_buffer("seen", torch.zeros(()))
            self.seen += 1
            return super().forward(input)

    model = Counting(2, 1)
    optimizer = ampopt.SGD(model.parameters())
    step = TrainStep(model, MSE, optimizer, 1.0, cuda_graph=True, autocast=None)
    for _ in range(CAPTURED_AT + 2):
        step(*batch())
    assert graphs.captures == 1


@stand_in_only
def test_a_step_with_another_kind_of_scale_is_captured_again(graphs):
    def train(training: Training) -> None:
        training(1.0, 2.0, 3.0, 4.0)
        for scale in (None, DynamicLossScale(init_scale=2.0), 4.0, None):
            training.step.scale = scale
            training(1.0, 2.0, 3.0, 4.0)

    both(train)
    assert (graphs.captures, graphs.replays) == (5, 5)


@stand_in_only
def test_a_scale_that_was_loaded_in_place_is_used(graphs):
    def train(training: Training) -> None:
        training(1.0, 2.0, 3.0, 4.0)
        for changed in ({"scale": 2.0}, {"growth_interval": 1}):
            now = training.step.scale
            assert now is not None
            now.load_state_dict({**now.state_dict(), **changed})
            training(1.0, 2.0)

    both(train)
    both(train_static, scale=lambda: StaticLossScale(4.0))


def train_static(training: Training) -> None:
    training(1.0, 2.0, 3.0, 4.0)
    assert training.step.scale is not None
    training.step.scale.load_state_dict(StaticLossScale(0.5).state_dict())
    training(1.0, INF)


@stand_in_only
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda step: pickle.loads(pickle.dumps(step))], ids=["copy", "pickle"]
)
def test_a_copy_of_a_captured_step_has_a_graph_of_its_own(graphs, copied):
    def train(training: Training) -> None:
        training(1.0, 2.0, 3.0, 4.0)
        training.step = copied(training.step)
        training.model, training.optimizer = training.step.model, training.step.optimizer
        training(1.0, 2.0, 3.0, 4.0)

    both(train)
    assert (graphs.captures, graphs.replays) == (2, 2)


def test_post_hooks_run_for_each_step_once_and_know_whether_it_was_skipped(graphs):
    def train(training: Training) -> None:
        optimizer = training.optimizer
        flags: list[Tensor] = []
        optimizer.register_step_post_hook(lambda o, *_: flags.append(o.found_inf))
        gate = ampopt.lr_scheduler_gate(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
        for first in (1.0, 2.0, INF, 3.0, INF, 1.0):
            training(first)
            gate.step()
        training.seen.append([[float(flag) for flag in flags], gate.get_last_lr()])

    assert both(train).seen[-1][0] == [0.0, 0.0, 1.0, 0.0, 1.0, 0.0]


@stand_in_only
def test_no_captured_step_reads_a_tensor(graphs):
    training = Training(True, max_norm=1.0)
    batches = [batch(first) for first in (1.0, 2.0, 3.0, 1.0, INF, 2.0)]
    with assert_no_sync():
        for inputs, targets in batches:
            training.step(inputs, targets)
    assert graphs.replays == 3


def captured_later(training: Training) -> None:
    training(*[1.0] * (CAPTURED_AT + 1))


@stand_in_only
def test_a_model_that_reads_a_tensor_is_refused(graphs):
    training = Training(True)
    training.model.register_forward_hook(lambda module, args, output: output * output.max().item())
    with pytest.raises(AssertionError, match="the host looked while capturing"):
        captured_later(training)


@stand_in_only
def test_a_pre_hook_is_refused(graphs):
    training = Training(True)
    training.optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="a step pre-hook cannot change a step"):
        captured_later(training)


@stand_in_only
def test_a_step_on_copies_is_refused(graphs):
    weight = torch.nn.Parameter(torch.ones(2, 3))
    optimizer = ampopt.SGD([weight], lr=0.5)
    optimizer.state[weight]["momentum_buffer"] = torch.ones(3, 2).t()
    optimizer.param_groups[0]["momentum"] = 0.5
    step = TrainStep(lambda x: x * weight, torch.sum, optimizer, 1.0, cuda_graph=True)
    with pytest.raises(RuntimeError, match="this step works on copies"):
        for _ in range(CAPTURED_AT + 1):
            step(torch.ones(()))


def test_complex_parameters_get_the_same_bits(graphs):
    def trained(cuda_graph: bool) -> Any:
        weight = torch.nn.Parameter(torch.full((3,), 1 + 2j))
        optimizer = ampopt.AdamW([weight], lr=0.5)

        def model(x: Tensor) -> Tensor:
            return torch.view_as_real(weight) * x

        step = TrainStep(model, torch.sum, optimizer, 4.0, cuda_graph=cuda_graph)
        for numbers in ((1, 2), (3, -1), (0, 1), (2, 2), (1, INF), (-1, 5)):
            step(torch.tensor([float(number) for number in numbers]).expand(3, 2))
        return bits(weight), state_of(optimizer)

    assert trained(True) == trained(False)
    assert graphs.replays == 3


@stand_in_only
def test_an_optimizer_of_other_parameters_is_refused(graphs):
    training = Training(True)
    training.optimizer.param_groups[0]["params"] = [torch.nn.Parameter(torch.ones(1))]
    with pytest.raises(RuntimeError, match="no parameter of the optimizer has a gradient"):
        captured_later(training)


@stand_in_only
def test_under_autocast_it_is_refused(graphs):
    training = Training(True)
    with pytest.raises(RuntimeError, match="called under torch.autocast"):
        with torch.autocast("cpu", torch.bfloat16):
            training(1.0)


def test_a_device_without_graphs_is_trained_without():
    assert cuda_graphs.graphs_on(torch.device("cpu")) is None
    training = Training(True)(1.0, 2.0, 3.0, 1.0, INF)
    assert training.seen[-1][1] == 1.0


def test_another_backend_on_a_device_is_refused(monkeypatch):
    monkeypatch.setattr("ampopt.backend._chosen", "eager")
    with pytest.raises(RuntimeError, match="needs the triton backend on cuda, got eager"):
        cuda_graphs.graphs_on(torch.device("cuda"))


def test_other_threads_may_do_what_would_break_a_capture(monkeypatch):
    """The thread that pins the memory of a DataLoader makes calls that break a capture."""
    captures: list[Any] = []
    for name in ("Stream", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, mock.Mock())
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(
        torch.cuda, "graph", lambda *_, **options: captures.append(options) or nullcontext()
    )
    graphs = cuda_graphs.CudaGraphs(torch.device("cuda"))
    with graphs.capture():
        pass
    [options] = captures
    assert options == {"stream": graphs._stream, "capture_error_mode": "thread_local"}


@pytest.mark.parametrize("around", [lambda model: model, torch.nn.Sequential])
@pytest.mark.usefixtures("process_group")
def test_a_model_of_many_ranks_is_refused(around):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = ampopt.SGD(model.parameters(), lr=0.5)
    with pytest.raises(TypeError, match="under DistributedDataParallel.*leave cuda_graph out"):
        TrainStep(around(model), MSE, optimizer, 1.0, cuda_graph=True)
    TrainStep(around(model), MSE, optimizer, 1.0)
