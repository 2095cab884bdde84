"""Rows for the three passes, built in guarded memory from drawn numbers, and the engines to run."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor

from ampopt_kernels import rules
from ampopt_kernels.cpu.backend import Cpu
from ampopt_kernels.eager import Eager
from ampopt_kernels.language import HAS_TRITON
from ampopt_kernels.rule import Rule
from ampopt_kernels.step import Backend, Row, Work

__all__ = [
    "BLOCK",
    "CHUNK",
    "CPU",
    "DTYPES",
    "ENGINES",
    "NOT_FINITE",
    "Placed",
    "RowPlan",
    "WorkPlan",
    "each_engine",
    "edge_numbers",
    "fingerprint",
    "gradient_works",
    "numbers",
    "sizes",
    "spots",
    "works",
]

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
NOT_FINITE = (float("inf"), float("-inf"), float("nan"))
BLOCK, CHUNK = 1 << 6, 1 << 8
"""Elements at a time and in a program, for these tests: ``conftest`` has engines take these."""


def _triton() -> Backend:
    if not HAS_TRITON:
        pytest.skip("Triton cannot be imported here")
    from ampopt_kernels.triton.backend import Triton

    return Triton()


ENGINES: dict[str, Callable[[], Backend]] = {
    "eager": Eager,
    "cpu": Cpu,
    "triton": _triton,
}
each_engine = pytest.mark.parametrize("engine", ENGINES)
"""Runs a test on each engine in turn; it takes a key of ``ENGINES``."""


# --- memory --------------------------------------------------------------------------------------


@dataclass
class Placed:
    """A tensor in the midst of memory that is not its own, all of it NaN.

    Whoever reads past the tensor finds a NaN, and whoever writes past it is found out.
    """

    tensor: Tensor
    memory: Tensor

    @staticmethod
    def of(values: Tensor, shift: int = 0) -> "Placed":
        """A copy of ``values``, ``shift`` elements past an address that allows wide accesses."""
        guard, n = 32, values.numel()
        memory = torch.full((guard + shift + n + guard,), float("nan"), dtype=values.dtype)
        tensor = memory[guard + shift : guard + shift + n].view(values.shape)
        tensor.copy_(values)
        assert memory.data_ptr() % 16 == 0
        return Placed(tensor, memory)

    def around(self) -> str:
        """A fingerprint of the bits around the tensor."""
        start = self.tensor.storage_offset()
        before, after = self.memory[:start], self.memory[start + self.tensor.numel() :]
        return fingerprint(torch.cat((before, after)))


def fingerprint(tensor: Tensor) -> str:
    """Equal for equal bits. Short, so that a failure about a large tensor can be read."""
    return hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


# --- plans, which Hypothesis draws ---------------------------------------------------------------


@dataclass(frozen=True)
class RowPlan:
    """One parameter to build.

    Attributes:
        shape: of all of its tensors.
        dtype: likewise.
        shift: elements past an aligned address.
        grad: numbers repeated along the gradient.
        spots: (index, value) of gradient elements that differ.
        param: numbers repeated along the parameter.
        state: the same for each state of its rule.
        step: the steps it has taken.
        flags: of the rule.
        group: its group.
        master: parameter and states are float32, and a copy in ``dtype`` follows the parameter.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    shift: int
    grad: tuple[float, ...]
    spots: tuple[tuple[int, float], ...] = ()
    param: tuple[float, ...] = (0.0,)
    state: tuple[tuple[float, ...], ...] = ()
    step: int = 0
    flags: tuple[bool, ...] = ()
    group: int = 0
    master: bool = False

    @property
    def stored(self) -> torch.dtype:
        """The dtype of parameter and states."""
        return torch.float32 if self.master else self.dtype

    def tensor(self, pattern: Sequence[float], spots: Sequence[tuple[int, float]] = ()) -> Tensor:
        """``pattern`` over and over in this row's shape, float64."""
        n = torch.Size(self.shape).numel()
        few = torch.tensor(pattern, dtype=torch.float64)
        values = few.repeat(n // len(few) + 1)[:n]
        for index, value in spots:
            values[index] = value
        return values.reshape(self.shape)


@dataclass(frozen=True)
class WorkPlan:
    """Rows of one rule, or gradients only, with the hyperparameters of each group."""

    rows: tuple[RowPlan, ...]
    rule: Rule | None = None
    hyper: tuple[tuple[float, ...], ...] = ()

    def build(self) -> "Built":
        """The same bits each time, in fresh memory."""
        return Built(self)


@dataclass
class Built:
    """A plan's work, and all the memory that it lives in."""

    plan: WorkPlan
    placed: list[Placed] = field(default_factory=list)
    work: Work = field(init=False)

    def __post_init__(self) -> None:
        rule = self.plan.rule
        made = [self._row(row, rule) for row in self.plan.rows]
        self.work = Work(CPU, [r for r, _ in made], [g for _, g in made], rule, self.plan.hyper)
        self._around = [placed.around() for placed in self.placed]

    def _row(self, plan: RowPlan, rule: Rule | None) -> tuple[Row, Tensor]:
        def place(values: Tensor, dtype: torch.dtype) -> Tensor:
            self.placed.append(Placed.of(values.to(dtype), plan.shift))
            return self.placed[-1].tensor

        grad = place(plan.tensor(plan.grad, plan.spots), plan.dtype)
        if rule is None:
            return Row(grad.dtype), grad
        count, param = torch.tensor(float(plan.step)), plan.tensor(plan.param)
        scalars = [part in rule.scalar_state_for(plan.flags) for part in rule.scalar_state]
        row = Row(
            grad.dtype,
            param=place(param, plan.stored),
            state=tuple(place(plan.tensor(pattern), plan.stored) for pattern in plan.state),
            copy=place(param, plan.dtype) if plan.master else None,
            scalars=tuple(place(count, torch.float32) if exists else None for exists in scalars),
            flags=plan.flags,
            group=plan.group,
        )
        return row, grad

    @property
    def rows(self) -> list[Row]:
        """The rows."""
        return self.work.rows

    @property
    def grads(self) -> list[Tensor]:
        """The gradient of each."""
        return self.work.grads

    def fingerprints(self) -> list[str]:
        """Of every tensor, in the order in which they were placed."""
        return [fingerprint(placed.tensor) for placed in self.placed]

    def assert_guards(self) -> None:
        """No element outside the tensors has changed."""
        assert [placed.around() for placed in self.placed] == self._around


def numbers(least: float = -4.0, most: float = 4.0) -> st.SearchStrategy[tuple[float, ...]]:
    """A few numbers that every dtype holds and whose arithmetic stays well in range."""
    number = st.integers(round(least * 32), round(most * 32)).map(lambda n: n / 32)
    return st.lists(number, min_size=1, max_size=5).map(tuple)


def edge_numbers(dtype: torch.dtype) -> st.SearchStrategy[tuple[float, ...]]:
    """A few finite numbers of ``dtype``: zeros of both signs, subnormals, next to overflow."""
    info = torch.finfo(dtype)
    sizes = [0.0, info.smallest_normal, 1.0, info.max / 2, info.max]
    if dtype != torch.bfloat16:  # whose subnormals Triton's interpreter misreads
        sizes.append(info.smallest_normal * info.eps)
    edge = st.sampled_from([sign * size for size in sizes for sign in (1.0, -1.0)])
    return st.lists(edge, min_size=1, max_size=5).map(tuple)


def sizes() -> st.SearchStrategy[int]:
    """Numbers of elements: mostly few, sometimes about the edges of blocks and chunks."""
    edges = [BLOCK - 1, BLOCK, BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + BLOCK + 3]
    return st.one_of(st.integers(0, 9), st.integers(0, 9), st.sampled_from(edges))


def spots(n: int, values: st.SearchStrategy[float]) -> st.SearchStrategy[tuple[int, float]]:
    """A place in a tensor of ``n`` elements, the ends of blocks and chunks often, and a value."""
    edges = {0, n - 1, BLOCK - 1, BLOCK, CHUNK - 1, CHUNK} & set(range(n))
    place = st.sampled_from(sorted(edges)) | st.integers(0, n - 1)
    return st.tuples(place, values)


@st.composite
def _rows(draw: st.DrawFn, edges: bool, bad: st.SearchStrategy[float] | None) -> dict[str, Any]:
    n = draw(sizes())
    shape = draw(st.sampled_from([(n,), (1, n), (n, 1)] + [()] * (n == 1)))
    dtype = draw(st.sampled_from(DTYPES))
    grad = draw(edge_numbers(dtype) | numbers() if edges else numbers())
    spoiled = () if bad is None or n == 0 else draw(st.lists(spots(n, bad), max_size=1))
    return {
        "shape": shape,
        "dtype": dtype,
        "shift": draw(st.integers(0, 3)),
        "grad": grad,
        "spots": tuple(spoiled),
    }


@st.composite
def gradient_works(draw: st.DrawFn, bad: bool = True, max_rows: int = 3) -> WorkPlan:
    """Gradients to be read: edge values, and with ``bad`` non-finite ones among them."""
    values = st.sampled_from(NOT_FINITE) if bad else None
    rows = draw(st.lists(_rows(True, values), max_size=max_rows))
    return WorkPlan(tuple(RowPlan(**row) for row in rows))


@st.composite
def works(draw: st.DrawFn, max_rows: int = 3) -> WorkPlan:
    """Rows of Adam or SGD in two groups, with flags of their own, mid-training or at the start."""
    name = draw(st.sampled_from(["adam", "sgd"]))
    rule: Rule = getattr(rules, name)
    lr, decay = st.sampled_from([0.5, 0.125, 0.0]), st.sampled_from([0.0, 0.25])
    if name == "adam":
        betas = st.sampled_from([(0.9, 0.999), (0.5, 0.75), (0.0, 0.5)])
        hyper = st.builds(lambda *h: (h[0], *h[1], *h[2:]), lr, betas, st.just(0.125), decay)
    else:
        momentum, dampening = st.sampled_from([0.5, 0.9]), st.sampled_from([0.0, 0.5])
        hyper = st.tuples(lr, momentum, dampening, decay)
    groups = draw(st.tuples(hyper, hyper))
    rows = []
    for _ in range(draw(st.integers(1, max_rows))):
        flags = draw(st.tuples(*[st.booleans()] * len(rule.flags)))
        positive = numbers(least=0.25)
        state = [
            draw(positive if part.name.endswith("_sq") else numbers())
            for part in rule.state_for(flags)
        ]
        common = draw(_rows(False, None))
        low = common["dtype"] in (torch.float16, torch.bfloat16)
        rows.append(
            RowPlan(
                **common,
                master=low and draw(st.booleans()),
                param=draw(numbers()),
                state=tuple(state),
                step=draw(st.sampled_from([0, 1, 1000])),
                flags=flags,
                group=draw(st.integers(0, 1)),
            )
        )
    return WorkPlan(tuple(rows), rule, groups)
