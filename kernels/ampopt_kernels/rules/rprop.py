"""Rprop, as torch defines it (``torch/optim/rprop.py``; Riedmiller and Braun, ICNN 1993)."""

from ampopt_kernels.language import jit, maximum, minimum, tl
from ampopt_kernels.rule import Rule, State

__all__ = ["rprop"]


@jit
def _scalars(s, h):
    """Count the step, and mark the first applied one."""
    (step,) = s
    lr, shrink, grow, smallest, largest = h
    # The first step size is the learning rate at the first applied step. A skipped step may have
    # created the state with another one.
    first = tl.where(step > 0, 0.0, 1.0)
    return (step + 1,), (lr, shrink, grow, smallest, largest, first)


@jit
def _update(p, g, state, h, flags):
    """Adapt each element's step size to the sign of its gradient, and move by it."""
    MAXIMIZE: tl.constexpr = flags[0]
    lr, shrink, grow, smallest, largest, first = h
    if MAXIMIZE:
        g = -g
    agreement = g * state[0]
    old = tl.where(first > 0, lr + 0 * state[1], state[1])
    slower = tl.where(agreement < 0, old * shrink, old)
    step_size = tl.where(agreement > 0, old * grow, slower)
    step_size = minimum(maximum(step_size, smallest), largest)
    # Where the sign has changed, do not move, and store 0, so that the next step sees no change.
    g = tl.where(agreement < 0, 0.0, g)
    p = tl.where(g > 0, p - step_size, tl.where(g < 0, p + step_size, p))
    return p, (g, step_size)


rprop = Rule(
    update=_update,
    scalars=_scalars,
    hyper=("lr", "etas", "step_sizes"),
    flags=("maximize",),
    state=(State("prev"), State("step_size", init="lr", positive=True)),
    scalar_state=(State("step"),),
)
