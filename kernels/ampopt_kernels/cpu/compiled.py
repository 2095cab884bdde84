"""The compiled backend: update rules as C++ for the CPU.

The function that the eager backend runs operation by operation becomes one loop over gradient,
parameter and states (see ``cpp``): each element is read and written once.

Most results are bitwise those of the eager backend. ``auto`` compiles such functions in the
background and switches to them when the compiler is done: the time of the switch varies, and no
result depends on it. The exceptions are rules with functions that C++ and torch round differently
(an exponential), and sums over matrix rows and columns, which C++ adds up in another order. Their
first step waits for the compiler.
"""

import ctypes
import functools
import time
import warnings
from collections.abc import Callable, Sequence
from itertools import chain, starmap
from typing import Any, NamedTuple

from torch import Tensor

from ampopt_kernels.codecs import Codec
from ampopt_kernels.cpu import numbers, watch
from ampopt_kernels.cpu.backend import CpuBackend, LargeRow, sums_are_finite
from ampopt_kernels.cpu.blocks import Block
from ampopt_kernels.cpu.bundles import Bundle, Copies, Numbers, TorchCopies, placed
from ampopt_kernels.cpu.calls import CALLS, CompiledUpdate
from ampopt_kernels.cpu.cpp import source_of
from ampopt_kernels.cpu.scalars import ScalarRows, scalars_on_host, scalars_source
from ampopt_kernels.cpu.sums import sum_of_squares
from ampopt_kernels.cpu.torch_functions import torch_functions
from ampopt_kernels.decision import Partials, Request
from ampopt_kernels.gradient_reports import GradientReport
from ampopt_kernels.native import objects
from ampopt_kernels.native.build import Library
from ampopt_kernels.native.cache import CacheError
from ampopt_kernels.rule import Rule
from ampopt_kernels.uploads import Uploads
from ampopt_kernels.watch_statistics import ChunkRange, RecordedStep, WatchStatistics
from ampopt_kernels.work import Work

__all__ = ["PATIENCE", "Compiled"]

PATIENCE = 0.05
"""Seconds for which ``auto`` runs a rule eagerly before it starts the compiler.

To compile a rule takes about 0.1 seconds of a core, and three times as long while a training uses
all cores. Without this delay a program of a few steps, such as a test, would start a compiler for
each rule. A rule that was compiled before is loaded from disk at once.
"""

COMPILED_AT_ONCE = 1 << 22
"""Elements of a step beyond which ``auto`` starts the compiler in the first step, not after
:data:`PATIENCE`: a few eager steps of so many take as long as compiling."""

IN_PLACE = 1 << 11
"""Elements of a row, on average, beyond which a compiled rule updates the rows of a bundle where
they are: to copy that many to scratch and back takes longer than one more row of a call."""


class _Key(NamedTuple):
    """The key of a compiled function: the arguments of :func:`source_of`.

    Or, if the role is ``"scalars"``, the first of them are those of :func:`scalars_source`.
    """

    rule: Rule
    flags: tuple[bool, ...]
    dtypes: tuple[Any, ...]
    width: int
    role: str
    rounds_stochastically: bool = False
    jumps: int = 0
    codecs: tuple[Codec | None, ...] = ()


class Compiled(CpuBackend):
    """CPU tensors, with each rule compiled once for its flags and dtypes.

    Sizes, learning rates and all other scalars are arguments of the compiled function, so nothing
    is ever compiled again for them.
    """

    name = "compiled"

    def __init__(self, patience: float = 0.0) -> None:
        """Start without compiled functions.

        Args:
            patience: for how many seconds to run a rule eagerly before its compiler is started in
                the background. With 0 the first step of each rule waits for the compiler. The
                first step of a rule whose results differ once compiled always waits.
        """
        super().__init__()
        objects.loops.want()
        self._patience = patience
        self._broken = False
        self._spent: dict[_Key, float] = {}
        self._detecting = 0.0
        self._libraries: dict[_Key, tuple[Library | None, bool]] = {}
        self._functions: dict[_Key, Any] = {}

    def detect(self, work: Work, request: Request) -> Partials:
        """See :meth:`Backend.detect`."""
        if numbers.loaded is not None or work.rule is not None:  # prepare loads them for rules
            return self._detect(work, request)
        if self._loaded(numbers.library(), self._detecting >= self._patience) is not None:
            numbers.loops()
        start = time.perf_counter()
        partials = self._detect(work, request)
        self._detecting += time.perf_counter() - start
        return partials

    def note(
        self,
        statistics: WatchStatistics,
        attempt: RecordedStep,
        report: GradientReport | None,
        parts: Sequence[ChunkRange],
        uploads: Uploads,
        *,
        notes_step: bool,
    ) -> None:
        """See :meth:`Backend.note`. One loop of C++, once it has been loaded."""
        if numbers.loaded is None:
            super().note(statistics, attempt, report, parts, uploads, notes_step=notes_step)
        else:
            watch.note(numbers.loaded, statistics, attempt, report, parts, notes_step=notes_step)

    def _scalars(
        self, rule: Rule, flags: tuple[bool, ...], rows: ScalarRows, h: Sequence[float]
    ) -> Numbers:
        """See :meth:`CpuBackend._scalars`."""
        dtypes = tuple(None if s is None else s.dtype for s in rows.states)
        key = _Key(rule, flags, dtypes, len(h), "scalars")
        function = self._function(key)
        if function is None:
            function = self._timed(functools.partial(scalars_on_host, rule, flags), key)
        return function(rows, h)

    def _timed(self, function: Callable[..., Any], key: _Key) -> Callable[..., Any]:
        """Return ``function``, made to add the time that it takes to ``self._spent[key]``."""

        def run(*arguments: Any) -> Any:
            start = time.perf_counter()
            result = function(*arguments)
            self._spent[key] = self._spent.get(key, 0.0) + time.perf_counter() - start
            return result

        return run

    def _sums_of_squares(self, grads: list[Tensor]) -> list[float]:
        """The sum of squares of each gradient, by C++ once it has been loaded."""
        if numbers.loaded is not None:
            return numbers.sums_of_squares(grads)
        return list(map(sum_of_squares, grads))

    def _update_large(self, large: list[LargeRow]) -> None:
        """Update those that share a compiled function in one call of it."""
        alike: dict[CompiledUpdate, list[LargeRow]] = {}
        others = []
        for row in large:
            function = row.bundle.functions["update"]
            if isinstance(function, CompiledUpdate):
                alike.setdefault(function, []).append(row)
            else:
                others.append(row)
        super()._update_large(others)
        for function, rows in alike.items():
            h = [placed(row.h, row.rows[0]) if row.rows else row.h for row in rows]
            function.whole(h, [row.tensors for row in rows])

    def _surely_finite(self, grads: list[Tensor]) -> bool:
        """Whether all gradients are finite; may be false although they are, until C++ is loaded."""
        return sums_are_finite(grads) if numbers.loaded is None else numbers.all_finite(grads)

    def _prepare_functions(self, work: Work, bundles: list[tuple[Block, Bundle]]) -> bool:
        """Give each bundle its functions: compiled ones that are ready, else timed torch ones.

        Returns whether these functions are final.
        """
        rule = work.rule
        assert rule is not None
        decided, has_function = True, False
        elements = sum(bundle.param.numel() for _, bundle in bundles)
        for block, bundle in bundles:
            bundle.functions = torch_functions(rule, bundle)
            if bundle.param.numel():
                widths = rule.widths(len(work.hyper[block.group]))
                keys = [_key(rule, bundle, 2 + widths.update, "update")]
                if rule.reduces:
                    keys.append(_key(rule, bundle, 2 + widths.reduce, "reduce"))
                if bundle.row_column_states:
                    keys.append(_key(rule, bundle, 2 + widths.reduce, "averages"))
                for key in keys:
                    if elements > COMPILED_AT_ONCE:
                        self._spent.setdefault(key, self._patience)
                    function = self._function_for(bundle, key)
                    has_function = has_function or function is not None
                    bundle.functions[key.role] = function or self._timed(
                        bundle.functions[key.role], key
                    )
                decided = decided and all(
                    key in self._functions or self._libraries[key][0] is None for key in keys
                )
        if has_function and self._loaded(numbers.library(), wanted=True) is not None:
            numbers.loops()
            for block, bundle in bundles:
                if bundle.copies is not None:
                    bundle.copies = _native(bundle.copies)
                bundle.scattered = list(map(_native, bundle.scattered))
                block.scattered = list(map(_native, block.scattered))
        in_place = chain.from_iterable(starmap(_in_place, bundles))
        work.backend_rows.update_bundles += in_place
        return self._broken or (decided and (numbers.loaded is not None or not has_function))

    def _function_for(self, bundle: Bundle, key: _Key) -> Any:
        """Return :meth:`_function` of ``key``, bound to the row and column statistics, if any."""
        function = self._function(key)
        if function is None or not bundle.row_column_states:
            return function
        own = bundle.row_column_states[0]
        if key.role == "averages":
            return functools.partial(function, own=own)
        return functools.partial(function, beside=own.addresses)

    def _function(self, key: _Key) -> Any:
        """Return the compiled function, as :data:`CALLS` wraps it; ``None`` to run it eagerly."""
        if key in self._functions:
            return self._functions[key]
        first = key not in self._libraries
        if first:
            self._libraries[key] = self._library(key)
        library, exact = self._libraries[key]
        if library is not None:
            waits = first and not exact  # else results would depend on the compiler's speed
            wanted = waits or self._spent.get(key, 0.0) >= self._patience
            loaded = self._loaded(library, wanted, waits)
            if loaded is not None:
                self._functions[key] = CALLS[key.role](loaded)
        return self._functions.get(key)

    def _library(self, key: _Key) -> tuple[Library | None, bool]:
        """Return the library to compile, and whether its results are bitwise the eager ones.

        The library is ``None`` if the rule cannot be written as C++, or its scalars would have
        other bits; then it always runs eagerly.
        """
        of_scalars = key.role == "scalars"
        try:
            source = scalars_source(*key[:4]) if of_scalars else source_of(*key)
        except Exception as error:
            if self._patience:
                return None, True
            raise RuntimeError(
                f"the compiled backend has no C++ for a rule: {type(error).__name__}: {error}; "
                "choose 'auto' or 'eager'"
            ) from error
        if of_scalars and not source.exact:
            return None, True
        return Library(source.text, source.options), source.exact

    def _loaded(self, library: Library, wanted: bool, waits: bool = False) -> ctypes.CDLL | None:
        """Load ``library`` if it has been compiled.

        Args:
            library: the library.
            wanted: whether to start the compiler in the background, if it was not.
            waits: whether to wait for the compiler.

        Returns:
            ``None`` while the compiler has not finished, and if it failed.
        """
        if self._broken:
            return None
        try:
            if waits or not self._patience or library.ready():
                return library.load()
            if wanted:
                library.start()
        except Exception as error:
            message = str(error)
            if not isinstance(error, CacheError):
                message = f"compiling a rule failed, {type(error).__name__}: {error}"
            if not self._patience:
                raise RuntimeError(f"the compiled backend {_needed(error, message)}") from error
            self._broken = True  # the compiler would fail for the next rule too
            warnings.warn(f"{message}; staying on the eager backend", RuntimeWarning, stacklevel=2)
        return None


def _native(copies: Copies) -> Copies:
    """Return the same copies by loops of C++."""
    if isinstance(copies, TorchCopies):
        return numbers.NativeCopies(copies.params, copies.scratch)
    return copies


def _fits_in_place(bundle: Bundle) -> bool:
    """Return whether compiled code updates the rows faster where they are than in scratch."""
    large = bundle.param.numel() > IN_PLACE * len(bundle.rows)
    return bundle.copies is not None and large and not bundle.row_column_states


def _in_place(block: Block, bundle: Bundle) -> list[tuple[Block, Bundle]]:
    """Divide a bundle whose rows compiled code updates faster where they are than in scratch.

    Its compiled update is that of single rows: see :func:`_key`. What detect reads remains the
    bundle: sums of squares are added up as the eager backend does.
    """
    update = bundle.functions["update"]
    if not (_fits_in_place(bundle) and isinstance(update, CompiledUpdate)):
        return [(block, bundle)]
    alone = [
        Bundle.of([row], [place - block.start], block.start)
        for row, place in zip(bundle.rows, bundle.among, strict=True)
    ]
    for row in alone:
        row.functions = bundle.functions
    return [(block, row) for row in alone]


def _needed(error: Exception, message: str) -> str:
    """The message for a user whose backend ``"compiled"`` cannot be used."""
    if isinstance(error, CacheError):
        return f"needs a place on disk: {message}, or choose 'auto' or 'eager'"
    return (
        f"needs a working C++ compiler: {message}. Install g++ or clang++ (or point CXX at one), "
        "or choose 'auto' or 'eager'"
    )


def _key(rule: Rule, bundle: Bundle, width: int, role: str) -> _Key:
    """Return the arguments of :func:`source_of` for a bundle.

    The update of rows where they are also writes the low-precision copies of master weights; that
    of scratch does not.

    Args:
        rule: the update rule.
        bundle: the bundle.
        width: how many numbers the function takes as ``h``.
        role: ``"update"``, ``"reduce"`` or ``"averages"``.
    """
    updates, row = role == "update", bundle.rows[0]
    writes_copy = updates and (bundle.copies is None or _fits_in_place(bundle))
    copies = [row.copy] if writes_copy and row.copy is not None else []
    copies += [] if row.low is None else [row.low]
    dtypes = (row.grad_dtype, *(t.dtype for t in (bundle.param, *bundle.states, *copies)))
    rounds_stochastically = updates and row.rounds
    jumps = len(row.places.jumps) if updates else 0
    codecs = row.codecs if row.is_coded else ()
    return _Key(rule, bundle.flags, dtypes, width, role, rounds_stochastically, jumps, codecs)
