"""LARS (You et al., 1708.03888), as ``pytorch_optimizer``'s ``lars.py`` computes it."""

from ampopt_kernels.language import jit, tl
from ampopt_kernels.rule import Rule, State

__all__ = ["lars"]


@jit
def _reduce(p, g, state, h, flags):
    """The terms of the squared norms of parameter and gradient."""
    return p * p, g * g


@jit
def _scalars(s, h, flags, sums):
    """Compute the ratio of norms, which multiplies the gradient."""
    ADAPT: tl.constexpr = flags[0]
    lr, momentum, dampening, weight_decay, trust_coefficient = h
    size, slope = tl.sqrt(sums[0]), tl.sqrt(sums[1])
    ratio = size * 0 + 1
    if ADAPT:
        length = slope + weight_decay * size
        ratio = tl.where((size > 0) & (length > 0), trust_coefficient * size / length, 1.0)
    return s, (lr, momentum, 1 - dampening, weight_decay, ratio)


@jit
def _update(p, g, state, h, flags):
    """Update the momentum buffer by the gradient times the ratio, and the parameter."""
    MOMENTUM: tl.constexpr = flags[1]
    NESTEROV: tl.constexpr = flags[2]
    MAXIMIZE: tl.constexpr = flags[3]
    lr, momentum, new, weight_decay, ratio = h
    if MAXIMIZE:
        g = -g
    direction = ratio * (g + weight_decay * p)
    if MOMENTUM:
        buffer = momentum * state[0] + new * direction
        new_state = (buffer,)
        if NESTEROV:
            direction = direction + momentum * buffer
        else:
            direction = buffer
    else:
        new_state = ()
    return p - lr * direction, new_state


lars = Rule(
    update=_update,
    reduce=_reduce,
    scalars=_scalars,
    hyper=("lr", "momentum", "dampening", "weight_decay", "trust_coefficient"),
    flags=("adapt", "momentum", "nesterov", "maximize"),
    state=(State("momentum_buffer", when="momentum"),),
)
