"""Tensors on other devices, waited for only where the host would read them too early."""

import torch
from torch import Tensor

__all__ = ["carried"]


def carried(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """``tensor`` on ``device``, in ``dtype`` if given.

    On its way to an accelerator the host goes on; whatever runs there runs later. On its way to the
    host it is waited for, as torch would have the host read memory that is yet to be written.
    """
    return tensor.to(device, dtype or tensor.dtype, non_blocking=device.type != "cpu")
