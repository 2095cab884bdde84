"""Adan (Xie et al., 2208.06677, algorithm 1), as its authors' ``adan.py`` computes it."""

from ampopt_kernels.language import div_rn, jit, power, sqrt_rn, tl
from ampopt_kernels.rule import Rule, State
from ampopt_kernels.rules.averages import lerp

__all__ = ["adan"]


@jit
def _scalars(s, h):
    (step,) = s
    lr, beta1, beta2, beta3, eps, weight_decay = h
    step = step + 1
    return (step,), (
        lr / (1 - power(beta1, step)),
        lr * beta2 / (1 - power(beta2, step)),
        tl.sqrt(1 - power(beta3, step)),
        1 - beta1,
        beta2,
        1 - beta2,
        beta3,
        1 - beta3,
        eps,
        1 - lr * weight_decay,
        1 / (1 + lr * weight_decay),
        # The first gradient differs from none before it.
        tl.where(step > 1, 1.0, 0.0),
    )


@jit
def _update(p, g, state, h, flags):
    WEIGHT_DECAY: tl.constexpr = flags[0]
    NO_PROX: tl.constexpr = flags[1]
    MAXIMIZE: tl.constexpr = flags[2]
    size, diff_size, correction3, new1, beta2, new2, beta3, new3, eps, kept, shrunk, later = h
    if MAXIMIZE:
        g = -g
    diff = tl.where(later > 0, g + state[3], 0.0)
    exp_avg = lerp(state[0], g, new1)
    exp_avg_diff = lerp(state[2], diff, new2)
    ahead = g + beta2 * diff
    exp_avg_sq = beta3 * state[1] + new3 * ahead * ahead
    denominator = div_rn(sqrt_rn(exp_avg_sq), correction3) + eps
    move = div_rn(size * exp_avg + diff_size * exp_avg_diff, denominator)
    if WEIGHT_DECAY:
        if NO_PROX:
            p = p * kept - move
        else:
            p = (p - move) * shrunk
    else:
        p = p - move
    return p, (exp_avg, exp_avg_sq, exp_avg_diff, -g)


adan = Rule(
    update=_update,
    scalars=_scalars,
    hyper=("lr", "betas", "eps", "weight_decay"),
    flags=("weight_decay", "no_prox", "maximize"),
    state=(
        State("exp_avg"),
        State("exp_avg_sq"),
        State("exp_avg_diff"),
        State("neg_pre_grad"),
    ),
    scalar_state=(State("step"),),
)
