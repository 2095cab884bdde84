"""Adagrad, as torch defines it (``torch/optim/adagrad.py``; Duchi, Hazan and Singer, JMLR 12)."""

from ampopt_kernels.language import jit, tl
from ampopt_kernels.rule import Rule, State

__all__ = ["adagrad"]


@jit
def _scalars(s, h):
    """Count the step, and decay the learning rate."""
    (step,) = s
    lr, lr_decay, eps, weight_decay = h
    return (step + 1,), (lr / (1 + step * lr_decay), eps, weight_decay)


@jit
def _update(p, g, state, h, flags):
    """Add the squared gradient to its sum, and update the parameter."""
    WEIGHT_DECAY: tl.constexpr = flags[0]
    MAXIMIZE: tl.constexpr = flags[1]
    step_size, eps, weight_decay = h
    if MAXIMIZE:
        g = -g
    if WEIGHT_DECAY:
        g = g + weight_decay * p
    total = state[0] + g * g
    return p - step_size * g / (tl.sqrt(total) + eps), (total,)


adagrad = Rule(
    update=_update,
    scalars=_scalars,
    hyper=("lr", "lr_decay", "eps", "weight_decay"),
    flags=("weight_decay", "maximize"),
    state=(State("sum", init="initial_accumulator_value", positive=True),),
    scalar_state=(State("step"),),
)
