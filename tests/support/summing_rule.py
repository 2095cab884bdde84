"""An update rule that sums over parameters, and uses the sums in its scalars."""

from typing import Any

import torch

import ampopt
from ampopt_kernels import Rule, State, jit, tl

__all__ = ["Ratio"]


@jit
def _before(s, h, flags):
    (step, total) = s
    lr, beta = h
    step = step + 1
    return (step, total), (lr, beta, 1 / step)


@jit
def _direction(p, g, average, h):
    lr, beta, share = h
    average = average + (1 - beta) * (g - average)
    return average, average * share + 0.25 * p


@jit
def _reduce(p, g, state, h, flags):
    SQUARED: tl.constexpr = flags[0]
    average, direction = _direction(p, g, state[0], h)
    if SQUARED:
        direction = direction * direction
    return (p * p, tl.abs(direction))


@jit
def _scalars(s, h, flags, sums, totals):
    step, total = s
    lr, beta, share = h
    size, length = sums
    all_sizes, all_lengths = totals
    ratio = tl.where(length > 0, tl.sqrt(size) / length, 1.0)
    total = total + all_lengths / (all_sizes + 1)
    return (step, total), (lr * ratio, beta, share)


@jit
def _update(p, g, state, h, flags):
    average, direction = _direction(p, g, state[0], h)
    return p - h[0] * direction, (average,)


class Ratio(ampopt.ElementwiseOptimizer):
    """A variant of LAMB that uses every feature of ``reduce``: update as long as the parameter."""

    rule = Rule(
        update=_update,
        reduce=_reduce,
        before_reduce=_before,
        scalars=_scalars,
        hyper=("lr", "beta"),
        flags=("squared",),
        state=(State("average"),),
        scalar_state=(State("step"), State("total", dtype=torch.float64)),
    )

    def __init__(self, params: Any, lr: Any = 0.125, squared: bool = False, **options: Any):
        super().__init__(params, {"lr": lr, "beta": 0.5, "squared": squared}, **options)
