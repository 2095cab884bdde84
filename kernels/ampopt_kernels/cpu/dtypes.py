"""The C++ types and conversions of the dtypes of parameters, gradients and states."""

import functools
from pathlib import Path
from typing import NamedTuple

import torch

__all__ = ["CODES", "DTYPES", "CDtype", "preamble"]


class CDtype(NamedTuple):
    """How C++ stores and reads elements of one dtype.

    Attributes:
        c_type: the C++ type of an element in memory.
        load: the C++ function that converts an element to the type of arithmetic; empty if that is
            ``c_type``.
        store: the C++ function that rounds the result to an element, or empty.
    """

    c_type: str
    load: str
    store: str


_HALVES = {
    torch.float16: CDtype("uint16_t", "from_float16", "to_float16"),
    torch.bfloat16: CDtype("uint16_t", "from_bfloat16", "to_bfloat16"),
}
DTYPES = {
    **_HALVES,
    torch.float32: CDtype("float", "", ""),
    torch.float64: CDtype("double", "", ""),
}
"""The dtypes that rules support. ``gradients.cpp`` knows them by their index here."""
CODES = {
    torch.int8: CDtype("int8_t", "int32_t", "int32_t"),
    torch.uint8: CDtype("uint8_t", "int32_t", "int32_t"),
    **_HALVES,
}
"""The dtypes of codes: the numbers of integers are ``int32_t``, and of floats ``float``."""


@functools.cache
def preamble() -> str:
    """The C++ with which every source begins: it has the functions of :data:`DTYPES`, and more."""
    return Path(__file__).with_name("preamble.h").read_text(encoding="utf-8")
