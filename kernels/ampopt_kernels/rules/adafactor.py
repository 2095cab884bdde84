"""Adafactor (Shazeer and Stern, 1804.04235) as ``torch/optim/_adafactor.py`` computes it."""

from typing import Any

import torch

from ampopt_kernels.language import jit, maximum, minimum, tl
from ampopt_kernels.rule import Rule, State
from ampopt_kernels.rules.averages import lerp

__all__ = ["adafactor"]


def _entries(group: Any, ndim: int, dtype: torch.dtype) -> dict[str, Any]:
    """The flag ``vector`` of a parameter, and its epsilons; the first may depend on its dtype."""
    eps1, eps2 = group["eps"]
    return {
        "vector": ndim < 2,
        "eps": (torch.finfo(dtype).eps if eps1 is None else eps1, eps2),
    }


@jit
def _before_reduce(s, h, flags):
    """Count the step, and compute the weight of new statistics and the longest step size."""
    (step,) = s
    lr, beta2_decay, eps1, eps2, d, weight_decay = h
    step = step + 1
    new = tl.exp(beta2_decay * tl.log(step))
    longest = minimum(lr, 1 / tl.sqrt(step))
    return (step,), (new, 1 / eps1, eps1, eps2, longest, d, 1 - lr * weight_decay)


@jit
def _averages(p, g, state, h, flags):
    """The squared gradient, to be averaged over rows and over columns."""
    square = g * g
    return square, square


def _factors(means: Any, state: Any, h: Any, flags: Any) -> Any:
    """The new row and column statistics, and their factors of the inverse root of the variance."""
    new, _, eps1, *_ = h
    row_var, col_var = (torch.lerp(old, mean, new) for old, mean in zip(state, means, strict=True))
    mean = row_var.mean(-2, keepdim=True).clamp(min=eps1)
    # Take roots of the small factors, not of their product, which has the size of the matrix.
    return (row_var, col_var), (row_var.rsqrt(), (col_var / mean).rsqrt())


@jit
def _state_and_direction(p, g, state, h, flags):
    """The new state of a vector (a matrix has none here), and the direction before clipping."""
    VECTOR: tl.constexpr = flags[0]
    MAXIMIZE: tl.constexpr = flags[1]
    new, largest = h[0], h[1]
    if MAXIMIZE:
        g = -g
    if VECTOR:
        variance = lerp(state[0], g * g, new)
        return (variance,), minimum(tl.rsqrt(variance), largest) * g
    else:
        return (), minimum(state[0] * state[1], largest) * g


@jit
def _reduce(p, g, state, h, flags):
    """The terms of the squared norms of parameter and direction, and of the number of elements."""
    _, direction = _state_and_direction(p, g, state, h, flags)
    return p * p, direction * direction, tl.where(p == p, 1.0, 1.0)


@jit
def _scalars(s, h, flags, sums):
    """The step size: the parameter's root mean square times a factor, clipped by the update's."""
    new, largest, _, eps2, longest, d, shrinkage = h
    size, length, count = sums
    alpha = maximum(tl.sqrt(size / count), eps2) * longest
    return s, (new, largest, alpha / maximum(tl.sqrt(length / count) / d, 1.0), shrinkage)


@jit
def _update(p, g, state, h, flags):
    """Move the parameter in the clipped direction, after weight decay."""
    state, direction = _state_and_direction(p, g, state, h, flags)
    return p * h[3] - h[2] * direction, state


adafactor = Rule(
    update=_update,
    before_reduce=_before_reduce,
    averages=_averages,
    factors=_factors,
    reduce=_reduce,
    scalars=_scalars,
    entries=_entries,
    hyper=("lr", "beta2_decay", "eps", "d", "weight_decay"),
    flags=("vector", "maximize"),
    state=(
        State("variance", when="vector", positive=True),
        State("row_var", shape="rows", when="not vector"),
        State("col_var", shape="columns", when="not vector"),
    ),
    scalar_state=(State("step"),),
)
