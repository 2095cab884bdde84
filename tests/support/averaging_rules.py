"""Rules that average over rows and columns, and need no state of these shapes for each mean."""

from typing import Any

import ampopt
from ampopt_kernels import Rule, State, jit, tl

__all__ = ["Centered", "Damped"]


@jit
def _gradient(p, g, state, h, flags):
    return (g,)


@jit
def _falling(s, h, flags):
    return (s[0] + 1,), (h[0] / (s[0] + 1),)


@jit
def _centered(p, g, state, h, flags):
    VECTOR: tl.constexpr = flags[0]
    if VECTOR:
        return p - h[0] * g, ()
    else:
        return p - h[0] * (g - state[0]), ()


class Centered(ampopt.ElementwiseOptimizer):
    """SGD whose gradients have a mean of 0 over each row; keeps a step count and nothing else."""

    rule = Rule(
        update=_centered,
        averages=_gradient,
        averages_over=("rows",),
        averages_when="not vector",
        scalars=_falling,
        hyper=("lr",),
        flags=("vector",),
        entries=lambda group, ndim, dtype: {"vector": ndim < 2},
        scalar_state=(State("step"),),
    )

    def __init__(self, params: Any, lr: float = 0.5, **options: Any) -> None:
        super().__init__(params, {"lr": lr}, **options)


@jit
def _products(p, g, state, h, flags):
    return g * state[0], state[1]


def _by_row(means: Any, state: Any, h: Any, flags: Any) -> Any:
    new = 0.5 * state[0] + 0.5 * means[0]
    return (new,), (new, means[1])


@jit
def _damped(p, g, state, h, flags):
    VECTOR: tl.constexpr = flags[0]
    momentum = 0.75 * state[0] + g
    square = 0.5 * state[1] + 0.5 * g * g
    if VECTOR:
        damping = 1.0
    else:
        damping = 1.0 + tl.abs(state[2]) + state[3]
    return p - h[0] * momentum / damping, (momentum, square)


class Damped(ampopt.ElementwiseOptimizer):
    """Momentum divided by means over rows and columns of its own elementwise states."""

    rule = Rule(
        update=_damped,
        averages=_products,
        averages_over=("rows", "columns"),
        averages_when="not vector",
        factors=_by_row,
        hyper=("lr",),
        flags=("vector",),
        entries=lambda group, ndim, dtype: {"vector": ndim < 2},
        state=(
            State("row_mean", shape="rows", when="not vector"),
            State("momentum"),
            State("square", positive=True),
        ),
    )

    def __init__(self, params: Any, lr: float = 0.25, **options: Any) -> None:
        super().__init__(params, {"lr": lr}, **options)
