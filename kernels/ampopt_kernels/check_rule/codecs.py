"""Checks of the codecs that an author's rule declares for its states."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ampopt_kernels.check_rule.function import Function
from ampopt_kernels.codecs import (
    BFLOAT16,
    NON_NEGATIVE,
    SIGNED,
    WIDE,
    Codec,
    decoded,
    encoded,
    limits,
)
from ampopt_kernels.rule import Rule
from ampopt_kernels.state import State

__all__ = ["check", "functions_of"]

_DRAWS = (2**-16, 0.5, 1 - 2**-16)
"""Random numbers ``u``: the least, the one that rounds to nearest, and the greatest."""


def functions_of(rule: Rule) -> Iterator[tuple[str, Any, int]]:
    """For each function of an author's codecs: its name in messages, itself, and its arguments."""
    for name, _, codec in _authored(rule):
        yield f"encode of state {name!r}", codec.encode, 2
        yield f"decode of state {name!r}", codec.decode, 1


def _authored(rule: Rule) -> Iterator[tuple[str, State, Codec]]:
    """The states with a codec that is not one of this package, their names and codecs."""
    for part in rule.state:
        if part.codec is not None and part.codec not in (BFLOAT16, NON_NEGATIVE, SIGNED, WIDE):
            yield part.name, part, part.codec


def check(rule: Rule, owner: str) -> None:
    """Encode and decode a few numbers by the codecs of a rule.

    Args:
        rule: the rule.
        owner: name of the optimizer class, for the message.

    Raises:
        ValueError: a function of a codec fails, is not elementwise, or does not return 0 for 0;
            ``encode`` returns what the dtype cannot hold; ``decode`` does not undo ``encode``.
        AttributeError: a function uses a function of ``tl`` that not every backend has.
    """
    for name, part, codec in _authored(rule):
        encode = Function(f"encode of state {name!r}", owner, codec.encode.fn, ())
        decode = Function(f"decode of state {name!r}", owner, codec.decode.fn, ())
        _check_decode(decode, codec)
        for u in _DRAWS:
            _check_encode(encode, codec, u, positive=part.positive)
        _check_undone(decode, codec, positive=part.positive)


def _numbers(positive: bool) -> Tensor:
    """Numbers to encode: a block with its largest magnitude 1, some of them small."""
    sizes = torch.tensor([0.0, 1.0, 0.5, 0.3, 2.0**-12], device="cpu")
    return sizes if positive else torch.cat((sizes, -sizes[1:]))


def _check_decode(decode: Function, codec: Codec) -> None:
    """Refuse a ``decode`` that does not return 0 for code 0, and a number for the others."""
    range_ = limits(codec)
    low, high = (-4.0, 4.0) if range_ is None else range_
    codes = torch.arange(low, high + 1, device="cpu")

    def call(block: Tensor) -> dict[str, Any]:
        return decode(lambda x: {"x": x}, codec.torch_decode, block)

    decode.elementwise(call, codes[::3][:3])
    values = call(codes)["x"]
    zero = values[codes == 0].item()
    if zero != 0:
        raise ValueError(
            f"{decode.title} returned {zero:g} for code 0: return 0, so that an element that is 0 "
            "stays 0; encode must then return code 0 for 0 alone"
        )
    if not values.isfinite().all():
        code = codes[~values.isfinite()][0].item()
        raise ValueError(
            f"{decode.title} returned {values[codes == code].item():g} for code {code:g}: return a "
            f"finite number for every code that {codec.dtype} holds"
        )
    if range_ is None and not codec.has_scales and not torch.equal(values, codes):
        raise ValueError(
            f"{decode.title} changes the code, and the codec has dtype {codec.dtype} and block=1: "
            "return the code as it is, since checkpoints take such codes for values; or choose "
            "torch.int8 or torch.uint8, or a block of 32 or more"
        )


def _check_encode(encode: Function, codec: Codec, u: float, *, positive: bool) -> None:
    """Refuse an ``encode`` whose codes are not numbers of the dtype, or not 0 for 0."""

    def call(block: Tensor) -> dict[str, Any]:
        return encode(
            lambda code: {"code": code}, codec.torch_encode, block, torch.full_like(block, u)
        )

    x = _numbers(positive)
    codes = encode.elementwise(call, x)["code"].float()
    if (zero := codes[0].item()) != 0:
        raise ValueError(
            f"{encode.title} returned {zero:g} for x = 0 and u = {u:.4g}: return 0 for 0 and any "
            "u, so that an element that is 0 stays 0"
        )
    is_whole = codec.dtype.is_floating_point | (codes == codes.floor())
    if (wrong := ~(codes.isfinite() & is_whole)).any():
        must = "finite" if codec.dtype.is_floating_point else "a whole number"
        raise ValueError(
            f"{encode.title} returned {codes[wrong][0].item():g} for x = {x[wrong][0].item():.4g} "
            f"and u = {u:.4g}, and a code of {codec.dtype} must be {must}: round by "
            "tl.floor(y + u), which is y on average"
        )


def _check_undone(decode: Function, codec: Codec, *, positive: bool) -> None:
    """Refuse a ``decode`` that does not return about ``x`` for the code of ``x``."""
    x = _numbers(positive)
    x = x[x.abs() >= 0.5]
    for each in x.split(1):  # the largest of its block
        back = decoded(*_with_codec(each, codec))
        if not abs(back - each) <= abs(each) / 2:
            advice = ""
            if each < 0:
                advice = (
                    "; a state that is never below 0 is declared with positive=True, and needs no "
                    "codes for numbers below"
                )
            raise ValueError(
                f"{decode.title} returned {back.item():g} for the code of x = {each.item():g}: it "
                f"must undo encode, whose codes are clamped to {limits(codec) or codec.dtype}"
                + advice
            )


def _with_codec(x: Tensor, codec: Codec) -> tuple[Tensor, Codec, Tensor | None]:
    """``x`` encoded, with the codec and the scales of its blocks."""
    codes, scales = encoded(x, codec, 0.5)
    return codes, codec, scales
