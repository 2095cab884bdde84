"""The eager backend on the CPU: small tensors together, and no more work than the host can see.

A network's small tensors cost a CPU more in calls than in arithmetic. Those whose states lie end
to end (``ampopt.arena`` lays them so) are gathered into one scratch that fits the cache, the rule
runs once over all of them, and the parameters are scattered back.

The host may read a CPU tensor at no cost. So a skipped step returns at once, and the ``scalars``
of a rule run on Python numbers where a bundle's step counts agree, which they do unless gradients
come and go.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from ampopt_kernels.eager import CHUNK, Eager
from ampopt_kernels.layout import flat
from ampopt_kernels.precision import arithmetic
from ampopt_kernels.rule import Rule
from ampopt_kernels.work import Decision, Partials, Request, Row, Work

__all__ = ["BUNDLE", "SMALL", "Cpu"]

SMALL = 1 << 14
"""Elements up to which a tensor is bundled: beyond it, a call costs less than a copy."""
BUNDLE = 1 << 16
"""Elements of a bundle: its float32 gradient, parameter and two states fit a core's cache."""


class Cpu(Eager):
    """Torch operations on CPU tensors."""

    name = "eager"
    host_sees = True

    def detect(self, work: Work, request: Request) -> Partials:
        """See :meth:`Backend.detect`. A part is a bundle, or a row that is in none."""
        if request.write or work.rule is None:
            return super().detect(work, request)
        gathered = [Row(piece.gather()) for piece in _pieces(work)]
        return super().detect(Work(work.device, gathered), request)

    def update(self, work: Work, decision: Decision) -> None:
        """See :meth:`Backend.update`."""
        skip, inverse, clip = decision.factors.tolist()
        rule = work.rule
        assert rule is not None
        known: dict[Any, Any] = {}
        for piece in _pieces(work):
            grad = piece.gather()
            piece.gathered = None
            if skip > 0:
                continue
            row = piece.rows[0]
            h = piece.advance(rule, work.hyper[row.group], known)
            if not piece.alone:
                torch.cat(piece.flat_params, out=piece.param)
            tensors = (grad, piece.param, *piece.state)
            if piece.alone and row.copy is not None:
                tensors = (*tensors, flat(row.copy))
            self._apply(rule, row.flags, tensors, (inverse, clip, *h))
            if not piece.alone:
                torch._foreach_copy_(piece.params, piece.parts)
                if row.copy is not None:
                    torch._foreach_copy_([r.copy for r in piece.rows], piece.parts)  # type: ignore[misc]

    def _apply(
        self, rule: Rule, flags: tuple[bool, ...], tensors: Sequence[Tensor], h: tuple[Any, ...]
    ) -> None:
        """Apply the rule to flat gradient, parameter and states, in place.

        One tensor more than the rule has states is a copy of the parameter, which is written.
        ``h`` begins with the reciprocal of the scale and the clip coefficient; its entries are
        numbers, or tensors with an entry for each element.
        """
        dtype = arithmetic(*(t.dtype for t in tensors[:2]))
        n = tensors[0].numel()
        for start in range(0, n, CHUNK):
            grad, *stored = tensors if n <= CHUNK else [t[start : start + CHUNK] for t in tensors]
            inverse, clip, *rest = (x.to(dtype) if isinstance(x, Tensor) else x for x in h)
            g = grad.to(dtype)
            if not (inverse == 1 and clip == 1):
                g = g * inverse * clip
            new = updated(rule, flags, g, [t.to(dtype) for t in stored], tuple(rest))
            for old, value in zip(stored, new, strict=True):
                old.copy_(value)


def updated(
    rule: Rule, flags: tuple[bool, ...], grad: Tensor, stored: Sequence[Tensor], h: tuple[Any, ...]
) -> tuple[Tensor, ...]:
    """What the rule makes of parameter, states and, if there is one more tensor, copy."""
    n = len(rule.state_for(flags))
    param, state = rule.torch_update(stored[0], grad, tuple(stored[1 : 1 + n]), h, flags)
    copies = len(stored) - 1 - n
    return (param, *state, *[param] * copies)


@dataclass
class _Piece:
    """Rows that are updated together: a bundle of small ones, or one alone.

    Attributes:
        rows: all of one kind and group.
        params: their parameters.
        flat_params: the same, as flat views.
        param: what the rule works on: scratch for all parameters, or the parameter if alone.
        parts: ``param``, as views of the shape of each parameter.
        state: the states of all rows, end to end, flat.
        scalars: the scalar states, one for each row; ``None`` where the flags leave one out.
        gathered: the gradients, from the detect pass to the update of the same step.
    """

    rows: list[Row]
    params: list[Tensor]
    flat_params: list[Tensor]
    param: Tensor
    parts: list[Tensor]
    state: list[Tensor]
    scalars: list[Tensor | None]
    gathered: Tensor | None = None

    @staticmethod
    def of(rows: list[Row]) -> "_Piece":
        params = [row.param for row in rows if row.param is not None]
        flat_params = [flat(p) for p in params]
        param, parts = flat_params[0], [params[0]]
        if len(rows) > 1:
            param = param.new_empty(sum(p.numel() for p in params))
            sizes = [p.numel() for p in params]
            parts = [x.view(p.shape) for x, p in zip(param.split(sizes), params, strict=True)]
        states = zip(*(row.state for row in rows), strict=True)
        scalars = zip(*(row.scalars for row in rows), strict=True)
        return _Piece(
            rows,
            params,
            flat_params,
            param,
            parts,
            state=[_spanning(column) for column in states],
            scalars=[None if column[0] is None else _spanning(column) for column in scalars],
        )

    @property
    def alone(self) -> bool:
        return len(self.rows) == 1

    def gather(self) -> Tensor:
        """The gradients, end to end, flat."""
        if self.gathered is None:
            grads = [row.grad for row in self.rows]
            self.gathered = flat(grads[0]) if self.alone else _flatten_dense_tensors(grads)
        return self.gathered

    def advance(self, rule: Rule, hyper: Sequence[Any], known: dict[Any, Any]) -> tuple[Any, ...]:
        """Advance the scalars; return ``h``, as numbers or with an entry for each element.

        ``known`` holds the results of this step: bundles of one group share them.
        """
        first = [0.0 if s is None else s[0].item() for s in self.scalars]
        even = all(s is None or self.alone or bool((s == s[0]).all()) for s in self.scalars)
        if even:
            key = (self.rows[0].group, *first)
            if key not in known:
                numbers = tuple(x.item() if isinstance(x, Tensor) else float(x) for x in hyper)
                known[key] = rule.torch_scalars(tuple(first), numbers)
            new_s, h = known[key]
            for stored, value in zip(self.scalars, new_s, strict=True):
                if stored is not None:
                    stored.fill_(value)
            return h
        sizes = torch.tensor([row.grad.numel() for row in self.rows])
        s = tuple(
            torch.zeros(len(sizes), dtype=torch.float64) if s is None else s.double()
            for s in self.scalars
        )
        new_s, h = rule.torch_scalars(s, tuple(hyper))
        for stored, value in zip(self.scalars, new_s, strict=True):
            if stored is not None:
                stored.copy_(value)
        return tuple(
            x.repeat_interleave(sizes) if isinstance(x, Tensor) and x.ndim else float(x) for x in h
        )


@dataclass
class _Pieces:
    pieces: list[_Piece]


def _pieces(work: Work) -> list[_Piece]:
    if not isinstance(work.table, _Pieces):
        work.table = _Pieces([_Piece.of(run) for run in _runs(work.rows)])
    return work.table.pieces


def _runs(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows in runs that can be a bundle each, in their order."""
    runs: list[list[Row]] = []
    total = 0
    for row in rows:
        size = row.grad.numel()
        if runs and total + size <= BUNDLE and _joins(runs[-1][-1], row):
            runs[-1].append(row)
            total += size
        else:
            runs.append([row])
            total = size
    return runs


def _joins(last: Row, row: Row) -> bool:
    return (
        last.group == row.group
        and last.kind == row.kind
        and all(0 < r.grad.numel() <= SMALL for r in (last, row))
        and all(t.is_contiguous() for r in (last, row) for t in r.tensors)
        and all(_adjoins(a, b) for a, b in zip(last.state, row.state, strict=True))
        and all(_adjoins(a, b) for a, b in zip(last.scalars, row.scalars, strict=True))
    )


def _adjoins(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether ``b`` begins where ``a`` ends."""
    if a is None or b is None:
        return a is b
    return (
        a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        and a.storage_offset() + a.numel() == b.storage_offset()
    )


def _spanning(tensors: Sequence[Tensor]) -> Tensor:
    """One flat view over tensors that adjoin."""
    if len(tensors) == 1:
        return flat(tensors[0])
    return tensors[0].as_strided((sum(t.numel() for t in tensors),), (1,))
