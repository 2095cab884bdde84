"""The compiled backend: a rule's own body traced once and compiled to C++ for the CPU.

The body that the eager backend runs operation by operation becomes, through torch's Inductor, one
loop over gradient, parameter and states: each element is read and written once.
"""

import math
import os
import shutil
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ampopt_kernels import native, scans
from ampopt_kernels.copies import NativeCopies, TorchCopies
from ampopt_kernels.cpu import Cpu, updated
from ampopt_kernels.pieces import BUNDLE, Piece, pieces_of
from ampopt_kernels.precision import arithmetic
from ampopt_kernels.rule import Rule
from ampopt_kernels.work import Work

__all__ = ["PATIENCE", "Compiled", "cpp_compiler"]

PATIENCE = 10.0
"""Seconds that ``auto`` spends in a rule eagerly before it has it compiled.

On two cores, with torch 2.13 and g++, the first rule takes about 9 seconds, of which 2 are for the
import of Inductor and 6 for torch's precompiled header, which later processes find in Inductor's
cache; each further rule takes about 1. Once on a machine, 8 more go by in trying the compiler out
and compiling the loops of ``native``. Waiting about as long as it would cost bounds the loss either
way: whenever a run ends, it has taken hardly more than twice the better choice, but for those 8.
"""


def cpp_compiler() -> str | None:
    """The path of the C++ compiler that Inductor would use, or ``None``."""
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        path = shutil.which(name) if name else None
        if path is not None:
            return path
    return None


class Compiled(Cpu):
    """CPU tensors, with each rule compiled once for its flags and dtypes, and for large tensors.

    Sizes, learning rates and all other scalars are arguments of the compiled function, so nothing
    is ever compiled again for them.
    """

    name = "compiled"

    def __init__(self, patience: float = 0.0) -> None:
        """Make the backend.

        Args:
            patience: seconds to run a rule eagerly before compiling it.
        """
        super().__init__()
        self._patience = patience
        self._spent: dict[Any, float] = {}
        self._functions: dict[Any, Callable[..., Any] | None] = {}
        self._factors: tuple[Any, Tensor | None] = (None, None)

    def _apply(
        self, rule: Rule, piece: Piece, tensors: Sequence[Tensor], h: tuple[float, ...]
    ) -> None:
        if piece.function is not None:
            piece.function(self._on_tensor(h, piece.dtype), *tensors)
            return
        start = time.perf_counter()
        super()._apply(rule, piece, tensors, h)
        key = _key(rule, piece, tensors[0], len(h))
        self._spent[key] = self._spent.get(key, 0.0) + time.perf_counter() - start

    def _on_tensor(self, numbers: tuple[float, ...], dtype: torch.dtype) -> Tensor:
        """As a vector; the last one again where it is of the very same tuple."""
        known, tensor = self._factors
        if known is not numbers or tensor is None or tensor.dtype != dtype:
            tensor = torch.tensor(numbers, dtype=dtype, device="cpu")
            self._factors = (numbers, tensor)
        return tensor

    def _sums_of_squares(self, grads: list[Tensor]) -> list[float]:
        if native.are_compiled() and scans.can_square(grads):
            return scans.sums_of_squares(grads)
        return super()._sums_of_squares(grads)

    def _surely_finite(self, grads: list[Tensor]) -> bool:
        if native.are_compiled():
            return scans.all_finite(grads)
        return super()._surely_finite(grads)

    def _prepare(self, work: Work) -> bool:
        # While nothing has changed yet that a failure would leave half done.
        rule = work.rule
        assert rule is not None
        done = True
        for block, piece in pieces_of(work).pieces:
            piece.function = None
            if piece.param.numel():
                width = 2 + rule.width(len(work.hyper[block.group]))
                key = _key(rule, piece, piece.gather(work, again=False), width)
                if key not in self._functions and self._spent.get(key, 0.0) >= self._patience:
                    self._functions[key] = self._compile(*key)
                piece.function = self._functions.get(key)
                if isinstance(piece.copies, TorchCopies) and piece.function is not None:
                    piece.copies = NativeCopies(piece.params, piece.param)
                done = done and key in self._functions
        return done

    def _compile(
        self,
        rule: Rule,
        flags: tuple[bool, ...],
        dtypes: tuple[torch.dtype, ...],
        width: int,
        parallel: bool,
    ) -> Callable[..., Any] | None:
        """The compiled function; ``None`` if compiling failed where nobody asked for it."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's, of what it uses itself
                native.loops()
                return compile_rule(rule, flags, dtypes, width, parallel)
        except Exception as error:
            message = f"compiling a rule failed, {type(error).__name__}: {_first_line(error)}"
            if not self._patience:
                raise RuntimeError(
                    f"the compiled backend needs a working C++ compiler: {message}. Install g++ or "
                    "clang++ (or point CXX at one), or choose 'auto' or 'eager'"
                ) from error
            self._patience = math.inf  # with the next rule the compiler would fail again
            warnings.warn(f"{message}; staying on the eager backend", RuntimeWarning, stacklevel=2)
            return None


def _key(
    rule: Rule, piece: Piece, grad: Tensor, width: int
) -> tuple[Rule, tuple[bool, ...], tuple[torch.dtype, ...], int, bool]:
    """What :func:`compile_rule` takes for a piece and its gradients."""
    dtypes = tuple(t.dtype for t in (grad, piece.param, *piece.rest))
    return rule, piece.flags, dtypes, width, piece.param.numel() > BUNDLE


def _first_line(error: Exception) -> str:
    """What went wrong, without the command line, the source and the traceback that may follow."""
    return next((line for line in str(error).splitlines() if line.strip()), "no message")


def compile_rule(
    rule: Rule,
    flags: tuple[bool, ...],
    dtypes: tuple[torch.dtype, ...],
    width: int,
    parallel: bool,
) -> Callable[..., Any]:
    """``rule`` as one compiled loop, ``function(h, grad, param, *state)``, in place.

    Args:
        rule: whose ``update`` is compiled.
        flags: of the rule.
        dtypes: of gradient, parameter, states and copy, if there is one, which are flat and of
            one size.
        width: of ``h``, a 1-d tensor of the arithmetic dtype: the reciprocal of the scale, the
            clip coefficient, then what ``update`` takes as ``h``.
        parallel: use all threads, as many as torch has now; else one, for small tensors.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner  # seconds to import
    from torch._inductor.decomposition import select_decomp_table
    from torch.func import functionalize
    from torch.fx.experimental.proxy_tensor import make_fx

    compute = arithmetic(*dtypes[:2])

    def body(h: Tensor, *tensors: Tensor) -> tuple[()]:
        inverse, clip, *rest = h.unbind()
        grad, *stored = (t.to(compute) for t in tensors)
        new = updated(rule, flags, grad * inverse * clip, stored, tuple(rest))
        for old, value in zip(tensors[1:], new, strict=True):
            old.copy_(value)
        return ()

    # Inductor compiles for any size, and decides by this one whether threads are worth their start.
    # It is not that of h: equal sizes would become one symbol.
    size = 1 << 20 if parallel else width + 64
    sizes = [(width, compute), *((size, dtype) for dtype in dtypes)]
    example = [torch.ones(n, dtype=dtype, device="cpu") for n, dtype in sizes]
    # What torch.compile does on the way to Inductor, without the wrappers that it leaves around the
    # result for autograd and aliases, of which there are none here.
    functional = functionalize(body, remove="mutations_and_views")
    traced = make_fx(
        functional, decomposition_table=select_decomp_table(), tracing_mode="symbolic"
    )(*example)
    placeholders = [n.meta["val"] for n in traced.graph.nodes if n.op == "placeholder"]
    # Kept by this backend, so never looked up; and torch 2.11 cannot pickle the key of the lookup,
    # which it reports with a traceback.
    with config.patch(fx_graph_cache=False):
        compiled: Any = compile_fx_inner(traced, placeholders)
    return lambda *tensors: compiled.current_callable(list(tensors))
