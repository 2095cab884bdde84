"""The report of a watch: what happened, since when, and advice that fits the numbers."""

from typing import Any

import pytest
import torch
from torch.nn import Parameter

import ampopt

INF = float("inf")


def reported(norms: list[float], **options: Any) -> str:
    """The report after gradients with these values; the parameter has one element."""
    weight = Parameter(torch.ones(1, dtype=options.pop("dtype", torch.float32)))
    optimizer = ampopt.SGD([("weight", weight)], lr=0.0)
    watch = ampopt.Watch(optimizer)
    for norm, loss in zip(norms, options.get("losses", [None] * len(norms)), strict=True):
        weight.grad = torch.full_like(weight, norm)
        optimizer.unscale_and_step(grads_scaled_by=options.get("scale", 2.0), loss=loss)
    return watch.report()


def test_a_report_says_since_when_steps_overflow_in_a_row():
    now = reported([1.0] * 4 + [INF, 1.0] + [INF] * 12)
    assert "All steps from step 7 on have overflowed, 12 in a row." in now
    assert "resume from a checkpoint of before step 7" in now
    assert "A few overflows are normal" not in now and "first_nonfinite" in now
    over = reported([1.0] * 2 + [INF] * 3 + [1.0, INF])
    assert "The longest run of overflows is of 3 steps, from 3 to 5." not in over  # one is now
    over = reported([1.0] * 2 + [INF] * 3 + [1.0, INF, 1.0])
    assert "The longest run of overflows is of 3 steps, from 3 to 5." in over
    assert "checkpoint" not in over


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
