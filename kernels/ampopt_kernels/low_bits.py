"""24-bit master weights: a half-precision parameter, and 8 more bits of its master.

The master is a float32 number of which only 24 bits may be set: 16 more than bfloat16 has, or 18
bits of significand where the parameter is float16. The parameter is the master rounded to nearest,
ties away from zero. The *low bits*, int8, say how many steps the master is above the parameter, in
magnitude; a step is a 256th of the parameter's last place.

A new master is rounded stochastically, by the random numbers of :mod:`ampopt_kernels.codecs`, so
that it is the float32 number on average. All operations are exact, or on integers, so that every
backend stores the same bits.

A bfloat16 master is within 2**-15 of its magnitude of the float32 number. So is that of a float16
parameter above 2**-17; below, it is within 2**-32, as float16 has no smaller exponents. A float16
parameter beyond 65504 is infinite, as with float32 masters, and so is its master.
"""

import torch
from torch import Tensor

from ampopt_kernels import torch_language
from ampopt_kernels.language import chance, float_of, int_bits, jit, tl

__all__ = [
    "LOW_BITS",
    "joined",
    "low_bits_of",
    "master_of",
    "split",
    "split_master",
]

LOW_BITS = torch.int8
"""The dtype of low bits."""


@jit
def joined(param, low, HALF: tl.constexpr):
    """The master: float32.

    A user may have written to the parameter since, and not to the low bits. Low bits are ignored if
    the parameter is NaN, or if they would make it NaN, as negative ones make 0.

    Args:
        param: the parameter, converted to float32.
        low: the low bits, int32.
        HALF: whether the parameter is float16; else it is bfloat16.
    """
    bits = int_bits(param)
    if HALF:
        near = low.to(tl.float32) * 2.3283064365386963e-10
        # Up to 2**-13, a last place is always 2**-24.
        near = tl.where(bits < 0, param - near, param + near)
        whole = tl.where(tl.abs(param) < 0.0001220703125, near, float_of(bits + low * 32))
    else:
        whole = float_of(bits + low * 256)
    added = whole - param
    return tl.where(added == added, whole, param)


@jit
def split(x, u, HALF: tl.constexpr):
    """The parameter, as float32, and the low bits of the new master ``x``.

    The low bits are the last 8 of an int32, which a conversion to int8 keeps.

    Args:
        x: a block of float32.
        u: a uniform random number in (0, 1) for each element, or 0.5 to round to nearest.
        HALF: as for :func:`joined`.
    """
    x = x.to(tl.float32)
    bits = int_bits(x)
    if HALF:
        full = (bits + chance(u, 5)) & -32
        top = (full + 0x1000) & -8192
        # Up to 2**-13, count steps of 2**-32.
        steps = tl.abs(x) * 4294967296.0
        whole = tl.floor(steps)
        whole = whole + tl.floor((steps - whole) + u)
        places = tl.floor((whole + 128.0) * 0.00390625)
        # Not ``-near``, which is 0 - near in Triton 3.6: it has no -0.
        near = places * tl.where(bits < 0, -5.960464477539063e-08, 5.960464477539063e-08)
        is_near = tl.abs(x) < 0.0001220703125
        param = tl.where(is_near, near, float_of(top))
        low = tl.where(is_near, (whole - places * 256.0).to(tl.int32), (full - top) >> 5)
        fits = (tl.abs(x) < 65536.0) & (tl.abs(param) < 65536.0)
        return tl.where(fits, param, x * 65536.0), tl.where(fits, low, 0)
    else:
        # The parameter and the low bits are side by side in the bits of the master. Low bits of 128
        # or more are below 0 as int8: they add 1 to the parameter. The upper half of a NaN that
        # arithmetic returned is NaN.
        finite = (bits & 0x7F800000) != 0x7F800000
        full = bits + chance(u, 8)
        param = float_of(tl.where(finite, full + 0x8000, bits) & -65536)
        return param, tl.where(finite, full >> 8, 0)


_joined, _split = map(torch_language.bind, (joined, split))


def master_of(param: Tensor, low: Tensor) -> Tensor:
    """:func:`joined` on torch tensors: the master of ``param``, with the shape of both."""
    return _joined(param.to(torch.float32), low.to(torch.int32), param.dtype == torch.float16)


def split_master(master: Tensor, dtype: torch.dtype, u: Tensor | float) -> tuple[Tensor, Tensor]:
    """:func:`split` on torch tensors: the parameter of ``dtype``, and the low bits, int8."""
    u = torch.as_tensor(u, device=master.device)
    param, low = _split(master.to(torch.float32), u, dtype == torch.float16)
    return param.to(dtype), low.to(LOW_BITS)


def low_bits_of(param: Tensor, master: Tensor) -> Tensor:
    """The low bits with which ``param`` is nearest to ``master``, a float32 tensor: int8.

    If ``param`` is not ``master`` rounded to nearest, they are the largest or the smallest.
    """
    value = param.to(torch.float32)
    top, low = split_master(master, param.dtype, 0.5)
    low = torch.where(top == param, low, torch.where(master.abs() > value.abs(), 127, -128))
    low = torch.where(value.isfinite() & (value != 0), low, low.clamp_min(0))
    return torch.where(value.isfinite(), low, 0).to(LOW_BITS)
