"""The statistics of a watch, compared with a definition in plain Python."""

import math
from dataclasses import dataclass

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support.kernel_rows import CPU
from support.strategies import fewer

from ampopt_kernels.watch_statistics import (
    CAUSES,
    COLUMNS,
    COUNTS,
    NOT_GIVEN,
    RING,
    Findings,
    RecordedStep,
    Statistics,
)

PLACES, LAST = 3, 4


@dataclass
class Step:
    """One step: place, flag and measures of each parameter with a gradient, and the outcome."""

    rows: list[tuple[int, bool, tuple[float, float, int, int]]]
    cause: int
    scale: float | None
    norm: float | None
    loss: float | None
    surely_finite: bool
    looked: bool
    accumulates: bool
    is_over: bool

    def __post_init__(self):
        self.rows = [] if not self.looked else self.rows
        if self.surely_finite:
            self.rows = [(place, False, numbers) for place, _, numbers in self.rows]

    def found(self):
        """What was found, as of one device for each of the two halves of the rows."""
        halves = self.rows[:1], self.rows[1:]
        found = [self._of(rows) for rows in halves if rows]
        in_micro_batch = [one._replace(measures=None) for one in found if self.accumulates]
        return [*found, *in_micro_batch]

    def _of(self, rows):
        flags = torch.tensor([flag for _, flag, _ in rows], dtype=torch.float32)
        measures = torch.tensor([row[2] for row in rows], dtype=torch.float64).T
        places = torch.tensor([row[0] for row in rows], dtype=torch.int64)
        flags = None if self.surely_finite else flags
        return Findings(flags, measures, torch.arange(len(rows)), places)

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
    st.integers(0, 2**50).map(float),  # squares whose sums are exact in any order
    st.floats(0.0, 2.0**60, width=32),
    *[st.integers(0, 2**40)] * 2,
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
    *[st.booleans()] * 4,
)


def defined(history):
    """The parameters, totals and ring after ``history``, by definition."""
    table = [[-1.0] + [0.0] * (COLUMNS - 1) for _ in range(PLACES)]
    totals, ring = [0.0] * (1 + len(CAUSES)), [[NOT_GIVEN] * RING for _ in range(LAST)]
    for number, step in enumerate(history, start=1):
        squares = 0.0 if step.rows else NOT_GIVEN
        for place, flag, (square, largest, used, flushed) in step.rows:
            row = table[place]
            if largest or not step.cause:  # a sum of which all was dropped is 0, and skips
                row[0] = max(row[0], largest)
            if not step.cause:
                row[2] += used
                row[3] += flushed
            squares += square
            if flag:
                row[COUNTS + int(row[1]) % (COLUMNS - COUNTS)] = number
                row[1] += 1
        if any(flag for _, flag, _ in step.rows):
            squares = math.inf
        if step.is_over:
            totals[0] = totals[0] + 1 if step.cause else 0.0
            if step.cause:
                totals[step.cause] += 1
            scale, norm, loss = (NOT_GIVEN if x is None else x for x in step.told)
            ring[(number - 1) % LAST] = [step.cause, scale, norm, squares, loss]
    return table, totals, ring


ZEROS_SKIPPED = Step([(0, False, (0.0, 0.0, 0, 0))], 1, None, None, None, False, True, False, True)


@fewer(0.5)
@example(history=[ZEROS_SKIPPED])
@given(history=st.lists(steps, max_size=6))
def test_notes_what_is_defined(history):
    statistics = Statistics.empty(LAST, CPU)
    statistics.grow(PLACES)
    for number, step in enumerate(history, start=1):
        statistics.add(step.attempt(number), step.found(), is_over=step.is_over)
    table, totals, ring = defined(history)
    assert statistics.parameters.tolist() == table
    assert statistics.totals.tolist() == totals
    assert statistics.ring.tolist() == ring


def test_a_parameter_in_several_chunks_is_one():
    statistics = Statistics.empty(1, CPU)
    statistics.grow(3)
    numbers = [[2.0, 7.0, 25.0, 4.0], [1.0, 7.0, 5.0, 2.0], [4, 7, 3, 1], [1, 7, 0, 1]]
    measures = torch.tensor(numbers, dtype=torch.float64)
    chunks, places = torch.tensor([0, 2, 3]), torch.tensor([2, 2, 0])
    for number, flags in enumerate(([0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]), start=1):
        found = Findings(torch.tensor(flags), measures, chunks, places)
        statistics.add(RecordedStep(number), [found], is_over=True)
        assert statistics.ring[0, 3] == (31.0 if number == 1 else math.inf)
    assert statistics.parameters[2, :6].tolist() == [5.0, 1.0, 14.0, 2.0, 0.0, 2.0]
    assert statistics.parameters[0, :6].tolist() == [2.0, 0.0, 2.0, 2.0, 0.0, 0.0]
    assert statistics.parameters[1].tolist() == [-1.0] + [0.0] * (COLUMNS - 1)
