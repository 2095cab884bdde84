"""Adadelta, as torch defines it (``torch/optim/adadelta.py``; Zeiler, 1212.5701)."""

from ampopt_kernels.language import jit, tl
from ampopt_kernels.rule import Rule, State

__all__ = ["adadelta"]


@jit
def _scalars(s, h):
    """Count the step; besides hyperparameters, ``1 - rho``."""
    (step,) = s
    lr, rho, eps, weight_decay = h
    return (step + 1,), (lr, rho, 1 - rho, eps, weight_decay)


@jit
def _update(p, g, state, h, flags):
    """Update the averages of squared gradients and of squared updates, and the parameter."""
    WEIGHT_DECAY: tl.constexpr = flags[0]
    MAXIMIZE: tl.constexpr = flags[1]
    lr, rho, new, eps, weight_decay = h
    if MAXIMIZE:
        g = -g
    if WEIGHT_DECAY:
        g = g + weight_decay * p
    square_avg = rho * state[0] + new * g * g
    delta = tl.sqrt(state[1] + eps) / tl.sqrt(square_avg + eps) * g
    acc_delta = rho * state[1] + new * delta * delta
    return p - lr * delta, (square_avg, acc_delta)


adadelta = Rule(
    update=_update,
    scalars=_scalars,
    hyper=("lr", "rho", "eps", "weight_decay"),
    flags=("weight_decay", "maximize"),
    state=(State("square_avg", positive=True), State("acc_delta", positive=True)),
    scalar_state=(State("step"),),
)
