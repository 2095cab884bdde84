"""What the state of an optimizer is before a step has been taken with it."""

from typing import Any

import torch

from ampopt.testing.bits import bits

__all__ = ["is_fresh"]


def is_fresh(name: str, value: Any) -> bool:
    """Whether the bits of a state tensor are zeros, which each of our optimizers starts from.

    A buffer of SGD's starts from -0.0, to which a first gradient is added as it is.

    Args:
        name: of the state.
        value: its :class:`ampopt.testing.bits.Bits`.
    """
    zero = torch.zeros((), dtype=value.dtype)
    start = bits(-zero if name == "momentum_buffer" else zero).data
    return value.data in (bytes(len(value.data)), start * (len(value.data) // len(start)))
