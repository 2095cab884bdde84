"""What an optimizer keeps for each parameter, as its rule declares it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["MASTER", "PARAM", "State"]

MASTER = "master_param"
"""Where ``optimizer.state[p]`` keeps the float32 master of ``p``, beside the states of the rule."""
PARAM = "param"
"""As ``State.init``: what the parameter is when the state is made."""


@dataclass(frozen=True)
class State:
    """One tensor (or 0-d scalar) that an optimizer keeps for each parameter.

    Attributes:
        name: the key in ``optimizer.state[p]``; torch's own name where torch has one.
        init: its value before the first step: a number; the name of the param-group entry that
            holds it; or ``"param"`` for a copy of the parameter, of its master if it has one. It is
            read when the state is made, which a skipped step may do; a rule that wants the entry's
            value at the first step taken knows that step by its count.
        when: the flag under which it exists, or several, under all of which; ``None`` for always.
            ``"not FLAG"`` is without that one.
        dtype: what it is kept in: float16, bfloat16, float32 or float64, and of complex parameters
            the complex dtype of two such; of a scalar, float32 or float64. What is loaded is
            converted to the arithmetic dtype, and rounded once when it is stored. ``None`` is the
            dtype of the parameter, or its master, and of scalars float32, or float64 if that is
            torch's default dtype.
        shape: ``None`` for a value for each element. ``"rows"`` for one for each row, of shape
            ``[..., m, 1]`` beside a parameter of shape ``[..., m, n]``, or ``"columns"``, of shape
            ``[..., 1, n]``: its *marginals*, which :attr:`Rule.averages` makes.
    """

    name: str
    init: float | str = 0.0
    when: str | tuple[str, ...] | None = None
    dtype: torch.dtype | None = None
    shape: str | None = None

    def __post_init__(self) -> None:
        """Check dtype and shape."""
        if self.dtype is not None and self.dtype not in _DTYPES:
            raise ValueError(
                f"State {self.name!r} cannot be kept in {self.dtype!r}: choose torch.float16, "
                "torch.bfloat16, torch.float32 or torch.float64, or leave dtype out for the "
                "parameter's own"
            )
        if self.shape not in (None, "rows", "columns"):
            raise ValueError(
                f"State {self.name!r} cannot have the shape {self.shape!r}: choose 'rows' or "
                "'columns', for one value for each, or leave shape out for one for each element"
            )
        if self.shape is not None and self.init == PARAM:
            raise ValueError(
                f"State {self.name!r} has one value for each of the {self.shape}, and cannot begin "
                "as a copy of the parameter: begin with a number or a param-group entry"
            )

    @property
    def needs(self) -> tuple[tuple[str, bool], ...]:
        """Each flag that it depends on, with the truth under which it exists."""
        when = (self.when,) if isinstance(self.when, str) else self.when or ()
        return tuple((name.removeprefix("not "), not name.startswith("not ")) for name in when)

    def beside(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Its shape beside a parameter of ``shape``."""
        if self.shape is None:
            return tuple(shape)
        return (*shape[:-1], 1) if self.shape == "rows" else (*shape[:-2], 1, shape[-1])


_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
