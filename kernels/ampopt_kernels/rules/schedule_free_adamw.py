"""Schedule-free AdamW (Defazio et al., 2405.15682), as its authors' ``schedule_free`` computes it.

The parameter is where gradients are taken, ``y`` of the paper; the average ``x`` lies on the line
through it and ``z``.
"""

import torch

from ampopt_kernels.language import jit, maximum, power, tl
from ampopt_kernels.rule import Rule, State
from ampopt_kernels.rules.averages import lerp

__all__ = ["schedule_free_adamw"]


@jit
def _scalars(s, h):
    """Count the step, and compute its learning rate, and its weight in the average."""
    step, lr_max, weight_sum = s
    lr, beta1, beta2, eps, weight_decay, warmup_steps, r, weight_lr_power = h
    step = step + 1
    lr = lr * tl.where(step < warmup_steps, step / warmup_steps, 1.0)
    lr_max = maximum(lr, lr_max)
    # power() needs an exponent above 0; x ** 0 is 1, also for x = 0.
    of_lr = tl.where(weight_lr_power > 0, power(lr_max, weight_lr_power), 1.0)
    weight = power(step, r) * of_lr
    weight_sum = weight_sum + weight
    to_z = tl.where(weight_sum > 0, weight / weight_sum, 0.0)
    move = lr * (beta1 * (1 - to_z) - 1)
    averages = (1 - power(beta2, step), beta2, 1 - beta2, eps)
    return (step, lr_max, weight_sum), (lr, to_z, move, weight_decay) + averages


@jit
def _update(p, g, state, h, flags):
    """Move ``z``, and move the parameter towards it."""
    MAXIMIZE: tl.constexpr = flags[0]
    lr, to_z, move, weight_decay, correction2, beta2, new2, eps = h
    z = state[0]
    if MAXIMIZE:
        g = -g
    exp_avg_sq = beta2 * state[1] + new2 * g * g
    direction = g / (tl.sqrt(exp_avg_sq / correction2) + eps) + weight_decay * p
    return lerp(p, z, to_z) + move * direction, (z - lr * direction, exp_avg_sq)


schedule_free_adamw = Rule(
    update=_update,
    scalars=_scalars,
    hyper=("lr", "betas", "eps", "weight_decay", "warmup_steps", "r", "weight_lr_power"),
    flags=("maximize",),
    state=(State("z", init="param"), State("exp_avg_sq", positive=True)),
    # float64, as the sum of many small weights in float32 would stop growing.
    scalar_state=(
        State("step"),
        State("lr_max", dtype=torch.float64),
        State("weight_sum", dtype=torch.float64),
    ),
)
