"""Sophia (Liu et al., 2305.14342, algorithm 3), as its authors' ``sophia.py`` computes it.

Two rules over the same states: the step, and the update of the Hessian diagonal estimate, which
runs every few steps.
"""

from ampopt_kernels.language import jit, minimum, sign, tl
from ampopt_kernels.rule import Rule, State
from ampopt_kernels.rules.averages import lerp

__all__ = ["sophia", "sophia_hessian"]


@jit
def _scalars(s, h):
    """The weights, and the factor of the Hessian estimate."""
    lr, beta1, beta2, rho, bs, weight_decay = h
    return s, (lr, 1 - beta1, rho * bs, 1 - lr * weight_decay)


@jit
def _update(p, g, state, h, flags):
    """Move by the momentum over the Hessian estimate, at most by ``lr``."""
    WEIGHT_DECAY: tl.constexpr = flags[0]
    MAXIMIZE: tl.constexpr = flags[1]
    lr, new1, curvature, shrinkage = h
    hessian = state[1]
    if MAXIMIZE:
        g = -g
    if WEIGHT_DECAY:
        p = p * shrinkage
    exp_avg = lerp(state[0], g, new1)
    ratio = minimum(tl.abs(exp_avg) / (curvature * hessian + 1e-15), 1.0)
    return p - lr * sign(exp_avg) * ratio, (exp_avg, hessian)


sophia = Rule(
    update=_update,
    scalars=_scalars,
    hyper=("lr", "betas", "rho", "bs", "weight_decay"),
    flags=("weight_decay", "maximize"),
    state=(State("exp_avg"), State("hessian", positive=True)),
)


@jit
def _estimate(s, h):
    """The weights of old and new estimates."""
    beta1, beta2 = h
    return s, (beta2, 1 - beta2)


@jit
def _update_hessian(p, g, state, h, flags):
    """Average the squared gradient into the Hessian estimate."""
    beta2, new2 = h
    return p, (beta2 * state[0] + new2 * g * g,)


sophia_hessian = Rule(
    update=_update_hessian,
    scalars=_estimate,
    hyper=("betas",),
    state=(State("hessian", positive=True),),
)
