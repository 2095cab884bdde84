"""Launches that cost the host little.

At every launch through ``kernel[grid](...)`` Triton binds the arguments, works out what they are
compiled for, and asks the driver where each tensor is: of a step of small tensors that is the
longest part. A compiled kernel knows all that, and takes addresses as numbers.
"""

import functools
from typing import Any

import torch
from torch import Tensor

__all__ = ["launch"]

_compiled: dict[tuple[Any, ...], Any] = {}


def launch(
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
    compiled = kernel[(programs,)](**arguments, **options)
    if hasattr(compiled, "__getitem__"):  # nothing comes from a kernel that was interpreted
        _compiled[tuple(kind)] = compiled


@functools.cache
def _parameters(kernel: Any) -> tuple[tuple[str, bool], ...]:
    """The name of each parameter, and whether it is a compile-time one."""
    return tuple((p.name, p.is_constexpr) for p in kernel.params)
