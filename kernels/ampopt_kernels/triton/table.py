"""The kernels' tables on the device: addresses, (row, chunk) of each program, hyperparameters.

The table of addresses has one row for each parameter. All columns are int64; "address" means the
``data_ptr()`` of a tensor, or 0 for none:

==================  =========  ====================================================================
name                columns    meaning
==================  =========  ====================================================================
grad                1          address of the gradient; 0 for a row that this step leaves unchanged
param               1          address of the parameter, or of its float32 master weight
states              1 each     addresses of the elementwise states
copy                0 or 1     address of the low-precision copy, or low bits, of a master weight
factors             1 each     addresses of the factors; see ``row_column_means``
m, n                0 or 2     rows and columns of a matrix, if there are factors
(padding)                      0, up to the same number of columns in every row
scales              0 or more  addresses of the scales of states with codecs; see ``codecs``
scalar states       1 each     addresses of the 0-d states; 0 where the flags omit one
jumps               3 each     period, phase and size; padded with 0 in front
random key          1          address of the random key of stochastic rounding
first               1          position of the first element in the whole parameter
flags               1          index of the row's flags in ``Table.flag_sets``
in_norm             1          1 if the gradient is part of the norm, else 0
variant             1          index of its hyperparameters in ``Work.hyper``
numel               1          number of elements
==================  =========  ====================================================================

A launch runs over the (row, chunk) pairs of rows with the same dtypes, flags and alignment, so the
number of launches depends neither on the number of tensors nor on that of groups.
"""

import functools
import math
import operator
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ampopt_kernels.element_indices import NUMBERS
from ampopt_kernels.step_tensors import ParamRow, Work

__all__ = [
    "BLOCK",
    "CHUNK",
    "EVEN",
    "PROGRAMS",
    "Launch",
    "Table",
    "hyper_table",
]

BLOCK = 1 << 10
"""Elements that a program reads at a time: eight for each thread, 16 bytes of a 2-byte dtype.

With sixteen Adam needs 167 registers in place of 70, so a third as many programs run at a time.
"""
CHUNK = 1 << 12
"""The fewest elements of a program: enough to hide the latency of loading the table."""
PROGRAMS = 1 << 14
"""The most programs of a pass, besides one partial chunk for each tensor; chunks grow instead.

More programs use the bandwidth better, since those that run at a time are closer together in
memory, and the last wave is shorter. But control reduces one flag for each program. For the figures
see "Sizes of chunks" in ``kernels/PREDICTIONS.md``.
"""

EVEN = 1 << 4
"""A number that divides most row lengths: that many neighbours are in one row, and are read at
once."""


@dataclass(frozen=True)
class Launch:
    """One launch: some programs of the table of chunks, over rows of one kind.

    Attributes:
        start: its first program.
        programs: the number of programs.
        like: one of its rows; all have the same dtypes and flags.
        align: a power of two in bytes that divides every address.
        even: a number that divides the row length of every matrix with factors.
    """

    start: int
    programs: int
    like: ParamRow
    align: int
    even: int

    @functools.cached_property
    def compute_dtype(self) -> torch.dtype:
        """The arithmetic dtype."""
        return self.like.compute_dtype

    @functools.cached_property
    def gradient(self) -> ParamRow:
        """``like`` without all but the gradient, for a pass that reads nothing else."""
        return ParamRow(self.like.grad_dtype)

    def aligns_of(self, dtypes: tuple[torch.dtype, ...]) -> tuple[int, ...]:
        """The alignment, in bytes, that Triton may assume of each tensor that a pass reads.

        It may be less than ``align``. A thread reads as many elements of each tensor as make 16
        bytes of the widest dtype; if it read 16 bytes of a narrower one too, Triton would exchange
        elements between threads, through shared memory and barriers.
        """
        sizes = [dtype.itemsize for dtype in dtypes]
        return tuple(min(self.align, 16 // max(sizes) * size) for size in sizes)


@dataclass
class Table:
    """The table of addresses on the device, what it was made of, and the launches over it.

    Attributes:
        addresses: the table itself: int64, shape (rows * columns,), on the device.
        on_host: the same numbers on the host.
        columns: the width of the table.
        first_scale: the column with the address of the first state's scales, if there are any.
        first_scalar: the column with the address of the first scalar state.
        chunks: int32, on the device: (row, chunk) of each program.
        row_of_chunk: the row of each chunk.
        spans: for each row its first program, and the program after its last.
        block: elements that a program reads at a time.
        chunk: elements for each program.
        launches: the launches of a pass.
        flag_sets: all different flags of the rows; ``((),)`` if ``scalars`` of the rule takes none.
        aligned: for each row, whether its addresses are multiples of 16 bytes.
        grads_version: ``Work.grads_version`` of the gradients in the table.
        tiles: the :class:`~ampopt_kernels.triton.row_column_sums.Tiles` of matrices; ``None`` until
            they are needed.
        prepared_updates: whether the work decides, for each way in which ``Triton.prepare`` has
            compiled what follows control.
        variants: what :class:`~ampopt_kernels.triton.launch.Variant` each launch has, by kind of
            pass; see ``passes.py`` and ``control.py``.
    """

    addresses: Tensor
    on_host: array
    columns: int
    first_scale: int
    first_scalar: int
    chunks: Tensor
    row_of_chunk: list[int]
    spans: list[int]
    block: int
    chunk: int
    launches: list[Launch]
    flag_sets: tuple[tuple[bool, ...], ...]
    aligned: list[bool]
    grads_version: int
    tiles: Any = None
    prepared_updates: set[bool] = field(default_factory=set)
    variants: dict[Any, Any] = field(default_factory=dict)

    @property
    def n_chunks(self) -> int:
        """The number of programs of all launches."""
        return len(self.row_of_chunk)

    @staticmethod
    def of(work: Work) -> "Table":
        """The table of ``work``; sent to the device again if an address or a size has changed."""
        table = work.backend_rows if isinstance(work.backend_rows, Table) else None
        if table is None or (
            table.grads_version != work.grads_version and not table._takes_gradients_of(work)
        ):
            work.backend_rows = table = Table._new(work)
        return table

    def _takes_gradients_of(self, work: Work) -> bool:
        """Replace the gradients' addresses; false, and no change, if a new one is less aligned."""
        grads = work.addresses
        if functools.reduce(operator.or_, grads, 0) % 16 and any(  # usually all are aligned
            address % 16 for address, aligned in zip(grads, self.aligned, strict=True) if aligned
        ):
            return False
        numbers = self.on_host[:]  # a copy, because the upload is compared with the old numbers
        numbers[:: self.columns] = grads
        self.addresses = work.uploads.get(_name("rows", work), numbers, torch.int64, work.device)
        self.on_host, self.grads_version = numbers, work.grads_version
        # Rows of another work with these uploads may have replaced the chunks there.
        work.uploads.keep_while_captured(work.device, [self.chunks])
        return True

    @staticmethod
    def _new(work: Work) -> "Table":
        """A new table of ``work``, sent to the device."""
        n_states = n_scales = n_scalars = 0
        if (rule := work.rule) is not None:
            factors = 0 if rule.averages is None else len(rule.averages_over) + 2
            n_states, n_scalars = len(rule.state) + 1 + factors, len(rule.scalar_state)
            n_scales = len(rule.state) if any(row.is_coded for row in work.rows) else 0
        flag_sets: tuple[tuple[bool, ...], ...] = ((),)
        takes_flags = rule is not None and rule.scalars_arguments > 2
        if takes_flags:
            flag_sets = tuple(dict.fromkeys(row.flags for row in work.rows))
        n_jumps = max((len(row.indices.jumps) for row in work.rows), default=0)
        rows: list[int] = []
        kinds: dict[tuple[Any, int, int], list[int]] = {}
        aligned: list[bool] = []
        sizes = [
            (grad if row.param is None else row.param).numel()
            for row, grad in zip(work.rows, work.grads, strict=True)
        ]
        for index, (row, address) in enumerate(zip(work.rows, work.addresses, strict=True)):
            streams, means = [address, *_addresses(row.outputs)], row.row_column_means
            aligned.append(all(address % 16 == 0 for address in streams))
            if means is not None:
                streams += means.addresses
            rows += _padded(streams, 2 + n_states)
            if n_scales:
                rows += _padded(_addresses(row.scales), n_scales)
            rows += _padded(_addresses(row.scalars), n_scalars)
            jumps = [n for jump in row.indices.jumps for n in jump]
            rows += [*[0] * (NUMBERS * n_jumps - len(jumps)), *jumps]
            rows += [*_addresses([row.random_key]), row.indices.first]
            rows += [flag_sets.index(row.flags) if takes_flags else 0]
            rows += [int(row.in_norm), row.variant, sizes[index]]
            # Without alignment, Triton would lay out loads of factors unlike those of elements.
            even = aligned[index] and means is not None and means.shape[-1] % EVEN == 0
            kind = row.kind, 16 if aligned[index] else 1, EVEN if even else 1
            kinds.setdefault(kind, []).append(index)
        chunk = _chunk(sum(sizes))
        launches, chunks, spans = _launches(work, kinds, [-(-size // chunk) for size in sizes])
        get, numbers = work.uploads.get, array("q", rows)
        return Table(
            addresses=get(_name("rows", work), numbers, torch.int64, work.device),
            on_host=numbers,
            columns=8 + n_states + n_scales + n_scalars + NUMBERS * n_jumps,
            first_scale=2 + n_states,
            first_scalar=2 + n_states + n_scales,
            chunks=get(_name("chunks", work), chunks, torch.int32, work.device),
            row_of_chunk=chunks[::2],
            spans=spans,
            block=BLOCK,
            chunk=chunk,
            launches=launches,
            flag_sets=flag_sets,
            aligned=aligned,
            grads_version=work.grads_version,
        )


def _addresses(tensors: Sequence[Tensor | None]) -> list[int]:
    """The address of each tensor; 0 for ``None``."""
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def _padded(numbers: list[int], n: int) -> list[int]:
    """``numbers``, and zeros up to ``n`` of them."""
    return numbers + [0] * (n - len(numbers))


def _launches(
    work: Work, kinds: dict[tuple[Any, int, int], list[int]], counts: list[int]
) -> tuple[list[Launch], list[int], list[int]]:
    """Divide the chunks of all rows among programs.

    Args:
        work: the rows.
        kinds: the indices of the rows of one launch, by their kind, ``align`` and ``even``.
        counts: the number of chunks of each row.

    Returns:
        The launches; row and chunk of each program; and for each row its first program, and the
        program after its last.
    """
    launches: list[Launch] = []
    chunks: list[int] = []
    spans = [0] * (2 * len(counts))
    for (_, align, even), members in kinds.items():
        start = len(chunks) // 2
        for index in members:
            first = len(chunks) // 2
            spans[2 * index : 2 * index + 2] = first, first + counts[index]
            for chunk in range(counts[index]):
                chunks += (index, chunk)
        if programs := len(chunks) // 2 - start:
            launches.append(Launch(start, programs, work.rows[members[0]], align, even))
    return launches, chunks, spans


def hyper_table(work: Work) -> Tensor:
    """The hyperparameters on the device: float64, shape (variants, hyperparameters).

    A hyperparameter that is a device tensor is copied on the device. Does not synchronize.
    """
    numbers, on_device = [], []
    for variant, values in enumerate(work.hyper):
        for i, value in enumerate(values):
            if isinstance(value, Tensor) and value.device.type == "cpu":
                value = value.item()  # does not synchronize
            if isinstance(value, Tensor):
                on_device.append((variant, i, value))
                value = math.nan  # so that a number in its place, such as 0, is sent
            numbers.append(float(value))
    table = work.uploads.get("hyper", numbers, torch.float64, work.device, in_place=True)
    table = table.view(len(work.hyper), -1)
    for variant, i, value in on_device:
        table[variant, i].copy_(value.detach().reshape(()), non_blocking=True)
    return table


def _chunk(elements: int) -> int:
    """The elements for each program of a pass over ``elements``, however tensors divide them."""
    chunk = CHUNK
    while chunk * PROGRAMS < elements:
        chunk *= 2
    return chunk


def _name(what: str, work: Work) -> str:
    """The name of a table among the uploads of ``work``."""
    return f"{what} of {'gradients' if work.rule is None else 'parameters'}"
