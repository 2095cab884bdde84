"""Update rules that draw random numbers."""

from typing import Any

import ampopt
from ampopt_kernels import Rule, State, jit, rand, randn, tl

__all__ = ["Langevin", "Shaken"]


@jit
def _scalars(s, h):
    lr, temperature, seed = h
    step = s[0] + 1
    return (step,), (lr, tl.sqrt(2 * lr * temperature), seed, step)


@jit
def _shaken(p, g, state, h, flags, at):
    lr, size, seed, step = h
    chance = rand(seed, step, at)
    return p - lr * g + size * (chance - 0.5), (chance,)


@jit
def _langevin(p, g, state, h, flags, at):
    lr, size, seed, step = h
    return p - lr * g + size * randn(seed, step, at), ()


class Shaken(ampopt.ElementwiseOptimizer):
    """SGD with uniform noise that is kept as a state; bitwise equal on every backend."""

    rule = Rule(
        update=_shaken,
        scalars=_scalars,
        hyper=("lr", "temperature", "seed"),
        state=(State("chance"),),
        scalar_state=(State("step"),),
    )

    def __init__(
        self, params: Any, lr: Any = 0.25, temperature: float = 0.5, seed: int = 0, **options: Any
    ):
        defaults = {"lr": lr, "temperature": temperature, "seed": seed}
        super().__init__(params, defaults, **options)


class Langevin(Shaken):
    """Stochastic gradient Langevin dynamics (Welling and Teh, 2011): samples of exp(-loss / T)."""

    rule = Rule(
        update=_langevin,
        scalars=_scalars,
        hyper=("lr", "temperature", "seed"),
        scalar_state=(State("step"),),
    )
