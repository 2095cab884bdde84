"""The functions of a rule as torch operations on the tensors of a bundle."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ampopt_kernels import codecs
from ampopt_kernels.codecs import Codec
from ampopt_kernels.cpu.bundles import Bundle, Slice, Slices
from ampopt_kernels.cpu.sums import sum_terms
from ampopt_kernels.eager import CHUNK
from ampopt_kernels.low_bits import has_low_bits, master_of, split_master, with_master
from ampopt_kernels.row_column_states import RowColumnStates, sums_of
from ampopt_kernels.rule import Rule
from ampopt_kernels.stochastic import stochastically
from ampopt_kernels.tensors import arithmetic, flat, times
from ampopt_kernels.work import ParamRow

__all__ = ["apply_rule", "torch_functions"]


def torch_functions(rule: Rule, bundle: Bundle) -> dict[str, Callable[..., Any]]:
    """Return the torch operations for :attr:`Bundle.functions`."""
    # Not ``bundle`` itself, which would keep itself alive in a cycle, with all of its tensors.
    codecs_of_states = bundle.codecs if bundle.rows[0].is_coded else ()
    functions = _Functions(rule, bundle.flags, codecs_of_states, bundle.row_column_states)
    return {
        "update": functions.update,
        "reduce": functions.reduce,
        "averages": functions.averages,
    }


@dataclass(frozen=True)
class _Functions:
    """The functions of a rule for one bundle.

    Each takes slices of the bundle, and the tensors of the bundle: gradient, parameter and those
    that :attr:`Bundle.functions` names.

    Attributes:
        rule: the update rule.
        flags: its flags.
        codecs: the codec of each state, or ``None``; empty if no state has one.
        row_column_states: the row and column states of each parameter of the bundle; empty if the
            rule has none. All have the same size.
    """

    rule: Rule
    flags: tuple[bool, ...]
    codecs: tuple[Codec | None, ...]
    row_column_states: list[RowColumnStates]

    def update(self, slices: Slices, tensors: Sequence[Tensor]) -> None:
        """Apply the rule to slices of a bundle."""
        joined = not self.row_column_states and not slices.rows
        for part, views, row_column_states in self._each(slices, tensors, joined=joined):
            row = slices.rows[part.row] if slices.rows else None
            apply_rule(self.rule, self.flags, views, part.h, row_column_states, self.codecs, row)

    def reduce(self, slices: Slices, tensors: Sequence[Tensor]) -> Tensor:
        """Return the terms of the rule summed over each slice: float64, shape (slices, terms)."""
        sums = [
            sum_terms(
                self.rule, self.flags, self._read(views), part.h, row_column_states, self.codecs
            )
            for part, views, row_column_states in self._each(slices, tensors)
        ]
        return torch.stack(sums)

    def averages(self, slices: Slices, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the sums over matrix rows or columns of each slice; see :func:`sums_of`."""
        sums = (
            sums_of(self.rule, row_column_states, self.flags, self._read(views), part.h)
            for part, views, row_column_states in self._each(slices, tensors)
            if row_column_states is not None
        )
        return list(map(torch.cat, zip(*sums, strict=True)))

    def _read(self, views: list[Tensor]) -> list[Tensor]:
        """Return the tensors of a slice with a 24-bit master in place of its two parts."""
        return with_master(views, len(self.rule.state_for(self.flags)))

    def _each(
        self, slices: Slices, tensors: Sequence[Tensor], *, joined: bool = False
    ) -> Iterator[tuple[Slice, list[Tensor], RowColumnStates | None]]:
        """Yield each slice, flat views of its elements, and its row and column statistics."""
        flat_tensors = list(map(flat, tensors))
        for part in slices.each(joined=joined):
            row_column_states = self.row_column_states[part.row] if self.row_column_states else None
            yield part, [t[part.start : part.end] for t in flat_tensors], row_column_states


def apply_rule(
    rule: Rule,
    flags: tuple[bool, ...],
    tensors: Sequence[Tensor],
    h: Sequence[float],
    row_column_states: RowColumnStates | None = None,
    of_states: Sequence[Codec | None] = (),
    row: ParamRow | None = None,
) -> None:
    """Apply ``rule`` in place.

    Args:
        rule: the update rule.
        flags: its flags.
        tensors: the gradient, which is only read, the parameter, the states, and optionally a
            low-precision copy of the parameter, which is only written, or the low bits of its
            24-bit master. All flat and of one size. Then the scales of the states that have some.
        h: the reciprocal of the scale, the clip coefficient, and the numbers of the rule.
        row_column_states: the row and column states of the parameter, if the rule has any; then
            ``tensors`` are those of a whole parameter.
        of_states: the codec of each state, or ``None``. Empty if no state has one.
        row: has the places of the elements and the random key; ``None`` if nothing is drawn.
    """
    dtype = arithmetic(*(t.dtype for t in tensors[:2]))
    update, n_states = rule.torch_update_in(dtype), len(rule.state_for(flags))
    inverse, clip, *rest = h
    key = None if row is None else row.keys
    n, scales = tensors[0].numel(), ()
    if of_states:
        *tensors, scales = codecs.with_scales(tensors, of_states)
    splits = has_low_bits(tensors, n_states)
    for start in range(0, n, CHUNK):
        grad, *chunk = tensors if n <= CHUNK else [t[start : start + CHUNK] for t in tensors]
        g = times(grad.to(dtype), inverse, clip)
        position = None
        if row is not None:
            position = row.places.after(start).of(grad.numel(), grad.device)
        factors = (
            () if row_column_states is None else row_column_states.at(start, start + grad.numel())
        )
        values, targets = chunk[: 1 + n_states], list(chunk)
        if of_states:
            own_scales = codecs.scales_at(scales, of_states, start, start + grad.numel())
            values[1:] = codecs.decoded_each(values[1:], of_states, own_scales)
            targets += [x for x in own_scales if x is not None]
        if splits:
            values[0] = master_of(chunk[0], chunk[-1])
        param, *state = [t.to(dtype) for t in values]
        at = rule.at(param, position)
        new_param, new_state = update(param, g, (*state, *factors), tuple(rest), flags, *at)
        if row is not None and row.rounds and key is not None and position is not None:
            new_param = stochastically(new_param, position, key)
        copies, new_scales = [new_param] * (len(chunk) - 1 - n_states), []
        if splits and key is not None and position is not None:
            u = codecs.uniform(position, key, -1)
            new_param, *copies = split_master(new_param, chunk[0].dtype, u)
        if of_states:
            new_state, new_scales = codecs.encoded_each(new_state, of_states, position, key)
        for old, new in zip(targets, (new_param, *new_state, *copies, *new_scales), strict=True):
            old.copy_(new)
