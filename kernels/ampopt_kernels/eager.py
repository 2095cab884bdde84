"""The eager backend: runs update rules as torch operations, on any device that torch supports.

The decision to skip stays a tensor on the device: a skipped step computes the new values and then
selects the old ones. Where the host sees the tensors, on the CPU, a skipped step returns at once,
and numbers of a rule (``h``) are Python's: their arithmetic is in float64, as in compiled C++.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampopt_kernels import codecs
from ampopt_kernels.gradient_reports import GradientReport
from ampopt_kernels.gradient_terms import added, found_in, overflow_of
from ampopt_kernels.low_bits import master_of, split_master
from ampopt_kernels.row_column_means import add_sums
from ampopt_kernels.rule import Rule
from ampopt_kernels.step import Backend, as_tensor, reciprocal, widened
from ampopt_kernels.step_data import Decision, Partials, Request
from ampopt_kernels.step_tensors import ParamRow, Work
from ampopt_kernels.stochastic import stochastically
from ampopt_kernels.sums import Sums
from ampopt_kernels.tensors import flat, widest
from ampopt_kernels.torch_language import bind

__all__ = ["CHUNK", "Eager", "accumulate_gradients", "overflows"]

CHUNK = 1 << 17
"""Elements of each tensor that a rule processes at a time.

Temporaries of this size stay in the cache. With smaller chunks, starting the threads of each torch
operation would take longer than the operation."""


_added, _overflow_of, _found_in = map(bind, (added, overflow_of, found_in))


def overflows(grad: Tensor, factor: Any, dtype: torch.dtype) -> Tensor:
    """Whether an element of ``grad``, not empty, is not finite once unscaled: bool, 0-d.

    Args:
        grad: the gradient, of any shape.
        factor: the reciprocal of the scale, a number or a 0-d tensor.
        dtype: the arithmetic dtype, in which ``grad`` is unscaled.
    """
    # Unscaling is monotone: if any element leaves the range, an extreme does. NaN is an extreme.
    extremes = torch.stack(grad.aminmax()).to(dtype) * factor
    return ~extremes.isfinite().all()


def accumulate_gradients(work: Work, request: Request) -> Partials:
    """Add gradients to sums, as :meth:`Backend.detect` does; see :attr:`Request.accumulate`.

    The flags are those of chunks of at most :data:`CHUNK` elements.
    """
    inverse = 1.0 if request.scale is None else reciprocal(widened(request.scale))
    h = () if request.found_inf is None else (request.found_inf.reshape(()),)
    flags, rows = [], []
    for place, row, whole in work.present_rows():
        dtype = row.compute_dtype
        for grad, total in _chunks(whole, *row.outputs):
            unscaled = grad.to(dtype) * _cast(inverse, dtype)
            new, _ = _added(total, unscaled, (), h, row.flags)
            flags.append(_overflow_of(total, unscaled, new, row.flags).any())
            rows.append(place)
            total.copy_(new)
    flag_tensor = as_tensor(flags, torch.float32, work.device)
    return Partials(flag_tensor, None, (GradientReport(flag_tensor, rows, work.owners),))


def _measured(unscaled: Tensor, square: Tensor) -> Tensor:
    """The measures of one chunk that is not empty; see :attr:`GradientReport.measures`.

    Args:
        unscaled: unscaled gradients, in the arithmetic dtype.
        square: the sum of their squares: ``widest``, 0-d.
    """
    _, _, finite, is_nonzero, flushes = _found_in(None, unscaled, (), (), ())
    each = square, finite.max(), is_nonzero.sum(), flushes.sum()
    return torch.stack([x.to(square.dtype) for x in each])


class Eager(Backend):
    """Torch operations on one parameter after another: the specification of every rule."""

    name = "eager"

    def __init__(self, *, host_sees: bool = False) -> None:
        """Choose where decisions are made; see :attr:`Backend.host_sees`."""
        self.host_sees = host_sees

    def detect(self, work: Work, request: Request) -> Partials:
        """See :meth:`Backend.detect`. There is one flag for each row that has elements."""
        if request.accumulate:
            return accumulate_gradients(work, request)
        scale = request.grad_scale
        inverse = 1.0 if scale is None else reciprocal(widened(scale))
        flags, rows, squares, measures, wide = [], [], [], [], widest(work.device)
        for place, row, grad in work.present_rows():
            if not grad.numel():
                continue
            unscaled = tested = grad
            scaled_by = inverse
            if request.write or request.measure:
                unscaled = grad.to(row.compute_dtype) * _cast(inverse, row.compute_dtype)
            if request.write:
                tested, scaled_by = unscaled, 1.0
                grad.copy_(unscaled)
            factor = _cast(scaled_by, row.compute_dtype)
            flags.append(overflows(tested, factor, row.compute_dtype))
            rows.append(place)
            if request.max_norm is not None or request.measure:
                norm = torch.linalg.vector_norm(tested, dtype=wide) * scaled_by
                squares.append(norm * norm if row.in_norm else torch.zeros_like(norm))
            if request.measure:
                measures.append(_measured(unscaled, squares[-1]))
        flag_tensor = as_tensor(flags, torch.float32, work.device)
        return Partials(
            flag_tensor,
            None if request.max_norm is None else as_tensor(squares, wide, work.device),
            (
                GradientReport(
                    flag_tensor, rows, work.owners, torch.stack(measures, 1) if measures else None
                ),
            ),
        )

    def sum_lines(self, work: Work, decision: Decision) -> Tensor | None:
        """See :meth:`Backend.sum_lines`."""
        if self._sees_skip(decision):
            return None
        assert work.rule is not None
        n_h = work.rule.widths(len(work.hyper[0])).reduce
        h: list[tuple[Any, ...]] = [(0.0,) * n_h] * len(work.rows)
        work.clear_line_sums()
        for index, row, _, coefficients in self._before_sums(work, work.rule, decision):
            if row.row_column_means is not None:
                add_sums(work, index, coefficients)
                h[index] = coefficients[2:]
        numbers = as_tensor([x for own in h for x in own], widest(work.device), work.device)
        return numbers.view(len(work.rows), n_h)

    def reduce(self, work: Work, decision: Decision) -> Tensor:
        """See :meth:`Backend.reduce`."""
        rule, wide = work.rule, widest(work.device)
        assert rule is not None
        n_terms = rule.widths(len(work.hyper[0])).terms
        sums = torch.zeros(len(work.rows), n_terms, dtype=wide, device=work.device)
        if self._sees_skip(decision):
            return sums
        for index, row, whole, coefficients in self._before_sums(work, rule, decision):
            inverse, clip, *h = coefficients
            terms_of = rule.on_tensors("reduce", row.compute_dtype)
            for _, _, param, g, state in _inputs(row, whole, inverse, clip):
                terms = terms_of(param, g, state, tuple(h), row.flags)
                sums[index] += torch.stack([term.to(wide).sum() for term in terms])
        return sums

    def update(self, work: Work, decision: Decision) -> None:
        """See :meth:`Backend.update`."""
        if self._sees_skip(decision):
            return
        rule, (inverse, clip) = work.rule, self._of(decision)
        assert rule is not None
        skip = None if self.host_sees else decision.skip > 0
        advanced = _advance(work, rule, skip, decision.sums)
        for index, row, whole in work.present_rows():
            dtype, key = row.compute_dtype, row.random_key
            h = tuple(_cast(x, dtype) for x in advanced[index])
            update, has_indices = rule.on_tensors("update", dtype), key is not None or rule.draws
            inputs = _inputs(
                row, whole, _cast(inverse, dtype), _cast(clip, dtype), in_order=has_indices
            )
            for start, chunk, param, g, state in inputs:
                position = None
                if has_indices:
                    position = row.indices.after(start).of(g.numel(), work.device)
                at = ((position, param),) * rule.draws
                param, state = update(param, g, state, h, row.flags, *at)
                copy = () if row.copy is None else (param,)
                if position is not None and key is not None:
                    if row.rounds:
                        param = stochastically(param, position, key)
                    if row.low is not None:
                        u = codecs.uniform(position, key, -1)
                        param, *copy = split_master(param, chunk[0].dtype, u)
                chunk += [x for x in row.scales_at(start, start + g.numel()) if x is not None]
                states, scales = codecs.encoded_each(state, row.codecs, position, key)
                pairs = zip(chunk, (param, *states, *copy, *scales), strict=True)
                news = [_kept(skip, old, new.to(old.dtype)) for old, new in pairs]
                # A rule may return an argument as another state: read it before it is written.
                written = {old.data_ptr() for old in chunk}
                news = [x.clone() if x.data_ptr() in written else x for x in news]
                for old, new in zip(chunk, news, strict=True):
                    old.copy_(new)

    def _sees_skip(self, decision: Decision) -> bool:
        """Whether the host sees that the step is skipped."""
        return self.host_sees and decision.coefficients_on_host.skip > 0

    def _of(self, decision: Decision) -> Sequence[Any]:
        """The reciprocal of the scale and the clip coefficient."""
        if self.host_sees:
            return decision.coefficients_on_host[1:]
        return decision.coefficients_on_device.unbind()[1:]

    def _before_sums(
        self, work: Work, rule: Rule, decision: Decision
    ) -> Iterator[tuple[int, ParamRow, Tensor, tuple[Any, ...]]]:
        """Yield index, row and gradient of each row that has one, and the numbers before the sums.

        These are the reciprocal of the scale, the clip coefficient, and what ``reduce`` and
        ``averages`` get.
        """
        coefficients: list[tuple[Any, ...]] = [()] * len(work.rows)
        for variant in _variants(work, in_numbers=self.host_sees):
            h = rule.torch_before_sums(variant.s, variant.h, variant.flags)[1]
            _hand_out(h, variant.members, coefficients)
        for index, row, grad in work.present_rows():
            h = (*self._of(decision), *coefficients[index])
            yield index, row, grad, tuple(_cast(x, row.compute_dtype) for x in h)


def _kept(skip: Tensor | None, old: Tensor, new: Tensor) -> Tensor:
    """``old`` if the step is skipped, else ``new``; ``skip`` is ``None`` if it surely is not."""
    return new if skip is None else torch.where(skip, old, new)


class _Variant(NamedTuple):
    """The scalar states of rows that have gradients, and whose numbers are computed together.

    These are all rows of one variant; or a single one, if it is computed in Python numbers.

    Attributes:
        members: the indices of the rows in ``work.rows``.
        columns: for each scalar state, its 0-d tensors, one a row; ``None`` where the flags omit
            the state.
        s: for each scalar state, one tensor of shape (rows,), or a number; 0 where the flags omit
            the state.
        h: the hyperparameters, numbers or 0-d tensors.
        flags: the flags of the rule.
    """

    members: list[int]
    columns: list[tuple[Tensor | None, ...]]
    s: tuple[Any, ...]
    h: tuple[Any, ...]
    flags: tuple[bool, ...]


def _variants(work: Work, *, in_numbers: bool) -> Iterator[_Variant]:
    """The rows with gradients, and their scalar states.

    Args:
        work: the rows.
        in_numbers: whether the host reads the states. Then each row is computed by itself, as
            functions of torch round differently in vectors than alone.
    """
    together: dict[int, list[int]] = {}
    for index, row, _ in work.present_rows():
        together.setdefault(index if in_numbers else row.variant, []).append(index)
    for members in together.values():
        first = work.rows[members[0]]
        columns = list(zip(*(work.rows[i].scalars for i in members), strict=True))
        hyper = work.hyper[first.variant]
        if in_numbers:
            s = tuple(0.0 if state is None else state.item() for (state,) in columns)
            h = tuple(map(float, hyper))
        else:
            zero, wide = torch.zeros((), device=work.device), widest(work.device)
            s = tuple(torch.stack([zero if x is None else x for x in c]).to(wide) for c in columns)
            h = tuple(_cast(x.reshape(()) if isinstance(x, Tensor) else x, wide) for x in hyper)
        yield _Variant(members, columns, s, h, first.flags)


def _advance(
    work: Work, rule: Rule, skip: Tensor | None, sums: Sums | None
) -> list[tuple[Any, ...]]:
    """Advance the scalar states; return the ``h`` of ``update`` for each row with a gradient.

    Args:
        work: the rows.
        rule: their rule.
        skip: whether to keep the old states: bool, 0-d; ``None`` if the host knows that the step
            is not skipped, and computes in Python numbers.
        sums: the sums of the terms of the rule, if it has any.
    """
    result: list[tuple[Any, ...]] = [()] * len(work.rows)
    scalars, dtypes = rule.on_tensors("scalars", torch.float64), work.scalar_dtypes
    for variant in _variants(work, in_numbers=skip is None):
        arguments: tuple[Any, ...] = (variant.s, variant.h, variant.flags)
        if sums is not None:
            if skip is None:
                (index,) = variant.members
                terms: Any = tuple(sums.each[index].tolist()), tuple(sums.totals.tolist())
            else:
                each = torch.stack([sums.each[i] for i in variant.members])
                terms = each.unbind(1), sums.totals.unbind()
            arguments = (*rule.torch_before_sums(*arguments), variant.flags, *terms)
        new_s, new_h = scalars(*arguments)
        for column, old, new, dtype in zip(variant.columns, variant.s, new_s, dtypes, strict=True):
            if skip is None:
                (state,) = column
                if state is not None:
                    state.fill_(_cast(new, state.dtype))
                continue
            values = torch.where(skip, old, new).to(dtype).unbind()
            pairs = [(x, v) for x, v in zip(column, values, strict=True) if x is not None]
            if pairs:
                copy: Any = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
                copy([x for x, _ in pairs], [v for _, v in pairs])
        _hand_out(map(float, new_h) if skip is None else new_h, variant.members, result)
    return result


def _hand_out(h: Iterable[Any], members: list[int], to: list[tuple[Any, ...]]) -> None:
    """Set ``to[i]`` of each row ``i`` in ``members`` to the row's entries of ``h``.

    Args:
        h: numbers, 0-d tensors, and tensors with one entry for each of ``members``.
        members: the indices of the rows.
        to: one tuple for each row of the work; written.
    """
    per_row = [x.unbind() if isinstance(x, Tensor) and x.ndim else [x] * len(members) for x in h]
    for place, i in enumerate(members):
        to[i] = tuple(values[place] for values in per_row)


def _inputs(
    row: ParamRow, grad: Tensor, inverse: Any, clip: Any, *, in_order: bool = False
) -> Iterator[tuple[int, list[Tensor], Tensor, Tensor, tuple[Tensor, ...]]]:
    """Yield, chunk by chunk, what ``reduce`` and ``update`` get.

    Args:
        row: the row.
        grad: its gradient.
        inverse: the reciprocal of the loss scale, in the arithmetic dtype.
        clip: the clip coefficient, in the arithmetic dtype.
        in_order: whether chunks are flattened in memory order, by which elements are numbered.

    Yields:
        The index of the first element; the chunk's elements of ``row.outputs``; and the arguments
        ``p``, ``g`` and ``state``.
    """
    dtype, n, start = row.compute_dtype, 1 + len(row.state), 0
    tensors = (grad, *row.outputs)
    if in_order or row.is_coded or row.row_column_means is not None:
        tensors = tuple(map(flat, tensors))
    for own, *chunk in _chunks(*tensors):
        end = start + own.numel()
        full = chunk[0] if row.low is None else master_of(chunk[0], chunk[n])
        states = row.decoded(chunk[1:n], start, end)
        param, *state = (t.to(dtype) for t in (full, *states))
        g = own.to(dtype) * inverse * clip
        yield start, chunk, param, g, (*state, *row.row_column_factors(start, end))
        start = end


def _chunks(*tensors: Tensor):
    """Yield chunks of at most :data:`CHUNK` elements of ``tensors``, which have the same size."""
    if tensors[0].numel() <= CHUNK:
        yield tensors
    else:
        yield from zip(*(flat(t).split(CHUNK) for t in tensors), strict=True)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """A number in the arithmetic dtype: a 0-d tensor would otherwise promote a 0-d parameter.

    A Python number that float32 cannot hold becomes infinite, where torch raises an error.
    """
    if isinstance(value, Tensor):
        return value.to(dtype)
    if dtype == torch.float32 and abs(value) > torch.finfo(dtype).max:
        return math.copysign(math.inf, value)
    return value
