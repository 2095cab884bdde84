"""The C++ types, conversions and bits of the dtypes of parameters, gradients and states."""

import functools
from pathlib import Path
from typing import NamedTuple

import torch

__all__ = ["DTYPES", "CDtype", "preamble"]


class CDtype(NamedTuple):
    """How C++ stores and reads elements of one dtype.

    Attributes:
        c_type: the C++ type of an element in memory.
        load: the C++ function that converts an element to float32; empty if arithmetic is in this
            dtype.
        store: the C++ function that rounds a float32 number to an element, or empty.
        integer: the integer dtype of the same width.
        infinity: the bits of infinity, as an integer.
    """

    c_type: str
    load: str
    store: str
    integer: torch.dtype
    infinity: int


DTYPES = {
    torch.float16: CDtype("uint16_t", "from_float16", "to_float16", torch.int16, 0x7C00),
    torch.bfloat16: CDtype("uint16_t", "from_bfloat16", "to_bfloat16", torch.int16, 0x7F80),
    torch.float32: CDtype("float", "", "", torch.int32, 0x7F800000),
    torch.float64: CDtype("double", "", "", torch.int64, 0x7FF0000000000000),
}
"""The dtypes that rules support. ``gradients.cpp`` knows them by their index here."""


@functools.cache
def preamble() -> str:
    """The C++ with which every source begins: it has the functions of :data:`DTYPES`, and more."""
    return Path(__file__).with_name("preamble.h").read_text(encoding="utf-8")
