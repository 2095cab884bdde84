"""Rounding errors made larger on purpose, to measure how far they take an optimizer."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ampopt._step.torch_private import TorchDispatchMode, schema_of, written_by
from ampopt.testing.blueprints import elements

__all__ = ["Rounding"]


class Rounding(TorchDispatchMode):
    """A dispatch mode that gives float64 results of torch operations a random relative error.

    Float64 steps under several such modes differ as steps in a dtype of that ``eps`` may: little
    where an optimizer is well-conditioned, and much where it subtracts nearly equal numbers or
    divides by a number near zero. This is Monte Carlo arithmetic (D. S. Parker, "Monte Carlo
    Arithmetic", UCLA CSD-970002, 1997); it needs no analysis of the optimizer.

    Tensors of other dtypes are left alone: counts and flags are exact in any dtype. Kernels that
    bypass torch's dispatcher are not reached; call :meth:`disturb` on their inputs instead.
    """

    def __init__(self, eps: float, seed: int) -> None:
        """Draw relative errors of up to ``eps`` from a generator seeded with ``seed``."""
        super().__init__()
        self.eps = eps
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func``, and disturb the tensors that it created or wrote to."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        for tensor in _written_tensors(func, args, kwargs, result):
            self.disturb(tensor)
        return result

    def disturb(self, tensor: Any) -> None:
        """Multiply each element of a float64 tensor by a random factor near 1, in place.

        Anything else is left alone.
        """
        if not isinstance(tensor, Tensor) or tensor.dtype != torch.float64 or not tensor.numel():
            return
        values = elements(tensor)
        noise = torch.rand(values.shape, dtype=torch.float64, generator=self.generator)
        values.mul_(noise.mul_(2 * self.eps).add_(1 - self.eps))


def _written_tensors(func: Any, args: Any, kwargs: Any, result: Any) -> Iterator[Any]:
    """The tensors that an operation created or wrote to; views hold no new data."""
    for argument in written_by(func, args, kwargs):
        yield from argument if isinstance(argument, (list, tuple)) else [argument]
    results = result if isinstance(result, (list, tuple)) else [result]
    for output, value in zip(schema_of(func).returns, results, strict=False):
        if output.alias_info is None:
            yield from value if isinstance(value, (list, tuple)) else [value]
