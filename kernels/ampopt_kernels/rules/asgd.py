"""Averaged SGD, as torch defines it (``torch/optim/asgd.py``; Polyak and Juditsky, SICON 30, 1992).

The schedules of ``eta`` and ``mu`` are those of Xu, 1107.2490.
"""

from ampopt_kernels.language import as_float32, jit, maximum, power, tl
from ampopt_kernels.rule import Rule, State

__all__ = ["asgd"]


@jit
def _advanced(s, h, ROUNDED: tl.constexpr):
    """Count the step, and compute the next ``eta`` and ``mu``; ``ROUNDED`` is for float32."""
    step, eta, mu = s
    lr, lambd, alpha, t0, weight_decay = h
    # The first eta is the learning rate at the first applied step. A skipped step may have created
    # the state with another one. It is rounded to float32, as stored etas are.
    eta = tl.where(step > 0, eta, lr)
    if ROUNDED:
        eta = as_float32(eta)
    step = step + 1
    new_eta = lr / power(1 + lambd * lr * step, alpha)
    new_mu = 1 / maximum(step - t0, 1.0)
    return (step, new_eta, new_mu), (eta, 1 - lambd * eta, mu, weight_decay)


@jit
def _scalars(s, h):
    """The step in float32, with ``eta`` rounded as torch stores it."""
    return _advanced(s, h, True)


@jit
def _scalars64(s, h):
    """The step of float64 parameters, without rounding."""
    return _advanced(s, h, False)


@jit
def _update(p, g, state, h, flags):
    """Take the SGD step, and update the average of the parameter."""
    WEIGHT_DECAY: tl.constexpr = flags[0]
    MAXIMIZE: tl.constexpr = flags[1]
    eta, shrinkage, mu, weight_decay = h
    if MAXIMIZE:
        g = -g
    if WEIGHT_DECAY:
        g = g + weight_decay * p
    p = p * shrinkage - eta * g
    ax = tl.where(mu == 1, p, state[0] + (p - state[0]) * mu)
    return p, (ax,)


asgd = Rule(
    update=_update,
    scalars=_scalars,
    scalars64=_scalars64,
    hyper=("lr", "lambd", "alpha", "t0", "weight_decay"),
    flags=("weight_decay", "maximize"),
    state=(State("ax", full=True),),
    scalar_state=(State("step"), State("eta", init="lr"), State("mu", init=1.0)),
)
