"""The error of a closure whose gradients stay non-finite under every scale."""

from collections.abc import Sequence
from typing import Literal

__all__ = ["NonFiniteGradientError"]


class NonFiniteGradientError(FloatingPointError):
    """The gradients, or the loss, of a closure were not finite under any scale that was tried.

    Parameters and optimizer state are bitwise what they were before the call.

    Attributes:
        reason: ``"loss"`` if the loss itself is not finite, so that no scale can help;
            ``"replays"`` if gradients overflowed in the last replay, or under a static scale.
        parameters: the names of the parameters whose gradients are not finite, as
            ``named_parameters()`` gave them to the optimizer, else group and position.
        module: the name of the first module that returned inf or NaN, if the call ran within
            :func:`ampopt.first_nonfinite`; else ``None``.
    """

    def __init__(
        self,
        message: str,
        *,
        reason: Literal["loss", "replays"],
        parameters: Sequence[str],
        module: str | None = None,
    ) -> None:
        """Store the attributes; see the class."""
        super().__init__(message)
        self.reason = reason
        self.parameters = list(parameters)
        self.module = module

    def __reduce__(self):  # the default passes positional arguments only
        """Support pickling, with which process pools pass errors on."""
        return _rebuild, (str(self), self.reason, self.parameters, self.module)


def _rebuild(message: str, reason, parameters: list[str], module) -> NonFiniteGradientError:
    """The error with its keyword arguments, for unpickling, which passes positional ones."""
    return NonFiniteGradientError(message, reason=reason, parameters=parameters, module=module)
