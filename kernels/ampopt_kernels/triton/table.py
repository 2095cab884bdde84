"""What the kernels read: a table of addresses, the programs over it, and the hyperparameters.

The table has one int64 row for each parameter::

    grad | param | states ... copy | scalar states ... | jumps ... | keys | first place | flags
    | counted | group | numel

and, where the rule has any, factors of rows and columns behind the copy, and how many rows and
columns a matrix has, with 0 for what a row has not, and for ``in_norm`` where it does not count
towards the norm. Where a row has jumps (see ``places``), all rows have columns for as many, of
three numbers each; a row's own are the last. ``flags`` is their number among ``Table.flag_sets``. A
launch takes those of its programs' (row, chunk) pairs that share dtypes, flags and alignment, so
the number of launches does not depend on the number of tensors or groups.
"""

import functools
import operator
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ampopt_kernels.marginals import EVEN
from ampopt_kernels.native.objects import addresses
from ampopt_kernels.places import NUMBERS
from ampopt_kernels.rule import Rule
from ampopt_kernels.work import Row, Work

if TYPE_CHECKING:
    from ampopt_kernels.triton.lines import Lines

__all__ = ["CHUNK", "PROGRAMS", "Launch", "Table", "hyper_table", "state_columns"]

CHUNK = 1 << 12
"""Elements for each program at least: enough to hide the loads of the table behind the data's."""
PROGRAMS = 1 << 13
"""Programs of a pass at most, but for a chunk begun in each tensor; then chunks are larger.

A device runs one or two thousand at a time, and those of the last round leave part of it idle: one
round and a tenth take nearly as long as two. Fewer programs leave control fewer parts to reduce.
"""


@dataclass(frozen=True)
class Launch:
    """Programs ``start`` to ``stop`` of the block table, all of the kind of the row ``like``.

    ``align`` divides every address in bytes, ``even`` the length of the rows of every matrix that
    has marginals.
    """

    start: int
    stop: int
    like: Row
    align: int
    even: int

    @property
    def programs(self) -> int:
        """How many there are."""
        return self.stop - self.start

    @functools.cached_property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Of the gradient and of what is written."""
        return self.like.dtypes

    @functools.cached_property
    def aligns(self) -> tuple[int, ...]:
        """What to say of the addresses of each tensor, which ``align`` divides: no more than helps.

        A thread reads as many elements of each tensor as make 16 bytes of the widest. Reading 16
        bytes of a narrower one takes another arrangement of threads, and shared memory and barriers
        between.
        """
        sizes = [dtype.itemsize for dtype in self.dtypes]
        return tuple(min(self.align, 16 // max(sizes) * size) for size in sizes)


@dataclass
class Table:
    """The table of addresses on the device, what it was made from, and the launches over it.

    ``lines`` are those that a rule averages over, once they were asked for.
    ``spans`` are the first program of each row and the one behind its last; ``flag_sets`` are all
    flags that rows have, where ``scalars`` of the rule takes them.
    """

    rows: Tensor
    numbers: array
    columns: int
    blocks: Tensor
    row_of_block: list[int]
    spans: list[int]
    chunk: int
    launches: list[Launch]
    flag_sets: tuple[tuple[bool, ...], ...]
    aligned: list[bool]
    grads_version: int
    lines: "Lines | None" = None
    prepared: bool = False

    @property
    def n_blocks(self) -> int:
        """How many programs all launches have."""
        return len(self.row_of_block)

    @staticmethod
    def of(work: Work) -> "Table":
        """The table of ``work``, sent to the device where an address or a size changed."""
        table = work.table if isinstance(work.table, Table) else None
        if table is None or (
            table.grads_version != work.grads_version and not table._takes_gradients_of(work)
        ):
            work.table = table = Table._made(work)
        return table

    def _takes_gradients_of(self, work: Work) -> bool:
        """Point to other gradients, unless they are not aligned as the old ones."""
        grads = addresses(work.grads)
        if functools.reduce(operator.or_, grads, 0) % 16 and any(  # mostly all are aligned
            address % 16 for address, aligned in zip(grads, self.aligned, strict=True) if aligned
        ):
            return False
        numbers = self.numbers[:]  # those that were sent stay as they are
        numbers[:: self.columns] = grads
        self.rows = work.uploads.get(_name("rows", work), numbers, torch.int64, work.device)
        self.numbers, self.grads_version = numbers, work.grads_version
        return True

    @staticmethod
    def _made(work: Work) -> "Table":
        n_states = state_columns(work.rule)
        n_scalars = 0 if work.rule is None else len(work.rule.scalar_state)
        flag_sets: tuple[tuple[bool, ...], ...] = ()
        if work.rule is not None and work.rule.scalars_arguments > 2:
            flag_sets = tuple(dict.fromkeys(row.flags for row in work.rows))
        n_jumps = max((len(row.places.jumps) for row in work.rows), default=0)
        rows: list[int] = []
        kinds: dict[Any, list[int]] = {}
        aligned: list[bool] = []
        for index, (row, grad) in enumerate(zip(work.rows, work.grads, strict=True)):
            streams = [t.data_ptr() for t in (grad, *row.written)]
            aligned.append(all(address % 16 == 0 for address in streams))
            if row.marginals is not None:
                streams += row.marginals.addresses
            streams += [0] * (2 + n_states - len(streams))
            scalars = [0 if s is None else s.data_ptr() for s in row.scalars]
            scalars += [0] * (n_scalars - len(scalars))
            of_flags = flag_sets.index(row.flags) if flag_sets else 0
            keys = 0 if row.keys is None else row.keys.data_ptr()
            jumps = [n for jump in row.places.jumps for n in jump]
            rows += [*streams, *scalars, *[0] * (NUMBERS * n_jumps - len(jumps)), *jumps]
            rows += [keys, row.places.first, of_flags]
            rows += [int(row.in_norm), row.group, grad.numel()]
            # Of what is not aligned, threads would read factors in another arrangement.
            even = aligned[index] and row.marginals is not None and row.marginals.is_even
            kinds.setdefault((row.kind, aligned[index], even), []).append(index)
        chunk = _chunk(sum(grad.numel() for grad in work.grads))
        blocks: list[int] = []
        spans = [0] * (2 * len(work.rows))
        launches: list[Launch] = []
        for (_, is_aligned, is_even), members in kinds.items():
            start = len(blocks) // 2
            for index in members:
                n = -(-work.grads[index].numel() // chunk)
                spans[2 * index] = len(blocks) // 2
                spans[2 * index + 1] = len(blocks) // 2 + n
                for place in range(n):
                    blocks += (index, place)
            stop = len(blocks) // 2
            if stop > start:
                align, even = (16 if is_aligned else 1), (EVEN if is_even else 1)
                launches.append(Launch(start, stop, work.rows[members[0]], align, even))
        get, numbers = work.uploads.get, array("q", rows)
        return Table(
            rows=get(_name("rows", work), numbers, torch.int64, work.device),
            numbers=numbers,
            columns=8 + n_states + n_scalars + NUMBERS * n_jumps,
            blocks=get(_name("blocks", work), blocks, torch.int32, work.device),
            row_of_block=blocks[::2],
            spans=spans,
            chunk=chunk,
            launches=launches,
            flag_sets=flag_sets,
            aligned=aligned,
            grads_version=work.grads_version,
        )


def state_columns(rule: Rule | None) -> int:
    """Columns for states, and what comes right behind those that a row has, the copy first."""
    return 0 if rule is None else len(rule.state) + 1 + 2 * (rule.averages is not None)


def hyper_table(work: Work) -> Tensor:
    """Float64, (groups, hyperparameters). A device tensor among them is copied on the device."""
    numbers, on_device = [], []
    for group, values in enumerate(work.hyper):
        for i, value in enumerate(values):
            if isinstance(value, Tensor) and value.device.type == "cpu":
                value = value.item()  # no device to wait for
            if isinstance(value, Tensor):
                on_device.append((group, i, value))
                value = 0.0
            numbers.append(float(value))
    table = work.uploads.get("hyper", numbers, torch.float64, work.device, in_place=True)
    table = table.view(len(work.hyper), -1)
    for group, i, value in on_device:
        table[group, i].copy_(value.detach().reshape(()), non_blocking=True)
    return table


def _chunk(elements: int) -> int:
    """How many of so many elements each program takes. The same however they are divided."""
    chunk = CHUNK
    while chunk * PROGRAMS < elements:
        chunk *= 2
    return chunk


def _name(what: str, work: Work) -> str:
    return f"{what} of {'gradients' if work.rule is None else 'parameters'}"
