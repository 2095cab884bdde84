"""A watch records the gradients of each step, and changes no bit of the training."""

import io
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.optimizers import Plain
from support.strategies import fewer
from torch.nn import Parameter

import ampopt
from ampopt.testing import as_on_a_device, assert_no_sync
from ampopt.testing.bits import bits, everything
from ampopt.testing.isolation import small_states_of_any_size
from ampopt.train_step import cuda_graphs
from ampopt_kernels.watch_statistics import COLUMNS, COUNTS

pytestmark = [
    pytest.mark.parametrize(
        "backend", ["eager", "eager on a device", "compiled", "triton"], indirect=True
    ),
    pytest.mark.usefixtures("backend"),
]

INF, NAN = float("inf"), float("nan")
SIZES = (3, 0, 5000, 2)
NAMES = [f"layer{i}.weight" for i in range(len(SIZES))]
TINY = 2.0**-25
SMALL: Any = {"state_bits": 8, "master_weights": True, "master_bits": 24}


@pytest.fixture(autouse=True)
def states_may_be_small():
    """Let ``state_bits`` and ``master_bits`` apply to small parameters, too."""
    with small_states_of_any_size():
        yield


def made(cls: Any = ampopt.AdamW, dtype: Any = torch.float32, **options: Any) -> Any:
    params = [Parameter(torch.ones(size, dtype=dtype)) for size in SIZES]
    return cls(list(zip(NAMES, params, strict=True)), **options), params


def give(params: Any, step: Any, scale: float) -> None:
    """Set gradients to ``scale`` times a few repeated numbers; ``None`` removes a gradient."""
    for p, numbers in zip(params, step, strict=True):
        if numbers is None:
            p.grad = None
            continue
        repeated = (list(numbers) * (p.numel() // len(numbers) + 1))[: p.numel()]
        p.grad = (torch.tensor(repeated, dtype=torch.float64) * scale).to(p.dtype)


def in_one_call(optimizer: Any, scale: Any) -> None:
    optimizer.unscale_and_step(grads_scaled_by=scale)


def in_two_calls(optimizer: Any, scale: Any) -> None:
    optimizer.unscale(grads_scaled_by=scale)
    optimizer.step_after_unscale()


def together(optimizer: Any, scale: Any) -> None:
    other = ampopt.SGD([Parameter(torch.ones(2))])
    other.param_groups[0]["params"][0].grad = torch.full((2,), 1.0)
    ampopt.unscale_and_step([other, optimizer], grads_scaled_by=scale)


def with_our_scaler(optimizer: Any, scale: Any) -> None:
    scaler = ampopt.GradScaler("cpu", init_scale=float(scale))
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)


def with_torchs_scaler(optimizer: Any, scale: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=float(scale))
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)


WAYS = (in_one_call, in_two_calls, together, with_our_scaler, with_torchs_scaler)


class Expected:
    """Computes in plain Python what a watch should report."""

    def __init__(self) -> None:
        self.steps = self.skips = self.in_a_row = 0
        self.told: Any = {n: {"overflows": 0, "last": None, "largest": 0.0} for n in NAMES}
        self.used, self.flushed = dict.fromkeys(NAMES, 0), dict.fromkeys(NAMES, 0)
        self.recent: list[Any] = []

    def add(self, params: Any, scale: float) -> None:
        self.steps += 1
        found, squares = False, 0.0
        counts = {}
        for name, p in zip(NAMES, params, strict=True):
            if p.grad is None:
                continue
            numbers = [abs(x) / scale for x in p.grad.double().tolist()]
            finite = [x for x in numbers if math.isfinite(x)]
            told = self.told[name]
            told["largest"] = max([told["largest"], *finite])
            if len(finite) < len(numbers):
                found, told["overflows"], told["last"] = True, told["overflows"] + 1, self.steps
            squares += sum(x * x for x in finite)
            used = [x for x in finite if x > 0]
            counts[name] = len(used), sum(x <= TINY for x in used)
        for name, (used, flushed) in {} if found else counts.items():
            self.used[name] += used
            self.flushed[name] += flushed
        self.skips += found
        self.in_a_row = self.in_a_row + 1 if found else 0
        self.recent.append((self.steps, found, scale, INF if found else math.sqrt(squares)))

    def agrees(self, read: Any, last: int) -> None:
        assert (read["steps"], read["skips"]) == (self.steps, self.skips)
        assert read["skips_in_a_row"] == self.in_a_row
        assert read["skipped_by"] == {"overflow": self.skips, "norm": 0, "loss": 0}
        assert list(read["parameters"]) == NAMES
        for name, told in read["parameters"].items():
            mine = self.told[name]
            assert told["overflows"] == mine["overflows"]
            assert told["last_overflow"] == mine["last"]
            assert told["largest"] == mine["largest"]
            used = self.used[name]
            assert told["underflow"] == (self.flushed[name] / used if used else 0.0)
        assert len(read["recent"]) == min(last, self.steps)
        for told, mine in zip(read["recent"], self.recent[-last:], strict=True):
            assert (told["step"], told["skipped"], told["scale"]) == mine[:3]
            assert told["norm"] == pytest.approx(mine[3], rel=1e-5)


NUMBERS = st.sampled_from(
    [0.0, 1.0, -1.5, 2.0**-20, TINY, -TINY, 2.0**-24, 2.0**-30, INF, -INF, NAN]
)
STEPS = st.lists(
    st.tuples(*[st.none() | st.lists(NUMBERS, min_size=1, max_size=3)] * len(SIZES)).filter(
        lambda step: any(g is not None for g in (step[0], step[2], step[3]))
    ),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize("way", WAYS)
@fewer(0.25)
@given(
    kind=st.sampled_from(["rule", "ordinary", "masters", "small"]),
    steps=STEPS,
    exponent=st.integers(0, 12),
    last=st.integers(1, 5),
)
def test_a_watch_counts_as_python_does(way, kind, steps, exponent, last):
    cls = Plain if kind == "ordinary" else ampopt.SGD
    masters = {"dtype": torch.bfloat16, "master_weights": True}
    options: Any = {"masters": masters, "small": {**masters, **SMALL, "momentum": 0.5}}
    options = options.get(kind, {})
    optimizer, params = made(cls, **options)
    watch, expected = ampopt.Watch(optimizer, last=last), Expected()
    for step in steps:
        give(params, step, 2.0**exponent)
        expected.add(params, 2.0**exponent)
        way(optimizer, 2.0**exponent)
    expected.agrees(watch.read(), last)


@fewer(0.5)
@given(
    steps=STEPS,
    scale=st.sampled_from([1.0, 3.0, 1024.0]),
    clips=st.booleans(),
    options=st.sampled_from([{}, SMALL]),
)
def test_training_is_bitwise_what_it_is_without(steps, scale, clips, options):
    ends = []
    for watched in (False, True):
        optimizer, params = made(**options)
        if watched:
            ampopt.Watch(optimizer)
        given = ampopt.DynamicLossScale(init_scale=scale)
        for step in steps:
            give(params, step, scale)
            max_norm = 0.5 if clips else None
            _, _, given = optimizer.unscale_and_step(grads_scaled_by=given, max_norm=max_norm)
        ends.append((bits(params), everything(optimizer), given.state_dict(), optimizer.grad_norm))
    assert ends[0][:3] == ends[1][:3]
    if clips:
        assert bits([ends[0][3]]) == bits([ends[1][3]])
    assert optimizer.state_dict().keys() == made()[0].state_dict().keys()


@pytest.mark.parametrize("cls", [ampopt.AdamW, Plain, ampopt.Muon])
@pytest.mark.parametrize("before", ["unscale", "accumulate"])
def test_a_plain_step_that_follows_a_flag_is_recorded_as_a_control_point(cls, before):
    param = Parameter(torch.ones(2, 2))
    optimizer, scale = cls([("w", param)]), ampopt.StaticLossScale(2.0)
    watch = ampopt.Watch(optimizer)
    for value in (1.0, INF, 2.0):
        param.grad = torch.full((2, 2), value)
        getattr(optimizer, before)(grads_scaled_by=scale)
        optimizer.step()
    result = watch.read()
    assert (result["steps"], result["skips"]) == (3, 1)
    assert result["parameters"]["w"]["overflows"] == 1
    assert result["parameters"]["w"]["last_overflow"] == 2


@pytest.mark.parametrize("exact", [3.0, 1000.0 / 3])
def test_underflow_is_counted_after_unscaling(exact):
    optimizer, params = made()
    watch = ampopt.Watch(optimizer)
    scale = torch.tensor(exact)
    grads = [TINY * exact, torch.nextafter(scale * TINY, torch.tensor(1.0)).item() * 1.001]
    give(params, [grads[:1], None, None, grads], 1.0)
    optimizer.unscale_and_step(grads_scaled_by=scale)
    told = watch.read()["parameters"]
    unscaled = params[0].grad * scale.double().reciprocal().float()
    assert told[NAMES[0]]["underflow"] == float(bool((unscaled <= TINY).all()))
    assert told[NAMES[3]]["underflow"] in (0.0, 0.5)


def test_only_applied_steps_count_for_underflow():
    optimizer, params = made()
    watch = ampopt.Watch(optimizer)
    for step in ([[TINY], None, None, [1.0]], [[1.0], None, [INF], [TINY]]):
        give(params, step, 2.0)
        optimizer.unscale_and_step(grads_scaled_by=2.0)
    told = watch.read()["parameters"]
    assert (told[NAMES[0]]["underflow"], told[NAMES[3]]["underflow"]) == (1.0, 0.0)
    assert told[NAMES[0]]["largest"] == 1.0


@pytest.mark.parametrize(
    ("cls", "way"),
    [(ampopt.SGD, in_one_call), (Plain, in_two_calls), (ampopt.SGD, with_our_scaler)],
)
def test_a_watch_measures_the_sum_of_the_micro_batches(cls, way):
    optimizer, params = made(cls)
    watch = ampopt.Watch(optimizer)
    for value in (1.0, 2.0):
        give(params, [[value]] * 4, 2.0)
        optimizer.accumulate(grads_scaled_by=2.0, drop="micro_batch")
    give(params, [[4.0]] * 4, 2.0)
    way(optimizer, 2.0)
    read = watch.read()
    assert read["parameters"][NAMES[0]]["largest"] == 7.0
    assert read["recent"][0]["norm"] == pytest.approx(7.0 * math.sqrt(sum(SIZES)))


def test_accumulated_gradients_are_seen_as_their_sum():
    optimizer, params = made(ampopt.SGD)
    watch = ampopt.Watch(optimizer)
    for value in (1.0, INF):
        for again in (0, 1):
            give(params, [[value if again else 1.0]] * 4, 2.0)
            if again:
                optimizer.unscale_and_step(grads_scaled_by=2.0)
            else:
                optimizer.accumulate(grads_scaled_by=2.0)
    read = watch.read()
    assert (read["steps"], read["skips"]) == (2, 1)
    assert read["parameters"][NAMES[0]] == {
        "overflows": 1,
        "last_overflow": 2,
        "largest": 2.0,
        "underflow": 0.0,
        "only_zeros": False,
    }


@pytest.mark.parametrize("clips", [False, True])
def test_overflows_of_micro_batches_that_were_dropped_are_counted_once_a_step(clips):
    optimizer, params = made(ampopt.SGD)
    watch = ampopt.Watch(optimizer)
    for spoilt in (2, 0, 1):
        for i in range(2):
            give(params, [[INF if i < spoilt else 1.0], None, [2.0], None], 2.0)
            optimizer.accumulate(grads_scaled_by=2.0, drop="micro_batch")
        give(params, [[3.0], None, None, [1.0]], 2.0)
        optimizer.unscale_and_step(grads_scaled_by=2.0, max_norm=1e9 if clips else None)
    read = watch.read()
    assert (read["steps"], read["skips"]) == (3, 0)
    told = read["parameters"][NAMES[0]]
    assert (told["overflows"], told["last_overflow"], told["largest"]) == (
        2,
        3,
        9.0,
    )  # of 3, renormalised
    assert not any(read["parameters"][name]["overflows"] for name in NAMES[1:])
    assert all(math.isfinite(step["norm"]) for step in read["recent"])


def test_nothing_synchronizes():
    optimizer, params = made()
    watch = ampopt.Watch(optimizer)
    with as_on_a_device(), assert_no_sync():
        for bad in (1.0, INF):
            give(params, [[bad]] * 4, 1.0)
            optimizer.unscale_and_step(grads_scaled_by=1.0)
        later = watch.read_later()
        assert later.done()
        give(params, [[INF]] * 4, 1.0)
        optimizer.unscale_and_step(grads_scaled_by=1.0)
    assert later.result()["steps"] == 2
    assert later.result()["skips"] == 1
    assert watch.read()["skips"] == 2


def test_plain_steps_and_steps_without_gradients_are_attempts():
    optimizer, params = made()
    watch = ampopt.Watch(optimizer)
    give(params, [[TINY]] * 4, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.unscale_and_step(grads_scaled_by=8.0)
    read = watch.read()
    assert (read["steps"], read["skips"]) == (2, 0)
    assert read["parameters"][NAMES[0]]["underflow"] == 1.0
    assert [step["scale"] for step in read["recent"]] == [None, None]
    assert read["recent"][1]["norm"] is None


def test_the_norm_is_the_one_that_clips():
    optimizer, params = made()
    watch = ampopt.Watch(optimizer)
    give(params, [[1.0], None, None, [2.0]], 4.0)
    optimizer.unscale_and_step(grads_scaled_by=4.0, max_norm=0.1)
    assert watch.read()["recent"][0]["norm"] == optimizer.grad_norm.item()
    give(params, [[NAN], None, None, [2.0]], 4.0)
    optimizer.unscale_and_step(grads_scaled_by=4.0, max_norm=0.1)
    assert math.isnan(watch.read()["recent"][1]["norm"])


def test_the_loss_is_that_of_the_control_point():
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = ampopt.SGD(model.named_parameters(), lr=0.0)
    watch, inputs = ampopt.Watch(optimizer), torch.full((1, 1), 3.0)

    def closure(scale: Any) -> Any:
        optimizer.zero_grad()
        loss = model(inputs).sum()
        ampopt.scale_outputs(loss, scale).backward()
        return loss

    losses = []
    closure(4.0)
    for loss in (-2.5, torch.tensor([7.0], dtype=torch.float64), None):
        optimizer.unscale_and_step(grads_scaled_by=4.0, loss=loss)
        losses.append(None if loss is None else float(loss))
    optimizer.unscale_and_step(grads_scaled_by=None, loss=1.5)
    optimizer.unscale_and_step(closure, grads_scaled_by=4.0)
    optimizer.step_after_unscale(lambda s: (closure(s), *optimizer.unscale(s)), 4.0)
    optimizer.step()
    losses += [1.5, 3.0, 3.0, None]
    for hook in (None, lambda _: None):  # in one call, and in two
        step = ampopt.TrainStep(
            model, lambda y, _: y.sum() - 5, optimizer, ampopt.StaticLossScale(4), on_gradients=hook
        )
        step(inputs, inputs)
        losses.append(-2.0)
    assert [step["loss"] for step in watch.read()["recent"]] == losses


@pytest.mark.parametrize("way", [in_one_call, in_two_calls, together, with_torchs_scaler])
def test_a_hook_has_the_scale_of_its_step_too(way):
    optimizer, params = made()
    scales = []
    optimizer.register_step_post_hook(lambda o, *_: scales.append(o.grads_scaled_by))
    give(params, [[1.0], None, None, None], 4.0)
    way(optimizer, 4.0)
    optimizer.step()
    assert [None if s is None else s.item() for s in scales] == [4.0, None]


@pytest.mark.parametrize("cls", [ampopt.SGD, ampopt.Adafactor, Plain])
def test_of_a_closure_each_overflow_and_the_last_evaluation_are_noted(cls):
    optimizer, params = made(cls)
    watch, losses, scales = ampopt.Watch(optimizer), [INF, 0.0], []
    optimizer.register_step_post_hook(lambda o, *_: scales.append(o.grads_scaled_by))

    def closure(scale: Any) -> Any:
        size = float(scale) if float(scale) <= 4.0 else INF
        for param in params:
            param.grad = torch.full_like(param, size)
        return torch.tensor(losses[-1])

    scale = ampopt.DynamicLossScale(init_scale=16.0)
    _, _, scale = optimizer.unscale_and_step(closure, grads_scaled_by=scale)
    (entry,) = watch.read()["recent"]
    elements = sum(param.numel() for param in params)
    assert (entry["skipped"], entry["scale"]) == (False, 4.0)
    assert entry["norm"] == pytest.approx(elements**0.5)
    read = watch.read()
    told = read["parameters"].values()
    assert [row["largest"] for row in told] == [float(size > 0) for size in SIZES]
    assert [row["overflows"] for row in told] == [2 * (size > 0) for size in SIZES]
    assert {row["last_overflow"] for row in told} <= {1, None}
    assert (read["steps"], read["skips"]) == (1, 0)
    assert float(scales[0]) == 4.0

    def split(scale: Any) -> Any:
        return (closure(scale), *optimizer.unscale(scale))

    losses[-1] = 0.0
    optimizer.step_after_unscale(split, ampopt.DynamicLossScale(init_scale=8.0))
    told = watch.read()["parameters"].values()
    assert [row["overflows"] for row in told] == [3 * (size > 0) for size in SIZES]
    assert {row["last_overflow"] for row in told} <= {2, None}

    losses.pop()
    with pytest.raises(ampopt.NonFiniteGradientError):
        optimizer.unscale_and_step(closure, grads_scaled_by=scale)
    optimizer.step()
    assert watch.read()["recent"][-1]["scale"] is None


def test_parameters_added_later_are_watched():
    optimizer, params = made()
    watch = ampopt.Watch(optimizer)
    give(params, [[INF], None, None, None], 1.0)
    optimizer.unscale_and_step(grads_scaled_by=1.0)
    new = Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [("new", new)]})
    assert watch.read()["parameters"]["new"]["overflows"] == 0
    new.grad = torch.tensor([1.0, NAN])
    optimizer.unscale_and_step(grads_scaled_by=1.0)
    read = watch.read()
    assert [read["parameters"][n]["overflows"] for n in (NAMES[0], NAMES[2], "new")] == [2, 0, 1]
    assert read["parameters"]["new"]["last_overflow"] == read["skips"] == 2


def test_parameters_that_replace_others_go_on_in_their_statistics():
    """As where a model grows: each new tensor takes the place, and the name, of an old one."""
    optimizer, params = made(ampopt.SGD)
    watch = ampopt.Watch(optimizer)
    group = optimizer.param_groups[0]
    for n in range(4):
        for place in range(len(SIZES)):  # one by one, so that ids of old ones are used again
            params[place] = group["params"][place] = Parameter(torch.ones(SIZES[place] + n))
        give(params, [[1.0], None, [INF], [2.0]], 1.0)
        optimizer.unscale_and_step(grads_scaled_by=1.0)
    counts = {name: told["overflows"] for name, told in watch.read()["parameters"].items()}
    assert counts == dict(zip(NAMES, (0, 0, 4, 0), strict=True))


def test_parameters_of_two_models_with_the_same_names():
    params = [Parameter(torch.ones(2)) for _ in range(3)]
    watch = ampopt.Watch(ampopt.SGD([("weight", params[0]), ("weight", params[1])]))
    watch.optimizer.add_param_group({"params": [("weight", params[2])]})
    params[0].grad = torch.tensor([1.0, NAN])
    watch.optimizer.unscale_and_step(grads_scaled_by=1.0)
    read = watch.read()
    assert {name: stats["overflows"] for name, stats in read["parameters"].items()} == {
        "weight": 1,
        "weight (group 0, parameter 1)": 0,
        "weight (group 1, parameter 0)": 0,
    }
    watch.load_state_dict(watch.state_dict())
    assert watch.read() == read


def test_parameters_without_a_norm_are_watched():
    """Frozen codes of a quantized model, and parameters of lazy modules before their first use."""
    lazy = torch.nn.LazyLinear(1, bias=False)
    frozen = [torch.ones(2, dtype=dtype) for dtype in (torch.int8, torch.float8_e4m3fn)]
    params = [Parameter(x, requires_grad=False) for x in frozen]
    optimizer = ampopt.AdamW([*params, lazy.weight])
    watch = ampopt.Watch(optimizer)
    lazy(torch.ones(1, 3)).sum().backward()
    optimizer.unscale_and_step(grads_scaled_by=1.0)
    watch.report()
    largest = [told["largest"] for told in watch.read()["parameters"].values()]
    assert largest == [0.0, 0.0, 1.0]


@pytest.mark.parametrize("base", [ampopt.AdamW, Plain])
@pytest.mark.parametrize("skip_by", ["host", "transaction"])
def test_a_step_within_the_step_of_a_subclass_is_no_further_attempt(base, skip_by):
    class Derived(base):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    made(base)  # torch puts hooks around the step of a class that has instances
    optimizer, params = made(Derived)
    optimizer.skip_by = skip_by
    watch = ampopt.Watch(optimizer)
    for way in (in_one_call, in_two_calls, with_our_scaler, with_torchs_scaler):
        for number in (1.0, INF):
            give(params, [[number], None, None, [1.0]], 2.0)
            way(optimizer, 2.0)
    read = watch.read()
    assert (read["steps"], read["skips"], read["skips_in_a_row"]) == (8, 4, 1)
    assert read["parameters"][NAMES[0]]["overflows"] == 4
    optimizer.step()
    assert watch.read()["steps"] == 9


def test_a_step_that_was_put_on_the_instance_is_counted():
    optimizer, params = made(Plain)
    theirs = optimizer.step
    optimizer.step = lambda *args, **kwargs: theirs(*args, **kwargs)
    watch = ampopt.Watch(optimizer)
    for number in (1.0, INF):
        give(params, [[number], None, None, None], 2.0)
        optimizer.unscale_and_step(grads_scaled_by=2.0)
    assert (watch.read()["steps"], watch.read()["skips"]) == (2, 1)


def test_a_run_resumes_from_a_state_loaded_with_weights_only():
    optimizer, params = made()
    watch = ampopt.Watch(optimizer, last=3)
    for bad in (1.0, INF, 1.0, INF):
        give(params, [[bad], None, [2.0], [TINY]], 1.0)
        optimizer.unscale_and_step(grads_scaled_by=2.0)
    file = io.BytesIO()
    torch.save(watch.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert state["parameters"][NAMES[0]][COUNTS:] == [2.0, 4.0, *[0.0] * (COLUMNS - COUNTS - 2)]
    for last in (3, 2, 7):
        other, params = made()
        resumed = ampopt.Watch(other, last=last)
        resumed.load_state_dict(state)
        read, before = resumed.read(), watch.read()
        assert read.pop("recent") == before.pop("recent")[-last:]
        assert read == before
        give(params, [[INF], None, None, None], 1.0)
        other.unscale_and_step(grads_scaled_by=2.0)
        read = resumed.read()
        assert read["parameters"][NAMES[0]]["last_overflow"] == read["steps"] == 5
        assert (read["skips"], read["skips_in_a_row"]) == (3, 2)
        assert [step["step"] for step in read["recent"]][-2:] == [4, 5]


def test_a_captured_step_is_watched(backend, monkeypatch):
    if backend != "triton":
        pytest.skip("nothing is captured")
    from support.fake_cuda_graphs import FakeGraphs

    graphs = FakeGraphs()
    monkeypatch.setattr(cuda_graphs, "graphs_on", lambda device: graphs)
    reads, watch = [], None
    for graph in (True, False):
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)
        optimizer = ampopt.SGD(model.named_parameters())
        step = ampopt.TrainStep(
            model,
            lambda outputs, spoil: outputs.mean() * spoil,
            optimizer,
            ampopt.DynamicLossScale(init_scale=8.0, growth_interval=2),
            autocast=None,
            max_norm=1.0,
            cuda_graph=graph,
        )
        spoils = [1.0, INF, 1.0, 1.0, 1.0, INF, 1.0, NAN, 1.0]
        for i, spoil in enumerate(spoils):
            if i == 4:  # a graph that was captured without is captured again
                watch = ampopt.Watch(optimizer)
            step(torch.ones(4, 2), torch.tensor(spoil))
        assert watch is not None
        reads.append(watch.read())
    assert repr(reads[0]) == repr(reads[1])  # a norm of them is NaN
    assert reads[0]["skipped_by"]["overflow"] == 2
    assert [r["scale"] for r in reads[0]["recent"]] == [8.0, 8.0, 4.0, 4.0, 2.0]


# --- who is told ----------------------------------------------------------------------------------


def skipping(optimizer: Any, params: Any, n: int, value: float = INF) -> None:
    for _ in range(n):
        give(params, [[value], None, [1.0], None], 1.0)
        optimizer.unscale_and_step(grads_scaled_by=2.0)


def test_an_alarm_warns_once_each_time(backend):
    if "device" in backend or backend == "triton":
        pytest.skip("looks some steps later")
    optimizer, params = made()
    watch = ampopt.Watch(optimizer)
    watch.alarm(skips_in_a_row=3)
    skipping(optimizer, params, 2)
    with pytest.warns(ampopt.watching.Alarm, match="3 steps in a row"):
        skipping(optimizer, params, 1)
    skipping(optimizer, params, 3)  # which would be an error
    skipping(optimizer, params, 1, value=1.0)
    with pytest.warns(ampopt.watching.Alarm, match="at step 10"):
        skipping(optimizer, params, 3)


@pytest.mark.parametrize(
    ("condition", "value", "said"),
    [
        ({"skips_in_a_row": 4}, INF, "in a row"),
        ({"scale_below": 4.0}, 1.0, "loss scale is 2"),
        ({"zero_share_above": 0.5}, TINY, "100% of the gradients of layer0.weight"),
    ],
)
def test_an_alarm_is_raised_some_steps_later_without_waiting(condition, value, said):
    optimizer, params = made()
    watch = ampopt.Watch(optimizer)
    watch.alarm(**condition, raises=True)
    with pytest.raises(ampopt.watching.Alarm, match=said):
        skipping(optimizer, params, 16, value=value)
    assert watch.read()["steps"] <= 8


@pytest.mark.filterwarnings("ignore::ampopt.watching.Alarm")  # which pytest would raise
def test_an_alarm_raises_each_of_its_conditions():
    optimizer, params = made()
    watch = ampopt.Watch(optimizer)
    watch.alarm(skips_in_a_row=1, scale_below=4.0, raises=True)
    for said in ("in a row", "loss scale is 2"):
        with pytest.raises(ampopt.watching.Alarm, match=said):
            skipping(optimizer, params, 16)
    skipping(optimizer, params, 16)  # both were told


@pytest.mark.parametrize("scale", [None, 4.0])
def test_no_alarm_is_raised_within_its_limits(scale):
    optimizer, params = made()
    watch = ampopt.Watch(optimizer)
    watch.alarm(skips_in_a_row=1, scale_below=4.0, zero_share_above=0.5, raises=True)
    for _ in range(9):
        give(params, [[1.0, 1e-9]] * 4, scale or 1.0)
        optimizer.unscale_and_step(grads_scaled_by=scale)
    assert watch.read()["steps"] == 9


def test_a_watched_optimizer_may_have_no_parameters_yet():
    optimizer = ampopt.SGD([{"params": []}])
    watch = ampopt.Watch(optimizer)
    watch.alarm(zero_share_above=0.0)
    optimizer.unscale_and_step(grads_scaled_by=2.0)
    assert watch.report().startswith("1 step, 0 skipped")
    assert str(watch).endswith("parameter  overflows  last  largest |g|  underflow")


class Writer:
    def __init__(self) -> None:
        self.written: Any = {}

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.written[name, step] = value


def test_numbers_are_logged_from_then_on():
    optimizer, params = made()
    watch = ampopt.Watch(optimizer)
    skipping(optimizer, params, 1)
    writer, dicts = Writer(), []
    watch.log_to(writer, every=2)
    watch.log_to(dicts.append)
    skipping(optimizer, params, 3)
    watch.close()
    skipping(optimizer, params, 1)
    assert [told["step"] for told in dicts] == [2, 3, 4]
    assert dicts[-1] == {
        "step": 4,
        "skipped": True,
        "scale": 2.0,
        "norm": INF,
        "skips": 4,
        "skips_in_a_row": 4,
    }
    assert {step for _, step in writer.written} == {2, 4}
    assert writer.written["ampopt/scale", 2] == 2.0
    assert watch.read()["steps"] == 4


def test_table_report_and_picture_name_the_worst(tmp_path):
    optimizer, params = made()
    watch = ampopt.Watch(optimizer)
    assert "No step" in watch.report()
    skipping(optimizer, params, 2)
    skipping(optimizer, params, 1, value=1.0)
    handle = ampopt.skip_when(optimizer, norm=1e-9)
    skipping(optimizer, params, 1, value=1.0)
    handle.remove()
    assert watch.report().endswith("Skipped for the norm: 1 step.")
    assert str(watch).splitlines()[2].split()[:3] == [NAMES[0], "2", "2"]
    assert f"`{NAMES[0]}` overflowed 2 times" in watch.report()
    pytest.importorskip("matplotlib")
    watch.plot(tmp_path / "watch.png")
    assert (tmp_path / "watch.png").read_bytes().startswith(b"\x89PNG")


# --- what is refused ------------------------------------------------------------------------------


def test_wrong_arguments_are_refused(monkeypatch):
    optimizer, params = made()
    with pytest.raises(TypeError, match="ampopt.Optimizer"):
        ampopt.Watch(torch.optim.SGD(params))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="last"):
        ampopt.Watch(optimizer, last=0)
    watch = ampopt.Watch(optimizer)
    with pytest.raises(RuntimeError, match="watched already"):
        ampopt.Watch(optimizer)
    with pytest.raises(TypeError, match="SummaryWriter"):
        watch.log_to(3)
    with pytest.raises(ValueError, match="every"):
        watch.log_to(print, every=0)
    with pytest.raises(ValueError, match="skips_in_a_row, scale_below"):
        watch.alarm()
    wrong: Any
    for wrong in ({"skips_in_a_row": 0}, {"scale_below": -1.0}, {"zero_share_above": 1.5}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            watch.alarm(**wrong)
    with pytest.raises(TypeError, match="must be a dict, got list"):
        watch.load_state_dict([])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="entries"):
        watch.load_state_dict({})
    state = watch.state_dict()
    state["parameters"]["unknown"] = [0.0] * 5
    with pytest.raises(ValueError, match="unknown"):
        watch.load_state_dict(state)
    before = watch.state_dict()
    for entry, wrong in (
        ("steps", -1), ("steps", "3"), ("parameters", None), ("totals", [0.0]), ("recent", [[1.0]]),
        ("parameters", dict.fromkeys(before["parameters"], [0.0])),
    ):  # fmt: skip
        with pytest.raises((TypeError, ValueError), match="steps|other parameters|invalid"):
            watch.load_state_dict({**before, entry: wrong})
        assert watch.state_dict() == before
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        watch.plot("nowhere.png")
    watch.close()
    watch.close()
    with pytest.raises(RuntimeError, match="closed"):
        watch.alarm(skips_in_a_row=1)
    ampopt.Watch(optimizer).close()
