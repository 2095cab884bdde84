"""Rows for detect, control and update, built in guarded memory from drawn numbers, and backends."""

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor

from ampopt_kernels import rules
from ampopt_kernels.cpu.compiled import Compiled
from ampopt_kernels.eager import Eager
from ampopt_kernels.language import HAS_TRITON
from ampopt_kernels.native.build import cpp_compiler
from ampopt_kernels.rule import Rule
from ampopt_kernels.step import Backend
from ampopt_kernels.step_tensors import ParamRow, Work

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
"""Elements per block and per program in these tests, set by ``conftest``; small ones are fast."""


def _triton() -> Backend:
    if not HAS_TRITON:
        pytest.skip("Triton cannot be imported here")
    from ampopt_kernels.triton.backend import Triton

    return Triton()


def _compiled() -> Backend:
    if cpp_compiler() is None:
        pytest.skip("there is no C++ compiler here")
    return Compiled()


ENGINES: dict[str, Callable[[], Backend]] = {
    "eager": Eager,
    "eager on the host": functools.partial(Eager, host_sees=True),
    "compiled": _compiled,
    "triton": _triton,
}
each_engine = pytest.mark.parametrize("engine", ENGINES)
"""Parametrizes a test over the keys of ``ENGINES``."""


# --- memory --------------------------------------------------------------------------------------


@dataclass
class Placed:
    """A tensor surrounded by NaN in memory.

    A read past the tensor gives NaN, and a write past it shows in :meth:`around`.
    """

    tensor: Tensor
    memory: Tensor

    @staticmethod
    def of(values: Tensor, shift: int = 0) -> "Placed":
        """Copy ``values`` to ``shift`` elements past an address aligned to 16 bytes."""
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
    """A hash of the bits; short, so that a failure about a large tensor can be read."""
    return hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


# --- plans, which Hypothesis draws ---------------------------------------------------------------


@dataclass(frozen=True)
class RowPlan:
    """One parameter to build.

    Attributes:
        shape: shape of all of its tensors.
        dtype: dtype of gradient and parameter.
        shift: number of elements past an aligned address.
        grad: elements of the gradient, repeated.
        spots: (index, value) pairs that replace single elements of the gradient.
        param: elements of the parameter, repeated.
        state: elements of each state of the rule, repeated.
        step: the step count.
        flags: flags of the rule.
        variant: index of the row's hyperparameters.
        master: whether parameter and states are float32, with a copy of the parameter in ``dtype``.
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
    variant: int = 0
    master: bool = False

    @property
    def stored(self) -> torch.dtype:
        """The dtype of parameter and states."""
        return torch.float32 if self.master else self.dtype

    def tensor(self, pattern: Sequence[float], spots: Sequence[tuple[int, float]] = ()) -> Tensor:
        """A float64 tensor in this row's shape with the elements of ``pattern``, repeated."""
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
        """Build the rows in fresh memory, with the same bits each time."""
        return Built(self)


@dataclass
class Built:
    """The work of a plan, and the memory of its tensors."""

    plan: WorkPlan
    placed: list[Placed] = field(default_factory=list)
    work: Work = field(init=False)

    def __post_init__(self) -> None:
        rule = self.plan.rule
        pairs = [self._row(row, rule) for row in self.plan.rows]
        self.work = Work(CPU, [r for r, _ in pairs], [g for _, g in pairs], rule, self.plan.hyper)
        self._around = [placed.around() for placed in self.placed]

    def _row(self, plan: RowPlan, rule: Rule | None) -> tuple[ParamRow, Tensor]:
        def place(values: Tensor, dtype: torch.dtype) -> Tensor:
            self.placed.append(Placed.of(values.to(dtype), plan.shift))
            return self.placed[-1].tensor

        grad = place(plan.tensor(plan.grad, plan.spots), plan.dtype)
        if rule is None:
            return ParamRow(grad.dtype), grad
        count, param = torch.tensor(float(plan.step)), plan.tensor(plan.param)
        scalars = [part in rule.scalar_state_for(plan.flags) for part in rule.scalar_state]
        row = ParamRow(
            grad.dtype,
            param=place(param, plan.stored),
            state=tuple(place(plan.tensor(pattern), plan.stored) for pattern in plan.state),
            copy=place(param, plan.dtype) if plan.master else None,
            scalars=tuple(place(count, torch.float32) if exists else None for exists in scalars),
            flags=plan.flags,
            variant=plan.variant,
        )
        return row, grad

    @property
    def rows(self) -> list[ParamRow]:
        """The rows of the work."""
        return self.work.rows

    @property
    def grads(self) -> list[Tensor]:
        """The gradients of the rows."""
        return self.work.grads

    def fingerprints(self) -> list[str]:
        """The fingerprint of every tensor, in the order of placement."""
        return [fingerprint(placed.tensor) for placed in self.placed]

    def assert_guards(self) -> None:
        """Check that no element outside of the tensors has changed."""
        assert [placed.around() for placed in self.placed] == self._around


def numbers(least: float = -4.0, most: float = 4.0) -> st.SearchStrategy[tuple[float, ...]]:
    """Strategy of a few numbers that every dtype represents and whose arithmetic stays in range."""
    number = st.integers(round(least * 32), round(most * 32)).map(lambda n: n / 32)
    return st.lists(number, min_size=1, max_size=5).map(tuple)


def edge_numbers(dtype: torch.dtype) -> st.SearchStrategy[tuple[float, ...]]:
    """Strategy of a few finite numbers of ``dtype``: signed zeros, subnormals, near overflow."""
    info = torch.finfo(dtype)
    sizes = [0.0, info.smallest_normal, 1.0, info.max / 2, info.max]
    if dtype != torch.bfloat16:  # Triton's interpreter misreads bfloat16 subnormals
        sizes.append(info.smallest_normal * info.eps)
    edge = st.sampled_from([sign * size for size in sizes for sign in (1.0, -1.0)])
    return st.lists(edge, min_size=1, max_size=5).map(tuple)


def sizes() -> st.SearchStrategy[int]:
    """Strategy of numbers of elements: mostly few, sometimes near block and chunk sizes."""
    edges = [BLOCK - 1, BLOCK, BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + BLOCK + 3]
    return st.one_of(st.integers(0, 9), st.integers(0, 9), st.sampled_from(edges))


def spots(n: int, values: st.SearchStrategy[float]) -> st.SearchStrategy[tuple[int, float]]:
    """Strategy of an index, often at the end of a block or chunk, and a value."""
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
    """Strategy of gradients with edge values, and with ``bad`` also non-finite ones."""
    values = st.sampled_from(NOT_FINITE) if bad else None
    rows = draw(st.lists(_rows(True, values), max_size=max_rows))
    return WorkPlan(tuple(RowPlan(**row) for row in rows))


@st.composite
def works(draw: st.DrawFn, max_rows: int = 3) -> WorkPlan:
    """Strategy of rows of Adam or SGD in two groups, with any flags, fresh or mid-training."""
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
                variant=draw(st.integers(0, 1)),
            )
        )
    return WorkPlan(tuple(rows), rule, groups)
