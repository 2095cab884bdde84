"""Try out the codecs that an author declares for states, on numbers."""

import torch
from torch import Tensor

from ampopt_kernels.check_rule.function import Function, OwnCodec
from ampopt_kernels.codecs import Codec, decoded, encoded

__all__ = ["check"]

_DRAWS = (2**-16, 0.5, 1 - 2**-16)
"""Random numbers ``u``: the least, the one that rounds to nearest, and the greatest."""


def check(own: OwnCodec) -> None:
    """Refuse a codec that does not keep to what :class:`Codec` says.

    Raises:
        ValueError: a function does not return 0 for 0; ``encode`` returns what the dtype cannot
            hold; or ``decode`` does not undo ``encode``.
    """
    _check_decode(own.decode, own.codec)
    for u in _DRAWS:
        _check_encode(own.encode, own.codec, u, positive=own.positive)
    _check_undone(own.decode, own.codec, positive=own.positive)


def _numbers(positive: bool) -> Tensor:
    """Numbers to encode: a block with its largest magnitude 1, some of them small."""
    sizes = torch.tensor([0.0, 1.0, 0.5, 0.3, 2.0**-12], device="cpu")
    return sizes if positive else torch.cat((sizes, -sizes[1:]))


def _check_decode(decode: Function, codec: Codec) -> None:
    """Refuse a ``decode`` that does not return 0 for code 0, and a number for the others."""
    range_ = codec.limits
    low, high = (-4.0, 4.0) if range_ is None else range_
    codes = torch.arange(low, high + 1, device="cpu")
    values = codec.torch_decode(codes)
    zero = values[codes == 0].item()
    if zero != 0:
        raise decode.returned(
            f"{zero:g} for code 0: return 0, so that an element that is 0 "
            "stays 0; encode must then return code 0 for 0 alone"
        )
    if not values.isfinite().all():
        code = codes[~values.isfinite()][0].item()
        raise decode.returned(
            f"{values[codes == code].item():g} for code {code:g}: return a "
            f"finite number for every code that {codec.dtype} holds"
        )
    if range_ is None and not codec.has_scales and not torch.equal(values, codes):
        raise decode.returned(
            f"another number than the code, and the codec has dtype {codec.dtype} and block=1: "
            "return the code as it is, since checkpoints take such codes for values; or choose "
            "torch.int8 or torch.uint8, or a block of 32 or more"
        )


def _check_encode(encode: Function, codec: Codec, u: float, *, positive: bool) -> None:
    """Refuse an ``encode`` whose codes are not numbers of the dtype, or not 0 for 0."""
    x = _numbers(positive)
    codes = codec.torch_encode(x, torch.full_like(x, u)).float()
    if (zero := codes[0].item()) != 0:
        raise encode.returned(
            f"{zero:g} for x = 0 and u = {u:.4g}: return 0 for 0 and any u, so that an element "
            "that is 0 stays 0"
        )
    is_whole = codec.dtype.is_floating_point | (codes == codes.floor())
    if (wrong := ~(codes.isfinite() & is_whole)).any():
        must = "finite" if codec.dtype.is_floating_point else "a whole number"
        raise encode.returned(
            f"{codes[wrong][0].item():g} for x = {x[wrong][0].item():.4g} and u = {u:.4g}, and a "
            f"code of {codec.dtype} must be {must}: round by tl.floor(y + u), which is y on average"
        )


def _check_undone(decode: Function, codec: Codec, *, positive: bool) -> None:
    """Refuse a ``decode`` that does not return about ``x`` for the code of ``x``."""
    x = _numbers(positive)
    x = x[x.abs() >= 0.5]
    for each in x.split(1):  # the largest of its block
        codes, scales = encoded(each, codec, 0.5)
        back = decoded(codes, codec, scales)
        if not abs(back - each) <= abs(each) / 2:
            advice = ""
            if each < 0:
                advice = (
                    "; a state that is never below 0 is declared with positive=True, and needs no "
                    "codes for numbers below"
                )
            raise decode.returned(
                f"{back.item():g} for the code of x = {each.item():g}: it must undo encode, whose "
                f"codes are clamped to {codec.limits or codec.dtype}{advice}"
            )
