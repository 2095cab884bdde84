"""Stochastic gradient descent with momentum, as torch defines it (``torch/optim/sgd.py``)."""

from ampopt_kernels.language import jit, tl
from ampopt_kernels.rule import Rule, State

__all__ = ["sgd"]


@jit
def _scalars(s, h):
    (step,) = s
    lr, momentum, dampening, weight_decay = h
    # The first step sets the buffer to the gradient, undampened; torch knows it by the missing
    # buffer, a kernel that may be skipped knows it by the count of steps taken.
    first = tl.where(step > 0, 0.0, 1.0)
    return (step + 1,), (lr, momentum, 1 - dampening, weight_decay, first)


@jit
def _update(p, g, state, h, flags):
    MOMENTUM: tl.constexpr = flags[0]
    NESTEROV: tl.constexpr = flags[1]
    WEIGHT_DECAY: tl.constexpr = flags[2]
    MAXIMIZE: tl.constexpr = flags[3]
    lr, momentum, undampened, weight_decay, first = h
    if MAXIMIZE:
        g = -g
    if WEIGHT_DECAY:
        g = g + weight_decay * p
    if MOMENTUM:
        buffer = tl.where(first > 0, g, momentum * state[0] + undampened * g)
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
    flags=("momentum", "nesterov", "weight_decay", "maximize"),
    state=(State("momentum_buffer", when="momentum"),),
    scalar_state=(State("step", when="momentum"),),
)
