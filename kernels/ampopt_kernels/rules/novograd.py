"""NovoGrad (Ginsburg et al., 1905.11286), as ``pytorch_optimizer``'s ``novograd.py`` has it."""

import torch

from ampopt_kernels.language import jit, tl
from ampopt_kernels.rule import Rule, State

__all__ = ["novograd"]


@jit
def _reduce(p, g, state, h, flags):
    """The term of the squared norm of the gradient."""
    return (g * g,)


@jit
def _scalars(s, h, flags, sums):
    """Update the average of the squared norm, and take its root as the denominator."""
    GRAD_AVERAGING: tl.constexpr = flags[0]
    step, exp_avg_sq = s
    lr, beta1, beta2, eps, weight_decay = h
    first = step == 0
    exp_avg_sq = tl.where(first, sums[0], beta2 * exp_avg_sq + (1 - beta2) * sums[0])
    new1 = step * 0 + 1
    if GRAD_AVERAGING:
        new1 = tl.where(first, 1.0, 1 - beta1)
    return (step + 1, exp_avg_sq), (lr, beta1, new1, tl.sqrt(exp_avg_sq) + eps, weight_decay)


@jit
def _update(p, g, state, h, flags):
    """Add the normalized gradient and weight decay to the average, and move by it."""
    MAXIMIZE: tl.constexpr = flags[1]
    lr, beta1, new1, denominator, weight_decay = h
    if MAXIMIZE:
        g = -g
    exp_avg = beta1 * state[0] + new1 * (g / denominator + weight_decay * p)
    return p - lr * exp_avg, (exp_avg,)


novograd = Rule(
    update=_update,
    reduce=_reduce,
    scalars=_scalars,
    hyper=("lr", "betas", "eps", "weight_decay"),
    flags=("grad_averaging", "maximize"),
    state=(State("exp_avg"),),
    scalar_state=(State("step"), State("exp_avg_sq", dtype=torch.float64)),
)
