"""``TrainStep`` is bitwise the loop that its docstring shows."""

import collections
import copy
import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.optimizers import HostCounted, Plain

import ampopt
from ampopt import DynamicLossScale, StaticLossScale, TrainStep, scale_outputs
from ampopt.testing.bits import bits, everything

INF = float("inf")
MSE = torch.nn.MSELoss()


def made(cls: Any = ampopt.AdamW, dropout: float = 0.0, **options: Any) -> tuple[Any, Any]:
    """A small model with fixed initial values, and its optimizer."""
    model = torch.nn.Sequential(
        torch.nn.Linear(2, 3), torch.nn.Dropout(dropout), torch.nn.Linear(3, 1)
    )
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.linspace(-1.0, 0.75, p.numel()).reshape(p.shape))
    return model, cls(model.parameters(), **options)


def batch(first: float = 1.0, rows: int = 4, bad_row: int | None = None) -> tuple[Any, Any]:
    inputs = torch.linspace(-1.0, first, rows * 2).reshape(rows, 2)
    if bad_row is not None:
        inputs[bad_row, 0] = INF
    return inputs, torch.ones(rows, 1)


def by_hand(model: Any, optimizer: Any, scale: Any, batches: Any, **options: Any) -> list[Any]:
    """The results of each step of the loop in the docstring."""
    n, dtype = options.get("micro_batches", 1), options.get("autocast", torch.float16)
    seen = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        total: Any = 0.0
        for x, y in zip(inputs.chunk(n), targets.chunk(n), strict=True):
            with torch.autocast("cpu", dtype or torch.float16, enabled=dtype is not None):
                loss = MSE(model(x), y) / n
            scale_outputs(loss, scale).backward()
            total = total + loss.detach()
        result = optimizer.unscale_and_step(grads_scaled_by=scale, max_norm=options.get("max_norm"))
        scale = result.scale
        seen.append((total, result.found_inf, optimizer.grad_norm, saved(scale)))
    return seen


def by_step(model: Any, optimizer: Any, scale: Any, batches: Any, **options: Any) -> list[Any]:
    step = TrainStep(model, MSE, optimizer, scale, **options)
    seen = []
    for inputs, targets in batches:
        loss, found_inf, scale = step(inputs, targets)
        assert step.scale is scale
        seen.append((loss, found_inf, optimizer.grad_norm, saved(scale)))
    return seen


def saved(scale: Any) -> Any:
    return None if scale is None else scale.state_dict()


SCALES = {
    "none": lambda: None,
    "static": lambda: StaticLossScale(8.0),
    "applied": lambda: StaticLossScale(8.0, drop_overflow_update=False),
    "dynamic": lambda: DynamicLossScale(init_scale=2.0**10, growth_interval=2),
}
batches = st.builds(
    batch,
    st.integers(-16, 16).map(lambda n: n / 8),
    st.just(4),
    st.sampled_from([None, None, 0, 3]),
)


@given(
    cls=st.sampled_from([ampopt.AdamW, ampopt.SGD, ampopt.Muon, Plain, HostCounted]),
    scale=st.sampled_from(sorted(SCALES)),
    training=st.lists(batches, min_size=1, max_size=4),
    micro_batches=st.sampled_from([1, 2, 4]),
    max_norm=st.sampled_from([None, 0.25, INF]),
    autocast=st.sampled_from([torch.float16, torch.bfloat16, None]),
    cuda_graph=st.booleans(),
)
@settings(max_examples=30)
def test_a_train_step_is_the_documented_loop(cls, scale, training, cuda_graph, **options):
    if cls is ampopt.Muon:  # which takes matrices only
        make = lambda params: ampopt.Muon([p for p in params if p.ndim == 2])  # noqa: E731
    else:
        make = cls
    on_cpu = {"cuda_graph": cuda_graph and issubclass(cls, ampopt.ElementwiseOptimizer)}
    (loop_model, loop), (model, optimizer) = made(make), made(make)
    torch.manual_seed(0)
    expected = by_hand(loop_model, loop, SCALES[scale](), training, **options)
    torch.manual_seed(0)
    actual = by_step(model, optimizer, SCALES[scale](), training, **on_cpu, **options)
    assert bits(actual) == bits(expected)
    assert everything(optimizer) == everything(loop)


def test_an_overflow_in_one_micro_batch_skips_all_of_them():
    model, optimizer = made()
    step = TrainStep(model, MSE, optimizer, DynamicLossScale(init_scale=8.0), micro_batches=4)
    step(*batch())
    before = everything(optimizer)
    result = step(*batch(bad_row=2))
    assert result.skipped
    assert everything(optimizer) == before
    assert step.scale is not None and step.scale.item() == 4.0
    assert not step(*batch()).skipped


def test_earlier_results_do_not_change():
    model, optimizer = made()
    scale = DynamicLossScale(init_scale=8.0, growth_interval=1)
    step = TrainStep(model, MSE, optimizer, scale, max_norm=1.0)
    kept = []
    for first in (1.0, 2.0):
        result = step(*batch(first))
        kept.append((result.loss, result.scale.value, optimizer.grad_norm))
    assert all(not torch.equal(a, b) for a, b in zip(*kept, strict=True))
    assert not kept[0][0].requires_grad


@pytest.mark.parametrize(
    ("inputs", "called_with"),
    [
        (torch.ones(2), "one"),
        ((torch.ones(2), torch.zeros(2)), "two"),
        ({"y": torch.zeros(2), "x": torch.ones(2)}, "named"),
    ],
)
def test_inputs_are_passed_as_they_come(inputs, called_with):
    weight = torch.nn.Parameter(torch.ones(2))

    def model(*args: Any, **kwargs: Any) -> Any:
        assert ("one", "two")[len(args) - 1] == called_with if args else called_with == "named"
        assert not kwargs or set(kwargs) == {"x", "y"}
        return (args[0] if args else kwargs["x"]) * weight

    def loss_fn(outputs: Any, factor: float, shift: Any) -> Any:
        return (outputs * factor + shift).mean()

    step = TrainStep(model, loss_fn, ampopt.SGD([weight], lr=1.0), 1.0, micro_batches=2)
    assert step(inputs, 3.0, torch.tensor(1.0)).loss == 4.0
    assert weight.tolist() == [-0.5, -0.5]  # d loss / d weight is 3 / 2 for each


@pytest.mark.parametrize("kind", [tuple, list])
def test_a_batch_that_was_not_unpacked_is_refused_with_the_call_to_make(kind):
    model, optimizer = made()
    step = TrainStep(model, MSE, optimizer, 1.0)
    with pytest.raises(TypeError, match=r"call step\(\*batch\)"):
        step(kind(batch()))


def test_replay_runs_the_batch_again_until_it_is_finite():
    """The result is that of a step with the last scale from the start, and the same dropout."""
    results = []
    for init in (2.0**40, None):
        model, optimizer = made(dropout=0.5)
        start = DynamicLossScale(init_scale=init or results[0][1].scale.item())
        step = TrainStep(model, MSE, optimizer, start, max_replays=100, preserve_rng=True)
        torch.manual_seed(3)
        result = step(*batch())
        assert not result.skipped
        results.append((everything(optimizer), result))
    (first, a), (second, b) = results
    assert a.scale.item() < 2.0**40
    assert bits(a.loss) == bits(b.loss)
    assert first == second


def test_replay_ends_where_no_scale_helps():
    model, optimizer = made()
    step = TrainStep(model, MSE, optimizer, DynamicLossScale(), max_replays=3)
    before = [bits(p) for p in model.parameters()]
    with pytest.raises(ampopt.NonFiniteGradientError):
        step(*batch(bad_row=0))
    assert [bits(p) for p in model.parameters()] == before


@pytest.mark.parametrize("scale", [DynamicLossScale(init_scale=8.0), None])
def test_an_optimizer_that_evaluates_by_itself(scale):
    model, optimizer = made(ampopt.LBFGS, max_iter=4)
    step = TrainStep(model, MSE, optimizer, scale, max_replays=10)
    first = step(*batch()).loss
    assert step(*batch()).loss < first


@given(
    before=st.lists(batches, max_size=3),
    after=st.lists(batches, min_size=1, max_size=3),
    scale=st.sampled_from(["none", "dynamic"]),
)
@settings(max_examples=15)
def test_a_saved_and_loaded_run_is_the_same_run(before, after, scale):
    model, optimizer = made()
    step = TrainStep(model, MSE, optimizer, SCALES[scale](), max_norm=1.0)
    for b in before:
        step(*b)
    checkpoint = copy.deepcopy((model.state_dict(), step.state_dict()))
    expected = [bits(step(*b)[:2]) for b in after]

    other_model, other = made()
    resumed = TrainStep(other_model, MSE, other, SCALES[scale](), max_norm=1.0)
    other_model.load_state_dict(checkpoint[0])
    resumed.load_state_dict(checkpoint[1])
    assert [bits(resumed(*b)[:2]) for b in after] == expected
    assert saved(resumed.scale) == saved(step.scale)
    assert everything(other) == everything(optimizer)


def step_of(scale: Any = 1.0, **options: Any) -> TrainStep:
    model, optimizer = made()
    return TrainStep(model, MSE, optimizer, scale, **options)


def test_a_model_without_parameters_leaves_them_to_the_loss_function():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = ampopt.SGD([weight], lr=0.5)
    step = TrainStep(torch.nn.Identity(), lambda x: (x * weight).sum(), optimizer, 1.0)
    step(torch.ones(2))
    assert weight.tolist() == [0.5, 0.5]


def test_a_state_with_a_scale_does_not_fit_a_step_without_one():
    with pytest.raises(ValueError, match="the saved step has a loss scale, this step has none"):
        step_of(None).load_state_dict(step_of(1.0).state_dict())


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        ([], TypeError, "must be a dict, got list"),
        ({"optimizer": {}}, ValueError, "exactly the entries 'optimizer' and 'scale'"),
        (lambda: step_of(None).state_dict(), ValueError, "this step has a loss scale, the saved"),
        (lambda: step_of(8.0).state_dict(), ValueError, "not the state of a DynamicLossScale"),
        (
            lambda: {
                "optimizer": {"state": {}, "param_groups": []},
                "scale": DynamicLossScale(init_scale=2.0).state_dict(),
            },
            ValueError,
            "different number of parameter groups",
        ),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(state, error, message):
    step = step_of(DynamicLossScale(init_scale=16.0))
    step(*batch())
    saved_state: Any = state() if callable(state) else state
    before = everything(step.optimizer), saved(step.scale)
    with pytest.raises(error, match=message):
        step.load_state_dict(saved_state)
    assert (everything(step.optimizer), saved(step.scale)) == before


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"model": None}, TypeError, "model must be callable, got NoneType"),
        ({"loss_fn": 1}, TypeError, "loss_fn must be callable, got int"),
        ({"optimizer": "torch"}, TypeError, r"torch\.optim\.sgd\.SGD: import it from ampopt"),
        ({"scale": True}, TypeError, "scale must be a LossScale, .* got bool"),
        ({"scale": torch.ones(())}, TypeError, "scale must be a LossScale, .* got Tensor"),
        ({"scale": 0.0}, ValueError, "value must be"),
        ({"autocast": torch.float32}, ValueError, r"autocast must be .* got torch\.float32"),
        ({"micro_batches": 0}, ValueError, "micro_batches"),
        ({"micro_batches": 2.0}, TypeError, "micro_batches"),
        ({"batches_per_step": 0}, ValueError, "batches_per_step"),
        ({"reduction": "none"}, ValueError, "reduction must be 'mean' or 'sum', got 'none'"),
        ({"max_norm": -1.0}, ValueError, "max_norm"),
        ({"on_gradients": 1}, TypeError, "on_gradients must be callable, got int"),
        ({"on_gradients": print, "max_norm": 1.0}, ValueError, "with on_gradients: clip there"),
        ({"on_overflow": "next"}, ValueError, "on_overflow must be 'skip', 'replay' or 'next"),
        ({"on_overflow": "skip", "max_replays": 1}, ValueError, "cannot be combined with on_ov"),
        ({"scale": None, "on_overflow": "next_batch"}, ValueError, "without a scale no step is"),
        ({"scale": None, "max_replays": 2}, ValueError, "without a scale no step is checked"),
        ({"max_replays": -1}, ValueError, "max_replays"),
        ({"preserve_rng": True}, ValueError, "pass on_overflow='replay' too"),
        ({"max_replays": 1, "cuda_graph": True}, ValueError, "cannot be combined with cuda_graph"),
        (
            {"optimizer": "lbfgs"},
            TypeError,
            'LBFGS evaluates the loss itself: pass on_overflow="replay"',
        ),
        ({"optimizer": "plain", "cuda_graph": True}, TypeError, "Optimizer without .* got Plain"),
    ],
)
def test_arguments_that_cannot_work_are_refused_by_the_constructor(options, error, message):
    model, optimizer = made()
    others = {
        "torch": lambda: torch.optim.SGD(model.parameters()),
        "lbfgs": lambda: ampopt.LBFGS(model.parameters()),
        "plain": lambda: Plain(model.parameters()),
    }
    if "optimizer" in options:
        options = {**options, "optimizer": others[options["optimizer"]]()}
    given_ = {"model": model, "loss_fn": MSE, "optimizer": optimizer, "scale": 1.0, **options}
    with pytest.raises(error, match=message):
        TrainStep(**given_)


@pytest.mark.parametrize("kind", [dict, collections.UserDict])
def test_a_mapping_is_divided_into_micro_batches(kind):
    model, rows = torch.nn.Bilinear(2, 2, 1), []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: rows.append(len(kwargs["input1"])), with_kwargs=True
    )
    step = TrainStep(model, MSE, ampopt.SGD(model.parameters()), 1.0, micro_batches=2)
    step(kind(input1=torch.ones(4, 2), input2=torch.ones(4, 2)), torch.ones(4, 1))
    assert rows == [2, 2]


def test_a_batch_that_cannot_be_divided_changes_nothing():
    step = step_of(micro_batches=3)
    before = everything(step.optimizer)
    for n in (4, 0):
        with pytest.raises(ValueError, match=f"of {n} cannot be divided into micro_batches=3"):
            step(*(tensor[:n] for tensor in batch()))
    assert everything(step.optimizer) == before


def test_a_loss_of_several_elements_is_refused():
    model, optimizer = made()
    step = TrainStep(model, torch.nn.MSELoss(reduction="none"), optimizer, 1.0)
    with pytest.raises(TypeError, match=r"one element, got shape \(4, 1\)"):
        step(*batch())
    number: Any = lambda outputs, targets: 1.0  # noqa: E731
    step = TrainStep(model, number, optimizer, 1.0)
    with pytest.raises(TypeError, match="one element, got float"):
        step(*batch())


def test_the_bits_of_the_optimizer_are_those_of_the_policy_or_more_special():
    model = torch.nn.Linear(2, 1)
    policy = ampopt.Precision(state_bits=8)
    with pytest.raises(ValueError, match="requires state_bits=8, and AdamW was made with 32"):
        TrainStep(model, MSE, ampopt.AdamW(model.parameters()), precision=policy)
    optimizer = ampopt.AdamW(model.parameters(), **policy.optimizer_options)
    for each in (policy, ampopt.Precision()):
        assert TrainStep(model, MSE, optimizer, precision=each).scale is None


# --- parts of one's own ---------------------------------------------------------------------------


def clip_by_value(optimizer: Any) -> None:
    torch.nn.utils.clip_grad_value_(optimizer.master_params(), 0.25)


@pytest.mark.parametrize("on_overflow", ["skip", "replay", "next_batch"])
@pytest.mark.parametrize("cls", [ampopt.AdamW, HostCounted])
def test_on_gradients_sees_them_unscaled_before_each_step(cls, on_overflow):
    results = []
    for by_hook in (True, False):
        torch.manual_seed(0)
        model, optimizer = made(cls)
        scale: Any = DynamicLossScale(init_scale=64.0, growth_interval=2)
        step = TrainStep(
            model, MSE, optimizer, scale, on_gradients=clip_by_value, on_overflow=on_overflow
        )
        for _ in range(3):
            inputs, targets = batch()
            if by_hook:
                given = (iter([(inputs, targets)]),) if on_overflow == "next_batch" else batch()
                scale = step(*given).scale
                continue
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = MSE(model(inputs), targets)
            scale_outputs(loss, scale).backward()
            optimizer.unscale(grads_scaled_by=scale)
            clip_by_value(optimizer)
            scale = optimizer.step_after_unscale().scale
        results.append((everything(optimizer), scale.item()))
    assert results[0] == results[1]


@pytest.mark.parametrize("hook", [None, lambda optimizer: None])
def test_steps_go_on_after_a_post_hook_has_raised(hook):
    model = torch.nn.Linear(2, 1)
    optimizer = ampopt.SGD(model.parameters(), lr=0.5)
    scale = ampopt.DynamicLossScale(init_scale=8.0)
    step = ampopt.TrainStep(model, MSE, optimizer, scale, autocast=None, on_gradients=hook)
    batch = torch.ones(4, 2), torch.ones(4, 1)

    def raise_(*_: Any) -> None:
        raise KeyError("in a hook")

    handle = optimizer.register_step_post_hook(raise_)
    with pytest.raises(KeyError, match="in a hook"):
        step(*batch)
    handle.remove()
    assert step(*batch).scale.item() == 8.0


def test_a_subclass_accumulates_in_float32():
    """The example of the docstring, in half precision, gives the step of one float32 batch."""

    class Accumulating(TrainStep):
        def backward(self, loss: torch.Tensor, scale: Any) -> None:
            super().backward(loss, scale)
            self.optimizer.accumulate(grads_scaled_by=scale)

    model = torch.nn.Linear(1, 1, bias=False).bfloat16()
    optimizer = ampopt.SGD(model.parameters(), lr=1.0, master_weights=True)
    with torch.no_grad():
        model.weight.zero_()
    step = Accumulating(model, torch.sum, optimizer, 1.0, autocast=None, micro_batches=4)  # type: ignore[arg-type]
    step(torch.tensor([[1024.0], [4.0], [4.0], [4.0]]).bfloat16())
    (master,) = optimizer.master_params()
    assert master.item() == -(1024 + 12) / 4


def test_parts_are_called_in_their_order():
    called = []

    class Told(TrainStep):
        def forward(self, inputs: Any, *targets: Any) -> torch.Tensor:
            called.append("forward")
            return super().forward(inputs, *targets)

        def backward(self, loss: torch.Tensor, scale: Any) -> None:
            called.append("backward")
            super().backward(loss, scale)

        def update(self, scale: Any, closure: Any = None) -> Any:
            called.append("update")
            return super().update(scale, closure)

    model, optimizer = made()
    Told(model, MSE, optimizer, DynamicLossScale(), micro_batches=2)(*batch())
    assert called == ["forward", "backward"] * 2 + ["update"]


# --- the next batch -------------------------------------------------------------------------------


def test_an_overflow_takes_the_next_batch():
    """Each batch is tried in turn, until one is not skipped."""
    batches = [batch(), batch(bad_row=0), batch(bad_row=1), batch(), batch(), batch(bad_row=2)]
    model, optimizer = made()
    start = DynamicLossScale(init_scale=64.0, growth_interval=3)
    step = TrainStep(model, MSE, optimizer, start, on_overflow="next_batch")
    feed = iter([batches[0], *map(list, batches[1:])])
    results = [step(feed) for _ in range(3)]
    assert [result.scale.item() for result in results] == [64.0, 16.0, 16.0]
    assert not any(result.skipped for result in results)
    with pytest.raises(StopIteration):
        step(feed)
    other, reference = made()
    by_hand(other, reference, DynamicLossScale(init_scale=64.0, growth_interval=3), batches)
    assert everything(optimizer) == everything(reference)


def test_at_most_max_replays_further_batches_are_taken():
    model, optimizer = made()
    step = TrainStep(
        model, MSE, optimizer, DynamicLossScale(), on_overflow="next_batch", max_replays=2
    )
    before = bits(list(model.parameters()))
    feed = iter([batch(bad_row=0)] * 9)
    with pytest.raises(ampopt.NonFiniteGradientError, match="of 3 batches overflowed$") as raised:
        step(feed)
    assert raised.value.reason == "replays" and len(raised.value.parameters) == 4
    assert bits(list(model.parameters())) == before
    assert len(list(feed)) == 6
    assert step.scale is not None and step.scale.item() == 2.0**13


def test_a_step_that_skip_when_skips_takes_no_further_batch():
    model, optimizer = made()
    ampopt.skip_when(optimizer, norm=1e-9)
    step = TrainStep(
        model, MSE, optimizer, DynamicLossScale(init_scale=64.0), on_overflow="next_batch"
    )
    feed = iter([batch(bad_row=0), batch(), batch()])
    assert step(feed).skipped
    assert len(list(feed)) == 1 and step.scale is not None and step.scale.item() == 32.0


@pytest.mark.parametrize("options", [{"on_overflow": "next_batch"}, {"batches_per_step": 2}])
@pytest.mark.parametrize("kind", [lambda x: x, lambda x: {"input": x}], ids=["tensor", "dict"])
def test_a_batch_without_targets_need_not_be_a_tuple(kind, options):
    model, optimizer = made()
    scale = DynamicLossScale(init_scale=64.0)
    step = TrainStep(model, torch.mean, optimizer, scale, autocast=None, **options)
    inputs = batch()[0]
    assert torch.equal(step(iter([kind(inputs), kind(inputs)])).loss, made()[0](inputs).mean())


@pytest.mark.parametrize("options", [{"on_overflow": "next_batch"}, {"batches_per_step": 1}])
@pytest.mark.parametrize("given", [batch(), ([batch()],), (iter([batch()]), 1.0)])
def test_an_iterator_is_required(given, options):
    model, optimizer = made()
    step = TrainStep(model, MSE, optimizer, DynamicLossScale(), **options)
    with pytest.raises(TypeError, match="takes an iterator of batches, such as iter"):
        step(*given)


# --- several batches a step -----------------------------------------------------------------------


def joined(window: Any) -> tuple[Any, ...]:
    """One batch of all in ``window``."""
    return tuple(torch.cat(tensors) for tensors in zip(*window, strict=True))


@given(
    cls=st.sampled_from([ampopt.AdamW, Plain]),
    scale=st.sampled_from(sorted(SCALES)),
    training=st.lists(st.lists(batches, min_size=3, max_size=3), min_size=1, max_size=4),
    micro_batches=st.sampled_from([1, 2]),
    max_norm=st.sampled_from([None, 0.25]),
    cuda_graph=st.booleans(),
)
@settings(max_examples=20)
def test_batches_of_a_step_are_the_parts_of_one(
    cls, scale, training, micro_batches, max_norm, cuda_graph
):
    options: Any = {
        "micro_batches": 3 * micro_batches,
        "max_norm": max_norm,
        "cuda_graph": cuda_graph and cls is ampopt.AdamW,
    }
    (whole_model, whole), (model, optimizer) = made(cls), made(cls)
    expected = by_step(whole_model, whole, SCALES[scale](), map(joined, training), **options)
    options.update(micro_batches=micro_batches, batches_per_step=3)
    step = TrainStep(model, MSE, optimizer, SCALES[scale](), **options)
    feed = iter([one for window in training for one in window])
    actual = []
    for _ in training:
        loss, found_inf, scale_now = step(feed)
        actual.append((loss, found_inf, optimizer.grad_norm, saved(scale_now)))
    assert bits(actual) == bits(expected)
    assert everything(optimizer) == everything(whole)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_fewer_batches_at_the_end_are_a_step_too(reduction):
    training = [batch(first) for first in (1.0, 2.0, 3.0, -1.0, 0.5)]
    model, optimizer = made()
    step = TrainStep(
        model, MSE, optimizer, 8.0, autocast=None, batches_per_step=3, reduction=reduction
    )
    feed = iter(training)
    losses = [step(feed).loss for _ in range(2)]
    with pytest.raises(StopIteration):
        step(feed)
    expected_model, expected = made()
    for window, loss in zip((training[:3], training[3:]), losses, strict=True):
        n = len(window) if reduction == "mean" else 1
        parts = [MSE(expected_model(x), y) / n for x, y in window]
        for part in parts:
            part.backward()
        assert loss.item() == functools.reduce(torch.add, parts).item()
        expected.unscale_and_step(grads_scaled_by=1.0)
        expected.zero_grad()
    for p, q in zip(model.parameters(), expected_model.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_an_overflow_takes_the_batches_of_another_step():
    """As NNabla's updater does with ``accum_grad`` and a ``data_feeder``."""
    training = [batch(), batch(bad_row=0), batch(2.0), batch(3.0), batch(bad_row=1)]
    options: Any = {"batches_per_step": 2, "reduction": "sum", "on_overflow": "next_batch"}
    model, optimizer = made()
    step = TrainStep(model, MSE, optimizer, DynamicLossScale(init_scale=64.0), **options)
    feed = iter(training)
    assert step(feed).scale.item() == 32.0
    expected_model, expected = made()
    loop = TrainStep(expected_model, MSE, expected, 32.0, batches_per_step=2, reduction="sum")
    loop(iter(training[2:4]))
    assert bits(list(model.parameters())) == bits(list(expected_model.parameters()))
    with pytest.raises(StopIteration):
        step(feed)  # the last batch overflows, and there is no other
    step = TrainStep(
        model, MSE, optimizer, DynamicLossScale(init_scale=64.0), max_replays=1, **options
    )
    with pytest.raises(ampopt.NonFiniteGradientError, match="of 4 batches overflowed$"):
        step(iter([batch(bad_row=0)] * 9))


def test_replay_runs_all_batches_of_the_step_again():
    model, optimizer = made()
    seen = []

    def loss_fn(outputs: Any, targets: Any) -> Any:
        seen.append(float(targets.sum()))
        if len(seen) == 2:
            outputs.register_hook(lambda grad: grad * INF)
        return MSE(outputs, targets)

    scale = DynamicLossScale(init_scale=64.0)
    step = TrainStep(model, loss_fn, optimizer, scale, max_replays=3, batches_per_step=2)
    x, y = batch()
    assert step(iter([(x, y), (x, 2 * y)])).scale.item() == 32.0
    assert seen == [4.0, 8.0, 4.0, 8.0]


# --- another scale --------------------------------------------------------------------------------


@pytest.mark.parametrize("cuda_graph", [False, True])
def test_the_scale_and_its_schedule_can_be_set_between_steps(cuda_graph):
    model, optimizer = made()
    step = TrainStep(
        model, MSE, optimizer, DynamicLossScale(), autocast=None, cuda_graph=cuda_graph
    )
    step(*batch())
    assert step.scale is not None
    now = step.scale.state_dict()
    step.scale = scale = DynamicLossScale()
    scale.load_state_dict({**now, "growth": 0, "growth_interval": 2})
    values = [step(*batch()).scale.item() for _ in range(4)]
    assert values == [2.0**16, 2.0**17, 2.0**17, 2.0**18]
    step.scale = 8.0
    assert step(*batch()).scale.item() == 8.0
    step.scale = None
    assert step(*batch()).scale is None
    with pytest.raises(TypeError, match="scale must be a LossScale"):
        step.scale = torch.ones(())  # pyright: ignore
    assert step.scale is None
