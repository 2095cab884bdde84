"""The initial value of an optimizer's state."""

from typing import Any

import torch

from ampopt.testing.bits import bits

__all__ = ["is_fresh"]


def is_fresh(name: str, value: Any) -> bool:
    """Whether a state tensor has its initial value: zeros, in all of ampopt's optimizers.

    SGD's momentum buffer starts from -0.0, because -0.0 + g is g for every g.

    Args:
        name: name of the state.
        value: its :class:`ampopt.testing.bits.Bits`.
    """
    zero = torch.zeros((), dtype=value.dtype)
    start = bits(-zero if name == "momentum_buffer" else zero).data
    return value.data in (bytes(len(value.data)), start * (len(value.data) // len(start)))
