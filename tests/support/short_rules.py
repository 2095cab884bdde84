"""Optimizers that torch lacks, as users would write them: one rule each, at most 40 lines."""

from typing import Any

import torch

import ampopt
from ampopt_kernels import Rule, State, jit, maximum, minimum, power, sign, tl

__all__ = ["SHORT"]


@jit
def _tiger(p, g, state, h, flags):
    lr, beta, weight_decay = h
    mean = state[0] + (1 - beta) * (g - state[0])
    return p - lr * (sign(mean) + weight_decay * p), (mean,)


tiger = Rule(update=_tiger, hyper=("lr", "beta", "weight_decay"), state=(State("exp_avg"),))


@jit
def _signum(p, g, state, h, flags):
    lr, momentum = h
    mean = state[0] + (1 - momentum) * (g - state[0])
    return p - lr * sign(mean), (mean,)


signum = Rule(update=_signum, hyper=("lr", "momentum"), state=(State("momentum_buffer"),))


@jit
def _corrected(s, h):
    (step,) = s
    lr, beta1, beta2, eps = h
    step = step + 1
    correction2 = tl.sqrt(1 - power(beta2, step))
    return (step,), (lr / (1 - power(beta1, step)), correction2, beta1, beta2, eps)


@jit
def _adabelief(p, g, state, h, flags):
    size, correction2, beta1, beta2, eps = h
    mean = state[0] + (1 - beta1) * (g - state[0])
    surprise = g - mean
    variance = beta2 * state[1] + (1 - beta2) * surprise * surprise + eps
    return p - size * mean / (tl.sqrt(variance) / correction2 + eps), (mean, variance)


adabelief = Rule(
    update=_adabelief,
    scalars=_corrected,
    hyper=("lr", "betas", "eps"),
    state=(State("exp_avg"), State("exp_avg_var")),
    scalar_state=(State("step"),),
)


@jit
def _yogi(p, g, state, h, flags):
    size, correction2, beta1, beta2, eps = h
    mean = state[0] + (1 - beta1) * (g - state[0])
    variance = state[1] - (1 - beta2) * sign(state[1] - g * g) * g * g
    return p - size * mean / (tl.sqrt(variance) / correction2 + eps), (mean, variance)


yogi = Rule(
    update=_yogi,
    scalars=_corrected,
    hyper=("lr", "betas", "eps"),
    state=(
        State("exp_avg", init="initial_accumulator"),
        State("exp_avg_sq", init="initial_accumulator"),
    ),
    scalar_state=(State("step"),),
)


@jit
def _adamod_scalars(s, h):
    (step,) = s
    lr, beta1, beta2, beta3, eps = h
    step = step + 1
    size = lr * tl.sqrt(1 - power(beta2, step)) / (1 - power(beta1, step))
    return (step,), (size, beta1, beta2, beta3, eps)


@jit
def _adamod(p, g, state, h, flags):
    size, beta1, beta2, beta3, eps = h
    mean = state[0] + (1 - beta1) * (g - state[0])
    variance = beta2 * state[1] + (1 - beta2) * g * g
    rate = size / (tl.sqrt(variance) + eps)
    bound = state[2] + (1 - beta3) * (rate - state[2])
    return p - minimum(rate, bound) * mean, (mean, variance, bound)


adamod = Rule(
    update=_adamod,
    scalars=_adamod_scalars,
    hyper=("lr", "betas", "eps"),
    state=(State("exp_avg"), State("exp_avg_sq"), State("exp_avg_lr")),
    scalar_state=(State("step"),),
)


@jit
def _qhadam_scalars(s, h):
    weight1, weight2 = s
    lr, beta1, beta2, nu1, nu2, eps = h
    weight1 = beta1 * weight1 + 1
    weight2 = beta2 * weight2 + 1
    return (weight1, weight2), (lr, 1 / weight1, 1 / weight2, nu1, nu2, eps)


@jit
def _qhadam(p, g, state, h, flags):
    lr, new1, new2, nu1, nu2, eps = h
    mean = state[0] + new1 * (g - state[0])
    square = state[1] + new2 * (g * g - state[1])
    direction = nu1 * mean + (1 - nu1) * g
    size = tl.sqrt(nu2 * square + (1 - nu2) * g * g) + eps
    return p - lr * direction / size, (mean, square)


qhadam = Rule(
    update=_qhadam,
    scalars=_qhadam_scalars,
    hyper=("lr", "betas", "nus", "eps"),
    state=(State("exp_avg"), State("exp_avg_sq")),
    scalar_state=(State("beta1_weight"), State("beta2_weight")),
)


@jit
def _ademamix_scalars(s, h):
    (step,) = s
    lr, beta1, beta2, beta3, alpha, eps = h
    step = step + 1
    correction1, correction2 = 1 - power(beta1, step), tl.sqrt(1 - power(beta2, step))
    return (step,), (lr, correction1, correction2, beta1, beta2, beta3, alpha, eps)


@jit
def _ademamix(p, g, state, h, flags):
    lr, correction1, correction2, beta1, beta2, beta3, alpha, eps = h
    fast = state[0] + (1 - beta1) * (g - state[0])
    square = beta2 * state[1] + (1 - beta2) * g * g
    slow = state[2] + (1 - beta3) * (g - state[2])
    size = tl.sqrt(square) / correction2 + eps
    return p - lr * (fast / correction1 + alpha * slow) / size, (fast, square, slow)


ademamix = Rule(
    update=_ademamix,
    scalars=_ademamix_scalars,
    hyper=("lr", "betas", "alpha", "eps"),
    state=(State("exp_avg"), State("exp_avg_sq"), State("exp_avg_slow")),
    scalar_state=(State("step"),),
)


@jit
def _prodigy_terms(p, g, state, h, flags):
    d, per_d0, lr, beta1, beta2, beta3, eps = h
    return g * (state[0] - p), tl.abs(beta3 * state[3] + per_d0 * d * lr * g)


@jit
def _prodigy_before(s, h, flags):
    lr, beta1, beta2, beta3, d0, eps = h
    return s, (s[0], s[0] / d0, lr, beta1, beta2, beta3, eps)


@jit
def _prodigy_scalars(s, h, flags, sums, totals):
    d, numerator = s
    _, per_d0, lr, beta1, beta2, beta3, eps = h
    numerator = beta3 * numerator + per_d0 * d * lr * totals[0]
    estimate = tl.where(totals[1] > 0, numerator / totals[1], 0.0)
    new_d = maximum(d, estimate)
    return (new_d, numerator), (d, per_d0, lr, beta1, beta2, beta3, eps * new_d)


@jit
def _prodigy(p, g, state, h, flags):
    d, per_d0, lr, beta1, beta2, beta3, eps = h
    mean = beta1 * state[1] + (1 - beta1) * d * g
    square = beta2 * state[2] + (1 - beta2) * d * d * g * g
    total = beta3 * state[3] + per_d0 * d * lr * g
    return p - d * lr * mean / (tl.sqrt(square) + eps), (state[0], mean, square, total)


prodigy = Rule(
    update=_prodigy,
    reduce=_prodigy_terms,
    before_reduce=_prodigy_before,
    scalars=_prodigy_scalars,
    hyper=("lr", "betas", "d0", "eps"),
    state=(State("p0", init="param"), State("exp_avg"), State("exp_avg_sq"), State("s")),
    scalar_state=(
        State("d", init="d0", dtype=torch.float64),
        State("d_numerator", dtype=torch.float64),
    ),
)


def _optimizer(name: str, rule: Rule, **defaults: Any) -> type[ampopt.ElementwiseOptimizer]:
    class Short(ampopt.ElementwiseOptimizer):
        def __init__(self, params: Any, **changed: Any) -> None:
            super().__init__(params, {**defaults, **changed})

    Short.rule = rule
    Short.__name__ = Short.__qualname__ = name
    return Short


SHORT = {
    cls.__name__: cls
    for cls in (
        _optimizer("Tiger", tiger, lr=0.01, beta=0.965, weight_decay=0.01),
        _optimizer("SignSGD", signum, lr=0.01, momentum=0.9),
        _optimizer("AdaBelief", adabelief, lr=0.01, betas=(0.9, 0.999), eps=1e-12),
        _optimizer("Yogi", yogi, lr=0.01, betas=(0.9, 0.999), eps=1e-3, initial_accumulator=1e-6),
        _optimizer("AdaMod", adamod, lr=0.01, betas=(0.9, 0.99, 0.9999), eps=1e-8),
        _optimizer("QHAdam", qhadam, lr=0.01, betas=(0.9, 0.999), nus=(0.7, 0.9), eps=1e-8),
        _optimizer("AdEMAMix", ademamix, lr=0.01, betas=(0.9, 0.999, 0.9999), alpha=5.0, eps=1e-8),
        _optimizer("Prodigy", prodigy, lr=1.0, betas=(0.9, 0.999, 0.999**0.5), d0=1e-3, eps=1e-8),
    )
}
"""By the name of pytorch_optimizer's class, which takes the same options."""
