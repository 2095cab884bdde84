"""Adam and AdamW, as torch defines them (``torch/optim/adam.py``; Kingma and Ba, 1412.6980).

Decoupled weight decay is Loshchilov and Hutter's (1711.05101), AMSGrad Reddi et al.'s
(1904.09237).
"""

from ampopt_kernels.language import jit, maximum, power, tl
from ampopt_kernels.rule import Rule, State
from ampopt_kernels.rules.averages import lerp

__all__ = ["adam"]


@jit
def _scalars(s, h):
    """Count the step, and compute bias corrections and weight decay."""
    (step,) = s
    lr, beta1, beta2, eps, weight_decay = h
    step = step + 1
    correction1 = 1 - power(beta1, step)
    correction2 = tl.sqrt(1 - power(beta2, step))
    shrinkage = 1 - lr * weight_decay
    return (step,), (
        lr / correction1,
        correction2,
        1 - beta1,
        beta2,
        1 - beta2,
        eps,
        weight_decay,
        shrinkage,
    )


@jit
def _update(p, g, state, h, flags):
    """Update the averages of gradients and of their squares, and the parameter."""
    AMSGRAD: tl.constexpr = flags[0]
    WEIGHT_DECAY: tl.constexpr = flags[1]
    DECOUPLED: tl.constexpr = flags[2]
    MAXIMIZE: tl.constexpr = flags[3]
    step_size, correction2, new1, beta2, new2, eps, weight_decay, shrinkage = h
    if MAXIMIZE:
        g = -g
    if WEIGHT_DECAY:
        if DECOUPLED:
            p = p * shrinkage
        else:
            g = g + weight_decay * p
    exp_avg = lerp(state[0], g, new1)
    exp_avg_sq = beta2 * state[1] + new2 * g * g
    if AMSGRAD:
        largest = maximum(state[2], exp_avg_sq)
        new_state = (exp_avg, exp_avg_sq, largest)
    else:
        largest = exp_avg_sq
        new_state = (exp_avg, exp_avg_sq)
    denominator = tl.sqrt(largest) / correction2 + eps
    return p - step_size * exp_avg / denominator, new_state


adam = Rule(
    update=_update,
    scalars=_scalars,
    hyper=("lr", "betas", "eps", "weight_decay"),
    flags=("amsgrad", "weight_decay", "decoupled_weight_decay", "maximize"),
    state=(
        State("exp_avg"),
        # The largest of many rounded values is larger than the largest value.
        State("exp_avg_sq", positive=True, full="amsgrad"),
        State("max_exp_avg_sq", when="amsgrad", full=True),
    ),
    scalar_state=(State("step"),),
)
