"""Try out ``Rule.factors``, which is written with torch, on a matrix and on a stack of two."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ampopt_kernels.check_rule.function import Function
from ampopt_kernels.rule import Rule
from ampopt_kernels.state import shape_of_lines

__all__ = ["check"]


def check(rule: Rule, flags: tuple[bool, ...], n_h: int, owner: str) -> None:
    """Refuse ``factors`` with other shapes than those of the states and means.

    Or whose results for a matrix in a stack of two differ from those for the matrix alone.

    Args:
        rule: the rule, which has ``factors``.
        flags: values of ``rule.flags``.
        n_h: length of the ``h`` of ``averages``.
        owner: name of the optimizer class, for the message.

    Raises:
        ValueError: see above; or ``factors`` fails, or changes an argument.
    """
    function = Function("factors", owner, rule.factors)
    over, parts = rule.averages_for(flags), rule.row_column_states_for(flags)
    names = [part.name for part in parts]
    declared = (
        f"The rule gets {len(over)} means, over {over}; declares {len(parts)}, states of rows and "
        f"columns={names}; gets {n_h} numbers, the h of averages; declares {len(flags)}, "
        f"flags={rule.flags}"
    )

    def results(means: Any, states: Any, h: Any) -> tuple[tuple[Tensor, ...], ...]:
        before = [x.clone() for x in (*means, *states)]
        try:
            result = rule.factors(means, states, h, flags)
        except Exception as error:  # of any type, because the author's function runs here
            raise function.failed(error, declared) from error
        if not all(map(torch.equal, (*means, *states), before)):
            raise function.refused("a rule changes an argument in place", None)
        return tuple(map(tuple, function.pair(result, "two tuples, as (state, factors)")))

    def stack_of(lines: Iterable[str], first: float) -> tuple[Tensor, ...]:
        shapes = [(2, *shape_of_lines((2, 3), over)) for over in lines]
        return tuple(
            torch.arange(first, first + math.prod(s), device="cpu").view(s) for s in shapes
        )

    # Between equal numbers an average is that number, and one written in place would change none.
    means, states = stack_of(over, 1.0), stack_of((str(part.shape) for part in parts), 3.0)
    number = torch.full((), 0.5, device="cpu")
    stacked = results(means, states, (number.expand(2, 1, 1),) * n_h)
    for place in range(2):
        own_means, own_states = (tuple(x[place] for x in stack) for stack in (means, states))
        alone = results(own_means, own_states, (number,) * n_h)
        expected = (("states", own_states), ("factors", own_means))
        for values, (role, like) in zip(alone, expected, strict=True):
            shapes = [tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in values]
            if shapes != [tuple(x.shape) for x in like]:
                raise function.returned(
                    f"{role} of the shapes {shapes} for a parameter of shape (2, 3): return one "
                    f"for each of {names if role == 'states' else over}, with its shape"
                )
        for whole, each in zip((*stacked[0], *stacked[1]), (*alone[0], *alone[1]), strict=True):
            is_alike = whole.shape == (2, *each.shape) and torch.allclose(
                whole[place], each, rtol=1e-4, atol=1e-6, equal_nan=True
            )
            if not is_alike:
                raise function.returned(
                    "other results for a matrix in a stack of two than for the matrix alone: count "
                    "dimensions from the last, and pass dim= to each mean, as in "
                    "row_var.mean(-2, keepdim=True)"
                )
