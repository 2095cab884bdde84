"""The tensors of one step: :class:`Row`, one parameter's, and :class:`Work`, one device's rows."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ampopt_kernels.found import NOBODY, Owner
from ampopt_kernels.marginals import Marginals
from ampopt_kernels.places import Places
from ampopt_kernels.rule import Rule
from ampopt_kernels.tensors import arithmetic
from ampopt_kernels.uploads import Uploads

__all__ = ["Row", "Work"]


@dataclass(slots=True)
class Row:
    """One parameter's tensors, all real, dense and laid out alike, but for the gradient.

    That is another one at every step, laid out alike too, and among :attr:`Work.grads`. ``state``
    follows ``rule.state_for(flags)``; ``scalars`` follows ``rule.scalar_state``, with
    ``None`` where the flags leave one out. A row that is only to be read has no ``param``. Where
    ``param`` is a float32 master, ``copy`` is the low-precision parameter that gets it rounded.
    Where several ranks hold a parameter alike, it is ``in_norm`` towards the norm on one of them.
    A bfloat16 parameter that is rounded stochastically has ``keys``, of which each step takes one,
    0-d int64; see ``stochastic``. The chances of its elements, and random numbers of a rule, follow
    from their ``places`` in the whole parameter; where there are neither, ``places`` say nothing.
    Beside states of rows and columns, its ``marginals``, all tensors are contiguous.
    """

    grad_dtype: torch.dtype
    param: Tensor | None = None
    state: tuple[Tensor, ...] = ()
    copy: Tensor | None = None
    scalars: tuple[Tensor | None, ...] = ()
    flags: tuple[bool, ...] = ()
    group: int = 0
    in_norm: bool = True
    owner: Owner = NOBODY
    keys: Tensor | None = None
    places: Places = Places()
    marginals: Marginals | None = None

    @property
    def written(self) -> tuple[Tensor, ...]:
        """Parameter, states and copy: what ``update`` writes, in its order."""
        return tuple(t for t in (self.param, *self.state, self.copy) if t is not None)

    def row_column_factors(self, start: int, end: int) -> tuple[Tensor, ...]:
        """What a rule reads of rows and columns for the elements from ``start`` to ``end``."""
        return () if self.marginals is None else self.marginals.at(start, end)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Of the gradient and of what is written."""
        return (self.grad_dtype, *(t.dtype for t in self.written))

    @property
    def kind(self) -> tuple[Any, ...]:
        """What one launch must have in common: all that is compiled for a row."""
        jumps = len(self.places.jumps)
        return self.dtypes, self.flags, self.copy is not None, self.keys is not None, jumps

    @property
    def compute_dtype(self) -> torch.dtype:
        """The arithmetic dtype: float64 for float64 gradients or parameters, else float32."""
        given = (self.grad_dtype,) if self.param is None else (self.grad_dtype, self.param.dtype)
        return arithmetic(*given)


@dataclass
class Work:
    """The rows of one device.

    Attributes:
        rows: in any order; a row may have no elements.
        grads: of the rows in their order, in this step; none between steps.
        hyper: the hyperparameters of each group, as ``rule.hyper_values`` gives them.
        rule: ``None`` where gradients are only read.
        uploads: what the device already holds of the tables, kept from step to step.
        table: the backend's own form of the rows, once it has made one. It outlasts the
            gradients of one step.
        grads_version: changes whenever there are other gradients.
    """

    device: torch.device
    rows: list[Row]
    grads: list[Tensor] = field(default_factory=list)
    rule: Rule | None = None
    hyper: Sequence[Sequence[float | Tensor]] = ()
    uploads: Uploads = field(default_factory=Uploads)
    table: Any = None
    grads_version: int = field(default=0, init=False)

    @functools.cached_property
    def owners(self) -> list[Owner]:
        """Whose each row is."""
        return [row.owner for row in self.rows]

    @functools.cached_property
    def keys(self) -> list[Tensor]:
        """Of the rows that are rounded stochastically."""
        return [row.keys for row in self.rows if row.keys is not None]

    @functools.cached_property
    def compute_dtypes(self) -> list[torch.dtype]:
        """The arithmetic dtype of each row."""
        return [row.compute_dtype for row in self.rows]

    def take(self, grads: list[Tensor], hyper: Sequence[Sequence[float | Tensor]]) -> None:
        """Work on these from now on, each gradient laid out as the one in its place before."""
        self.grads, self.hyper = grads, hyper
        self.grads_version += 1

    @property
    def row_column_factors(self) -> Iterator[Tensor]:
        """What kernels read of rows and columns, made for these rows alone."""
        return (f for row in self.rows if row.marginals is not None for f in row.marginals.factors)

    @functools.cached_property
    def scalar_dtypes(self) -> tuple[torch.dtype, ...]:
        """What each of the scalar states is kept in, in every row that has it."""
        n = 0 if self.rule is None else len(self.rule.scalar_state)
        columns = ((s for row in self.rows for s in row.scalars[i : i + 1]) for i in range(n))
        return tuple(
            next((s.dtype for s in column if s is not None), torch.float32) for column in columns
        )

    @property
    def float64(self) -> bool:
        """Whether all of the arithmetic is float64. None is not."""
        return bool(self.rows) and all(row.compute_dtype == torch.float64 for row in self.rows)
