"""NAdam, as torch defines it (``torch/optim/nadam.py``; Dozat, ICLR 2016 workshop).

Decoupled weight decay is Loshchilov and Hutter's (1711.05101).
"""

from ampopt_kernels.language import as_float32, jit, power, tl
from ampopt_kernels.rule import Rule, State
from ampopt_kernels.rules.averages import lerp

__all__ = ["nadam"]


@jit
def _momentum(beta1, momentum_decay, step):
    """The momentum of step ``step``, which grows towards ``beta1``."""
    # 0.96 ** x, written as a power of 2 whose exponent is log2(0.96) * x
    return beta1 * (1 - 0.5 * tl.exp2(-0.05889368905356857 * (step * momentum_decay)))


@jit
def _advanced(s, h, ROUNDED: tl.constexpr):
    """Count the step, and compute momentum and corrections; ``ROUNDED`` rounds as torch does."""
    step, mu_product = s
    lr, beta1, beta2, eps, weight_decay, momentum_decay = h
    step = step + 1
    mu = _momentum(beta1, momentum_decay, step)
    mu_next = _momentum(beta1, momentum_decay, step + 1)
    if ROUNDED:
        # torch multiplies in float32, and the rounding shows in float64 parameters.
        mu_product = as_float32(mu_product * as_float32(mu))
    else:
        mu_product = mu_product * mu
    return (step, mu_product), (
        lr * (1 - mu) / (1 - mu_product),
        lr * mu_next / (1 - mu_product * mu_next),
        1 - power(beta2, step),
        1 - beta1,
        beta2,
        1 - beta2,
        eps,
        weight_decay,
        1 - lr * weight_decay,
    )


@jit
def _scalars(s, h):
    """The step in float32, with ``mu_product`` rounded as torch rounds it."""
    return _advanced(s, h, True)


@jit
def _scalars64(s, h):
    """The step of float64 states, without rounding."""
    return _advanced(s, h, False)


@jit
def _update(p, g, state, h, flags):
    """Update the averages, and move by the gradient and by the average."""
    WEIGHT_DECAY: tl.constexpr = flags[0]
    DECOUPLED: tl.constexpr = flags[1]
    MAXIMIZE: tl.constexpr = flags[2]
    of_gradient, of_average, correction2, new1, beta2, new2, eps, weight_decay, shrinkage = h
    if MAXIMIZE:
        g = -g
    if WEIGHT_DECAY:
        if DECOUPLED:
            p = p * shrinkage
        else:
            g = g + weight_decay * p
    exp_avg = lerp(state[0], g, new1)
    exp_avg_sq = beta2 * state[1] + new2 * g * g
    denominator = tl.sqrt(exp_avg_sq / correction2) + eps
    p = p - of_gradient * g / denominator
    return p - of_average * exp_avg / denominator, (exp_avg, exp_avg_sq)


nadam = Rule(
    update=_update,
    scalars=_scalars,
    scalars64=_scalars64,
    hyper=("lr", "betas", "eps", "weight_decay", "momentum_decay"),
    flags=("weight_decay", "decoupled_weight_decay", "maximize"),
    state=(State("exp_avg"), State("exp_avg_sq", positive=True)),
    scalar_state=(State("step"), State("mu_product", init=1.0)),
)
