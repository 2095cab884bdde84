"""A rule tried on two numbers, and shown to Triton, before it is let near a parameter."""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

from ampopt_kernels.check_rule.by_triton import check
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
            does not declare, returns other states than it declares, or does something that is not
            elementwise, such as an ``if`` on a gradient; or Triton, where it can be imported,
            cannot compile them.
        AttributeError: a function is used that ``tl`` does not have on every backend.
    """
    # The numbers are the trial's own: whoever watches the first step, as ``assert_no_sync`` does,
    # is not to see it look at them, nor a mode of torch's to make them into something else.
    with no_dispatch():
        _try_out(rule, flags, n_hyper, owner)
    if not rule.update.fn.__module__.startswith("ampopt_kernels.rules."):  # known to compile
        check(rule, flags, n_hyper, owner)


def _try_out(rule: Rule, flags: tuple[bool, ...], n_hyper: int, owner: str) -> None:
    declared = f"hyper={rule.hyper}, flags={rule.flags}"
    scalars = [part.name for part in rule.scalar_state]
    states = [part.name for part in rule.state_for(flags)]
    given = f"flags {dict(zip(rule.flags, flags, strict=True))}"

    one = torch.ones((), dtype=torch.float64, device="cpu")
    s, h = _called(
        f"scalars of {owner}'s rule, which declares scalar_state={scalars}, {declared}",
        rule.torch_scalars,
        (one,) * len(scalars),
        (one * 0.5,) * n_hyper,
        flags,
    )
    if not isinstance(s, tuple) or len(s) != len(scalars):
        raise ValueError(
            f"scalars of {owner}'s rule returned {_count(s)} scalar states, but the rule declares "
            f"{len(scalars)}, {scalars}: return one for each, in their order"
        )
    for what, values in (("scalar states", s), ("h", h)):
        if not isinstance(values, tuple) or not all(map(_is_number, values)):
            raise ValueError(
                f"scalars of {owner}'s rule returned {values!r} as {what}: return a tuple of "
                "numbers, one for each that update takes"
            )
    if len(h) != rule.width(n_hyper):
        raise ValueError(
            f"scalars of {owner}'s rule returned {len(h)} numbers as h under {given}, and "
            f"{rule.width(n_hyper)} without flags: return as many whatever the flags"
        )
    update = f"update of {owner}'s rule"
    both = f"{update}, which declares state={states} under {given}, {declared}"

    def updated(block: Tensor) -> tuple[Any, ...]:
        numbers = tuple(float(x) for x in h)
        state = tuple(block + i for i in range(1, 1 + len(states)))
        p, new = _called(both, rule.torch_update, block + 0, -block, state, numbers, flags)
        if not isinstance(new, tuple) or len(new) != len(states):
            raise ValueError(
                f"{update} returned {_count(new)} states, but under {given} the rule "
                f"declares {len(states)}, {states}: return one for each, in their order"
            )
        return (p, *new)

    block = torch.tensor([0.5, 2.0], device="cpu")
    together, apart = updated(block), zip(*map(updated, block.split(1)), strict=True)
    for name, value, each in zip(("p", *states), together, apart, strict=True):
        for made, of in ((value, block), *zip(each, block.split(1), strict=True)):
            if not isinstance(made, Tensor) or made.shape != of.shape:
                shape = tuple(made.shape) if isinstance(made, Tensor) else type(made).__name__
                raise ValueError(
                    f"{update} made {name!r} of {shape} from blocks of shape {tuple(of.shape)}: "
                    "a rule is elementwise, and returns a block for each"
                )
        if not torch.allclose(value.float(), torch.cat(each).float(), rtol=1e-4, equal_nan=True):
            raise ValueError(
                f"{update} made another {name!r} of two elements than of each alone: a rule is "
                "elementwise, and no element may depend on others"
            )


def _count(returned: Any) -> str:
    if isinstance(returned, tuple):
        return str(len(returned))
    return f"{type(returned).__name__} in place of a tuple of"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.ndim == 0)


def _called(what: str, function: Any, *arguments: Any) -> tuple[Any, Any]:
    try:
        first, second = function(*arguments)
    except AttributeError as error:
        raise AttributeError(f"{what}: {error}") from error
    except (IndexError, NameError, TypeError, ValueError) as error:
        raise ValueError(
            f"{what}, does not keep to that: {type(error).__name__}: {error}"
        ) from error
    except RuntimeError as error:
        raise ValueError(
            f"{what}, is not elementwise: {error}. Blocks have many elements, so choose between "
            "values by tl.where(g > 0, a, b), not by `if g > 0`, nor by `and`, `or`, `not`"
        ) from error
    return first, second
