"""Adan (Xie et al., 2208.06677, algorithm 1), as its authors' ``adan.py`` computes it."""

from ampopt_kernels.language import jit, power, tl
from ampopt_kernels.rule import Rule, State
from ampopt_kernels.rules.averages import lerp

__all__ = ["adan"]


@jit
def _scalars(s, h, flags):
    """Count the step, and compute bias corrections and both forms of weight decay."""
    NO_PROX: tl.constexpr = flags[0]
    (step,) = s
    lr, beta1, beta2, beta3, eps, weight_decay = h
    step = step + 1
    size, diff_size = lr / (1 - power(beta1, step)), lr * beta2 / (1 - power(beta2, step))
    correction3 = tl.sqrt(1 - power(beta3, step))
    decay, later = lr * weight_decay, tl.where(step > 1, 1.0, 0.0)
    if NO_PROX:
        before, after = 1 - decay, step * 0 + 1
    else:
        before, after = step * 0 + 1, 1 / (1 + decay)
    sizes = (size, diff_size, correction3, eps, before, after, later)
    return (step,), sizes + (1 - beta1, beta2, 1 - beta2, beta3, 1 - beta3)


@jit
def _update(p, g, state, h, flags):
    """Update the averages of gradients, of their differences and of the squares of both."""
    MAXIMIZE: tl.constexpr = flags[1]
    size, diff_size, correction3, eps, before, after, later, new1, beta2, new2, beta3, new3 = h
    if MAXIMIZE:
        g = -g
    # Before the first step there is no previous gradient: its difference is 0.
    diff = tl.where(later > 0, g + state[3], 0.0)
    exp_avg, exp_avg_diff = lerp(state[0], g, new1), lerp(state[2], diff, new2)
    ahead = g + beta2 * diff
    exp_avg_sq = beta3 * state[1] + new3 * ahead * ahead
    denominator = tl.sqrt(exp_avg_sq) / correction3 + eps
    move = (size * exp_avg + diff_size * exp_avg_diff) / denominator
    return (p * before - move) * after, (exp_avg, exp_avg_sq, exp_avg_diff, -g)


_SQUARES = State("exp_avg_sq", positive=True)

adan = Rule(
    update=_update,
    scalars=_scalars,
    hyper=("lr", "betas", "eps", "weight_decay"),
    flags=("no_prox", "maximize"),
    state=(State("exp_avg"), _SQUARES, State("exp_avg_diff"), State("neg_pre_grad")),
    scalar_state=(State("step"),),
)
