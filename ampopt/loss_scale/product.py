"""The product of a tensor and a loss scale."""

from typing import Any

import torch
from torch import Tensor

from ampopt_kernels.devices import to_device

__all__ = ["product"]


def product(output: Any, scale: float | Tensor, what: str = "outputs holds") -> Tensor:
    """``output`` times ``scale``: float64 for a float64 output, else float32.

    Args:
        output: a floating-point tensor.
        scale: a number, or a 0-d tensor on any device.
        what: the subject and verb of the error messages.

    Raises:
        TypeError: ``output`` is not a floating-point tensor.
        ValueError: ``scale`` is on meta, and ``output`` is not.
    """
    if not isinstance(output, Tensor):
        raise TypeError(
            f"{what} a {type(output).__name__}; only floating-point tensors can be scaled. "
            "Leave out what has no gradient, and register a class of your own with "
            "torch.utils._pytree.register_pytree_node."
        )
    if not output.is_floating_point():
        raise TypeError(
            f"{what} a tensor of {output.dtype}; only floating-point tensors can be scaled. "
            "Leave out what has no gradient."
        )
    dtype = torch.float64 if output.dtype == torch.float64 else torch.float32
    if isinstance(scale, Tensor):
        if scale.is_meta and not output.is_meta:
            raise ValueError(
                "S: the scale is on meta, where it has no number; make it without device=, or on "
                f"{str(output.device)!r}"
            )
        scale = to_device(scale, output.device, dtype)
    return output.to(dtype) * scale
