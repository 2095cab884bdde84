"""The decision of a step with checks of norm and loss, on every backend, compared with Python.

``passes/test_control.py`` tests the decisions without checks.
"""

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support.kernel_rows import CPU, ENGINES, each_engine

from ampopt.testing.bits import bits
from ampopt_kernels.next_scale import PolicyConstants
from ampopt_kernels.step_data import Decision, Partials, Request
from ampopt_kernels.step_decision import RUNNING, Check, Window
from ampopt_kernels.step_tensors import Work

INF, NAN = math.inf, math.nan
POLICY = PolicyConstants(2.0, 0.5, 3.0, 2.0, 1.0, 1.0, 0.0, 2.0**-3, 2.0**5)

VALUES = st.sampled_from([0.0, 1.0, 1.5, 2.0, 3.0, 1e100, INF, NAN])
CHECKS = st.builds(
    Check,
    cause=st.sampled_from([2.0, 3.0]),
    of_norm=st.sampled_from([0.0, 1.0]),
    limit=st.sampled_from([-1.0, 1.0, 2.0]),
    deviations=st.sampled_from([0.5, 2.0]),
    warmup=st.sampled_from([2.0, 3.0, INF]),
    both_sides=st.just(0.0),
    window=st.none(),
    statistics=st.sampled_from([None, (0.0, 0.0, 0.0), (1.0, 1.5, 0.0), (2.0, 1.5, 0.5)]),
)


class Cause:
    """A skip condition: some checks."""

    def __init__(self, *checks: Check) -> None:
        self._checks = list(checks)

    def checks(self, device: torch.device) -> list[Check]:
        return self._checks


def decide(engine: Any, checks: Any, norm: Any, loss: Any, **options: Any) -> Decision:
    squares = torch.tensor([0.0, norm * norm], dtype=torch.float64)
    request = Request(
        max_norm=INF if any(check.of_norm for check in checks) else None,
        causes=(Cause(*checks),),
        loss=torch.full((1,), loss, dtype=torch.float64)
        if any(not check.of_norm for check in checks)
        else None,
        **options,
    )
    partials = Partials(torch.zeros(2), squares if request.max_norm else None)
    return ENGINES[engine]().control(Work(CPU, []), request, partials)


def expected(checks: Any, norm: float, loss: float, overflow: bool) -> Any:
    """The cause of a skip by definition, and the statistics after it."""
    cause, after = 0.0, []
    for check in checks:
        value = norm if check.of_norm else loss
        too_large = check.limit > 0 and not value <= check.limit
        if check.statistics is not None:
            count, mean, squares = check.statistics
            limit = check.deviations * math.sqrt(squares / max(count - 1, 1.0))
            too_large = too_large or (count >= check.warmup and not value - mean <= limit)
        if too_large and not (cause or overflow):
            cause = check.cause
    for check in checks:
        value = norm if check.of_norm else loss
        if check.statistics is None or overflow or cause or not math.isfinite(value):
            after.append(check.statistics)
        else:
            count, mean, squares = check.statistics
            delta = value - mean
            new_mean = mean + delta / (count + 1)
            after.append((count + 1, new_mean, squares + delta * (value - new_mean)))
    return cause, after


@each_engine
@given(
    checks=st.lists(CHECKS, min_size=1, max_size=4),
    norm=VALUES,
    loss=VALUES,
    external=st.sampled_from([None, 0.0, 1.0]),
    drop=st.booleans(),
    scheduled_by=st.sampled_from([None, 0.0, 1.0]),
)
@example([Check(2.0, 1.0, limit=2.0)], 2.0, 0.0, None, True, None)
@example([Check(2.0, 1.0, limit=1.0)], 2.0, 0.0, None, True, 1.0)  # type: ignore[arg-type]
@example([Check(2.0, 1.0, limit=1.0), Check(3.0, 0.0, limit=1.0)], 2.0, 2.0, None, True, None)
@example([Check(3.0, 0.0, -1.0, 2.0, 2.0, statistics=(2.0, 1.5, 0.5))], 0.0, NAN, None, True, None)  # type: ignore[arg-type]
@example([Check(3.0, 0.0, -1.0, 2.0, 3.0, statistics=(1.0, 1.5, 0.0))], 0.0, INF, None, True, None)  # type: ignore[arg-type]
@example([Check(2.0, 0.0, -1.0, 2.0, 2.0, statistics=(2.0, 1.5, 0.5))], 0.0, 1.0, None, True, None)  # type: ignore[arg-type]
@example([Check(2.0, 0.0, -1.0, 2.0, 2.0, statistics=(2.0, 1.5, 0.5))], 0.0, 2.5, None, True, None)  # type: ignore[arg-type]
@example([Check(2.0, 0.0, -1.0, 2.0, 2.0, statistics=(2.0, 1.5, 0.0))], 0.0, 1.5, None, True, None)  # type: ignore[arg-type]
def test_finds_the_first_cause_and_updates_the_statistics(
    engine, checks, norm, loss, external, drop, scheduled_by
):
    norm = math.sqrt(norm * norm)
    cause, after = expected(checks, norm, loss, external == 1.0)
    checks = [
        check._replace(
            statistics=None
            if check.statistics is None
            else torch.tensor(check.statistics, dtype=torch.float64)
        )
        for check in checks
    ]
    flag = None if external is None else torch.full((1,), external)
    scale, counters = torch.full((), 8.0), torch.tensor([2, 1], dtype=torch.int32)
    schedule = {"scale": scale, "policy": POLICY, "counters": counters}
    if scheduled_by is not None:
        schedule["scheduled_by"] = torch.full((1,), scheduled_by)
    decision = decide(engine, checks, norm, loss, found_inf=flag, drop=drop, **schedule)
    assert decision.cause is not None
    assert (decision.cause.item(), decision.cause.shape) == (cause, ())
    assert (decision.found_inf > 0).item() == (external == 1.0 or cause > 0)
    assert (decision.skip > 0).item() == (drop and bool(decision.found_inf > 0))
    # The step after two finite ones grows the scale; one that is skipped for a check is not heard,
    # unless the flag that the schedule follows is another one, and set.
    assert decision.scale is not None
    assert decision.counters is not None
    overflow = external == 1.0 if scheduled_by is None else scheduled_by == 1.0
    heard = (4.0, 0, 0) if overflow else (8.0, 2, 1) if cause else (16.0, 1, 1)
    assert (decision.scale.item(), *decision.counters.tolist()) == heard
    for check, numbers in zip(checks, after, strict=True):
        if check.statistics is not None:
            assert bits(check.statistics) == bits(torch.tensor(numbers, dtype=torch.float64))


@each_engine
def test_a_scale_that_is_not_usable_is_an_overflow_and_no_other_cause(engine):
    check = Check(2.0, 1.0, limit=1.0, statistics=torch.zeros(RUNNING, dtype=torch.float64))
    decision = decide(engine, [check], 2.0, 0.0, scale=torch.tensor(-1.0))
    assert decision.cause is not None
    assert (decision.cause.item(), (decision.found_inf > 0).item()) == (0.0, True)
    assert not check.statistics.any()  # type: ignore[union-attr]


@each_engine
@given(
    values=st.lists(st.sampled_from([0.0, 1.0, 1.5, 2.0, 3.0, INF, NAN]), max_size=20),
    latest=st.sampled_from([0.0, 1.0]),
    correction=st.sampled_from([0.0, 1.0]),
    leaves_out=st.sampled_from([0.0, 2.0]),
    both_sides=st.sampled_from([0.0, 1.0]),
)
@example([1.0, 1.0, 1.5, 1.65], 0.0, 1.0, 0.0, 0.0)  # the last is an outlier
@example([1.0, 1.0, 1.5, 1.65], 1.0, 0.0, 0.0, 0.0)  # but not of a window that includes it
@example([1.0, 1.0, 1.5, 1.5], 0.0, 0.0, 0.0, 0.0)  # an outlier
@example([1.0, 1.0, 1.5, 1.5], 0.0, 1.0, 0.0, 0.0)  # but not with the correction
def test_a_window_has_the_last_values(engine, values, latest, correction, leaves_out, both_sides):
    length, warmup, deviations = 4, 3, 1.25
    numbers = torch.zeros(2 + length, dtype=torch.float64)
    window = Window(length, latest, correction, leaves_out)
    check = Check(3.0, 0.0, -1.0, deviations, warmup, both_sides, window, numbers)
    known: list[float] = []
    in_a_row = 0
    for value in values:
        decision = decide(engine, [check], 0.0, value)
        used = [*known, value][-length:] if latest else known[-length:]
        outlier = False
        if len(known) >= warmup:
            mean = math.fsum(used) / len(used)
            squares = math.fsum((x - mean) ** 2 for x in used) if math.isfinite(mean) else NAN
            away = abs(value - mean) if both_sides else value - mean
            limit = deviations * math.sqrt(squares / (len(used) - correction))
            if math.isclose(away, limit):
                return  # rounding decides
            outlier = not away <= limit
        assert decision.cause is not None
        assert decision.cause.item() == 3.0 * outlier
        if math.isfinite(value):
            in_a_row = in_a_row + 1 if outlier else 0
            if not outlier or in_a_row > leaves_out:
                known.append(value)
        assert numbers[:2].tolist() == [len(known), in_a_row]
        assert set(numbers[2:].tolist()) >= set(known[-length:])


@each_engine
def test_an_overflow_is_not_added_to_a_window(engine):
    numbers = torch.zeros(6, dtype=torch.float64)
    check = Check(3.0, 0.0, window=Window(4, 0, 1, 0), statistics=numbers)
    decide(engine, [check], 0.0, 1.0, found_inf=torch.ones(()))
    assert not numbers.any()
    decide(engine, [check], 0.0, 1.0)
    assert numbers.tolist() == [1.0, 0.0, 1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_without_parts_does_not_overflow(engine):
    request = Request(causes=(Cause(Check(3.0, 0.0, 1.0)),), loss=torch.ones(1))
    partials = Partials(torch.zeros(0, device=CPU), None)
    decision = ENGINES[engine]().control(Work(CPU, []), request, partials)
    assert decision.cause is not None
    assert (decision.found_inf.item(), decision.cause.item()) == (0.0, 0.0)
