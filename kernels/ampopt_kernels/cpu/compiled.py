"""The compiled backend: a rule's own body as C++ for the CPU.

The body that the eager backend runs operation by operation becomes one loop over gradient,
parameter and states (see ``cpp``): each element is read and written once.

Its results are the eager backend's to the bit, but for rules with functions that C++ and torch
round differently. So ``auto`` has the compiler work beside the training and takes up what it has
made whenever that is done: the clock decides when, and no result depends on it. Those other rules
are compiled at their first step.
"""

import ctypes
import time
import warnings
from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ampopt_kernels.cpu import native, reductions
from ampopt_kernels.cpu.backend import Cpu
from ampopt_kernels.cpu.build import Library
from ampopt_kernels.cpu.bundles import BUNDLE, Part, Piece, pieces_of
from ampopt_kernels.cpu.cpp import source_of
from ampopt_kernels.cpu.gather_scatter import NativeCopies, TorchCopies
from ampopt_kernels.rule import Rule
from ampopt_kernels.step import Partials, Request, Work

__all__ = ["PATIENCE", "Compiled"]

PATIENCE = 0.1
"""Seconds that ``auto`` spends in a rule eagerly before it has it compiled.

On two cores with g++ a rule takes about 0.3 seconds of one of them, and so do the loops of
``native``, once on a machine. What has been compiled before is loaded from
disk in a millisecond and so is taken up at once. Without any patience a program of a few steps, a
test perhaps, would start a compiler for each rule.
"""

_Key = tuple[Rule, tuple[bool, ...], tuple[torch.dtype, ...], int, bool, bool]


class Compiled(Cpu):
    """CPU tensors, with each rule compiled once for its flags and dtypes.

    Sizes, learning rates and all other scalars are arguments of the compiled function, so nothing
    is ever compiled again for them.
    """

    name = "compiled"

    def __init__(self, patience: float = 0.0) -> None:
        """Make the backend.

        Args:
            patience: seconds to run a rule eagerly before the compiler is started, which then is
                not waited for. With 0 the first step of each rule waits, and so it always does
                for rules whose results compiling changes.
        """
        super().__init__()
        native.want_object_loops()
        self._patience = patience
        self._broken = False
        self._spent: dict[_Key, float] = {}
        self._detecting = 0.0
        self._libraries: dict[_Key, tuple[Library | None, bool]] = {}
        self._functions: dict[_Key, Any] = {}

    def detect(self, work: Work, request: Request) -> Partials:
        """See :meth:`Backend.detect`."""
        if native.numbers is not None or work.rule is not None:  # which has loops prepared
            return super().detect(work, request)
        if self._loaded(native.library(), self._detecting >= self._patience) is not None:
            native.loops()
        start = time.perf_counter()
        found = super().detect(work, request)
        self._detecting += time.perf_counter() - start
        return found

    def _apply(
        self, rule: Rule, piece: Piece, tensors: Sequence[Tensor], parts: Sequence[Part]
    ) -> None:
        if piece.function is not None:
            piece.function(parts, tensors)
            return
        start = time.perf_counter()
        super()._apply(rule, piece, tensors, parts)
        self._note_spent(_key(rule, piece, len(parts[0].h)), start)

    def _sum(
        self, rule: Rule, piece: Piece, tensors: Sequence[Tensor], rows: Sequence[Part]
    ) -> Tensor:
        if piece.sums is not None:
            return piece.sums(rows, tensors)
        start = time.perf_counter()
        sums = super()._sum(rule, piece, tensors, rows)
        self._note_spent(_key(rule, piece, len(rows[0].h), reduces=True), start)
        return sums

    def _note_spent(self, key: _Key, start: float) -> None:
        self._spent[key] = self._spent.get(key, 0.0) + time.perf_counter() - start

    def _sums_of_squares(self, grads: list[Tensor]) -> list[float]:
        if native.numbers is not None:
            return reductions.sums_of_squares(grads)
        return super()._sums_of_squares(grads)

    def _surely_finite(self, grads: list[Tensor]) -> bool:
        if native.numbers is not None:
            return reductions.all_finite(grads)
        return super()._surely_finite(grads)

    def _prepare(self, work: Work) -> bool:
        rule = work.rule
        assert rule is not None
        decided, used = True, False
        for block, piece in pieces_of(work).pieces:
            if piece.param.numel():
                widths = rule.widths(len(work.hyper[block.group]))
                key = _key(rule, piece, 2 + widths.update)
                piece.function = self._function(key)
                keys = [key]
                if rule.reduces:
                    keys.append(_key(rule, piece, 2 + widths.reduce, reduces=True))
                    piece.sums = self._function(keys[1])
                used = used or piece.function is not None
                decided = decided and all(
                    key in self._functions or self._libraries[key][0] is None for key in keys
                )
        if used and self._loaded(native.library(), wanted=True) is not None:
            native.loops()
            for _, piece in pieces_of(work).pieces:
                if isinstance(piece.copies, TorchCopies):
                    piece.copies = NativeCopies(piece.params, piece.param)
        return self._broken or (decided and (native.numbers is not None or not used))

    def _function(self, key: _Key) -> Any:
        """:class:`_Function` or :class:`_Sums` for the next step; ``None`` to stay eager."""
        if key in self._functions:
            return self._functions[key]
        first = key not in self._libraries
        if first:
            self._libraries[key] = self._library(key)
        library, exact = self._libraries[key]
        if library is not None:
            waits = first and not exact  # else the results would depend on the clock
            wanted = waits or self._spent.get(key, 0.0) >= self._patience
            loaded = self._loaded(library, wanted, waits)
            if loaded is not None:
                self._functions[key] = (_Sums if key[-2] else _Function)(loaded)
        return self._functions.get(key)

    def _library(self, key: _Key) -> tuple[Library | None, bool]:
        """What the function of a rule would be in, and whether it is exact; ``None`` for never."""
        try:
            source = source_of(*key)
        except Exception as error:
            if self._patience:
                return None, True
            raise RuntimeError(
                f"the compiled backend has no C++ for a rule: {type(error).__name__}: {error}; "
                "choose 'auto' or 'eager'"
            ) from error
        return Library(source.text), source.exact

    def _loaded(self, library: Library, wanted: bool, waits: bool = False) -> ctypes.CDLL | None:
        """What ``library`` holds; ``None`` if the compiler is not to be waited for, or failed."""
        if self._broken:
            return None
        try:
            if waits or not self._patience or library.ready():
                return library.load()
            if wanted:
                library.start()
        except Exception as error:
            message = f"compiling a rule failed, {type(error).__name__}: {error}"
            if not self._patience:
                raise RuntimeError(
                    f"the compiled backend needs a working C++ compiler: {message}. Install g++ or "
                    "clang++ (or point CXX at one), or choose 'auto' or 'eager'"
                ) from error
            self._broken = True  # with the next rule it would fail again
            warnings.warn(f"{message}; staying on the eager backend", RuntimeWarning, stacklevel=2)
        return None


class _Function:
    """The compiled function of a rule, as a call on tensors."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._update = library.update
        pointer, count = ctypes.c_void_p, ctypes.c_int64
        self._update.argtypes = (pointer, pointer, pointer, count, count)
        self._update.restype = None

    def __call__(self, parts: Sequence[Part], tensors: Sequence[Tensor]) -> None:
        """Gradient, parameter, states and copy, in place; ``parts`` are all of them."""
        given = _given(parts, tensors)
        starts = (x.buffer_info()[0] for x in given)
        self._update(*starts, len(parts), _threads(parts[-1].end))


class _Sums:
    """The compiled ``reduce`` of a rule, as a call on tensors."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._sums = library.sums
        pointer, count = ctypes.c_void_p, ctypes.c_int64
        self._sums.argtypes = (pointer, pointer, pointer, count, count, pointer)
        self._sums.restype = None
        self._n_terms = ctypes.c_int64.in_dll(library, "n_terms").value

    def __call__(self, rows: Sequence[Part], tensors: Sequence[Tensor]) -> Tensor:
        """Of gradient, parameter and states; see :meth:`Cpu._sum`."""
        given = _given(rows, tensors)
        starts = (x.buffer_info()[0] for x in given)
        sums = torch.empty(len(rows), self._n_terms, dtype=torch.float64, device="cpu")
        self._sums(*starts, len(rows), _threads(rows[-1].end), sums.data_ptr())
        return sums


def _given(parts: Sequence[Part], tensors: Sequence[Tensor]) -> tuple[array, array, array]:
    """Numbers of each part, where the tensors are, and where each part ends."""
    numbers = array("d")
    for part in parts:
        numbers.extend(part.h)
        if part.chances:
            position, *key = part.chances
            numbers.extend((position - part.start, *key))  # where the piece begins
    ends = array("q", [part.end for part in parts])
    return numbers, array("q", map(Tensor.data_ptr, tensors)), ends


def _threads(n: int) -> int:
    """How many are worth the time they take to start."""
    return torch.get_num_threads() if n > BUNDLE else 1


def _key(rule: Rule, piece: Piece, width: int, *, reduces: bool = False) -> _Key:
    """What :func:`source_of` takes for a piece and its gradients."""
    stored = piece.rest[: len(rule.state_for(piece.flags))] if reduces else piece.rest
    dtypes = tuple(t.dtype for t in (piece.param, *stored))
    by_chance = not reduces and piece.rows[0].keys is not None
    return rule, piece.flags, (piece.rows[0].grad_dtype, *dtypes), width, reduces, by_chance
