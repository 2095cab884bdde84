"""What a rule is applied to on the CPU at a time: a tensor, or a bundle of small ones.

A network's small tensors cost a CPU more in calls than in arithmetic. Those whose states lie end
to end (``ampopt._step.rule_state`` lays them so) are gathered into one scratch that fits the
cache, the rule runs once over all of them, and the parameters are scattered back.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampopt_kernels.cpu.gather_scatter import Copies, TorchCopies
from ampopt_kernels.marginals import Marginals
from ampopt_kernels.places import Places
from ampopt_kernels.tensors import flat
from ampopt_kernels.work import Row, Work

__all__ = ["BUNDLE", "SMALL", "BundleSlice", "Bundle", "adjoins", "spanning"]

SMALL = 1 << 14
"""Elements up to which a tensor is bundled: beyond it, a call costs less than a copy."""
BUNDLE = 1 << 16
"""Elements of a bundle: its float32 gradient, parameter and two states fit a core's cache."""


class BundleSlice(NamedTuple):
    """Elements of a piece that a rule is applied to with the same numbers.

    Attributes:
        start: the first.
        end: that behind the last.
        h: the reciprocal of the scale, the clip coefficient, and what the rule takes as ``h``.
        places: of these elements, for random numbers and stochastic rounding; else ``None``.
        key: to round the parameter stochastically by; ``None`` to round it to the nearest.
    """

    start: int
    end: int
    h: tuple[float, ...]
    places: Places | None = None
    key: int | None = None

    def of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """These elements of the tensors of the piece."""
        return [t[self.start : self.end] for t in tensors]


@dataclass
class Bundle:
    """Rows that are updated together: a bundle of small ones, or one alone.

    Attributes:
        rows: all of one kind and group.
        places: where each row is in its block.
        among: where each row is among all rows of its work.
        dtype: of the arithmetic.
        param: what the rule works on, flat: the parameter, or scratch for those of a bundle.
        rest: what the rule works on besides: the states of all rows, end to end, flat; and the
            low-precision copy, if there is one and it is alone.
        grad: scratch for all gradients; ``None`` if alone.
        copies: between the scratch and the tensors of the rows; ``None`` if alone.
        rounded: from the scratch to low-precision copies, of a bundle that has them.
        marginals: of each row, with factors that lie end to end; of a rule without any, empty.
        gathered_at: the stamp of the work whose gradients ``grad`` holds.
        functions: ``"update"``, ``"reduce"`` and ``"averages"`` of the rule for this bundle, as
            torch operations or compiled. Each takes slices and the tensors of the bundle.
    """

    rows: list[Row]
    places: list[int]
    among: range | list[int]
    dtype: torch.dtype
    param: Tensor
    rest: list[Tensor]
    grad: Tensor | None = None
    copies: Copies | None = None
    rounded: Copies | None = None
    marginals: list[Marginals] = field(default_factory=list)
    gathered_at: int | None = None
    functions: dict[str, Callable[..., Any]] = field(default_factory=dict)

    @staticmethod
    def all_of(rows: list[Row], start: int) -> "list[Bundle]":
        """All rows of a block that begins at ``start``, small ones bundled."""
        return [Bundle.of([rows[i] for i in places], places, start) for places in _runs(rows)]

    @staticmethod
    def of(rows: list[Row], places: list[int], start: int) -> "Bundle":
        """Rows whose states adjoin, by their places in a block that begins at ``start``."""
        among = [start + place for place in places]
        whole = range(among[0], among[-1] + 1)
        where = (places, whole if len(whole) == len(among) else among, rows[0].compute_dtype)
        rest = [spanning(column) for column in zip(*(row.state for row in rows), strict=True)]
        rounded = [row.copy for row in rows if row.copy is not None]
        params, marginals = _params(rows), _end_to_end([r.marginals for r in rows if r.marginals])
        if len(rows) == 1:
            alone = flat(params[0]), rest + [flat(c) for c in rounded]
            return Bundle(rows, *where, *alone, marginals=marginals)
        size = sum(p.numel() for p in params)
        param = params[0].new_empty(size)
        grad = param.new_empty(size, dtype=rows[0].grad_dtype)
        return Bundle(
            rows,
            *where,
            param,
            rest,
            grad,
            TorchCopies(params, param),
            TorchCopies(rounded, param) if rounded else None,
            marginals,
        )

    @property
    def flags(self) -> tuple[bool, ...]:
        """Of the rule, for every row."""
        return self.rows[0].flags

    @property
    def states(self) -> list[Tensor]:
        """Those of all rows: what there is in ``rest`` besides copies."""
        return self.rest[: len(self.rows[0].state)]

    @property
    def params(self) -> list[Tensor]:
        """The parameter of each row."""
        return _params(self.rows)

    def gather(self, work: Work) -> Tensor:
        """The gradients, end to end, flat; once for each step."""
        if self.grad is None or self.copies is None:
            return flat(work.grads[self.among[0]])
        if self.gathered_at != work.grads_version:
            if isinstance(self.among, range):
                grads = work.grads[self.among.start : self.among.stop]
            else:
                grads = [work.grads[i] for i in self.among]
            self.copies.gather(grads, self.grad)
            self.gathered_at = work.grads_version
        return self.grad

    def alike(self, h: tuple[Any, ...]) -> Iterator[BundleSlice]:
        """Parts whose rows have the same ``h``.

        There are several only where gradients come and go, or the rule reduces; of a rule with
        marginals, each row is one. A part is applied as if it were alone, so that a parameter's
        result does not depend on what it is bundled with.

        Args:
            h: of the block; numbers, and lists with one for each row.
        """
        rows = list(self.each(h))
        start = 0
        for row, (_, end, own, *_) in enumerate(rows):
            if self.marginals or row + 1 == len(rows) or rows[row + 1].h != own:
                yield BundleSlice(start, end, own)
                start = end

    def each(self, h: tuple[Any, ...]) -> Iterator[BundleSlice]:
        """Each row as a part; ``h`` as for :meth:`alike`."""
        if self.copies is None:  # in less time
            place = self.places[0]
            own = tuple([x[place] if isinstance(x, list) else x for x in h])
            yield BundleSlice(0, self.param.numel(), own)
            return
        columns = ([x[i] for i in self.places] if isinstance(x, list) else repeat(x) for x in h)
        sizes = map(Tensor.numel, self.params)
        start = 0
        for size, *own in zip(sizes, *columns, strict=False):  # of which some have no end
            yield BundleSlice(start, start + size, tuple(own))
            start += size


def _params(rows: Sequence[Row]) -> list[Tensor]:
    return [row.param for row in rows if row.param is not None]


def _runs(rows: Sequence[Row]) -> list[list[int]]:
    """The places of the rows in runs that can be a piece each; small ones pass over large ones."""
    runs: list[list[int]] = []
    bundle: list[int] | None = None
    total = 0
    for place, (row, param) in enumerate(zip(rows, _params(rows), strict=True)):
        size = param.numel()
        if not 0 < size <= SMALL:
            runs.append([place])
        elif bundle is not None and total + size <= BUNDLE and _joins(rows[bundle[-1]], row):
            bundle.append(place)
            total += size
        else:
            bundle, total = [place], size
            runs.append(bundle)
    return runs


def _joins(last: Row, row: Row) -> bool:
    return (
        last.kind == row.kind
        and _stackable(last.marginals, row.marginals)
        and last.in_norm == row.in_norm
        and all(t.is_contiguous() for r in (last, row) for t in r.written)
        and all(adjoins(a, b) for a, b in zip(last.state, row.state, strict=True))
    )


def _stackable(last: Marginals | None, own: Marginals | None) -> bool:
    """Whether their parameters, end to end, are a stack of matrices."""
    if last is None or own is None:
        return last is own
    return last.shape == own.shape and last.spread is own.spread is None


def _end_to_end(several: list[Marginals]) -> list[Marginals]:
    """The same, with room for their factors end to end."""
    if len(several) < 2:
        return several
    columns = zip(*(own.factors for own in several), strict=True)
    rooms = zip(*(torch.stack(column).unbind() for column in columns), strict=True)
    return [replace(own, factors=room) for own, room in zip(several, rooms, strict=True)]


def adjoins(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether ``b`` begins where ``a`` ends."""
    if a is None or b is None:
        return a is b
    return (
        a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        and a.storage_offset() + a.numel() == b.storage_offset()
    )


def spanning(tensors: Sequence[Tensor]) -> Tensor:
    """One flat view over tensors that adjoin."""
    if len(tensors) == 1:
        return flat(tensors[0])
    return tensors[0].as_strided((sum(t.numel() for t in tensors),), (1,))
