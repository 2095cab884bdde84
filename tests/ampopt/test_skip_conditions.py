"""``skip_when``: steps with a large norm or loss are skipped, and the scale stays."""

import io
import math
import re
import statistics
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.counted_operations import counted, silent_launches
from support.optimizers import Plain
from support.strategies import fewer
from torch.nn import Parameter

import ampopt
from ampopt.testing import as_on_a_device, assert_no_sync
from ampopt.testing.bits import bits, everything
from ampopt.train_step import cuda_graphs

pytestmark = [
    pytest.mark.parametrize(
        "backend", ["eager", "eager on a device", "compiled", "triton"], indirect=True
    ),
    pytest.mark.usefixtures("backend"),
]

INF = float("inf")


def made(cls: Any = ampopt.AdamW) -> Any:
    param = Parameter(torch.ones(4))
    return cls([("weight", param)]), param


def give(param: Any, norm: float, scale: float) -> None:
    param.grad = torch.full_like(param, norm / 2 * scale)  # of four elements


@pytest.mark.parametrize("cls", [ampopt.AdamW, Plain])
@pytest.mark.parametrize("split", [False, True])
def test_a_large_norm_is_skipped_bitwise_and_the_scale_stays(cls, split):
    optimizer, param = made(cls)
    watch = ampopt.Watch(optimizer)
    handle = ampopt.skip_when(optimizer, norm=2.0)
    scale: Any = ampopt.DynamicLossScale(init_scale=8.0, growth_interval=3)
    flags, scales = [], []
    for norm in (1.0, 2.5, 2.0, INF, 3.0, 1.0):
        give(param, norm, scale.item())
        before = everything(optimizer)
        if split:
            optimizer.unscale(grads_scaled_by=scale)
            result = optimizer.step_after_unscale()
        else:
            result = optimizer.unscale_and_step(grads_scaled_by=scale)
        scale = result.scale
        flags.append(result.skipped)
        scales.append((scale.item(), scale.state_dict()["growth"]))
        if result.skipped and norm != 1.0:
            assert everything(optimizer)["parameters"] == before["parameters"]
            assert everything(optimizer)["state"] == before["state"]
            assert result.overflowed == (["weight"] if norm == INF else [])
    assert flags == [False, True, False, True, True, False]
    assert scales == [(8.0, 1), (8.0, 1), (8.0, 2), (4.0, 0), (4.0, 0), (4.0, 1)]
    read = watch.read()
    assert read["skipped_by"] == {"overflow": 1, "norm": 2, "loss": 0}
    assert read["skips"] == 3
    handle.remove()
    give(param, 5.0, scale.item())
    assert not optimizer.unscale_and_step(grads_scaled_by=scale).skipped


def end(optimizer: Any, split: bool, **given: Any) -> Any:
    """Step, in one call or in two."""
    if split:
        optimizer.unscale(**given)
        return optimizer.step_after_unscale()
    return optimizer.unscale_and_step(**given)


@pytest.mark.parametrize("cls", [ampopt.AdamW, Plain])
@pytest.mark.parametrize("split", [False, True])
def test_accumulated_gradients_are_tested_as_one_sum(cls, split):
    ends = []
    for accumulates in (False, True):
        optimizer, param = made(cls)
        watch = ampopt.Watch(optimizer)
        handle = ampopt.skip_when(optimizer, norm=4.0, norm_deviations=2.0, warmup=3)
        scale: Any = ampopt.DynamicLossScale(init_scale=8.0, growth_interval=3)
        said = []
        for norm in (1.0, 1.25, 1.0, 6.0, INF, 1.0, 2.5, 1.25):
            give(param, norm / 2, scale.item())
            if accumulates:
                assert (optimizer.accumulate(grads_scaled_by=scale).found_inf > 0) == (norm == INF)
                give(param, norm / 2, scale.item())
            else:
                param.grad *= 2
            before = everything(optimizer)
            result = end(optimizer, split, grads_scaled_by=scale)
            scale = result.scale
            said.append((result.skipped, scale.item(), scale.state_dict()["growth"]))
            if result.skipped:
                assert everything(optimizer)["state"] == before["state"]
                assert result.overflowed == (["weight"] if norm == INF else [])
            optimizer.zero_grad()
        assert [skipped for skipped, *_ in said] == [False] * 3 + [True] * 2 + [False, True, False]
        assert watch.read()["skipped_by"] == {"overflow": 1, "norm": 2, "loss": 0}
        ends.append((said, handle.state_dict(), everything(optimizer)))
    assert ends[0] == ends[1]


def test_the_loss_of_an_accumulation_cycle_is_the_one_passed_to_the_step():
    optimizer, param = made()
    ampopt.skip_when(optimizer, loss=2.0)
    skipped = []
    for loss in (1.0, numpy.float32(3.0)):
        give(param, 1.0, 8.0)
        optimizer.accumulate(grads_scaled_by=8.0)
        before = everything(optimizer)
        with pytest.raises(RuntimeError, match=r"skip_when\(loss=...\) needs the loss"):
            optimizer.unscale_and_step(grads_scaled_by=8.0)
        assert everything(optimizer) == before
        skipped.append(optimizer.unscale_and_step(grads_scaled_by=8.0, loss=loss).skipped)
    assert skipped == [False, True]


def test_a_dropped_micro_batch_lowers_the_scale_even_if_the_rest_is_skipped_for_its_norm():
    optimizer, param = made()
    ampopt.skip_when(optimizer, norm=4.0)
    scale: Any = ampopt.DynamicLossScale(init_scale=8.0)
    heard = []
    for norms in ((INF, 3.0), (1.0, 3.5), (INF, 1.0)):  # of which two are taken for 6, 4.5 and 2
        for norm in norms:
            give(param, norm, scale.item())
            optimizer.accumulate(grads_scaled_by=scale, drop="micro_batch")
        result = optimizer.unscale_and_step(grads_scaled_by=scale)
        scale = result.scale
        heard.append((result.skipped, scale.item()))
    assert heard == [(True, 4.0), (True, 4.0), (False, 2.0)]


def test_the_norm_is_that_before_clipping_and_clipping_is_as_without():
    ends = []
    for skips in (False, True):
        optimizer, param = made()
        if skips:
            ampopt.skip_when(optimizer, norm=4.0, norm_deviations=6.0)
        for norm in (3.0, 1.0, 2.0):
            give(param, norm, 2.0)
            optimizer.unscale_and_step(grads_scaled_by=2.0, max_norm=0.3)
        ends.append((bits([param]), everything(optimizer), optimizer.grad_norm.item()))
    assert ends[0] == ends[1]
    give(param, 5.0, 2.0)
    assert optimizer.unscale_and_step(grads_scaled_by=2.0, max_norm=0.3).skipped


@pytest.mark.parametrize("cls", [ampopt.AdamW, Plain])
@pytest.mark.parametrize("scaler_class", [ampopt.GradScaler, torch.amp.GradScaler])
@pytest.mark.parametrize("unscale_first", [False, True])
def test_what_a_scaler_has_unscaled_is_tested_or_refused(cls, scaler_class, unscale_first):
    optimizer, param = made(cls)
    ampopt.skip_when(optimizer, norm=2.0)
    scaler = scaler_class("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))
    give(param, 3.0, 8.0)
    before = bits(param)
    if unscale_first:
        scaler.unscale_(optimizer)
    if scaler_class is ampopt.GradScaler or not unscale_first:
        scaler.step(optimizer)
    else:
        with pytest.raises(RuntimeError, match="Use ampopt.GradScaler, or leave unscale_ out"):
            scaler.step(optimizer)
    assert bits(param) == before


@pytest.mark.parametrize("sizes", [(3, 5, 300), (0,), (0, 3)])
def test_the_norm_is_that_of_all_parameters(sizes):
    ends = []
    for skips in (False, True):
        params = [Parameter(torch.ones(size)) for size in sizes]
        optimizer = ampopt.SGD(params, lr=0.5)
        if skips:
            ampopt.skip_when(optimizer, norm=1e30)
        for param in params:
            param.grad = torch.linspace(-2.0, 3.0, param.numel())
        optimizer.unscale_and_step(grads_scaled_by=2.0, max_norm=0.3)
        ends.append((bits(params), bits(optimizer.grad_norm)))
    assert ends[0] == ends[1]


def test_a_loss_is_tested_if_it_is_passed():
    optimizer, param = made()
    watch = ampopt.Watch(optimizer)
    ampopt.skip_when(optimizer, loss=2.0)
    skipped = []
    for loss in (1.0, torch.tensor(3.0), torch.tensor([2.0])):
        give(param, 1.0, 1.0)
        skipped.append(optimizer.unscale_and_step(grads_scaled_by=1.0, loss=loss).skipped)
    assert skipped == [False, True, False]
    assert watch.read()["skipped_by"] == {"overflow": 0, "norm": 0, "loss": 1}
    give(param, 1.0, 1.0)
    with pytest.raises(RuntimeError, match="loss=loss"):
        optimizer.unscale_and_step(grads_scaled_by=1.0)
    with pytest.raises(TypeError, match="one element"):
        optimizer.unscale_and_step(grads_scaled_by=1.0, loss=torch.ones(2))


LIMITS = {
    "loss": lambda optimizer: ampopt.skip_when(optimizer, loss=2.0),
    "deviations": lambda optimizer: ampopt.skip_when(optimizer, loss_deviations=3.0, warmup=2),
    "olmo": lambda optimizer: ampopt.skip_when.like("olmo", optimizer, norm_deviations=None),
    "llm.c": lambda optimizer: ampopt.skip_when.like("llm.c", optimizer, loss_deviations=3.0),
}


@pytest.mark.parametrize(
    "limit, bad", [*((limit, math.nan) for limit in LIMITS), ("loss", INF), ("deviations", INF)]
)
def test_a_loss_that_is_not_finite_is_skipped_and_not_added_to_the_statistics(backend, limit, bad):
    if limit in ("olmo", "llm.c") and backend == "triton":
        return  # torch's operations too, after many steps in the interpreter
    optimizer, param = made(ampopt.SGD)
    watch = ampopt.Watch(optimizer)
    LIMITS[limit](optimizer)
    scale: Any = ampopt.DynamicLossScale(init_scale=8.0, growth_interval=1, max_scale=8.0)
    skipped = []
    usual = [1.0, 1.5] * (33 if limit in ("olmo", "llm.c") else 2)
    for loss in (*usual, bad, bad, 1.25, bad, 1.25):
        give(param, 1.0, 8.0)
        before = everything(optimizer)
        result = optimizer.unscale_and_step(grads_scaled_by=scale, loss=torch.tensor(loss))
        scale = result.scale
        skipped.append(result.skipped)
        if result.skipped:
            assert everything(optimizer) == before
    assert skipped == [False] * len(usual) + [True, True, False, True, False]
    assert watch.read()["skipped_by"] == {"overflow": 0, "norm": 0, "loss": 3}
    assert scale.item() == 8.0


@pytest.mark.parametrize(
    ("cls", "split", "fix"),
    [
        (Plain, False, r"step without a closure, with unscale_and_step\(grads_scaled_by=scale"),
        (ampopt.AdamW, True, r"Use unscale_and_step\(closure, grads_scaled_by=scale\)"),
    ],
)
def test_closures_whose_step_no_condition_can_skip_are_refused(cls, split, fix):
    optimizer, param = made(cls)
    ampopt.skip_when(optimizer, norm=2.0)

    def closure(scale: Any) -> Any:
        give(param, 1.0, scale)
        return (1.0, *optimizer.unscale(grads_scaled_by=scale)) if split else 1.0

    with pytest.raises(RuntimeError, match=f"skip_when.*{fix}"):
        if split:
            optimizer.step_after_unscale(closure, current_grad_scale=8.0)
        else:
            optimizer.unscale_and_step(closure, grads_scaled_by=8.0)
    assert torch.equal(param, torch.ones(4))


def test_a_closure_is_not_run_again_for_a_large_norm():
    optimizer, param = made()
    ampopt.skip_when(optimizer, loss=2.0)
    runs = []

    def closure(scale: Any) -> Any:
        runs.append(scale)
        give(param, 1.0, scale.item())
        if len(runs) == 2:
            param.grad[0] = INF
        return torch.tensor(3.0 if len(runs) == 1 else 1.0)

    before = bits([param])
    scale: Any = ampopt.DynamicLossScale(init_scale=4.0)
    result = optimizer.unscale_and_step(closure, grads_scaled_by=scale)
    assert (len(runs), result.skipped, result.scale.item()) == (1, True, 4.0)
    assert bits([param]) == before
    result = optimizer.unscale_and_step(closure, grads_scaled_by=result.scale)
    assert (len(runs), result.skipped, result.scale.item()) == (3, False, 2.0)
    assert bits([param]) != before


def test_train_step_passes_the_loss(backend, monkeypatch):
    captures = backend == "triton"
    if captures:
        from support.fake_cuda_graphs import FakeGraphs

        graphs = FakeGraphs()
        monkeypatch.setattr(cuda_graphs, "graphs_on", lambda device: graphs)
    model = torch.nn.Linear(2, 1)
    optimizer = ampopt.SGD(model.named_parameters(), lr=0.0)
    ampopt.skip_when(optimizer, loss_deviations=3.0, warmup=4)
    step = ampopt.TrainStep(
        model,
        lambda outputs, size: outputs.mean() * 0 + size,
        optimizer,
        ampopt.DynamicLossScale(init_scale=4.0),
        autocast=None,
        cuda_graph=captures,
    )
    sizes = (1.0, 1.5, 1.0, 1.5, 1.2, 9.0, 1.3, 0.1, 9.0)
    skipped = [step(torch.ones(4, 2), torch.tensor(size)).skipped for size in sizes]
    assert skipped == [size == 9.0 for size in sizes]


@fewer(0.5)
@given(
    norms=st.lists(st.sampled_from([1.0, 1.25, 1.5, 2.0, 8.0, INF]), min_size=1, max_size=12),
    deviations=st.sampled_from([0.5, 1.0, 2.0]),
    warmup=st.integers(2, 6),
)
def test_deviations_are_from_the_steps_that_were_applied(norms, deviations, warmup):
    optimizer, param = made(ampopt.SGD)
    ampopt.skip_when(optimizer, norm_deviations=deviations, warmup=warmup)
    taken: list[float] = []
    for norm in norms:
        give(param, norm, 4.0)
        skipped = optimizer.unscale_and_step(grads_scaled_by=4.0).skipped
        expected = norm == INF
        if not expected and len(taken) >= warmup:
            limit = statistics.fmean(taken) + deviations * statistics.stdev(taken)
            if math.isclose(norm, limit, rel_tol=1e-9):
                return
            expected = norm > limit
        assert skipped == expected
        if not skipped:
            taken.append(norm)


class Olmo:
    """OLMo-core's check, in plain Python."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def skips(self, value: float) -> bool | None:
        self.values = [*self.values, value][-129:]
        if len(self.values) < 64:
            return False
        before = self.values[:-1]
        away = abs(value - statistics.fmean(before))
        limit = 6 * statistics.stdev(before)
        return None if math.isclose(away, limit, rel_tol=1e-9) else away > limit


class LlmC:
    """llm.c's check in plain Python, with a threshold of 3."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self.in_a_row = 0

    def skips(self, value: float) -> bool | None:
        if len(self.values) < 64:
            self.values.append(value)
            return False
        window = [*self.values[1:], value]
        deviation = statistics.pstdev(window)
        away = value - statistics.fmean(window)
        bad = away > 3 * deviation if deviation else False
        self.in_a_row = self.in_a_row + 1 if bad else 0
        if not bad or self.in_a_row >= 3:
            self.values = window
        return None if math.isclose(away, 3 * deviation, rel_tol=1e-9) else bad


@pytest.mark.parametrize(
    ("name", "theirs", "options"),
    [("olmo", Olmo, {"loss_deviations": None}), ("llm.c", LlmC, {"norm_deviations": 3.0})],
)
@fewer(0.2)
@given(
    late=st.lists(st.sampled_from([0.0, 1.0, 1.5, 2.5, 9.0, 20.0]), min_size=1, max_size=12),
    length=st.sampled_from([62, 64, 70, 130]),
)
def test_presets_skip_what_their_systems_skip(backend, name, theirs, options, late, length):
    if backend == "triton":
        return  # torch's operations too, after many steps in the interpreter
    optimizer, param = made(ampopt.SGD)
    ampopt.skip_when.like(name, optimizer, **options)
    system = theirs()
    for norm in [*(1.0 + (7 * i % 5) / 4 for i in range(length)), *late]:
        give(param, norm, 1.0)
        expected = system.skips(norm)
        if expected is None:
            return
        assert optimizer.unscale_and_step(grads_scaled_by=1.0).skipped == expected


def test_nothing_synchronizes():
    optimizer, param = made()
    ampopt.skip_when(optimizer, norm=2.0, loss_deviations=3.0)
    with as_on_a_device(), assert_no_sync():
        for norm in (1.0, 3.0):
            give(param, norm, 1.0)
            result = optimizer.unscale_and_step(grads_scaled_by=1.0, loss=torch.tensor(norm))
    assert result.skipped


@pytest.mark.parametrize(
    "limits",
    [
        {"norm": 2.0},
        {"norm_deviations": 6.0, "loss": 2.0, "loss_deviations": 6.0},
        "olmo",
    ],
)
def test_checks_are_part_of_the_decision_and_launch_nothing(backend, monkeypatch, limits):
    if backend != "triton":
        return  # whose launches are torch operations
    param = Parameter(torch.ones(4))
    optimizer = ampopt.AdamW([param])
    if isinstance(limits, str):
        ampopt.skip_when.like(limits, optimizer)
    else:
        ampopt.skip_when(optimizer, **limits)
    scale: Any = ampopt.DynamicLossScale()
    loss = torch.tensor(1.0)
    param.grad = torch.ones_like(param)

    def step() -> None:
        nonlocal scale
        scale = optimizer.unscale_and_step(grads_scaled_by=scale, loss=loss).scale

    with silent_launches(monkeypatch) as launches:
        step()
        operations = counted(step)
    assert not operations
    assert launches == dict.fromkeys(("detect_kernel", "control_kernel", "update_kernel"), 2)


def test_of_several_causes_the_first_is_recorded_and_skipped_steps_are_not_added():
    optimizer, param = made(ampopt.SGD)
    watch = ampopt.Watch(optimizer)
    ampopt.skip_when.like("llm.c", optimizer, loss_deviations=6.0)
    deviations = ampopt.skip_when(optimizer, norm=8.0, norm_deviations=2.0, warmup=3)
    ampopt.skip_when(optimizer, loss=4.0)
    skipped = []
    for norm, loss in ((1.0, 1.0), (1.5, 9.0), (1.5, 1.0), (1.25, 1.0), (9.0, 9.0), (2.5, 1.0)):
        give(param, norm, 1.0)
        result = optimizer.unscale_and_step(grads_scaled_by=1.0, loss=torch.tensor(loss))
        skipped.append(result.skipped)
    assert skipped == [False, True, False, False, True, True]
    assert watch.read()["skipped_by"] == {"overflow": 0, "norm": 2, "loss": 1}
    assert deviations.state_dict() == {"norm": [3.0, 1.25, 0.125]}


def test_several_optimizers_skip_together():
    one, first = made()
    other, second = made(ampopt.SGD)
    ampopt.skip_when(other, norm=2.0)
    for norm in (1.0, 1.8):
        give(first, norm, 1.0)
        give(second, norm, 1.0)
        result = ampopt.unscale_and_step([one, other], grads_scaled_by=1.0)
        assert result.skipped == (norm > 1.5)


def test_a_run_resumes_from_a_state_loaded_with_weights_only():
    optimizer, param = made()
    handle = ampopt.skip_when(optimizer, norm_deviations=3.0, warmup=3)
    for norm in (1.0, 1.1, 1.2):
        give(param, norm, 1.0)
        optimizer.unscale_and_step(grads_scaled_by=1.0)
    file = io.BytesIO()
    torch.save(handle.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    other, param = made()
    resumed = ampopt.skip_when(other, norm_deviations=3.0, warmup=3)
    with pytest.raises(TypeError, match="must be a dict, got list"):
        resumed.load_state_dict([])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="entries"):
        resumed.load_state_dict({})
    with pytest.raises(ValueError, match="numbers"):
        resumed.load_state_dict({"norm": [1.0]})
    resumed.load_state_dict(state)
    assert resumed.state_dict() == handle.state_dict()
    give(param, 3.0, 1.0)
    assert other.unscale_and_step(grads_scaled_by=1.0).skipped


def test_a_state_that_is_wrong_in_one_entry_changes_no_other():
    optimizer, _ = made()
    handle = ampopt.skip_when(optimizer, norm_deviations=3.0, loss_deviations=3.0)
    before = handle.state_dict()
    for wrong in (["a"] * 3, [1.0], [1.0, None, 1.0], 1.0, "abc", None):
        with pytest.raises(ValueError, match=f"must have 3 numbers, got {re.escape(repr(wrong))}"):
            handle.load_state_dict({"norm": [1.0] * 3, "loss": wrong})
        assert handle.state_dict() == before


def test_several_optimizers_are_given_no_loss_to_test():
    optimizer, param = made()
    ampopt.skip_when(optimizer, loss=2.0)
    give(param, 1.0, 1.0)
    with pytest.raises(RuntimeError, match="several optimizers has no loss="):
        ampopt.unscale_and_step([optimizer], grads_scaled_by=1.0)


def test_wrong_arguments_are_refused():
    optimizer, param = made()
    wrong: Any
    for wrong in (
        {},
        {"norm": 0.0},
        {"norm": -1.0},
        {"norm": INF},
        {"loss": math.nan},
        {"norm_deviations": 0},
        {"loss_deviations": -6.0},
        {"norm": 1.0, "warmup": -1},
    ):
        with pytest.raises(ValueError):
            ampopt.skip_when(optimizer, **wrong)
    with pytest.raises(TypeError, match="norm must be a number"):
        ampopt.skip_when(optimizer, norm="2")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="ampopt.Optimizer"):
        ampopt.skip_when(torch.optim.SGD([param]), norm=1.0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="evaluates the loss itself"):
        ampopt.skip_when(ampopt.LBFGS([param]), norm=1.0)
    with pytest.raises(ValueError, match="'olmo', 'llm.c'"):
        ampopt.skip_when.like("apex", optimizer)
    with pytest.raises(ValueError, match="needs a cause"):
        ampopt.skip_when.like("llm.c", optimizer)
    with pytest.raises(TypeError, match="overrides"):
        ampopt.skip_when.like("olmo", optimizer, norm=1.0)
    assert optimizer._ampopt.observers.causes == ()
