"""Kernel launches with little host overhead.

At every launch through ``kernel[grid](...)`` Triton binds the arguments, computes which variant
they need, and asks the driver where each tensor is; in a step of small tensors that takes longest.
A compiled kernel needs none of that, and takes addresses as integers.
"""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ampopt_kernels.devices import ACCELERATORS, current, refuse_while_captured
from ampopt_kernels.language import INTERPRETED, tl

__all__ = [
    "PARTS",
    "ROWS",
    "THREADS",
    "TRITON_DTYPES",
    "Launcher",
    "Variant",
    "launch",
    "launch_compiled",
    "options",
    "sources_of",
    "variant_of",
]

THREADS = 1 << 7
"""Threads of each program, whatever the warp size."""

PARTS = 1 << 10
"""Results of chunks that a program reads at a time, to reduce them."""
ROWS = 1 << 7
"""Rows that control advances at a time."""

TRITON_DTYPES: dict[torch.dtype, Any] = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.int8: tl.int8,
    torch.int16: tl.int16,
    torch.int32: tl.int32,
    torch.int64: tl.int64,
    torch.uint8: tl.uint8,
}
"""Triton's name of each dtype that a row may have, of values, codes or bytes."""


@dataclass(frozen=True, eq=False)
class Variant:
    """A kernel and its compile-time arguments; :func:`variant_of` makes it.

    Attributes:
        kernel: a kernel made by ``language.kernel``, whose binary does not depend on the values or
            the alignment of arguments.
        constants: the compile-time arguments by name.
        compiled: what Triton has compiled, by device and types of the other arguments.
    """

    kernel: Any
    constants: dict[str, Any]
    compiled: dict[tuple[Any, ...], Any] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        """The name in messages and profilers: that of the pass, or of the kernel."""
        of = self.constants.get("PASS")
        return self.kernel.fn.__name__ if of is None else f"{of.name}_kernel"

    @functools.cached_property
    def arguments(self) -> tuple[list[str], list[Any]]:
        """The names of the arguments passed at run time, and the constants that follow them."""
        params = self.kernel.params
        names = [parameter.name for parameter in params if not parameter.is_constexpr]
        return names, [self.constants[p.name] for p in params if p.is_constexpr]


def variant_of(kernel: Any, constants: dict[str, Any]) -> Variant:
    """The variant of ``kernel`` for compile-time arguments: one object for equal arguments."""
    return _variant_of(kernel, tuple(constants.items()))


@functools.cache
def _variant_of(kernel: Any, constants: tuple[tuple[str, Any], ...]) -> Variant:
    """See :func:`variant_of`."""
    return Variant(kernel, dict(constants))


def sources_of(*functions: Any) -> str:
    """A text that changes with the source of each of ``functions``, or of what it calls.

    Triton's cache on disk knows ``jit`` functions by their source only if they are arguments
    themselves, and not within a tuple.
    """
    return "".join(getattr(function, "cache_key", "") for function in functions)


Launcher = Callable[[torch.device, Variant, int, dict[str, Any]], None]
"""``launcher(device, variant, programs, arguments)``, with the arguments of run time by name."""


def options(warp_size: int) -> dict[str, Any]:
    """Compile options of every kernel, for a warp of ``warp_size`` threads (64 on some AMD GPUs).

    Products and sums are not fused: a product is rounded before it is added. A gradient that
    ``unscale`` has stored was rounded so, and one call must give the same bits as two.
    """
    return {"num_warps": THREADS // warp_size, "enable_fp_fusion": False}


def launch(
    device: torch.device, variant: Variant, programs: int, arguments: dict[str, Any]
) -> None:
    """Launch a kernel on ``device``, or run it in Triton's interpreter.

    Args:
        device: the device of the tensors among the arguments.
        variant: the kernel.
        programs: the number of programs; with 0 the kernel is compiled and not run.
        arguments: the arguments of run time by name.
    """
    with _on(device):
        if INTERPRETED:
            if programs:  # the interpreter has nothing to compile
                variant.kernel[(programs,)](**arguments, **variant.constants)
        else:
            launch_compiled(device, variant, programs, arguments, _options_on(device))


@functools.cache
def _options_on(device: torch.device) -> dict[str, Any]:
    """:func:`options` for ``device``, which is the current device."""
    from triton.runtime import driver

    target: Any = driver.active.get_current_target()
    return options(target.warp_size)


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make ``device`` the current device; in the interpreter, silence NumPy's warnings."""
    if device.type in ACCELERATORS:
        return current(device)
    if INTERPRETED:
        import numpy

        return numpy.errstate(all="ignore")  # NumPy warns of overflow; a GPU does not
    return contextlib.nullcontext()


def launch_compiled(
    device: torch.device,
    variant: Variant,
    programs: int,
    arguments: dict[str, Any],
    options: dict[str, Any],
) -> None:
    """Launch a kernel on ``device``, the current device, and on its current stream.

    The first launch of a variant goes through Triton's ``kernel[grid]``, which compiles it and
    returns the compiled kernel; later launches call that directly. Profilers see both, through
    Triton's launch hooks. Later launches do not check again what only ``kernel[grid]`` checks:
    settings such as ``TRITON_DEBUG``, and whether globals that the kernel uses have changed.

    Args:
        device: the current device.
        variant: the kernel.
        programs: the number of programs.
        arguments: the arguments of run time by name.
        options: the compile options, the same for all kernels on a device.

    Raises:
        RuntimeError: this is the first launch of a variant, while a CUDA graph is captured.
    """
    names, constants = variant.arguments
    passed = [arguments[name] for name in names]
    kind = (device, *[v.dtype if isinstance(v, Tensor) else type(v) for v in passed])
    compiled = variant.compiled.get(kind)
    if compiled is not None:
        numbers = [v.data_ptr() if isinstance(v, Tensor) else v for v in passed]
        compiled[(programs, 1, 1)](*numbers, *constants)
        return
    refuse_while_captured(
        device, f"the first launch of {variant.name}, which is compiled and loaded then"
    )
    compiled = variant.kernel[(programs,)](**arguments, **variant.constants, **options)
    if hasattr(compiled, "__getitem__"):  # an interpreted kernel returns None
        variant.compiled[kind] = compiled
