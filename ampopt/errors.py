"""The error that ends a replay."""

from collections.abc import Sequence
from typing import Literal

__all__ = ["NonFiniteGradientError"]


class NonFiniteGradientError(FloatingPointError):
    """No scale made the gradients of a closure finite.

    Parameters and optimizer state are bitwise what they were before the call.

    Attributes:
        reason: ``"loss"`` if the loss itself is not finite, so that no scale can help;
            ``"replays"`` if the gradients still overflowed when the replays ended.
        parameters: those whose gradients are not finite, by the names of ``named_parameters()``
            if the optimizer was given them, else by group and position.
        module: the name of the first module that made something not finite, of those that
            :func:`ampopt.first_nonfinite` watches around the call; ``None`` if none was seen.
    """

    def __init__(
        self,
        message: str,
        *,
        reason: Literal["loss", "replays"],
        parameters: Sequence[str],
        module: str | None = None,
    ) -> None:
        """Make the error; see the class for its arguments."""
        super().__init__(message)
        self.reason = reason
        self.parameters = list(parameters)
        self.module = module

    def __reduce__(self):  # an exception with keyword arguments has to say how it is pickled
        """Support pickling, which process pools do to errors."""
        return _rebuild, (str(self), self.reason, self.parameters, self.module)


def _rebuild(message: str, reason, parameters: list[str], module) -> NonFiniteGradientError:
    return NonFiniteGradientError(message, reason=reason, parameters=parameters, module=module)
