"""RMSprop, as torch defines it (``torch/optim/rmsprop.py``; Hinton's lecture 6e of 2012).

The centered variant is Graves's (1308.0850).
"""

from ampopt_kernels.language import jit, tl
from ampopt_kernels.rule import Rule, State
from ampopt_kernels.rules.averages import lerp

__all__ = ["rmsprop"]


@jit
def _scalars(s, h):
    """Count the step; besides hyperparameters, ``1 - alpha``."""
    (step,) = s
    lr, alpha, eps, weight_decay, momentum = h
    return (step + 1,), (lr, alpha, 1 - alpha, eps, weight_decay, momentum)


@jit
def _update(p, g, state, h, flags):
    """Update the averages and, with momentum, the buffer, and the parameter."""
    MOMENTUM: tl.constexpr = flags[0]
    CENTERED: tl.constexpr = flags[1]
    WEIGHT_DECAY: tl.constexpr = flags[2]
    MAXIMIZE: tl.constexpr = flags[3]
    lr, alpha, new, eps, weight_decay, momentum = h
    if MAXIMIZE:
        g = -g
    if WEIGHT_DECAY:
        g = g + weight_decay * p
    square_avg = alpha * state[0] + new * g * g
    new_state = (square_avg,)
    variance = square_avg
    if CENTERED:
        grad_avg = lerp(state[1], g, new)
        variance = square_avg - grad_avg * grad_avg
        new_state = new_state + (grad_avg,)
    average = tl.sqrt(variance) + eps
    if MOMENTUM:
        buffer = momentum * state[len(state) - 1] + g / average
        p = p - lr * buffer
        new_state = new_state + (buffer,)
    else:
        p = p - lr * g / average
    return p, new_state


rmsprop = Rule(
    update=_update,
    scalars=_scalars,
    hyper=("lr", "alpha", "eps", "weight_decay", "momentum"),
    flags=("momentum", "centered", "weight_decay", "maximize"),
    state=(
        # Their difference is a variance, which must not become negative.
        State("square_avg", positive=True, full="centered"),
        State("grad_avg", when="centered", full=True),
        State("momentum_buffer", when="momentum"),
    ),
    scalar_state=(State("step"),),
)
