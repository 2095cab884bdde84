"""``averaged`` is bitwise torch's average over the steps that were not skipped."""

import copy
import math
import pickle
from typing import Any

import numpy
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support.counted_operations import counted
from support.fixtures import either_host
from support.local_ranks import mesh_of
from support.optimizers import Plain
from support.strategies import fewer
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import ampopt
from ampopt import averaging
from ampopt.testing import as_on_a_device, assert_no_sync
from ampopt.testing.bits import bits

INF = float("inf")

DECAYS = st.none() | st.sampled_from([0.0, 0.3, 0.5, 0.75, 0.999, 1.0])
HISTORIES = st.lists(st.booleans(), min_size=1, max_size=5)
"""For each step, whether it overflows."""

backend = either_host


class Net(nn.Module):
    """A model with parameters of two shapes, and buffers that every forward pass changes."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 2), nn.BatchNorm1d(2)
        self.to(dtype)
        with torch.no_grad():
            for i, p in enumerate(self.parameters()):
                p.copy_(torch.linspace(-1.0, i, p.numel()).reshape(p.shape))

    def forward(self, x: Any) -> Any:
        return self.norm(self.layer(x))


def torchs(model: nn.Module, decay: float | None, **options: Any) -> AveragedModel:
    multi_avg_fn = None if decay is None else get_ema_multi_avg_fn(decay)
    return AveragedModel(model, multi_avg_fn=multi_avg_fn, **options)


def gradients(model: nn.Module, step: int, overflows: bool) -> None:
    dtype = next(model.parameters()).dtype
    x = torch.linspace(-1.0, 1.0 + step, 12).reshape(4, 3).to(dtype)
    model.zero_grad()
    (model(x) * x[:, :2]).sum().backward()
    if overflows:
        first = next(model.parameters())
        assert first.grad is not None
        first.grad.view(-1)[0] = INF


def state(average: AveragedModel) -> Any:
    return bits(dict(average.state_dict()))


def with_control_points(optimizer: Any) -> None:
    optimizer.unscale_and_step(grads_scaled_by=1.0)


def with_torchs_scaler(optimizer: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)


def with_our_scaler(optimizer: Any) -> None:
    scaler = ampopt.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)


def agree(average: AveragedModel, theirs: AveragedModel, decay: float | None) -> bool:
    """Whether averages agree: bitwise; the plain mean, which torch rounds differently, nearly."""
    if decay is not None:
        return state(average) == state(theirs)
    dtypes = {p.dtype for p in average.parameters()}
    few_roundings = 8 * max(torch.finfo(dtype).eps for dtype in dtypes)
    mine, torch_has = dict(average.state_dict()), dict(theirs.state_dict())
    torch.testing.assert_close(mine, torch_has, rtol=few_roundings, atol=few_roundings)
    return True


@pytest.mark.usefixtures("backend")
class TestBesideTorchs:
    @pytest.mark.parametrize(
        ("cls", "attempt"),
        [
            (ampopt.AdamW, with_control_points),
            (ampopt.AdamW, with_torchs_scaler),
            (ampopt.Adafactor, with_our_scaler),
            (Plain, with_control_points),
        ],
    )
    @example(history=[False, False, True, False], decay=None, dtype="float64")
    @fewer(0.5)
    @given(history=HISTORIES, decay=DECAYS, dtype=st.sampled_from(["float32", "float64"]))
    def test_averages_are_torchs_over_the_applied_steps(self, cls, attempt, history, decay, dtype):
        model = Net(getattr(torch, dtype))
        optimizer = cls(model.parameters(), lr=0.125)
        average, theirs = ampopt.averaged(model, optimizer, decay), torchs(model, decay)
        for step, overflows in enumerate(history):
            gradients(model, step, overflows)
            before = state(average)
            attempt(optimizer)
            average.update_parameters(model)
            if overflows:
                assert state(average) == before
            else:
                theirs.update_parameters(model)
        assert agree(average, theirs, decay)


@pytest.mark.usefixtures("backend")
@example(history=[False, False, True, False], decay=0.5, dtype=torch.float16)
@example(history=[False, False, False, False], decay=None, dtype=torch.bfloat16)
@given(history=HISTORIES, decay=DECAYS, dtype=st.sampled_from([torch.float16, torch.bfloat16]))
def test_numbers_of_half_precision_are_averaged_as_torch_does(history, decay, dtype):
    model = nn.Linear(3, 2).to(dtype)
    for p in model.parameters():
        nn.init.constant_(p, 0.3)
    optimizer = ampopt.SGD(model.parameters(), lr=0.25, master_weights=True)
    average, theirs = ampopt.averaged(model, optimizer, decay), torchs(model, decay)
    for step, overflows in enumerate(history):
        for p in model.parameters():
            p.grad = torch.full_like(p, INF if overflows else 0.25 + step)
        result = optimizer.unscale_and_step(grads_scaled_by=1.0)
        average.update_parameters(model)
        if not result.skipped:
            theirs.update_parameters(model)
    assert agree(average, theirs, decay)


@pytest.mark.parametrize("decay", [None, 0.9])
@pytest.mark.parametrize("cls", [ampopt.AdamW, Plain])
def test_nothing_synchronizes(decay, cls):
    with as_on_a_device():
        model = nn.Linear(3, 2)
        optimizer = cls(model.parameters(), lr=0.125)
        average = ampopt.averaged(model, optimizer, decay)
        for overflows in (False, True, False):
            for p in model.parameters():
                p.grad = torch.full_like(p, INF if overflows else 1.0)
            optimizer.unscale_and_step(grads_scaled_by=1.0)
            with assert_no_sync():
                average.update_parameters(model)
    assert average.n_averaged.item() == 2


@pytest.mark.parametrize(
    ("layer", "decay", "use_buffers", "at_most"),
    [
        (nn.LayerNorm, 0.9, False, 10),
        (nn.LayerNorm, None, False, 15),
        (nn.BatchNorm1d, 0.9, False, 18),
        (nn.BatchNorm1d, 0.9, True, 20),
    ],
)
def test_operations_do_not_grow_with_the_number_of_parameters(layer, decay, use_buffers, at_most):
    def operations(layers: int) -> Any:
        model = nn.Sequential(*[layer(8) for _ in range(layers)])
        optimizer = ampopt.SGD(model.parameters(), lr=0.5)
        average = ampopt.averaged(model, optimizer, decay, use_buffers=use_buffers)
        stepped(average, model, optimizer, 1.0)
        return counted(lambda: average.update_parameters(model))

    with as_on_a_device():
        assert operations(2) == operations(6)
        assert operations(6).total() <= at_most


@pytest.mark.parametrize("layer", [nn.LayerNorm, nn.BatchNorm1d])
@pytest.mark.parametrize("decay", [None, 0.9])
def test_on_a_cpu_it_takes_no_more_operations_than_torchs(layer, decay):
    model = nn.Sequential(*[layer(8) for _ in range(6)])
    optimizer = ampopt.SGD(model.parameters(), lr=0.5)
    average, theirs = ampopt.averaged(model, optimizer, decay), torchs(model, decay)
    stepped(average, model, optimizer, 1.0)
    theirs.update_parameters(model)
    mine = counted(lambda: average.update_parameters(model))
    assert mine.total() <= counted(lambda: theirs.update_parameters(model)).total()


@pytest.mark.usefixtures("backend")
def test_parameters_in_8_bits_are_averaged_in_float32():
    """An ``AveragedModel`` refuses them."""
    model = nn.Linear(3, 2)
    codes = nn.Parameter(torch.ones(2, dtype=torch.float8_e4m3fn), requires_grad=False)
    model.register_parameter("codes", codes)
    optimizer = ampopt.SGD([model.weight], lr=0.5)
    average: Any = ampopt.averaged(model, optimizer, 0.75)
    for value, gradient in ((1.0, 1.0), (3.0, 1.0), (8.0, INF)):
        codes.copy_(torch.full((2,), value))
        model.weight.grad = torch.full_like(model.weight, gradient)
        optimizer.unscale_and_step(grads_scaled_by=1.0)
        average.update_parameters(model)
    assert average.module.codes.float().tolist() == [1.5, 1.5]


class ManyLayouts(nn.Module):
    """Parameters in several layouts, with values that an interpolation of weight 0 would change."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        values = torch.tensor([-0.0, math.nan, INF, -INF, 2.0**-133, 1.0, -2.0, 0.0], dtype=dtype)
        images = values.repeat(3).reshape(2, 3, 2, 2)
        self.vector, self.images = nn.Parameter(values), nn.Parameter(images)
        self.last = nn.Parameter(images.contiguous(memory_format=torch.channels_last))
        self.empty, self.low = nn.Parameter(values[:0]), nn.Parameter(values.half())
        self.register_buffer("columns", torch.arange(12.0, dtype=dtype).reshape(3, 4)[:, :2].T)
        self.register_buffer("steps", torch.tensor([3, 7]))
        self.register_buffer("mask", torch.tensor([True, False]))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("batch_bytes", [1, 100, 1 << 26])
@pytest.mark.parametrize(
    ("dtype", "use_buffers"), [(torch.float32, True), (torch.float64, False), (torch.half, True)]
)
def test_any_layout_and_any_value(monkeypatch, dtype, use_buffers, batch_bytes):
    """With batches of one, several and all tensors. A skipped step keeps each NaN and -0.0."""
    monkeypatch.setattr(averaging, "_BATCH_BYTES", batch_bytes)
    model = ManyLayouts(dtype)
    optimizer = ampopt.SGD(model.parameters(), lr=0.0)
    average = ampopt.averaged(model, optimizer, 0.25, use_buffers=use_buffers)
    theirs = torchs(model, 0.25, use_buffers=use_buffers)
    for gradient in (INF, 1.0, 1.0, INF, 1.0):
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.copy_(tensor.flip(0))
        before = state(average)
        stepped(average, model, optimizer, gradient)
        if gradient == INF:
            assert state(average) == before
            continue
        theirs.update_parameters(model)
        theirs.module.mask = model.mask  # torch makes numbers of bools, and averages these
        assert state(average) == state(theirs)
    assert dict(average.module.named_parameters())["last"].is_contiguous(
        memory_format=torch.channels_last
    )


def doubled(average: Any, value: Any, n_averaged: Any) -> Any:
    return torch.lerp(average, value, 1 / (2 * n_averaged.to(average.dtype) + 1))


def halved(averages: Any, values: Any, n_averaged: Any) -> None:
    torch._foreach_lerp_(averages, values, 0.5)  # pyright: ignore


def divided(average: Any, value: Any, n_averaged: Any) -> Any:
    return torch.lerp(average, value, 1 / int(n_averaged))  # which cannot be 0


OPTIONS: dict[str, dict[str, Any]] = {
    "buffers": {"use_buffers": True},
    "buffers, decay": {"use_buffers": True, "decay": 0.75},
    "avg_fn": {"avg_fn": doubled},
    "avg_fn, which divides": {"avg_fn": divided},
    "multi_avg_fn": {"multi_avg_fn": halved, "device": "cpu"},
    "avg_fn, buffers": {"avg_fn": doubled, "use_buffers": True},
}


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("options", OPTIONS)
def test_arguments_are_those_of_torchs_averaged_model(options):
    given = dict(OPTIONS[options])
    model = Net()
    optimizer = ampopt.AdamW(model.parameters(), lr=0.125)
    average = ampopt.averaged(model, optimizer, **given)
    decay = given.pop("decay", None)
    if decay is not None:
        given["multi_avg_fn"] = get_ema_multi_avg_fn(decay)
    theirs = AveragedModel(model, **given)
    for step, overflows in enumerate((True, False, False, True, False, False)):
        gradients(model, step, overflows)
        before = state(average)
        optimizer.unscale_and_step(grads_scaled_by=1.0)
        average.update_parameters(model)
        if overflows:
            assert state(average) == before
        else:
            theirs.update_parameters(model)
    mine, torch_has = dict(average.state_dict()), dict(theirs.state_dict())
    torch.testing.assert_close(mine, torch_has, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"avg_fn": doubled, "multi_avg_fn": halved}, ValueError, "got avg_fn and multi_avg_fn"),
        ({"decay": 0.5, "avg_fn": doubled}, ValueError, "got decay and avg_fn"),
        ({"avg_fn": 0.5}, TypeError, "avg_fn must be callable or None, got float"),
        ({"use_buffers": "yes"}, TypeError, "use_buffers must be True or False, got 'yes'"),
    ],
)
def test_arguments_that_have_no_effect_are_refused(options, error, text):
    model = nn.Linear(3, 2)
    with pytest.raises(error, match=text):
        ampopt.averaged(model, ampopt.SGD(model.parameters(), lr=0.5), **options)


def test_a_decay_of_numpy_is_a_number():
    decay: Any = numpy.float32(0.5)
    average = made(decay)[2]
    assert average.decay == 0.5
    assert type(average.decay) is float


def averaged_by_parts() -> Any:
    """Averages of a sharded model and of a whole one, and the errors of calls that are refused."""
    from torch.distributed.fsdp import fully_shard

    mesh, refused = mesh_of(2), []
    whole = Net()
    model, to_average, alone = copy.deepcopy(whole), copy.deepcopy(whole), copy.deepcopy(whole)
    for module in (model.layer, model):
        fully_shard(module, mesh=mesh)
    optimizers = [ampopt.SGD(m.parameters(), lr=0.125) for m in (model, alone)]
    averages: list[Any] = [
        ampopt.averaged(m, o, 0.75) for m, o in zip((to_average, alone), optimizers, strict=True)
    ]
    try:
        ampopt.averaged(model, optimizers[0])
    except RuntimeError as error:
        refused.append(str(error))
    try:
        averages[0].update_parameters(model)
    except RuntimeError as error:
        refused.append(str(error))
    for module in (averages[0].module.layer, averages[0].module):
        fully_shard(module, mesh=mesh)
    outputs = []
    for step, overflows in enumerate((False, True, False)):
        for m, o, average in zip((model, alone), optimizers, averages, strict=True):
            x = torch.linspace(-1.0, 1.0 + step, 12).reshape(4, 3)
            m.zero_grad()
            (m(x) * x[:, :2]).sum().backward()
            if overflows:
                next(m.parameters()).grad.mul_(INF)  # type: ignore
            o.unscale_and_step(grads_scaled_by=1.0)
            average.update_parameters(m)
            # After which parameters of the average may be whole.
            outputs.append(average.eval()(x).tolist())
    return outputs, averages[0].n_averaged.item(), refused


def test_an_average_is_sharded_as_the_model_is(two_ranks):
    first, second = two_ranks.run(averaged_by_parts)
    assert first == second
    outputs, counted, refused = first
    torch.testing.assert_close(torch.tensor(outputs[::2]), torch.tensor(outputs[1::2]))
    assert counted == 2
    assert "copy.deepcopy(model) before fully_shard(model)" in refused[0]
    assert "shard average.module as the model" in refused[1]


def stepped(average: Any, model: nn.Module, optimizer: Any, *grads: float) -> None:
    for g in grads:
        for p in model.parameters():
            p.grad = torch.full_like(p, g)
        optimizer.unscale_and_step(grads_scaled_by=1.0)
        average.update_parameters(model)


def made(decay: float | None = None) -> tuple[nn.Module, Any, Any]:
    model = nn.Linear(3, 2)
    optimizer = ampopt.SGD(model.parameters(), lr=0.5)
    return model, optimizer, ampopt.averaged(model, optimizer, decay)


def test_a_float32_average_of_a_bfloat16_model_keeps_small_changes():
    model = nn.Linear(1, 1).bfloat16()
    nn.init.ones_(model.weight)
    optimizer = ampopt.SGD(model.parameters(), lr=1.0, master_weights=True)
    average = ampopt.averaged(model, optimizer, decay=0.75).float()
    average.update_parameters(model)
    model.weight.grad = torch.full_like(model.weight, 2.0**-7)
    optimizer.unscale_and_step(grads_scaled_by=1.0)
    average.update_parameters(model)
    assert next(average.module.parameters()).item() == 1 - 2.0**-9  # in bfloat16: 1


def test_calls_before_any_step_and_second_calls_count():
    model, optimizer, average = made()
    average.update_parameters(model)
    assert average.n_averaged.item() == 1
    stepped(average, model, optimizer, 1.0)
    average.update_parameters(model)
    assert average.n_averaged.item() == 3
    stepped(average, model, optimizer, INF)
    average.update_parameters(model)
    assert average.n_averaged.item() == 3


def test_with_a_call_every_second_step_the_last_step_decides():
    model, optimizer, average = made()
    for grads, expected in (((1.0, INF), 0), ((INF, 1.0), 1), ((1.0, 1.0), 2)):
        for g in grads:
            for p in model.parameters():
                p.grad = torch.full_like(p, g)
            optimizer.unscale_and_step(grads_scaled_by=1.0)
        average.update_parameters(model)
        assert average.n_averaged.item() == expected


def test_a_plain_step_and_a_static_scale_that_lets_overflows_pass_count():
    model, optimizer, average = made()
    stepped(average, model, optimizer, INF)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    average.update_parameters(model)
    assert average.n_averaged.item() == 1
    scale = ampopt.StaticLossScale(1.0, drop_overflow_update=False)
    for p in model.parameters():
        p.grad = torch.full_like(p, INF)
    optimizer.unscale_and_step(grads_scaled_by=scale)
    average.update_parameters(model)
    assert average.n_averaged.item() == 2


def test_several_optimizers_have_skipped_if_all_have():
    model = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    optimizers = [ampopt.SGD(part.parameters(), lr=0.5) for part in model]
    average = ampopt.averaged(model, optimizers)
    counted = 0
    for grads in ((1.0, INF), (INF, 1.0), (INF, INF), (1.0, 1.0)):
        for part, optimizer, g in zip(model, optimizers, grads, strict=True):
            for p in part.parameters():
                p.grad = torch.full_like(p, g)
            optimizer.unscale_and_step(grads_scaled_by=1.0)
        average.update_parameters(model)
        counted += grads != (INF, INF)
        assert average.n_averaged.item() == counted

    alone = ampopt.averaged(model, optimizers)
    for part in model:
        for p in part.parameters():
            p.grad = torch.full_like(p, INF)
    optimizers[0].unscale_and_step(grads_scaled_by=1.0)  # the other does not step
    for each in (average, alone):
        for _ in range(2):
            each.update_parameters(model)
    assert average.n_averaged.item() == counted
    assert alone.n_averaged.item() == 0

    for p in model[1].parameters():
        p.grad = None
    optimizers[0].unscale_and_step(grads_scaled_by=1.0)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    scaler.step(optimizers[1])  # has no gradients, and so no flag: it was not skipped
    average.update_parameters(model)
    assert average.n_averaged.item() == counted + 1


@pytest.mark.parametrize("decay", [None, 0.5])
def test_state_dicts_are_torchs_and_load_either_way(decay):
    model, optimizer, average = made(decay)
    stepped(average, model, optimizer, 1.0, INF, 2.0)
    theirs = torchs(model, decay)
    theirs.load_state_dict(average.state_dict())
    again = ampopt.averaged(model, optimizer, decay)
    again.load_state_dict(theirs.state_dict())
    stepped(average, model, optimizer, 3.0)
    for other in (theirs, again):
        other.update_parameters(model)
        assert agree(average, other, decay)


def test_a_copy_follows_the_same_optimizer_and_goes_its_own_way():
    model, optimizer, average = made(0.5)
    stepped(average, model, optimizer, 1.0)
    other = copy.deepcopy(average)
    before = state(average)
    stepped(other, model, optimizer, INF)
    assert state(other) == before
    stepped(other, model, optimizer, 1.0)
    assert state(other) != before and state(average) == before


def test_a_copy_with_its_optimizer_skips_as_the_optimizers_copy_does():
    whole = made(0.5)
    stepped(whole[2], *whole[:2], 1.0)
    model, optimizer, average = copy.deepcopy(whole)
    before = state(average)
    stepped(average, model, optimizer, INF)
    assert state(average) == before
    stepped(whole[2], *whole[:2], INF)
    stepped(average, model, optimizer, 1.0)
    assert state(average) != before and state(whole[2]) == before


def test_it_evaluates_as_a_model_and_has_its_statistics_renewed():
    model = Net()
    optimizer = ampopt.SGD(model.parameters(), lr=0.5)
    average = ampopt.averaged(model, optimizer)
    gradients(model, 0, overflows=False)
    optimizer.unscale_and_step(grads_scaled_by=1.0)
    average.update_parameters(model)
    torch.optim.swa_utils.update_bn([torch.rand(4, 3)], average)
    x = torch.rand(4, 3)
    assert torch.equal(average.eval()(x), average.module(x))


def test_under_a_train_step():
    model = nn.Linear(2, 1)
    optimizer = ampopt.SGD(model.parameters(), lr=0.5)
    average = ampopt.averaged(model, optimizer)
    step = ampopt.TrainStep(model, nn.MSELoss(), optimizer, 1.0, autocast=None)
    for first in (1.0, INF, 2.0):
        step(torch.full((2, 2), first), torch.ones(2, 1))
        average.update_parameters(model)
    assert average.n_averaged.item() == 2


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        (lambda m, o: (m.parameters(), o), TypeError, "model must be a torch.nn.Module"),
        (lambda m, o: (m, torch.optim.SGD(m.parameters())), TypeError, "patch_optimizer"),
        (lambda m, o: (m, torch.amp.GradScaler("cpu")), TypeError, "GradScaler"),
        (lambda m, o: (m, []), ValueError, "got none"),
        (lambda m, o: (m, o, 1.5), ValueError, "from 0 to 1"),
        (lambda m, o: (m, o, float("nan")), ValueError, "decay must be a number, got nan"),
        (lambda m, o: (m, o, "0.9"), TypeError, "decay must be a number, got '0.9'"),
        (lambda m, o: (m, o, True), TypeError, "decay must be a number, got True"),
    ],
)
def test_models_that_cannot_be_averaged_are_refused(arguments, error, match):
    model = nn.Linear(1, 1)
    optimizer = ampopt.SGD(model.parameters(), lr=0.5)
    with pytest.raises(error, match=match):
        ampopt.averaged(*arguments(model, optimizer))
    assert not optimizer._optimizer_step_post_hooks


def test_it_is_not_pickled_without_its_optimizer():
    _, _, average = made()
    with pytest.raises(TypeError, match="save average.state_dict"):
        pickle.dumps(average)
