"""How far rounding errors can take an optimizer: the same step with every result a little off."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ampopt._step.torch_private import TorchDispatchMode, schema_of, uncoalesced_values, written_by

__all__ = ["Rounding"]


class Rounding(TorchDispatchMode):
    """Within this, every float64 result of a torch operation is off by up to so many ``eps``.

    Steps in float64 under several of these differ as steps in a dtype of that ``eps`` may: by
    little where an optimizer is well-conditioned, and by much where it subtracts nearly equal
    numbers, or divides by one that is nearly zero. That is Monte Carlo arithmetic (D. S. Parker,
    "Monte Carlo Arithmetic", UCLA CSD-970002, 1997), and needs no analysis of the optimizer.

    What is not float64 stays as it is: counts and flags are exact in any dtype. So is what a kernel
    computes past torch's dispatcher, for which :meth:`disturb` is applied to what goes in.
    """

    def __init__(self, eps: float, seed: int) -> None:
        """Relative errors up to ``eps``, drawn by a generator of its own from ``seed``."""
        super().__init__()
        self.eps = eps
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func``, and disturb what it has written."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        for tensor in _written(func, args, kwargs, result):
            self.disturb(tensor)
        return result

    def disturb(self, tensor: Any) -> None:
        """Put a tensor's elements off, in place, if it is float64."""
        if not isinstance(tensor, Tensor) or tensor.dtype != torch.float64 or not tensor.numel():
            return
        if tensor.is_sparse:
            tensor = uncoalesced_values(tensor)
        noise = torch.rand(tensor.shape, dtype=torch.float64, generator=self.generator)
        tensor.mul_(noise.mul_(2 * self.eps).add_(1 - self.eps))


def _written(func: Any, args: Any, kwargs: Any, result: Any) -> Iterator[Any]:
    """The tensors that an operation has made or written to; not views, of which nothing is new."""
    for given in written_by(func, args, kwargs):
        yield from given if isinstance(given, (list, tuple)) else [given]
    results = result if isinstance(result, (list, tuple)) else [result]
    for returned, value in zip(schema_of(func).returns, results, strict=False):
        if returned.alias_info is None:
            yield from value if isinstance(value, (list, tuple)) else [value]
