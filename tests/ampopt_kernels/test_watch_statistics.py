"""The statistics of a watch on every backend, compared with a definition in plain Python."""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.kernel_rows import CPU, ENGINES
from support.strategies import fewer

from ampopt_kernels.gradient_reports import GradientReport, Owner
from ampopt_kernels.uploads import Uploads
from ampopt_kernels.watch_statistics import (
    CAUSES,
    COLUMNS,
    COUNTS,
    NOT_GIVEN,
    RING,
    ChunkRange,
    RecordedStep,
    zeros,
)

PLACES, LAST = 3, 4


@dataclass
class Step:
    """One step: place, flag and measures of each parameter with a gradient, and the outcome."""

    rows: list[tuple[int, bool, tuple[float, int, int, float]]]
    cause: int
    scale: float | None
    norm: float | None
    loss: float | None
    host_sees: bool
    looked: bool
    notes_step: bool

    def found(self):
        if not self.looked:
            return None, []
        flags = [flag for _, flag, _ in self.rows]
        flags = flags if self.host_sees else torch.tensor(flags, dtype=torch.float32)
        measures = torch.tensor([row[2] for row in self.rows], dtype=torch.float64).view(-1, 4)
        owners = [Owner("a parameter", 0)] * len(self.rows)
        parts = [ChunkRange(i, 1, row[0]) for i, row in enumerate(self.rows)]
        return GradientReport(flags, range(len(self.rows)), owners, measures), parts

    def attempt(self, number):
        def given(x):
            return None if x is None else torch.tensor(x)

        other = None if self.cause < 2 else torch.tensor(self.cause)
        return RecordedStep(
            number, torch.tensor(float(self.cause > 0)), other, *map(given, self.told)
        )

    @property
    def told(self):
        return self.scale, self.norm, self.loss


measures = st.tuples(
    st.floats(0.0, 2.0**60, width=32), *[st.integers(0, 2**40)] * 2, st.floats(0.0, 2.0**60)
)
rows = st.lists(st.tuples(st.booleans(), measures), max_size=PLACES)
steps = st.builds(
    lambda places, rows, *rest: Step(
        [(place, *row) for place, row in zip(places, rows, strict=False)], *rest
    ),
    st.permutations(range(PLACES)),
    rows,
    st.integers(0, len(CAUSES)),
    st.none() | st.sampled_from([1.0, 2.0**-20, 65536.0]),
    st.none() | st.floats(0.0, 2.0**60, width=32),
    st.none() | st.floats(-(2.0**60), 2.0**60, width=32),
    *[st.booleans()] * 3,
)


def defined(history):
    """The parameters, totals and ring after ``history``, by definition."""
    table = [[0.0] * COLUMNS for _ in range(PLACES)]
    totals, ring = [0.0] * (1 + len(CAUSES)), [[0.0] * RING for _ in range(LAST)]
    for number, step in enumerate(history, start=1):
        rows = step.rows if step.looked else []
        squares = 0.0 if rows else NOT_GIVEN
        for place, flag, (largest, used, flushed, square) in rows:
            row = table[place]
            row[0] = max(row[0], largest)
            if not step.cause:
                row[2] += used
                row[3] += flushed
            squares += square
            if flag:
                row[COUNTS + int(row[1]) % (COLUMNS - COUNTS)] = number
                row[1] += 1
        if any(flag for _, flag, _ in rows):
            squares = math.inf
        if step.notes_step:
            totals[0] = totals[0] + 1 if step.cause else 0.0
            if step.cause:
                totals[step.cause] += 1
            scale, norm, loss = (NOT_GIVEN if x is None else x for x in step.told)
            ring[(number - 1) % LAST] = [step.cause, scale, norm, squares, loss]
    return table, totals, ring


@pytest.mark.parametrize("engine", ENGINES)
@fewer(0.5)
@given(history=st.lists(steps, max_size=6))
def test_each_backend_notes_what_is_defined(engine, history):
    backend, statistics, uploads = ENGINES[engine](), zeros(PLACES, LAST, CPU), Uploads()
    for number, step in enumerate(history, start=1):
        report, parts = step.found()
        attempt, notes_step = step.attempt(number), step.notes_step
        backend.note(statistics, attempt, report, parts, uploads, notes_step=notes_step)
    table, totals, ring = defined(history)
    assert statistics.parameters.tolist() == table
    assert statistics.totals.tolist() == totals
    noted = statistics.ring.tolist()
    squares, expected = ([entry.pop(3) for entry in of] for of in (noted, ring))
    assert noted == ring
    if engine == "triton":  # which adds some at a time
        assert squares == pytest.approx(expected, rel=1e-15)
    else:
        assert squares == expected


@pytest.mark.parametrize("engine", ["triton"])
def test_a_parameter_in_several_parts_is_one(engine):
    backend, statistics = ENGINES[engine](), zeros(1, 1, CPU)
    parts = torch.tensor([[1.0, 4, 1, 2.0], [5.0, 3, 0, 25.0]], dtype=torch.float64)
    for number, flags in enumerate(([0.0, 0.0], [1.0, 1.0]), start=1):
        report = GradientReport(torch.tensor(flags), [0, 0], [Owner("weight", 0)], parts)
        backend.note(
            statistics,
            RecordedStep(number),
            report,
            [ChunkRange(0, 2, 0)],
            Uploads(),
            notes_step=True,
        )
    assert statistics.parameters[0, :6].tolist() == [5.0, 1.0, 14.0, 2.0, 0.0, 2.0]
    assert statistics.ring[0, 3] == math.inf
