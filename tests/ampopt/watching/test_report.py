"""The report of a watch: what happened, since when, and advice that fits the numbers."""

import re
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import ampopt

INF, NAN = float("inf"), float("nan")


def reported(norms: list[float], **options: Any) -> str:
    """The report after gradients with these values; the parameter has one element."""
    weight = Parameter(torch.ones(1, dtype=options.pop("dtype", torch.float32)))
    optimizer = ampopt.SGD([("weight", weight)], lr=options.pop("lr", 0.0))
    watch = ampopt.Watch(optimizer, options.pop("last", 1000))
    for norm, loss in zip(norms, options.get("losses", [None] * len(norms)), strict=True):
        weight.grad = torch.full_like(weight, norm)
        optimizer.unscale_and_step(grads_scaled_by=options.get("scale", 2.0), loss=loss)
    return watch.report()


def of_layers(steps: list[list[float]], n: int = 3, *, scale: Any = 2.0) -> ampopt.Watch:
    """The watch of ``n`` parameters after these gradients of the first; all others are 1."""
    params = [Parameter(torch.ones(1)) for _ in range(n)]
    optimizer = ampopt.SGD([(f"layer{i}", p) for i, p in enumerate(params)])
    watch = ampopt.Watch(optimizer)
    for values in steps:
        for i, p in enumerate(params):
            p.grad = torch.full((1,), values[i] if i < len(values) else 1.0)
        optimizer.unscale_and_step(grads_scaled_by=scale)
    return watch


def test_a_report_says_how_many_overflowed_and_which_most():
    lines = of_layers([[4.0], [INF], [INF, INF]]).report().splitlines()
    assert lines[0] == "3 steps, 2 skipped, 2 in a row up to now, the last under a scale of 2^1."
    found = "`layer0` overflowed 2 times, last at step 3; its largest finite gradient was 2"
    assert lines[1] == f"{found}; 1 other parameter overflowed, too."
    assert lines[2].startswith("A few overflows are normal") and "module of `layer0`" in lines[2]
    assert lines[3:] == ["All steps from step 2 on have overflowed, 2 in a row."]
    assert "A few overflows are normal" in reported([INF, 1.0, 1.0], last=2)
    lines = of_layers([[INF], [INF, INF, INF]], scale=3.0).report().splitlines()
    assert lines[0].endswith("the last under a scale of 3.")
    assert lines[1].endswith("; 2 other parameters overflowed, too.")
    lines = of_layers([[1.0], [INF] * 3]).report().splitlines()
    assert lines[1].startswith("All parameters overflowed together, once, at step 2: the cause is")
    assert "first_nonfinite" in lines[1] and len(lines) == 2
    apart = of_layers([[INF], [1.0, INF]], n=2).report()  # as often, in different steps
    assert "`layer1` overflowed once, at step 2;" in apart and "together" not in apart
    lines = of_layers([[1.0]], scale=None).report().splitlines()
    assert lines == ["1 step, 0 skipped.", "No gradient overflowed: there is nothing to change."]
    lines = of_layers([[2.0**-25, 2.0]]).report().splitlines()
    assert len(lines) == 2 and lines[1].startswith(
        "Without a scale, 100% of the gradients of `layer0` would underflow in float16: keep"
    )


def test_a_table_has_the_worst_first_and_says_how_many_are_left():
    steps = [[INF], [1.0, INF], [1.0, 1.0, 4.0], [0.0, 0.0, 0.0, 2.0**-30]]
    lines = str(of_layers(steps, n=12)).splitlines()
    assert [line.split() for line in lines[2:6]] == [
        ["layer1", "1", "2", "0.5", "0.0%"],
        ["layer0", "1", "1", "0.5", "0.0%"],
        ["layer2", "0", "-", "2", "0.0%"],
        ["layer3", "0", "-", "0.5", "50.0%"],
    ]
    assert len(lines) == 13 and lines[-1] == "... and 2 more"
    assert str(of_layers([])).splitlines()[0] == "0 steps, 0 skipped."


@pytest.mark.parametrize("last", [3, 1000])
def test_a_report_says_since_when_steps_overflow_in_a_row(last):
    now = reported([1.0] * 4 + [INF, 1.0] + [INF] * 12, last=last)
    assert "All steps from step 7 on have overflowed, 12 in a row." in now
    assert "resume from a checkpoint older than step 7" in now
    assert "A few overflows are normal" not in now and "first_nonfinite" in now
    over = reported([1.0] * 2 + [INF] * 3 + [1.0, INF])
    assert "The longest run of overflows is 3 steps long, from 3 to 5." not in over  # one is now
    over = reported([1.0] * 2 + [INF] * 3 + [1.0, INF, 1.0])
    assert "The longest run of overflows is 3 steps long, from 3 to 5." in over
    assert "`weight` overflowed 4 times, last at step 7; its largest" in over
    assert "checkpoint" not in over


def test_a_spike_that_skip_when_skipped_was_not_applied():
    weight = Parameter(torch.ones(1))
    optimizer = ampopt.SGD([("weight", weight)])
    watch = ampopt.Watch(optimizer)
    ampopt.skip_when(optimizer, norm=50.0)
    for value in [1.0] * 12 + [100.0]:
        weight.grad = torch.full_like(weight, value)
        optimizer.unscale_and_step(grads_scaled_by=1.0, loss=value)
    lines = watch.report().splitlines()
    assert lines[1:] == ["Skipped for the norm: 1 step."]


def test_steps_of_which_every_micro_batch_was_dropped_overflowed():
    params = [Parameter(torch.ones(1)) for _ in range(2)]
    optimizer = ampopt.SGD(params)
    watch = ampopt.Watch(optimizer)
    for _ in range(12):
        for p, value in zip(params, (INF, 1.0), strict=True):
            p.grad = torch.full_like(p, value)
        optimizer.accumulate(2.0, drop="micro_batch")
        optimizer.unscale_and_step(grads_scaled_by=2.0)
    assert watch.read()["recent"][-1]["norm"] == 0.0  # of the sum of no micro-batch
    report = watch.report()
    assert "All steps from step 1 on have overflowed, 12 in a row. Nothing is being" in report
    assert "had only gradients of 0" not in report


def test_a_report_names_the_largest_spike_that_was_applied():
    usual = [0.02, 0.03] * 8
    report = reported([*usual, 13004.0, *usual, 4.0, 0.02])
    assert "At step 17 the gradient norm rose from about 0.0125 to 6.5e+03" in report
    assert "the largest of 2 such spikes" in report and "skip_when(optimizer, norm_dev" in report
    assert "skip_when" not in reported([*usual, INF, *usual, 0.1])


def test_a_report_names_the_largest_rise_of_a_loss_that_was_applied():
    usual = [2.5, 2.25] * 8
    falling = [10.0 - 0.25 * i for i in range(30)]
    report = reported([1.0] * 34, losses=[*usual, 12.0, *usual, 6.0])
    assert "At step 17 the loss rose from about 2.38 to 12" in report
    assert "the largest of 2 such spikes" in report and "skip_when(optimizer, loss_dev" in report
    for losses in ([*usual, 2.75], falling, [-x for x in usual], [1.0] * 20 + [INF]):
        assert "skip_when" not in reported([1.0] * len(losses), losses=losses)


@pytest.mark.parametrize(
    ("options", "is_said"),
    [
        ({"scale": 1.0}, False),
        ({"scale": 2.0}, True),
        ({"dtype": torch.float16, "scale": 1.0}, True),
    ],
)
def test_a_report_speaks_of_float16_only_where_something_is_scaled_or_float16(options, is_said):
    tiny = 2.0**-24 if options.get("dtype") else 2.0**-30  # float16 has nothing below
    for values in ([tiny] * 3, [1.0] * 3, [1.0, INF]):
        report = reported(values, **options)
        words = [word in report for word in ("float16", "scale grows", "max_scale", "min_scale")]
        assert any(words) == is_said, report


# --- gradients that are all zero ------------------------------------------------------------------


def trained(scale: Any, *, steps: int = 3) -> str:
    """The report on a model under float16 autocast; the gradients of "deep" need a loss scale."""
    deep, head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
    unused = torch.nn.Linear(2, 2)  # has no gradient at all
    model = torch.nn.ModuleDict({"deep": deep, "head": head, "unused": unused})
    optimizer = ampopt.SGD(model.named_parameters(), lr=0.01)
    watch = ampopt.Watch(optimizer)
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            out = head(deep(torch.ones(8, 4)) * 2.0**-14 + 1.0)
        ampopt.scale_outputs(out.float().sum() * 2.0**-12, scale).backward()
        optimizer.unscale_and_step(grads_scaled_by=scale)
    return watch.report()


@pytest.mark.parametrize(
    ("scale", "remedy"), [(2.0, "raise the loss scale (init_scale="), (1.0, "DynamicLossScale()")]
)
def test_parameters_whose_gradients_underflow_are_named(scale, remedy):
    torch.manual_seed(0)
    report = trained(scale)
    assert "`deep.weight`, `deep.bias` had only gradients of 0, while others did not" in report
    assert remedy in report
    assert "unused" not in report and "nothing to change" not in report
    assert "only gradients of 0" not in trained(2.0**13)


def test_gradients_that_are_all_zero_are_no_reason_to_leave_the_scale():
    report = reported([0.0] * 3)
    assert "`weight` had only gradients of 0, like all others" in report
    assert "raise the loss scale" in report and "nothing to change" not in report
    for values in ([0.0, 1.0], [0.0, INF]):
        assert "only gradients of 0" not in reported(values)


# --- a learning rate that is too high -------------------------------------------------------------


def of_a_network(lr: float, init_scale: float, optimizer_class: Any) -> str:
    """The report after a few steps of a small network under float16 autocast."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)
    )
    optimizer = optimizer_class(model.named_parameters(), lr=lr)
    watch, scale = ampopt.Watch(optimizer), ampopt.DynamicLossScale(init_scale=init_scale)
    inputs, labels = torch.randn(32, 16), torch.randint(8, (32,))
    for _ in range(12):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            out = model(inputs)
        loss = torch.nn.functional.cross_entropy(out.float(), labels)
        ampopt.scale_outputs(loss, scale).backward()
        _, _, scale = optimizer.unscale_and_step(grads_scaled_by=scale, loss=loss)
    return watch.report()


@pytest.mark.parametrize(("optimizer_class", "lr"), [(ampopt.AdamW, 3.0), (ampopt.SGD, 100.0)])
def test_a_run_that_diverges_is_told_of_its_learning_rate(optimizer_class, lr):
    report = of_a_network(lr, 2.0**16, optimizer_class)
    assert "the loss rose from 2." in report and "times what it was" in report
    assert f"the learning rate, {lr:.3g} now, is too high. Lower it" in report
    for wrong in ("max_scale", "run_in", "first_nonfinite"):
        assert wrong not in report
    healthy = of_a_network(lr / 1000, 2.0**30, optimizer_class)
    assert "overflowed" in healthy and "max_scale" in healthy and "learning rate" not in healthy


def test_a_rise_of_the_loss_is_compared_with_its_lowest():
    up = [2.0 - 0.05 * i for i in range(20)] + [1.0 + 0.25 * i for i in range(40)]
    applied = len(up)
    for losses, lr, is_told in (
        ([3.97, 5.17, 5.07, NAN], 1.0, True),  # gradients of -1, so the weight grows from 1
        ([3.97, 5.17, 5.07, NAN], 0.0, False),
        ([5.17, 4.2, 3.97, NAN], 1.0, False),
        ([3.97, NAN], 4.0, True),
        (up + [20.0], 1.0, True),
        (up[:20] + [20.0], 1.0, False),  # a spike
        ([1.0] * 30 + [5.0] * 8 + [NAN], 1.0, True),  # in most of the last ten
        ([None, None], 1.0, False),
        ([3.97, None], 4.0, False),
        ([3.97, 4.0, 20.0], 2.0, True),  # with too few before it to call it a spike
    ):
        report = reported([-1.0] * (len(losses) - 1) + [INF], losses=losses, lr=lr)
        assert ("learning rate" in report) == is_told, losses
    report = reported([-1.0] * applied + [INF], losses=[*up, 20.0], lr=1.0)
    assert re.search(
        r"Up to step 61, the first with inf or NaN, the loss rose from 1\.\d+ to 10\.8", report
    )
    assert "the gradient norm rose from 0.5 to 50, and" in reported([-1.0, -100.0, INF], lr=1.0)
    assert "learning rate" not in reported([-1.0] * applied, losses=up, lr=1.0)
    unchecked = reported([-1.0] * 3 + [INF], losses=[3.97, 5.17, 5.07, NAN], lr=1.0, scale=None)
    assert "the loss rose from 3.97 to 5.07, and `weight` is no longer finite: the" in unchecked


def test_the_learning_rates_of_several_groups_are_named():
    params = [Parameter(torch.ones(1)) for _ in range(2)]
    groups = [{"params": [p], "lr": lr} for p, lr in zip(params, (1.0, 4.0), strict=True)]
    watch = ampopt.Watch(ampopt.SGD(groups))
    for loss in (3.97, 5.17, 5.07, NAN):
        for p in params:
            p.grad = torch.full((1,), INF if loss is NAN else -1.0)
        watch.optimizer.unscale_and_step(grads_scaled_by=1.0, loss=loss)
    report = watch.report()
    assert "the learning rates, up to 4 now, are too high. Lower it" in report
    assert "All parameters overflowed together, once, at step 4." in report
    watch.optimizer.param_groups[1]["lr"] = None  # as of an Adafactor that sets its own
    assert "the learning rate, 1 now, is too high. Lower it" in watch.report()
    watch.optimizer.param_groups[0]["lr"] = None
    assert ": the learning rate is too high. Lower it" in watch.report()


def test_a_spike_that_overflows_is_both():
    usual = [2.5, 2.25] * 8
    report = reported([1.0] * 16 + [INF], losses=[*usual, 12.0])
    assert "`weight` overflowed once, at step 17;" in report
    assert "At step 17 the loss rose from about 2.38 to 12; the step overflowed" in report
    assert "look at the batch" in report and "skip_when" not in report and "max_scale" not in report
    report = reported([1.0] * 16 + [INF], losses=[*usual, 2.5])
    assert "loss rose" not in report and "max_scale" in report


def test_the_scale_is_not_blamed_where_the_loss_was_not_finite():
    report = reported([1.0, INF, 1.0], losses=[2.0, NAN, 2.0])
    assert "first_nonfinite" in report and "max_scale" not in report
