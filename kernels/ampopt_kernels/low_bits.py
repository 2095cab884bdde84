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

from collections.abc import Sequence

import torch
from torch import Tensor

from ampopt_kernels.language import float_bits, jit, tl

__all__ = [
    "CPP",
    "LOW_BITS",
    "has_low_bits",
    "joined",
    "low_bits_of",
    "master_of",
    "split",
    "split_master",
    "with_master",
]

LOW_BITS = torch.int8
"""The dtype of low bits."""


@jit
def joined(param, low, HALF: tl.constexpr):
    """The master: float32.

    Args:
        param: the parameter, converted to float32.
        low: the low bits, int32.
        HALF: whether the parameter is float16; else it is bfloat16.
    """
    bits = float_bits(param).to(tl.int32, bitcast=True)
    if HALF:
        near = low.to(tl.float32) * 2.3283064365386963e-10
        # Up to 2**-13, a last place is always 2**-24.
        near = tl.where(bits < 0, param - near, param + near)
        master = (bits + low * 32).to(tl.float32, bitcast=True)
        return tl.where(tl.abs(param) < 0.0001220703125, near, master)
    else:
        return (bits + low * 256).to(tl.float32, bitcast=True)


@jit
def split(x, u, HALF: tl.constexpr):
    """The parameter, as float32, and the low bits, int32, of the new master ``x``.

    Args:
        x: a block of float32.
        u: a uniform random number in (0, 1) for each element, or 0.5 to round to nearest.
        HALF: as for :func:`joined`.
    """
    x = x.to(tl.float32)
    bits = float_bits(x).to(tl.int32, bitcast=True)
    if HALF:
        full = (bits + (u * 32.0).to(tl.int32)) & -32
        top = (full + 0x1000) & -8192
        low = (full - top) >> 5
        param = top.to(tl.float32, bitcast=True)
        # Up to 2**-13, count steps of 2**-32.
        steps = tl.abs(x) * 4294967296.0
        whole = tl.floor(steps)
        whole = whole + tl.floor((steps - whole) + u)
        places = tl.floor((whole + 128.0) * 0.00390625)
        near = places * 5.960464477539063e-08
        is_near = tl.abs(x) < 0.0001220703125
        param = tl.where(is_near, tl.where(bits < 0, -near, near), param)
        low = tl.where(is_near, (whole - places * 256.0).to(tl.int32), low)
        fits = (tl.abs(x) < 65536.0) & (tl.abs(param) < 65536.0)
        return tl.where(fits, param, x * 65536.0), tl.where(fits, low, 0)
    else:
        full = (bits + (u * 256.0).to(tl.int32)) & -256
        top = (full + 0x8000) & -65536
        finite = (bits & 0x7F800000) != 0x7F800000
        param = tl.where(finite, top.to(tl.float32, bitcast=True), x)
        return param, tl.where(finite, (full - top) >> 8, 0)


CPP = """
static inline float joined_bfloat16(float param, int32_t low) {
    return number(bits(param) + uint32_t(low * 256));
}

static inline float joined_float16(float param, int32_t low) {
    const float step = float(low) * 0x1p-32f;
    const float near = bits(param) >> 31 ? param - step : param + step;
    return math::fabs(param) < 0x1p-13f ? near : number(bits(param) + uint32_t(low * 32));
}

// ``chance`` is 2**16 times the random number. The bits of the parameter and the low bits are side
// by side in those of the master: low bits of 128 or more, which count from above, add 1 to it.
static inline uint16_t split_bfloat16(float x, uint32_t chance, int8_t& low) {
    const bool finite = (bits(x) & 0x7F800000u) != 0x7F800000u;
    const uint32_t full = bits(x) + (finite ? chance >> 8 : 0);
    low = finite ? full >> 8 : 0;
    return (full + (finite ? 0x8000u : 0)) >> 16;
}

static inline float split_float16(float x, uint32_t chance, int8_t& low) {
    const uint32_t b = bits(x), full = (b + (chance >> 11)) & 0xFFFFFFE0u;
    const uint32_t top = (full + 0x1000u) & 0xFFFFE000u;
    const float size = math::fabs(x), steps = size * 0x1p32f;
    float whole = math::floor(steps);
    whole = whole + math::floor((steps - whole) + float(int32_t(chance)) * 0x1p-16f);
    const float places = math::floor((whole + 128.0f) * 0x1p-8f), near = places * 0x1p-24f;
    const bool is_near = size < 0x1p-13f;
    const float param = is_near ? (b >> 31 ? -near : near) : number(top);
    const bool fits = (size < 65536.0f) & (math::fabs(param) < 65536.0f);
    low = !fits ? 0 : is_near ? int32_t(whole - places * 256.0f) : int32_t(full - top) >> 5;
    return fits ? param : x * 65536.0f;
}
"""
""":func:`joined` and :func:`split` in C++, for each dtype of parameters."""


# --- on torch tensors -----------------------------------------------------------------------------


def master_of(param: Tensor, low: Tensor) -> Tensor:
    """:func:`joined` in torch: the master of ``param``, float32, with the shape of both."""
    value, low = param.to(torch.float32), low.to(torch.int32)
    bits = value.view(torch.int32)
    if param.dtype == torch.bfloat16:
        return (bits + low * 256).view(torch.float32)
    near = torch.copysign(low.to(torch.float32) * 2.0**-32, value)
    near = value + torch.where(low < 0, -near, near)
    return torch.where(value.abs() < 2.0**-13, near, (bits + low * 32).view(torch.float32))


def split_master(master: Tensor, dtype: torch.dtype, u: Tensor | float) -> tuple[Tensor, Tensor]:
    """:func:`split` in torch: the parameter of ``dtype``, and the low bits, int8."""
    param, low = _split(master.to(torch.float32), dtype, u)
    return param.to(dtype), low.to(LOW_BITS)


def _split(x: Tensor, dtype: torch.dtype, u: Tensor | float) -> tuple[Tensor, Tensor]:
    """The parameter, float32, and the low bits, int32."""
    bits, u = x.contiguous().view(torch.int32), torch.as_tensor(u, device=x.device)
    if dtype == torch.bfloat16:
        full = (bits + (u * 256.0).to(torch.int32)) & -256
        top = (full + 0x8000) & -65536
        finite = x.isfinite()
        low = torch.where(finite, (full - top) >> 8, 0)
        return torch.where(finite, top.view(torch.float32), x), low
    full = (bits + (u * 32.0).to(torch.int32)) & -32
    top = (full + 0x1000) & -8192
    size = x.abs()
    steps = size * 2.0**32
    whole = steps.floor()
    whole = whole + ((steps - whole) + u).floor()
    places = ((whole + 128.0) * 2.0**-8).floor()
    is_near = size < 2.0**-13
    param = torch.where(is_near, torch.copysign(places * 2.0**-24, x), top.view(torch.float32))
    low = torch.where(is_near, (whole - places * 256.0).to(torch.int32), (full - top) >> 5)
    fits = (size < 65536.0) & (param.abs() < 65536.0)
    return torch.where(fits, param, x * 65536.0), torch.where(fits, low, 0)


def low_bits_of(param: Tensor, master: Tensor) -> Tensor:
    """The low bits with which ``param`` is nearest to ``master``, a float32 tensor: int8.

    If ``param`` is not ``master`` rounded to nearest, they are the largest or the smallest.
    """
    value = param.to(torch.float32)
    top, low = _split(master, param.dtype, 0.5)
    low = torch.where(top == value, low, torch.where(master.abs() > value.abs(), 127, -128))
    low = torch.where(value.isfinite() & (value != 0), low, low.clamp_min(0))
    return torch.where(value.isfinite(), low, 0).to(LOW_BITS)


def has_low_bits(tensors: Sequence[Tensor], n_states: int) -> bool:
    """Whether low bits follow gradient, parameter and ``n_states`` states in ``tensors``."""
    return len(tensors) > 2 + n_states and tensors[2 + n_states].dtype == LOW_BITS


def with_master(tensors: list[Tensor], n_states: int) -> list[Tensor]:
    """``tensors`` with the master in place of a parameter and its low bits, if there are any."""
    if not has_low_bits(tensors, n_states):
        return tensors
    grad, param, *others = tensors
    master = master_of(param, others.pop(n_states))
    return [grad, master, *others]
