"""Lion (Chen et al., 2302.06675, algorithm 2), as its authors' ``lion_pytorch.py`` computes it."""

from ampopt_kernels.language import jit, sign, tl
from ampopt_kernels.rule import Rule, State
from ampopt_kernels.rules.averages import lerp

__all__ = ["lion"]


@jit
def _scalars(s, h):
    """The weights of the gradient in both means, and the share that weight decay keeps."""
    lr, beta1, beta2, weight_decay = h
    return s, (lr, 1 - beta1, 1 - beta2, 1 - lr * weight_decay)


@jit
def _update(p, g, state, h, flags):
    """Move by the sign of a mean of momentum and gradient, and update the momentum."""
    WEIGHT_DECAY: tl.constexpr = flags[0]
    MAXIMIZE: tl.constexpr = flags[1]
    lr, new1, new2, shrinkage = h
    exp_avg = state[0]
    if MAXIMIZE:
        g = -g
    if WEIGHT_DECAY:
        p = p * shrinkage
    direction = sign(lerp(exp_avg, g, new1))
    return p - lr * direction, (lerp(exp_avg, g, new2),)


lion = Rule(
    update=_update,
    scalars=_scalars,
    hyper=("lr", "betas", "weight_decay"),
    flags=("weight_decay", "maximize"),
    state=(State("exp_avg"),),
)
