"""Skip checks on every backend, compared with a definition in plain Python."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support.kernel_rows import CPU, ENGINES, each_engine

from ampopt.testing.bits import bits
from ampopt_kernels.skip_checks import CheckSettings, SkipChecks
from ampopt_kernels.step import Partials

INF, NAN = math.inf, math.nan

VALUES = st.sampled_from([0.0, 1.0, 1.5, 2.0, 3.0, 1e200, INF, NAN])
SETTINGS = st.builds(
    CheckSettings,
    st.sampled_from([2.0, 3.0]),
    st.sampled_from([-1.0, 1.0, 2.0]),
    st.sampled_from([0.5, 2.0]),
    st.sampled_from([2.0, 3.0, INF]),
    st.sampled_from([0.0, 1.0]),
)
STATISTICS = st.sampled_from([(0.0, 0.0, 0.0), (1.0, 1.5, 0.0), (2.0, 1.5, 0.5), (3.0, 1.0, 0.0)])
CHECKS = st.lists(st.tuples(SETTINGS, VALUES, STATISTICS), min_size=1, max_size=4)


def expected(checks, norm, overflow, reads_statistics):
    """The cause of a skip by definition, and the statistics after it."""
    cause, after = 0.0, []
    for settings, other, (count, mean, squares) in checks:
        value = norm if settings.of_norm else other
        limit = mean + settings.deviations * math.sqrt(squares / max(count - 1, 1.0))
        too_large = settings.limit > 0 and not value <= settings.limit
        if reads_statistics and count >= settings.warmup:
            too_large = too_large or not value <= limit
        if too_large and not (cause or overflow):
            cause = settings.cause
    for settings, other, (count, mean, squares) in checks:
        value = norm if settings.of_norm else other
        if overflow or cause or not math.isfinite(value):
            after.append((count, mean, squares))
        else:
            delta = value - mean
            new_mean = mean + delta / (count + 1)
            after.append((count + 1, new_mean, squares + delta * (value - new_mean)))
    return cause, after


@each_engine
@given(
    checks=CHECKS,
    roots=st.lists(VALUES, max_size=3) | st.just([2.0**-5] * 1025),
    flags=st.sampled_from(["none", "one", "external", "neither"]),
    reads_statistics=st.booleans(),
)
@example([(CheckSettings(2.0, 2.0, 0.0, INF, 1.0), 0.0, (0.0, 0.0, 0.0))], [2.0], "none", False)
@example([(CheckSettings(3.0, -1.0, 2.0, 2.0, 0.0), NAN, (2.0, 1.5, 0.5))], [], "none", True)
@example([(CheckSettings(3.0, -1.0, 2.0, 3.0, 0.0), INF, (1.0, 1.5, 0.0))], [], "none", True)
def test_finds_the_first_cause_and_updates_the_statistics(
    engine, checks, roots, flags, reads_statistics
):
    squares = torch.tensor([root * root for root in roots] or [0.0], dtype=torch.float64)
    of_parts = torch.zeros(len(squares))
    of_parts[-1] = flags == "one"
    external = None if flags == "none" else torch.full((1,), float(flags == "external"))
    norms = [bool(settings.of_norm) for settings, *_ in checks]
    statistics = torch.tensor([known for *_, known in checks], dtype=torch.float64)
    given = SkipChecks(
        torch.tensor([settings for settings, *_ in checks], dtype=torch.float64),
        None if all(norms) else torch.tensor([v for _, v, _ in checks], dtype=torch.float64),
        statistics if reads_statistics else None,
    )
    before = bits(statistics)
    found = ENGINES[engine]().find_cause(
        Partials(of_parts, squares if any(norms) else None), external, given
    )
    overflow = flags in ("one", "external")
    norm = math.sqrt(squares.sum().item())
    cause, after = expected(checks, norm, overflow, reads_statistics)
    assert (found.cause.item(), found.cause.shape) == (cause, ())
    assert (found.flag.tolist(), found.flag.dtype) == ([overflow or cause > 0], torch.float32)
    if reads_statistics:
        assert bits(statistics) == bits(torch.tensor(after, dtype=torch.float64))
    else:
        assert bits(statistics) == before
    if any(norms):
        assert bits(found.squares) == bits(squares.sum(0, keepdim=True))
    else:
        assert found.squares is None


@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_without_parts_does_not_overflow(engine):
    settings = CheckSettings(3.0, 1.0, 0.0, INF, 0.0)
    checks = SkipChecks(
        torch.tensor([settings], dtype=torch.float64), torch.ones(1, dtype=torch.float64), None
    )
    found = ENGINES[engine]().find_cause(Partials(torch.zeros(0, device=CPU), None), None, checks)
    assert (found.flag.tolist(), found.cause.item()) == ([0.0], 0.0)
