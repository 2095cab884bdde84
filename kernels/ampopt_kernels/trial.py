"""A rule tried on two numbers before it is let near a parameter."""

import functools
from typing import Any

import torch
from torch import Tensor

from ampopt_kernels.rule import Rule

__all__ = ["try_out"]


@functools.cache
def try_out(rule: Rule, flags: tuple[bool, ...], n_hyper: int, owner: str) -> None:
    """Refuse a rule that does not keep to what it declares. Runs once for each set of flags.

    Args:
        rule: to try.
        flags: to try it under.
        n_hyper: hyperparameters of a param group, laid flat.
        owner: the optimizer, for the message.

    Raises:
        ValueError: ``scalars`` or ``update`` reads a state, hyperparameter or flag that the rule
            does not declare, returns other states than it declares, or something that is not
            elementwise.
        AttributeError: a function is used that ``tl`` does not have on every backend.
    """
    declared = f"hyper={rule.hyper}, flags={rule.flags}"
    scalars = [part.name for part in rule.scalar_state]
    states = [part.name for part in rule.state_for(flags)]
    given = f"flags {dict(zip(rule.flags, flags, strict=True))}"

    one = torch.ones((), dtype=torch.float64)
    s, h = _called(
        f"scalars of {owner}'s rule, which declares scalar_state={scalars}, {declared}",
        rule.torch_scalars,
        (one,) * len(scalars),
        (one * 0.5,) * n_hyper,
    )
    if len(s) != len(scalars):
        raise ValueError(
            f"scalars of {owner}'s rule returned {len(s)} scalar states, but the rule declares "
            f"{len(scalars)}, {scalars}: return one for each, in their order"
        )
    block = torch.ones(2)
    p, new = _called(
        f"update of {owner}'s rule, which declares state={states} under {given}, {declared}",
        rule.torch_update,
        block,
        block,
        (block,) * len(states),
        tuple(float(x) for x in h),
        flags,
    )
    if not isinstance(new, tuple) or len(new) != len(states):
        count = len(new) if isinstance(new, tuple) else f"{type(new).__name__} in place of a tuple"
        raise ValueError(
            f"update of {owner}'s rule returned {count} states, but under {given} the rule "
            f"declares {len(states)}, {states}: return one for each, in their order"
        )
    for name, value in zip(("p", *states), (p, *new), strict=True):
        if not isinstance(value, Tensor) or value.shape != block.shape:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"update of {owner}'s rule made {name!r} of {shape} from blocks of shape "
                f"{tuple(block.shape)}: a rule is elementwise, and returns a block for each"
            )


def _called(what: str, function: Any, *arguments: Any) -> tuple[Any, Any]:
    try:
        first, second = function(*arguments)
    except AttributeError as error:
        raise AttributeError(f"{what}: {error}") from error
    except (IndexError, NameError, TypeError, ValueError) as error:
        raise ValueError(
            f"{what}, does not keep to that: {type(error).__name__}: {error}"
        ) from error
    return first, second
