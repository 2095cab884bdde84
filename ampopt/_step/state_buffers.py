"""Where small states live, and step counts: end to end, so that a CPU can take them as one."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ampopt._step.dtensor import local, spread_like
from ampopt_kernels.cpu.bundles import SMALL

__all__ = ["lay_end_to_end", "shares_storage"]


def lay_end_to_end(params: Sequence[Tensor], states: Sequence[dict[str, Any]], name: str) -> None:
    """Move ``state[name]`` of CPU parameters, where it is small, into one buffer, as views of it.

    Values, shapes and dtypes stay. A tensor that shares its storage already, such as one that was
    moved before, stays where it is: parameters whose gradients come and go do not make it move
    at every step. The buffer lives as long as any of its views.
    """
    moved = [
        (state, state[name], part)
        for param, state in zip(params, states, strict=True)
        if param.device.type == "cpu"
        and isinstance(state.get(name), Tensor)
        and 0 < (part := local(state[name])).numel() <= SMALL  # step counts of large ones, too
        and not shares_storage(part)
        and part.is_contiguous()
    ]
    by_dtype: dict[torch.dtype, list[tuple[dict[str, Any], Tensor, Tensor]]] = {}
    for entry in moved:
        by_dtype.setdefault(entry[1].dtype, []).append(entry)
    for entries in by_dtype.values():
        if len(entries) < 2:
            continue
        buffer = torch.cat([old.detach().reshape(-1) for _, _, old in entries])
        parts = buffer.split([old.numel() for _, _, old in entries])
        for (state, whole, old), part in zip(entries, parts, strict=True):
            state[name] = spread_like(part.view(old.shape), whole)


def shares_storage(tensor: Tensor) -> bool:
    """Whether there is more in the memory of ``tensor`` than ``tensor``."""
    tensor = local(tensor)
    if tensor.layout != torch.strided:  # as the momentum of sparse gradients, which has no storage
        return False
    return tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
