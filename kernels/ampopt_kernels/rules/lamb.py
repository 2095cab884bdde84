"""LAMB (You et al., 1904.00962, algorithm 2), as apex's ``multi_tensor_lamb.cu`` computes it."""

from ampopt_kernels.language import jit, power, tl
from ampopt_kernels.rule import Rule, State
from ampopt_kernels.rules.averages import lerp

__all__ = ["lamb"]


@jit
def _before_reduce(s, h, flags):
    """Count the step, and compute the reciprocals of the bias corrections."""
    BIAS_CORRECTION: tl.constexpr = flags[0]
    (step,) = s
    lr, beta1, beta2, eps, weight_decay = h
    step = step + 1
    # Reciprocals, so that reduce and update multiply each element instead of dividing it.
    over1 = step * 0 + 1
    over2 = step * 0 + 1
    if BIAS_CORRECTION:
        over1 = 1 / (1 - power(beta1, step))
        over2 = 1 / tl.sqrt(1 - power(beta2, step))
    return (step,), (lr, over1, over2, 1 - beta1, beta2, 1 - beta2, eps, weight_decay)


@jit
def _averages_and_direction(p, g, state, h, flags):
    """The new averages, and Adam's direction with weight decay."""
    MAXIMIZE: tl.constexpr = flags[1]
    _, over1, over2, new1, beta2, new2, eps, weight_decay = h
    if MAXIMIZE:
        g = -g
    exp_avg = lerp(state[0], g, new1)
    exp_avg_sq = beta2 * state[1] + new2 * g * g
    denominator = over2 * tl.sqrt(exp_avg_sq) + eps
    direction = over1 * exp_avg / denominator + weight_decay * p
    return exp_avg, exp_avg_sq, direction


@jit
def _reduce(p, g, state, h, flags):
    """The terms of the squared norms of parameter and direction."""
    _, _, direction = _averages_and_direction(p, g, state, h, flags)
    return p * p, direction * direction


@jit
def _scalars(s, h, flags, sums):
    """Multiply the learning rate by the ratio of the norms of parameter and direction."""
    lr, over1, over2, new1, beta2, new2, eps, weight_decay = h
    size, length = sums
    both = (size > 0) & (length > 0)
    ratio = tl.where(both, tl.sqrt(size) / tl.sqrt(length), 1.0)
    return s, (lr * ratio, over1, over2, new1, beta2, new2, eps, weight_decay)


@jit
def _update(p, g, state, h, flags):
    """Move the parameter in the direction, and store the averages."""
    exp_avg, exp_avg_sq, direction = _averages_and_direction(p, g, state, h, flags)
    return p - h[0] * direction, (exp_avg, exp_avg_sq)


lamb = Rule(
    update=_update,
    before_reduce=_before_reduce,
    reduce=_reduce,
    scalars=_scalars,
    hyper=("lr", "betas", "eps", "weight_decay"),
    flags=("bias_correction", "maximize"),
    state=(State("exp_avg"), State("exp_avg_sq", positive=True)),
    scalar_state=(State("step"),),
)
