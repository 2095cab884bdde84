"""Launches that cost the host little.

At every launch through ``kernel[grid](...)`` Triton binds the arguments, works out what they are
compiled for, and asks the driver where each tensor is: of a step of small tensors that is the
longest part. A compiled kernel knows all that, and takes addresses as numbers.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ampopt_kernels.devices import ACCELERATORS, current, refuse_while_captured
from ampopt_kernels.language import INTERPRETED, tl

__all__ = ["THREADS", "TRITON_DTYPES", "Launcher", "launch", "launch_compiled", "options"]

THREADS = 1 << 7
"""Threads of each program, in however many warps that is."""

TRITON_DTYPES: dict[torch.dtype, Any] = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
"""Triton's name of each dtype that a gradient, parameter or state may have."""

Launcher = Callable[[torch.device, Any, int, dict[str, Any]], None]
"""``launcher(device, kernel, programs, arguments)``; arguments by name, compile-time ones too."""


def options(warp_size: int) -> dict[str, Any]:
    """How every kernel is compiled where a warp has so many threads: AMD has some of 64.

    A product is rounded before it is added to something, as a gradient is that was unscaled by
    itself. Fused, stepping in one call would round otherwise than in two. Triton's own default is
    about to change.
    """
    return {"num_warps": THREADS // warp_size, "enable_fp_fusion": False}


def launch(device: torch.device, kernel: Any, programs: int, arguments: dict[str, Any]) -> None:
    """Launch ``kernel`` on ``device``, or run it in Triton's interpreter.

    Args:
        device: where.
        kernel: of ``language.kernel``, so that neither values nor alignment ask for another binary.
        programs: how many; with 0 it is compiled.
        arguments: by name, compile-time ones too.
    """
    with _on(device):
        if INTERPRETED:
            if programs:  # the interpreter compiles nothing
                kernel[(programs,)](**arguments)
        else:
            launch_compiled(device, kernel, programs, arguments, _options_on(device))


@functools.cache
def _options_on(device: torch.device) -> dict[str, Any]:
    """:func:`options` for ``device``, the current one."""
    from triton.runtime import driver

    target: Any = driver.active.get_current_target()
    return options(target.warp_size)


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Launch on ``device``, which Triton takes from the current one."""
    if device.type in ACCELERATORS:
        return current(device)
    if INTERPRETED:
        import numpy

        return numpy.errstate(all="ignore")  # which warns of overflow where devices do not
    return contextlib.nullcontext()


_compiled: dict[tuple[Any, ...], Any] = {}


def launch_compiled(
    device: torch.device,
    kernel: Any,
    programs: int,
    arguments: dict[str, Any],
    options: dict[str, Any],
) -> None:
    """Launch ``kernel`` on ``device``, the current one, and on its current stream.

    The first launch of a kind goes through Triton's front door, which compiles, and hands out what
    it has compiled; later ones launch that. Profilers see either, through Triton's hooks for
    launches. What Triton looks at in its front door alone is not looked at again: its settings,
    such as ``TRITON_DEBUG``, and whether globals that the kernel uses have changed.

    Args:
        device: where.
        kernel: of ``language.kernel``, so that neither values nor alignment ask for another binary.
        programs: how many.
        arguments: by name, compile-time ones too.
        options: to compile with, for all kernels of the device alike.

    Raises:
        RuntimeError: it is the first launch of a kind, inside the capture of a CUDA graph.
    """
    kind, values = [device, kernel], []
    for name, is_constant in _parameters(kernel):
        value = arguments[name]
        if is_constant:
            kind.append(value)
        elif isinstance(value, Tensor):
            kind.append(value.dtype)
            value = value.data_ptr()
        values.append(value)
    compiled = _compiled.get(tuple(kind))
    if compiled is not None:
        compiled[(programs, 1, 1)](*values)
        return
    name = kernel.fn.__name__
    refuse_while_captured(device, f"the first launch of {name}, which is compiled and loaded then")
    compiled = kernel[(programs,)](**arguments, **options)
    if hasattr(compiled, "__getitem__"):  # nothing comes from a kernel that was interpreted
        _compiled[tuple(kind)] = compiled


@functools.cache
def _parameters(kernel: Any) -> tuple[tuple[str, bool], ...]:
    """The name of each parameter, and whether it is a compile-time one."""
    return tuple((p.name, p.is_constexpr) for p in kernel.params)
