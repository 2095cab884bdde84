"""RAdam, as torch defines it (``torch/optim/radam.py``; Liu et al., 1908.03265).

Decoupled weight decay is Loshchilov and Hutter's (1711.05101).
"""

from ampopt_kernels.language import div_rn, jit, power, tl
from ampopt_kernels.rule import Rule, State
from ampopt_kernels.rules.averages import lerp

__all__ = ["radam"]


@jit
def _scalars(s, h):
    """Count the step, and compute the rectification: 0 in steps without it."""
    (step,) = s
    lr, beta1, beta2, eps, weight_decay = h
    step = step + 1
    power2 = power(beta2, step)
    correction2 = 1 - power2
    longest = 2 / (1 - beta2) - 1
    length = longest - 2 * step * power2 / correction2
    # Lengths up to 5 are not rectified: compute with 6 instead, as the formula may divide by 0
    # there, and discard the result. If the longest length is 5 or less, no step is rectified.
    rectified = length > 5
    length = tl.where(rectified, length, 6.0)
    longest = tl.where(longest > 5, longest, 6.0)
    rectification = (length - 4) * (length - 2) * longest
    rectification = rectification / ((longest - 4) * (longest - 2) * length)
    return (step,), (
        lr,
        1 - power(beta1, step),
        tl.sqrt(correction2),
        tl.where(rectified, tl.sqrt(rectification), 0.0),
        1 - beta1,
        beta2,
        1 - beta2,
        eps,
        weight_decay,
        1 - lr * weight_decay,
    )


@jit
def _update(p, g, state, h, flags):
    """Update the averages, and move by the first, adaptively in rectified steps."""
    WEIGHT_DECAY: tl.constexpr = flags[0]
    DECOUPLED: tl.constexpr = flags[1]
    MAXIMIZE: tl.constexpr = flags[2]
    lr, correction1, correction2, rectification, new1, beta2, new2, eps, weight_decay, shrinkage = h
    if MAXIMIZE:
        g = -g
    if WEIGHT_DECAY:
        if DECOUPLED:
            p = p * shrinkage
        else:
            g = g + weight_decay * p
    exp_avg = lerp(state[0], g, new1)
    exp_avg_sq = beta2 * state[1] + new2 * g * g
    change = exp_avg / correction1 * lr
    adaptive = div_rn(correction2, tl.sqrt(exp_avg_sq) + eps)
    change = tl.where(rectification > 0, change * adaptive * rectification, change)
    return p - change, (exp_avg, exp_avg_sq)


radam = Rule(
    update=_update,
    scalars=_scalars,
    hyper=("lr", "betas", "eps", "weight_decay"),
    flags=("weight_decay", "decoupled_weight_decay", "maximize"),
    state=(State("exp_avg"), State("exp_avg_sq", positive=True)),
    scalar_state=(State("step"),),
)
