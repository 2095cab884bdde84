"""Codecs: how the elementwise states of an optimizer are stored in 8 or 16 bits.

A :class:`Codec` is two functions in the language of rules. Every backend decodes a state where it
loads it, and encodes it where it stores it, in the pass that runs the rule. All operations of the
built-in codecs are exactly specified (IEEE 754, or integers), so all backends store the same bits.

With blocks, each ``block`` consecutive elements of a parameter, in the order of a contiguous
tensor, share a float32 scale: the smallest power of two above the largest magnitude. Because it is
a power of two, an element is stored with the same spacing whatever else is in its block.
"""

import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ampopt_kernels import torch_language
from ampopt_kernels.language import (
    after_steps,
    chance,
    float_of,
    jit,
    steps_above,
    tl,
    up_or_down,
)
from ampopt_kernels.random_numbers import element_bits, key_of_pair, uniform_part

__all__ = [
    "BFLOAT16",
    "NON_NEGATIVE",
    "SIGNED",
    "WIDE",
    "Codec",
    "decoded",
    "encoded",
    "encoded_each",
    "pair_and_part",
    "scale_of",
    "uniform",
]

BLOCK = 128
"""Elements that share a scale in the built-in codecs: 1/32 byte for each element."""

_DTYPES = (torch.int8, torch.uint8, torch.float16, torch.bfloat16)


@dataclass(frozen=True, eq=False)
class Codec:
    """How a state is stored in fewer bits than it is computed with.

    Eight bits for each element, evenly spaced between the largest magnitudes of a block::

        @jit
        def encode(x, u):
            return tl.floor(x * 127.0 + u)

        @jit
        def decode(code):
            return code * (1 / 127)

        EVEN = Codec(encode, decode, torch.int8)
        State("exp_avg", codec=EVEN)

    Both functions are elementwise, on float32 blocks, in the language of ``ampopt_kernels.Rule``.
    The first step refuses functions that break these rules, before it changes anything.

    Attributes:
        encode: ``encode(x, u) -> code``. ``x`` is an element divided by the scale of its block,
            between -1 and 1 (up to 4 for magnitudes above 2**126), or the element itself if
            ``block`` is 1. ``u`` is a uniform random number in (0, 1), for stochastic rounding:
            ``floor(y + u)`` is ``y`` on average. Returns a whole number that ``dtype`` holds;
            others are clamped. Must return 0 for 0, so that an element that is 0 stays 0.
        decode: ``decode(code) -> x``. Must return 0 for 0, and a finite number for every integer
            code. With a dtype of floats and a ``block`` of 1 it must return the code as it is.
        dtype: dtype in memory: int8, uint8, float16 or bfloat16.
        block: elements that share a scale, a power of two from 32 to 256; 1 for no scale.
    """

    encode: Any
    decode: Any
    dtype: torch.dtype
    block: int = BLOCK

    def __post_init__(self) -> None:
        """Check the declaration, so that the error is raised where the codec is written."""
        for role, takes in (("encode", "(x, u)"), ("decode", "(code)")):
            function = getattr(self, role)
            if not hasattr(function, "fn"):
                raise TypeError(
                    f"Codec {role} must be a function marked with @ampopt_kernels.jit, got "
                    f"{function!r}"
                )
            arguments = list(inspect.signature(function.fn).parameters)
            if len(arguments) != takes.count(",") + 1:
                raise TypeError(
                    f"Codec {role} must take {takes}, but {function.fn.__name__} takes "
                    f"({', '.join(arguments)})"
                )
        if self.dtype not in _DTYPES:
            raise ValueError(
                f"Codec dtype must be torch.int8, torch.uint8, torch.float16 or torch.bfloat16, "
                f"got {self.dtype!r}"
            )
        if type(self.block) is not int or self.block not in (1, 32, 64, 128, 256):
            raise ValueError(
                f"Codec block must be 32, 64, 128 or 256 elements, or 1 for no scale, got "
                f"{self.block!r}"
            )

    @property
    def has_scales(self) -> bool:
        """Whether blocks of elements have scales."""
        return self.block > 1

    @property
    def limits(self) -> tuple[float, float] | None:
        """The least and the greatest code; ``None`` if the dtype is not an integer."""
        if self.dtype.is_floating_point:
            return None
        return float(torch.iinfo(self.dtype).min), float(torch.iinfo(self.dtype).max)

    @functools.cached_property
    def torch_encode(self) -> Any:
        """:attr:`encode` on torch tensors."""
        return torch_language.bind(self.encode)

    @functools.cached_property
    def torch_decode(self) -> Any:
        """:attr:`decode` on torch tensors."""
        return torch_language.bind(self.decode)


# --- the built-in codecs --------------------------------------------------------------------------


# Code 0 is 18 * 2**-12, whose bits are 0x3B900000, before it is subtracted; 126 is 1.


@jit
def _encode_signed(x, u):
    """16 codes for each power of two of the magnitude, with the sign of ``x``."""
    code = steps_above(tl.abs(x) + 0.00439453125, u, 0x3B900000, 19)
    return tl.where(x < 0, -code, code)


@jit
def _decode_signed(code):
    """The number of a code of :func:`_encode_signed`."""
    x = after_steps(tl.abs(code), 0x3B900000, 19) - 0.00439453125
    return tl.where(code < 0, -x, x)


SIGNED = Codec(_encode_signed, _decode_signed, torch.int8)
"""Evenly spaced below 2**-8 of the scale; above, 16 codes for each power of two."""


# Code 0 is 20 * 2**-20, whose bits are 0x37A00000, before it is subtracted; 126 is 1.


@jit
def _encode_wide(x, u):
    """8 codes for each power of two of the magnitude, with the sign of ``x``."""
    code = steps_above(tl.abs(x) + 1.9073486328125e-05, u, 0x37A00000, 20)
    return tl.where(x < 0, -code, code)


@jit
def _decode_wide(code):
    """The number of a code of :func:`_encode_wide`."""
    x = after_steps(tl.abs(code), 0x37A00000, 20) - 1.9073486328125e-05
    return tl.where(code < 0, -x, x)


WIDE = Codec(_encode_wide, _decode_wide, torch.int8)
"""Evenly spaced below 2**-16 of the scale; above, 8 codes for each power of two.

For a state that is divided by one in :data:`NON_NEGATIVE`, both of which reach as far down. Where a
rule divides by the root of such a state, :data:`SIGNED` reaches far enough.
"""


# Code 0 is 18 * 2**-20, whose bits are 0x37900000, before it is subtracted; 254 is 1.


@jit
def _encode_non_negative(x, u):
    """16 codes for each power of two, up to 254 for 1."""
    code = steps_above(x + 1.71661376953125e-05, u, 0x37900000, 19)
    # Numbers that are not 0 never become 0: a step divides by them.
    return tl.where(x > 0, tl.where(code > 1, code, 1.0), 0.0)


@jit
def _decode_non_negative(code):
    """The number of a code of :func:`_encode_non_negative`."""
    return after_steps(code, 0x37900000, 19) - 1.71661376953125e-05


NON_NEGATIVE = Codec(_encode_non_negative, _decode_non_negative, torch.uint8)
"""Zero; evenly spaced below 2**-16 of the scale; above, 16 codes for each power of two."""


@jit
def _encode_bfloat16(x, u):
    """``x`` stochastically rounded to a number that bfloat16 holds."""
    return up_or_down(x, chance(u, 16))


@jit
def _as_is(code):
    """``code`` itself."""
    return code


BFLOAT16 = Codec(_encode_bfloat16, _as_is, torch.bfloat16, block=1)
"""bfloat16, stochastically rounded."""


@jit
def scale_of(largest):
    """The scale of a block, and its reciprocal: powers of two. NaN if an element is NaN.

    Args:
        largest: the bits of the largest magnitude of the block, int32; of a NaN if an element is.
    """
    exponent = largest & 0x7F800000
    exponent = tl.where(exponent < 0x7E000000, exponent, 0x7E000000)  # the reciprocal is a number
    scale = tl.where(largest > 0x7F800000, largest, exponent + 0x00800000)
    return float_of(scale), float_of(0x7E800000 - exponent)


# --- on torch tensors -----------------------------------------------------------------------------

_scale_of, _bits, _key_of_pair, _uniform_part = (
    torch_language.bind(f) for f in (scale_of, element_bits, key_of_pair, uniform_part)
)


def decoded(codes: Tensor, codec: Codec, scales: Tensor | None) -> Tensor:
    """The values of a state.

    Args:
        codes: codes, 1-d, from the beginning of a block on.
        codec: their codec.
        scales: one float32 number for each block; ``None`` without blocks.

    Returns:
        float32, 1-d.
    """
    values = codec.torch_decode(codes.to(torch.float32))
    if scales is None:
        return values
    return values * _spread(scales, codec, values.numel())


def encoded(values: Tensor, codec: Codec, u: Tensor | float) -> tuple[Tensor, Tensor | None]:
    """Codes and scales of ``values``.

    Args:
        values: float32 or float64, 1-d.
        codec: the codec.
        u: a random number in (0, 1) for each element, or 0.5 to round to nearest.

    Returns:
        Codes, 1-d, and float32 scales, one for each block, or ``None`` without blocks.
    """
    x, scales = values.to(torch.float32), None
    if codec.has_scales:
        bits = x.abs().view(torch.int32)  # the integers are in the order of the numbers, NaN last
        padding = -x.numel() % codec.block
        blocks = torch.nn.functional.pad(bits, (0, padding)).view(-1, codec.block)
        scales, reciprocals = _scale_of(blocks.amax(1))
        x = x * _spread(reciprocals, codec, x.numel())
    code = codec.torch_encode(x, torch.as_tensor(u, dtype=torch.float32, device=x.device))
    if (range_ := codec.limits) is not None:
        low, high = range_
        code = torch.where(code > low, code, low)
        code = torch.where(code < high, code, high)
    return code.to(codec.dtype), scales


def uniform(position: Tensor, key: int | Tensor, state: int) -> Tensor:
    """A random number in (0, 1) for each element of a state: multiples of 2**-16, float32.

    Args:
        position: index of each element, int64; see ``element_indices``.
        key: key of the parameter at this step, a number or 0-d int64.
        state: the index of the state; -1 for a 24-bit master. Two states share the bits of a
            random number, the first two with the master.
    """
    keys = torch.as_tensor(key, device=position.device)
    pair, part = pair_and_part(state)
    return _uniform_part(_bits(position, _key_of_pair(keys, pair)), part)


def pair_and_part(state: int) -> tuple[int, int]:
    """Which random bits a state takes: the arguments of ``key_of_pair`` and ``uniform_part``.

    Args:
        state: the index of the state; -1 for a 24-bit master.
    """
    return (0, 2) if state < 0 else (state // 2, state % 2)


def encoded_each(
    states: Sequence[Tensor],
    codecs: Sequence[Codec | None],
    position: Any,
    key: Any,
) -> tuple[list[Tensor], list[Tensor]]:
    """The stored form of states: codes, or values where there is no codec; and all scales.

    Args:
        states: values, 1-d.
        codecs: the codec of each.
        position: index of each element, int64; ``None`` if no state has a codec.
        key: key of the parameter at this step, a number or 0-d int64; ``None`` if no state has a
            codec.
    """
    arrays: list[Tensor] = []
    scales: list[Tensor] = []
    for i, (state, codec) in enumerate(zip(states, codecs, strict=True)):
        if codec is not None:
            state, own = encoded(state, codec, uniform(position, key, i))
            scales += [] if own is None else [own]
        arrays.append(state)
    return arrays, scales


def _spread(scales: Tensor, codec: Codec, n: int) -> Tensor:
    """The scale of each of ``n`` elements."""
    return scales.repeat_interleave(codec.block)[:n]
