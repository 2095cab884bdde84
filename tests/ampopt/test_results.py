"""``overflowed`` names the parameters of its step, however late it is read."""

import copy
import io
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.optimizers import Plain
from support.requirements import skip_unless_it_runs
from torch.nn import Parameter

import ampopt
from ampopt.testing import as_on_a_device, assert_no_sync

pytestmark = [
    pytest.mark.parametrize("backend", ["eager on a device", "compiled", "triton"], indirect=True),
    pytest.mark.usefixtures("backend"),
]

INF, NAN = float("inf"), float("nan")
SIZES = (3, 0, 5000, 1, 20000, 4)
"""Sizes that the CPU bundles, and others; sizes of one program of an accelerator, and of more."""
NAMES = [f"layer{i}.weight" for i in range(len(SIZES))]


def made(cls: Any, dtype: torch.dtype = torch.float32, named: bool = True, **options: Any) -> Any:
    params = [Parameter(torch.ones(size, dtype=dtype)) for size in SIZES]
    given = list(zip(NAMES, params, strict=True)) if named else params
    return cls(given, **options), params


def give(params: Any, bad: Any = (), value: float = INF) -> None:
    for i, p in enumerate(params):
        p.grad = torch.ones_like(p)
        if i in bad:
            p.grad[-1] = value


def in_one_call(optimizer: Any, scale: Any) -> Any:
    return optimizer.unscale_and_step(grads_scaled_by=scale)


def while_clipping(optimizer: Any, scale: Any) -> Any:
    return optimizer.unscale_and_step(grads_scaled_by=scale, max_norm=1.0)


def in_two_calls(optimizer: Any, scale: Any) -> Any:
    optimizer.unscale(grads_scaled_by=scale)
    return optimizer.step_after_unscale()


def together(optimizer: Any, scale: Any) -> Any:
    return ampopt.unscale_and_step([optimizer], grads_scaled_by=scale)


WAYS = (in_one_call, while_clipping, in_two_calls, together)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("cls", "options"),
    [(ampopt.AdamW, {}), (Plain, {}), (ampopt.SGD, {"dtype": torch.bfloat16, "masters": True})],
)
def test_overflowed_can_be_read_after_later_steps(way, cls, options, backend):
    options = dict(options)
    if options.pop("masters", False):
        options["master_weights"] = True
    optimizer, params = made(cls, **options)
    history = [(), (0, 2), (4,), (), (3, 5)]
    results = []
    for bad in history:
        give(params, bad)
        results.append(way(optimizer, 8.0))
    said = [result.overflowed for result in results]
    assert said == [[NAMES[i] for i in bad] for bad in history]


@given(
    bad=st.sets(st.sampled_from([0, 2, 3, 4, 5])),
    value=st.sampled_from([INF, -INF, NAN, 2.0**127]),
    scale=st.sampled_from([0.25, 1.0, 1024.0]),
    named=st.booleans(),
    steps_before=st.integers(0, 1),
)
def test_names_or_places_of_exactly_those_that_overflow_once_unscaled(
    bad, value, scale, named, steps_before
):
    optimizer, params = made(ampopt.SGD, named=named)
    for _ in range(steps_before):  # so that the step works on a plan that it was made before
        give(params)
        optimizer.unscale_and_step(grads_scaled_by=scale)
    give(params, bad, value)
    result = optimizer.unscale_and_step(grads_scaled_by=scale)
    if value == 2.0**127 and scale >= 1:
        bad = set()
    names = NAMES if named else [f"group 0, parameter {i}" for i in range(len(SIZES))]
    assert result.overflowed == [names[i] for i in sorted(bad)]
    loss, found_inf, scale = result  # and it is unpacked as before
    assert bool(found_inf > 0) == bool(bad)


@pytest.mark.parametrize(
    ("bad", "kept"), [([(2,), (), (0, 4)], 1), ([(2,), (0, 2)], 0), ([(), ()], 2)]
)
def test_parameters_that_overflow_in_a_dropped_micro_batch_are_named_too(bad, kept, backend):
    """Also if the step is applied. No other parameter is named, also if no micro-batch is kept."""
    optimizer, params = made(ampopt.SGD)
    for places in bad:
        give(params, places)
        optimizer.accumulate(grads_scaled_by=1.0, drop="micro_batch")
    result = optimizer.unscale_and_step(grads_scaled_by=1.0)
    assert result.skipped == (not kept)
    assert set(result.overflowed) == {NAMES[i] for places in bad for i in places}


@pytest.mark.parametrize("drop", ["window", "micro_batch"])
def test_a_sum_that_overflows_is_named(drop, backend):
    optimizer, params = made(ampopt.SGD)
    for _ in range(2):
        give(params, (4,), 3e38)
        optimizer.accumulate(grads_scaled_by=1.0, drop=drop)
    assert optimizer.unscale_and_step(grads_scaled_by=1.0).overflowed == [NAMES[4]]


def test_other_parameters_have_gradients_in_later_steps():
    optimizer, params = made(ampopt.AdamW)
    give(params, [2])
    params[0].grad = None
    first = optimizer.unscale_and_step(grads_scaled_by=1.0)
    give(params, [0])
    params[4].grad = None
    second = optimizer.unscale_and_step(grads_scaled_by=1.0)
    del optimizer, params
    assert first.overflowed == [NAMES[2]]
    assert second.overflowed == [NAMES[0]]


def test_parameters_of_two_models_with_the_same_names():
    params = [Parameter(torch.ones(2)) for _ in range(3)]
    optimizer = ampopt.AdamW([("weight", params[0]), ("weight", params[1])])
    optimizer.add_param_group({"params": [("weight", params[2])]})
    give(params, [1])
    result = optimizer.unscale_and_step(grads_scaled_by=1.0)
    assert result.overflowed == ["weight (group 0, parameter 1)"]
    give(params, [2, 0])
    result = optimizer.unscale_and_step(grads_scaled_by=1.0)
    assert result.overflowed == ["weight", "weight (group 1, parameter 0)"]


def test_nothing_synchronizes_until_overflowed_is_read():
    optimizer, params = made(ampopt.AdamW)
    give(params, [4])
    with as_on_a_device(), assert_no_sync():
        result = optimizer.unscale_and_step(grads_scaled_by=2.0)
    assert result.overflowed == [NAMES[4]]


def test_an_infinite_scale_names_no_parameter():
    optimizer, params = made(ampopt.AdamW)
    give(params)
    result = optimizer.unscale_and_step(grads_scaled_by=torch.tensor(0.0))
    assert result.skipped
    assert result.overflowed == NAMES[:1] + NAMES[2:]  # 1 / 0
    give(params)
    result = optimizer.unscale_and_step(grads_scaled_by=torch.tensor(INF))
    assert result.skipped
    assert result.overflowed == []


def test_steps_without_a_check_name_no_parameter():
    optimizer, params = made(ampopt.AdamW)
    give(params, [0])
    assert optimizer.unscale_and_step(grads_scaled_by=None, max_norm=1.0).overflowed == []
    for p in params:
        p.grad = None
    assert optimizer.unscale_and_step(grads_scaled_by=1.0).overflowed == []


def test_a_scaler_names_the_parameters_of_its_last_iteration():
    ours, params = made(ampopt.AdamW)
    theirs, others = made(torch.optim.SGD)
    scaler = ampopt.GradScaler("cpu", init_scale=4.0)
    for bad in ((2,), ()):
        give(params, bad)
        give(others, [b + 1 for b in bad])
        scaler.scale(torch.ones(()))
        scaler.unscale_(ours)
        scaler.step(ours)
        scaler.step(theirs)
        said = scaler.overflowed
        scaler.update()
        assert said == scaler.overflowed == [name for b in bad for name in NAMES[b : b + 2]]


def test_a_step_that_applies_an_overflow_names_the_parameters_too():
    optimizer, params = made(ampopt.SGD)
    give(params, [5])
    scale = ampopt.StaticLossScale(4.0, drop_overflow_update=False)
    result = optimizer.unscale_and_step(grads_scaled_by=scale)
    assert not result.skipped
    assert result.overflowed == [NAMES[5]]


@pytest.mark.parametrize("cls", [ampopt.AdamW, Plain, ampopt.LBFGS])
@pytest.mark.parametrize("unscales", [False, True])
def test_a_step_with_a_closure_names_those_of_its_last_evaluation(cls, unscales):
    scale = ampopt.StaticLossScale(4.0, drop_overflow_update=False)
    for bad in ((4,), (), (0, 2)):
        optimizer, params = made(cls)

        def closure(scale: Any, optimizer: Any = optimizer, params: Any = params, bad: Any = bad):
            give(params, bad)
            return (1.0, *optimizer.unscale(grads_scaled_by=scale)) if unscales else 1.0

        step = optimizer.step_after_unscale if unscales else optimizer.unscale_and_step
        assert step(closure, scale).overflowed == [NAMES[i] for i in bad]


def test_a_copy_or_a_file_has_the_flag_alone():
    optimizer, params = made(ampopt.SGD)
    give(params, [0])
    result = optimizer.unscale_and_step(grads_scaled_by=4.0)
    file = io.BytesIO()
    torch.save(result.found_inf, file)
    file.seek(0)
    flags: Any = (torch.load(file, weights_only=True), copy.deepcopy(result.found_inf))
    for flag in flags:
        assert float(flag) == 1.0
        assert ampopt.StepResult(None, flag, None).overflowed == []


def test_each_replay_of_a_captured_step_has_its_own_names(backend, monkeypatch):
    if backend != "triton":
        pytest.skip("nothing is captured")
    skip_unless_it_runs("triton")
    from support.fake_cuda_graphs import FakeGraphs

    graphs = FakeGraphs()
    monkeypatch.setattr(ampopt.train_step.cuda_graphs, "graphs_on", lambda device: graphs)
    model = torch.nn.Linear(2, 1)
    optimizer = ampopt.SGD(model.named_parameters(), lr=0.0)
    step = ampopt.TrainStep(
        model,
        lambda outputs, spoil: outputs.mean() * spoil,
        optimizer,
        ampopt.StaticLossScale(1.0),
        autocast=None,
        cuda_graph=True,
    )
    spoils = [1.0, 1.0, 1.0, 1.0, INF, 1.0, NAN]
    results = [step(torch.ones(4, 2), torch.tensor(spoil)) for spoil in spoils]
    bad = ["weight", "bias"]
    assert [r.overflowed for r in results] == [bad if s != 1 else [] for s in spoils]
