"""Stochastic gradient descent with momentum, as torch defines it (``torch/optim/sgd.py``)."""

from ampopt_kernels.language import jit, tl
from ampopt_kernels.rule import Rule, State

__all__ = ["sgd"]


@jit
def _scalars(s, h):
    """Mark that a step was applied, and choose the dampening of the first or of later ones."""
    (stepped,) = s
    lr, momentum, dampening, weight_decay = h
    # The first step sets the buffer to the undampened gradient. torch recognizes that step by the
    # missing buffer; here the buffer exists even if the first step was skipped, so this counts: 0
    # before the first applied step, 1 after it.
    undampened = tl.where(stepped > 0, 1 - dampening, 1.0)
    return (tl.where(stepped > 0, stepped, 1.0),), (lr, momentum, undampened, weight_decay)


@jit
def _update(p, g, state, h, flags):
    """Update the momentum buffer, if there is one, and the parameter."""
    MOMENTUM: tl.constexpr = flags[0]
    NESTEROV: tl.constexpr = flags[1]
    WEIGHT_DECAY: tl.constexpr = flags[2]
    MAXIMIZE: tl.constexpr = flags[3]
    DAMPENING: tl.constexpr = flags[4]
    lr, momentum, undampened, weight_decay = h
    if MAXIMIZE:
        g = -g
    if WEIGHT_DECAY:
        g = g + weight_decay * p
    if MOMENTUM:
        if DAMPENING:
            buffer = momentum * state[0] + undampened * g
        else:
            buffer = momentum * state[0] + g
        if NESTEROV:
            g = g + momentum * buffer
        else:
            g = buffer
        new_state = (buffer,)
    else:
        new_state = ()
    return p - lr * g, new_state


sgd = Rule(
    update=_update,
    scalars=_scalars,
    hyper=("lr", "momentum", "dampening", "weight_decay"),
    flags=("momentum", "nesterov", "weight_decay", "maximize", "dampening"),
    # x + -0.0 is x for every x, also for -0.0, so the first buffer is the gradient to the bit.
    state=(State("momentum_buffer", init=-0.0, when="momentum"),),
    # Only dampening makes the first step different from later ones.
    scalar_state=(State("stepped", when=("momentum", "dampening")),),
)
