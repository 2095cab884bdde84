"""The tensors of one step: a :class:`ParamRow` for each parameter, a :class:`Work` for a device."""

import functools
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from ampopt_kernels import codecs
from ampopt_kernels.codecs import Codec
from ampopt_kernels.element_indices import ElementIndices
from ampopt_kernels.gradient_reports import NOBODY, Owner
from ampopt_kernels.low_bits import master_of
from ampopt_kernels.native.objects import addresses
from ampopt_kernels.row_column_means import RowColumnMeans, stacks_of
from ampopt_kernels.rule import Rule
from ampopt_kernels.tensors import arithmetic, flat
from ampopt_kernels.uploads import Uploads

__all__ = ["ParamRow", "Work"]


@dataclass(slots=True)
class ParamRow:
    """The tensors of one parameter in a step, except its gradient, which changes at every step.

    The gradient is in :attr:`Work.grads`; a step without it changes none of these tensors. All
    tensors are real (a complex parameter has its real view), dense, and have the strides of the
    parameter; they are contiguous if there are ``row_column_means``. ``n`` is the number of
    elements that this rank has of the parameter.

    Attributes:
        grad_dtype: dtype of the gradient.
        param: the parameter, or its float32 master weight: n elements, float16, bfloat16, float32
            or float64. ``None`` in a row whose gradient is only read.
        state: elementwise states, in the order of ``rule.state_for(flags)``: n elements each, in
            the dtype that the rule declares, or that of the codec.
        copy: the low-precision parameter that gets ``param`` rounded, if ``param`` is a master
            weight: n elements, float16 or bfloat16.
        low: the bits that ``param``, float16 or bfloat16, lacks of its 24-bit master weight: n
            elements, int8; see ``low_bits``. ``None`` without such a master.
        scalars: scalar states, 0-d, float32 or float64, in the order of ``rule.scalar_state``;
            ``None`` for each that does not exist under ``flags``.
        flags: values of ``rule.flags``. In a step that accumulates, one flag: whether the sum,
            which is then ``param``, is still empty.
        variant: index of the row's hyperparameters in :attr:`Work.hyper`.
        in_norm: whether this rank adds the gradient to the global norm. One of the ranks that
            replicate a parameter does.
        owner: name and ``id`` of the parameter, for messages.
        codecs: for each of ``state`` its codec, or ``None`` if it is stored as it is computed.
        scales: for each of ``state`` one float32 number for each block, flat; ``None`` for a state
            without a codec, or whose codec has no scales. The row then has the elements of whole
            blocks, in the order of a contiguous parameter.
        random_key: the key of the random numbers of this step, which advances: 0-d int64.
            ``None`` if nothing is rounded stochastically. See ``stochastic``.
        rounds: whether the parameter, bfloat16, is rounded stochastically.
        indices: indices of the elements in the whole parameter, from which random numbers are
            computed. Unused if nothing is drawn.
        row_column_means: what the rule averages over rows or columns of the parameter, if anything.
    """

    grad_dtype: torch.dtype
    param: Tensor | None = None
    state: tuple[Tensor, ...] = ()
    copy: Tensor | None = None
    low: Tensor | None = None
    scalars: tuple[Tensor | None, ...] = ()
    flags: tuple[bool, ...] = ()
    variant: int = 0
    in_norm: bool = True
    owner: Owner = NOBODY
    random_key: Tensor | None = None
    rounds: bool = False
    indices: ElementIndices = ElementIndices()
    row_column_means: RowColumnMeans | None = None
    codecs: tuple[Codec | None, ...] = ()
    scales: tuple[Tensor | None, ...] = ()
    _kind: Any = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Fill in ``codecs`` and ``scales`` of a row that has none."""
        self.codecs = self.codecs or (None,) * len(self.state)
        self.scales = self.scales or (None,) * len(self.state)

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """The tensors that ``update`` writes: parameter, states, and copy or low bits."""
        every = (self.param, *self.state, self.copy, self.low)
        return tuple([t for t in every if t is not None])

    @property
    def decoded_inputs(self) -> tuple[Tensor, ...]:
        """The parameter, or its whole 24-bit master, and the values of the states."""
        assert self.param is not None
        full = self.param if self.low is None else master_of(self.param, self.low)
        if not self.is_coded:
            return (full, *self.state)
        return (full, *self.decoded(list(map(flat, self.state)), 0, full.numel()))

    @property
    def is_coded(self) -> bool:
        """Whether a state has a codec."""
        return any(codec is not None for codec in self.codecs)

    def decoded(self, states: Sequence[Tensor], start: int, end: int) -> list[Tensor]:
        """The values of the elements from ``start``, where a block begins, to ``end``.

        Args:
            states: what is stored of these elements in each of :attr:`state`.
            start: the first element.
            end: the element after the last.
        """
        scales = self.scales_at(start, end)
        return [
            x if codec is None else codecs.decoded(x, codec, own)
            for x, codec, own in zip(states, self.codecs, scales, strict=True)
        ]

    def scales_at(self, start: int, end: int) -> list[Tensor | None]:
        """The :attr:`scales` of the elements from ``start``, where a block begins, to ``end``."""
        return [
            None
            if own is None or codec is None
            else own[start // codec.block : -(-end // codec.block)]
            for own, codec in zip(self.scales, self.codecs, strict=True)
        ]

    def row_column_factors(self, start: int, end: int) -> tuple[Tensor, ...]:
        """The row and column factors of the elements from ``start`` to ``end``, each 1-d."""
        return () if self.row_column_means is None else self.row_column_means.at(start, end)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes of the gradient and of the tensors in :attr:`outputs`."""
        return (self.grad_dtype, *[t.dtype for t in self.outputs])

    @property
    def kind(self) -> tuple[Any, ...]:
        """Everything about a row that is compiled in: rows of one launch have the same kind."""
        if self._kind is None:
            jumps, copies = len(self.indices.jumps), self.copy is not None
            self._kind = (self.dtypes, self.flags, copies, self.rounds, jumps, self.codecs)
        return self._kind

    @property
    def compute_dtype(self) -> torch.dtype:
        """The arithmetic dtype: float64 for float64 gradients or parameters, else float32.

        Integers are not converted: they are the bytes of tensors that are copied.
        """
        if not self.grad_dtype.is_floating_point:
            return self.grad_dtype
        dtypes = (self.grad_dtype,) if self.param is None else (self.grad_dtype, self.param.dtype)
        return arithmetic(*dtypes)


class Work:
    """The rows of one device, and the gradients and hyperparameters of one step.

    Attributes:
        device: where all tensors of the rows are.
        rows: one for each parameter, in any order. A row may have no elements.
        present: for each row 1 if its parameter has a gradient in this step, else 0;
            ``None`` if every one has. A step does not change the tensors of the other rows.
        rule: the update rule; ``None`` if gradients are only read or accumulated, and nothing is
            updated.
        hyper: the numbers that ``rule.hyper_values`` returns, for each *variant*: each param group,
            or each kind of parameter in it, if ``rule.entries`` tells kinds apart.
        uploads: constants that are on the device already, kept from step to step.
        backend_rows: the rows in the backend's own form, kept from step to step; ``None`` until the
            backend makes it.
        line_stacks: the rows whose rows and columns are averaged together.
        grads_version: a count that goes up when ``grads`` are replaced, so that a backend knows
            when addresses of gradients are out of date.
    """

    def __init__(
        self,
        device: torch.device,
        rows: list[ParamRow],
        grads: list[Any] | None = None,
        rule: Rule | None = None,
        hyper: Sequence[Sequence[float | Tensor]] = (),
        uploads: Uploads | None = None,
    ) -> None:
        """Store the rows, and what they are stepped with; see the attributes."""
        self.device, self.rows, self.rule = device, rows, rule
        self.line_stacks = stacks_of(rows)
        self.uploads = Uploads() if uploads is None else uploads
        self.backend_rows: Any = None
        self.grads_version = 0
        self.refresh([] if grads is None else grads, hyper)

    def refresh(
        self,
        grads: list[Any] | Callable[[], list[Any]],
        hyper: Sequence[Sequence[float | Tensor]],
        present: bytearray | None = None,
        addresses: array | None = None,
    ) -> None:
        """Replace gradients and hyperparameters.

        Args:
            grads: as :attr:`grads`, with the strides and dtypes of those that they replace; or a
                function that returns them, called if a backend needs more than their addresses.
            hyper: as :attr:`hyper`.
            present: as :attr:`present`.
            addresses: as :attr:`addresses`, if they are known.
        """
        self._grads, self._addresses = grads, addresses
        self.hyper, self.present = hyper, present
        self.grads_version += 1

    def release(self) -> None:
        """Drop the references to the gradients, so that their memory can be freed."""
        self._grads = []

    @property
    def grads(self) -> list[Any]:
        """The gradient of each row, with the strides of its ``param``.

        ``None`` for a row that :attr:`present` omits; empty between steps.
        """
        if callable(self._grads):
            self._grads = self._grads()
        return self._grads

    @property
    def addresses(self) -> array:
        """The addresses of :attr:`grads`: int64; see :func:`native.objects.addresses`."""
        if self._addresses is None:
            self._addresses = addresses(self.grads)
        return self._addresses

    def present_rows(self) -> Iterator[tuple[int, ParamRow, Tensor]]:
        """Yield index, row and gradient of each row that has a gradient in this step."""
        for index, (row, grad) in enumerate(zip(self.rows, self.grads, strict=True)):
            if grad is not None:
                yield index, row, grad

    @property
    def present_grads(self) -> list[Tensor]:
        """The gradients of this step."""
        return self.grads if self.present is None else list(compress(self.grads, self.present))

    def is_present(self, index: int) -> bool:
        """Return whether the row of this index has a gradient in this step."""
        return self.present is None or bool(self.present[index])

    @functools.cached_property
    def owners(self) -> list[Owner]:
        """The owner of each row."""
        return [row.owner for row in self.rows]

    @property
    def random_keys(self) -> list[Tensor]:
        """The keys of the rows that this step rounds stochastically: 0-d int64 each."""
        return [self.rows[i].random_key for i in self.keyed_rows if self.is_present(i)]  # type: ignore

    @functools.cached_property
    def keyed_rows(self) -> list[int]:
        """The indices of the rows that a step rounds stochastically."""
        return [index for index, row in enumerate(self.rows) if row.random_key is not None]

    @functools.cached_property
    def compute_dtypes(self) -> list[torch.dtype]:
        """The arithmetic dtype of each row."""
        return [row.compute_dtype for row in self.rows]

    @property
    def of_lines(self) -> list[Tensor]:
        """The factors and the sums over lines of all rows."""
        return [tensor for stack in self.line_stacks for tensor in (*stack.factors, *stack.sums)]

    def clear_line_sums(self) -> None:
        """Write 0 to the sums over lines, before a pass adds to them."""
        for stack in self.line_stacks:
            for sums in stack.sums:
                sums.zero_()

    @functools.cached_property
    def scalar_dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtype of each scalar state, the same in every row that has it.

        float32 for one that no row has.
        """
        n = 0 if self.rule is None else len(self.rule.scalar_state)
        columns = ((s for row in self.rows for s in row.scalars[i : i + 1]) for i in range(n))
        return tuple(
            next((s.dtype for s in column if s is not None), torch.float32) for column in columns
        )

    @property
    def float64(self) -> bool:
        """Whether all rows with a gradient compute in float64; ``False`` if there are no rows."""
        dtypes = self.compute_dtypes
        if self.present is not None:
            dtypes = list(compress(dtypes, self.present))
        return bool(dtypes) and all(dtype == torch.float64 for dtype in dtypes)
