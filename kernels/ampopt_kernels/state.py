"""The declaration of a tensor that an optimizer keeps for each parameter."""

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ampopt_kernels.codecs import BFLOAT16, NON_NEGATIVE, SIGNED, Codec

__all__ = [
    "MASTER",
    "PARAM",
    "State",
    "codes_key",
    "conditions_of",
    "scale_key",
    "shape_of_lines",
]

MASTER = "master_param"
"""The key of the float32 master weight in ``optimizer.state[p]``."""
PARAM = "param"
"""A value for ``State.init``: the state starts as a copy of the parameter."""


def scale_key(name: str) -> str:
    """The key of the scales of the state ``name``."""
    return f"{name}_scale"


def codes_key(name: str) -> str:
    """The key, in a state dict, of the codes of the state ``name``."""
    return f"{name}_codes"


@dataclass(frozen=True)
class State:
    """One tensor (or 0-d scalar) that an optimizer keeps for each parameter.

    Attributes:
        name: the key in ``optimizer.state[p]``; torch's own name where torch has one.
        init: the value before the first step: a number; the name of the param-group entry that
            holds it; or ``"param"`` for a copy of the parameter, or of its master weight. The entry
            is read when the state is created, which may be in a step that is skipped. A
            rule that needs the entry's value at the first applied step compares a step count with
            0, as ``ampopt_kernels/rules/rprop.py`` does.
        when: the flag under which the state exists, or a tuple of flags that must all be true;
            ``"not FLAG"`` is the opposite. ``None`` for always.
        dtype: dtype in memory: float16, bfloat16, float32 or float64 (of each part, for complex
            parameters); for a scalar state float32 or float64. Values are converted
            to float32 (float64 for float64 parameters) for computing, and rounded once when they
            are stored. ``None`` is the dtype of the parameter, or of its master weight; for a
            scalar state float32, or float64 if that is torch's default dtype.
        shape: ``None`` for one value for each element. ``"rows"`` for one value for each row:
            shape ``[..., m, 1]`` for a parameter of shape ``[..., m, n]``. ``"columns"`` for one
            for each column: shape ``[..., 1, n]``. :attr:`Rule.factors` computes such states.
        positive: whether no value is ever below 0, as in an average of squares. With the option
            ``state_bits=8`` such a state is kept as ``codecs.NON_NEGATIVE``. Others are kept as
            ``codecs.SIGNED``, or as ``codecs.BFLOAT16`` if the rule averages over rows or columns,
            or has a state in full precision that is not a copy of the parameter.
        codec: the codec for ``state_bits=8``, in place of these.
        full: whether the state is kept in full precision whatever ``state_bits`` is; or the flag
            under which it is. States with ``init="param"``, a ``shape`` or a ``dtype`` always are.
            Set it for copies and means of the parameter, and where two states must agree to more
            digits than a codec keeps, such as a difference that must not become negative.
    """

    name: str
    init: float | str = 0.0
    when: str | tuple[str, ...] | None = None
    dtype: torch.dtype | None = None
    shape: str | None = None
    positive: bool = False
    codec: Codec | None = None
    full: bool | str = False

    def __post_init__(self) -> None:
        """Check the declaration, so that the error is raised where the rule is written."""
        if not isinstance(self.init, str | numbers.Real):
            raise TypeError(
                f"State {self.name!r} has init={self.init!r}, which must be a number, the name of "
                "a param-group entry, or 'param' for a copy of the parameter"
            )
        if self.codec is not None and not isinstance(self.codec, Codec):
            raise TypeError(
                f"State {self.name!r} has codec={self.codec!r}, which must be an "
                "ampopt_kernels.Codec, or None for a built-in one"
            )
        always = self.full is True or self.shape or self.dtype or self.init == PARAM
        if self.codec is not None and always:
            raise ValueError(
                f"State {self.name!r} has a codec, but full, shape, dtype or init says that it is "
                "never kept in few bits: remove one of them"
            )
        if self.dtype is not None and self.dtype not in _DTYPES:
            raise ValueError(
                f"State {self.name!r} cannot be kept in {self.dtype!r}: choose torch.float16, "
                "torch.bfloat16, torch.float32 or torch.float64, or omit dtype for the dtype of "
                "the parameter"
            )
        if self.shape not in (None, "rows", "columns"):
            raise ValueError(
                f"State {self.name!r} cannot have the shape {self.shape!r}: choose 'rows' or "
                "'columns' for one value for each of them, or omit shape for one for each element"
            )
        if self.shape is not None and self.init == PARAM:
            raise ValueError(
                f"State {self.name!r} has one value for each of the {self.shape}, so init='param', "
                "a copy of the parameter, does not fit: set init to a number or to the name of a "
                "param-group entry"
            )

    def codec_in(self, bits: int, flags: Mapping[str, bool]) -> Codec | None:
        """The codec that keeps the state in ``bits`` bits; ``None`` for full precision.

        Args:
            bits: 8, 16 or 32.
            flags: the values of the rule's flags, by name.
        """
        full = flags[self.full] if isinstance(self.full, str) else self.full
        if bits == 32 or full or self.shape or self.dtype or self.init == PARAM:
            return None
        if bits == 16:
            return BFLOAT16
        return self.codec or (NON_NEGATIVE if self.positive else SIGNED)

    def beside(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the state for a parameter of ``shape``."""
        return tuple(shape) if self.shape is None else shape_of_lines(shape, self.shape)


def conditions_of(when: str | tuple[str, ...] | None) -> tuple[tuple[str, bool], ...]:
    """Each flag in ``when``, see :attr:`State.when`, and the value that it must have."""
    names = (when,) if isinstance(when, str) else when or ()
    return tuple((name.removeprefix("not "), not name.startswith("not ")) for name in names)


def shape_of_lines(shape: Sequence[int], over: str) -> tuple[int, ...]:
    """The shape of one value for each of the ``"rows"``, or ``"columns"``, of ``shape``."""
    return (*shape[:-1], 1) if over == "rows" else (*shape[:-2], 1, shape[-1])


_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
