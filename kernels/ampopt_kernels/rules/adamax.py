"""Adamax, as torch defines it (``torch/optim/adamax.py``; Kingma and Ba, 1412.6980)."""

from ampopt_kernels.codecs import WIDE
from ampopt_kernels.language import jit, maximum, power, tl
from ampopt_kernels.rule import Rule, State
from ampopt_kernels.rules.averages import lerp

__all__ = ["adamax"]


@jit
def _scalars(s, h):
    """Count the step, and correct the bias of the average."""
    (step,) = s
    lr, beta1, beta2, eps, weight_decay = h
    step = step + 1
    return (step,), (lr / (1 - power(beta1, step)), 1 - beta1, beta2, eps, weight_decay)


@jit
def _update(p, g, state, h, flags):
    """Update the average of gradients and the maximum of their magnitudes, and the parameter."""
    WEIGHT_DECAY: tl.constexpr = flags[0]
    MAXIMIZE: tl.constexpr = flags[1]
    step_size, new1, beta2, eps, weight_decay = h
    if MAXIMIZE:
        g = -g
    if WEIGHT_DECAY:
        g = g + weight_decay * p
    exp_avg = lerp(state[0], g, new1)
    exp_inf = maximum(beta2 * state[1], tl.abs(g) + eps)
    return p - step_size * exp_avg / exp_inf, (exp_avg, exp_inf)


adamax = Rule(
    update=_update,
    scalars=_scalars,
    hyper=("lr", "betas", "eps", "weight_decay"),
    flags=("weight_decay", "maximize"),
    state=(
        # Divided by exp_inf itself, not by a root as in Adam.
        State("exp_avg", codec=WIDE),
        State("exp_inf", positive=True),
    ),
    scalar_state=(State("step"),),
)
