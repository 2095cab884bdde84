"""Overflows on demand, for tests of training loops."""

import math
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ampopt.testing.blueprints import elements

__all__ = ["inject_overflow"]


@contextmanager
def inject_overflow(
    params: Iterable[Tensor],
    where: int | tuple[int, int] = 0,
    *,
    value: float = math.inf,
    at: Collection[int] | None = None,
) -> Iterator[None]:
    """Make backward passes within the block leave a non-finite element in a gradient.

    Does not synchronize. Model and loop stay unchanged: a hook writes the element once the gradient
    of the parameter has been accumulated.

    Example:
        >>> import torch, ampopt
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> optimizer, scale = ampopt.SGD([weight], lr=0.5), 4.0
        >>> with inject_overflow([weight], at=[1]):  # the second backward pass
        ...     for _ in range(3):
        ...         optimizer.zero_grad()
        ...         ampopt.scale_outputs(weight.sum(), scale).backward()
        ...         print(optimizer.unscale_and_step(grads_scaled_by=scale).skipped)
        False
        True
        False

    Args:
        params: parameters, which must be leaf tensors that require gradients.
        where: the index of a parameter among ``params``, or the pair of that index and the flat
            index of an element of its gradient; by default the first element of the first
            parameter.
        value: the value to write, an infinity or NaN.
        at: indices of the backward passes of that parameter that overflow, the first being 0;
            ``None`` for all of them.

    Raises:
        ValueError: ``where`` names no parameter or no element, or ``value`` is finite.
    """
    position, element = where if isinstance(where, tuple) else (where, 0)
    every = list(params)
    if math.isfinite(value):
        raise ValueError(f"value must be an infinity or NaN, got {value!r}")
    if not -len(every) <= position < len(every):
        raise ValueError(f"where: got parameter {position}, but there are {len(every)}")
    param = every[position]
    if not -param.numel() <= element < param.numel():
        raise ValueError(
            f"where: got element {element}, but parameter {position} has {param.numel()}"
        )
    passes = 0

    def spoil(holder: Any) -> None:
        nonlocal passes
        passes += 1
        if at is not None and passes - 1 not in at:
            return
        with torch.no_grad():
            values = elements(holder.grad)
            index, rest = [], element % values.numel()
            for size in reversed(values.shape):
                index.append(rest % size)
                rest //= size
            values[tuple(reversed(index))] = value

    handle = param.register_post_accumulate_grad_hook(spoil)
    try:
        yield
    finally:
        handle.remove()
