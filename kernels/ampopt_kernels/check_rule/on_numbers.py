"""Run a rule on two numbers, and compile it with Triton, before its first step."""

import functools
import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

from ampopt_kernels.check_rule.by_triton import check
from ampopt_kernels.rule import Rule
from ampopt_kernels.state import State

__all__ = ["try_out"]


@functools.cache
def try_out(rule: Rule, flags: tuple[bool, ...], n_hyper: int, owner: str) -> None:
    """Refuse a rule that does not keep to what it declares. Runs once for each set of flags.

    Args:
        rule: the rule.
        flags: values of ``rule.flags``.
        n_hyper: number of hyperparameters, tuples flattened.
        owner: name of the optimizer class, for the message.

    Raises:
        ValueError: a function of the rule reads a state, hyperparameter or flag that the rule does
            not declare; returns other states than the rule declares; is not elementwise, as with
            an ``if`` on a gradient; or cannot be compiled by Triton, if Triton can be imported.
        AttributeError: the rule uses a function of ``tl`` that not every backend has.
    """
    # This reads its own CPU tensors. Dispatch modes of the caller must not see that, such as
    # assert_no_sync, nor change the tensors, such as FakeTensorMode.
    with no_dispatch():
        _try_out(rule, flags, n_hyper, owner)
    if not rule.update.fn.__module__.startswith("ampopt_kernels.rules."):  # known to compile
        check(rule, flags, n_hyper, owner)


def _try_out(rule: Rule, flags: tuple[bool, ...], n_hyper: int, owner: str) -> None:
    given = f"flags {dict(zip(rule.flags, flags, strict=True))}"
    declared = f"hyper={rule.hyper}, flags={rule.flags}"
    scalars = [part.name for part in rule.scalar_state]
    states = [part.name for part in rule.state_for(flags)]
    its_scalars = f"of {owner}'s rule, which declares scalar_state={scalars}, {declared}"
    read = [part.name for part in rule.tensor_state_for(flags)]
    its_states = f"of {owner}'s rule, which declares state={read} under {given}, {declared}"

    one, two = (torch.ones(n, dtype=torch.float64, device="cpu") for n in ((), 2))
    s, h, of_two = (one,) * len(scalars), (one * 0.5,) * n_hyper, (two,) * len(scalars)
    given_two, sums, in_norm = (of_two, h), (), []
    if rule.reduces:
        role = "before_reduce"
        before = rule.torch_before_reduce
        s, h = _called(f"{role} {its_scalars}", _pair, before, s, h, flags)
        _check_scalars(f"{role} of {owner}'s rule", s, h, scalars)
        given_two = _called(f"{role} {its_scalars}", _pair, before, *given_two, flags)
        if rule.marginals_for(flags):
            _try_marginals(rule, flags, h, its_states, owner)
        terms = _Blocks(f"reduce {its_states}", f"reduce of {owner}'s rule", h, flags, read)
        n_terms = terms.check(rule.torch_reduce_in(torch.float32), _terms)
        sums = (one,) * n_terms
        in_norm = [(role, "h", len(h), "reduce"), ("reduce", "terms", n_terms, "terms")]
    what = f"scalars {its_scalars}"
    s, h = _called(what, _pair, rule.torch_scalars, s, h, flags, sums, sums)
    # Backends may pass the scalars of several parameters as vectors; totals stay 0-d.
    _called(what, _pair, rule.torch_scalars, *given_two, flags, (two,) * len(sums), sums)
    _check_scalars(f"scalars of {owner}'s rule", s, h, scalars)
    for role, kind, n, name in (*in_norm, ("scalars", "h", len(h), "update")):
        without_flags = getattr(rule.widths(n_hyper), name)
        _check_number(f"{role} of {owner}'s rule", kind, n, without_flags, given)
    role = f"update of {owner}'s rule"
    update = _Blocks(f"update {its_states}", role, h, flags, read, rule.draws)

    def updated(returned: Any) -> dict[str, Any]:
        p, new = returned
        if not isinstance(new, tuple) or len(new) != len(states):
            raise _Broken(
                f"{update.role} returned {_count(new)} states, but under {given} the rule "
                f"declares {len(states)}, {states}: return one for each, in their order"
            )
        return dict(zip(("p", *states), (p, *new), strict=True))

    update.check(rule.torch_update_in(torch.float32), updated)


def _try_marginals(
    rule: Rule, flags: tuple[bool, ...], h: tuple[Any, ...], what: str, owner: str
) -> None:
    """Refuse ``averages`` or ``factors`` that do not return one tensor for each state."""
    states, parts = [part.name for part in rule.state_for(flags)], rule.marginals_for(flags)
    names = [part.name for part in parts]
    role = f"averages of {owner}'s rule"
    n_terms = _Blocks(f"averages {what}", role, h, flags, states).check(
        rule.torch_averages_in(torch.float32), _terms
    )
    if n_terms != len(parts):
        raise ValueError(
            f"{role} returned {n_terms} terms for {len(parts)} states of rows and columns, "
            f"{names}: return one for each, in their order"
        )
    given = tuple(torch.full(part.beside((2, 3)), 0.5, device="cpu") for part in parts)
    numbers = tuple(float(x) for x in h)
    made = _called(f"factors {what}", _pair, rule.factors, given, given, numbers, flags)
    for role, values in zip(("states", "factors"), made, strict=True):
        shapes = [tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in values]
        if shapes != [tuple(x.shape) for x in given]:
            raise ValueError(
                f"factors of {owner}'s rule returned {role} of the shapes {shapes} for a "
                f"parameter of shape (2, 3): return one for each of {names}, with its shape"
            )
    _try_stack(f"factors {what}", rule.factors, parts, numbers, flags, owner)


def _try_stack(
    what: str,
    factors: Any,
    parts: tuple[State, ...],
    numbers: tuple[float, ...],
    flags: tuple[bool, ...],
    owner: str,
) -> None:
    """Refuse ``factors`` whose results for a stack of two matrices differ from those for each."""
    shapes = [(2, *part.beside((2, 3))) for part in parts]
    stack = tuple(torch.arange(1.0, 1 + math.prod(s), device="cpu").view(s) for s in shapes)
    h = tuple(torch.full((2, 1, 1), x, device="cpu") for x in numbers)
    made = _called(f"{what} of two matrices in a stack", _pair, factors, stack, stack, h, flags)
    for place in range(2):
        given = tuple(x[place] for x in stack)
        alone = _called(what, _pair, factors, given, given, numbers, flags)
        for stacked, each in zip((*made[0], *made[1]), (*alone[0], *alone[1]), strict=True):
            is_alike = stacked.shape == (2, *each.shape) and torch.allclose(
                stacked[place], each, rtol=1e-4, atol=1e-6, equal_nan=True
            )
            if not is_alike:
                raise ValueError(
                    f"factors of {owner}'s rule has other results for a matrix in a stack of two "
                    "than for the matrix alone: count dimensions from the last, and pass dim= to "
                    "each mean, as in row_var.mean(-2, keepdim=True)"
                )


class _Broken(ValueError):
    """An error whose message is complete."""


def _check_scalars(role: str, s: Any, h: Any, scalars: list[str]) -> None:
    if not isinstance(s, tuple) or len(s) != len(scalars):
        raise ValueError(
            f"{role} returned {_count(s)} scalar states, but the rule declares "
            f"{len(scalars)}, {scalars}: return one for each, in their order"
        )
    for what, values in (("scalar states", s), ("h", h)):
        if not isinstance(values, tuple) or not all(map(_is_number, values)):
            raise ValueError(
                f"{role} returned {values!r} as {what}: return a tuple of "
                "numbers, one for each that update takes"
            )


def _check_number(role: str, what: str, n: int, without_flags: int, given: str) -> None:
    if n != without_flags:
        raise ValueError(
            f"{role} returned {n} numbers as {what} under {given}, and {without_flags} without "
            "flags: return as many whatever the flags are"
        )


def _terms(returned: Any) -> dict[str, Any]:
    if not isinstance(returned, tuple):
        raise TypeError(f"it returned {type(returned).__name__}, not a tuple of terms")
    return {f"term {i}": term for i, term in enumerate(returned)}


@dataclass
class _Blocks:
    """A function of blocks, such as ``update``, and the arguments to check it with.

    Attributes:
        what: name of the function and the rule's declaration, for messages.
        role: name of the function, for messages.
        h: numbers or 0-d tensors.
        flags: values of ``rule.flags``.
        states: names of the states in the ``state`` argument.
        draws: whether the function takes ``at``.
    """

    what: str
    role: str
    h: tuple[Any, ...]
    flags: tuple[bool, ...]
    states: list[str]
    draws: bool = False

    def check(self, function: Any, named: Callable[[Any], dict[str, Any]]) -> int:
        """Raise ValueError if ``function`` is not elementwise.

        Args:
            function: the function, on torch tensors.
            named: turns what the function returns into blocks by name.

        Returns:
            The number of blocks.
        """

        def made(block: Tensor) -> dict[str, Any]:
            numbers = tuple(float(x) for x in self.h)
            state = tuple(block + i for i in range(1, 1 + len(self.states)))
            given = (block + 0, -block, state, numbers, self.flags)
            given += ((block.to(torch.int64), block),) * self.draws
            return _called(self.what, named, function, *given)

        block = torch.tensor([0.5, 2.0], device="cpu")
        together, apart = made(block), [made(half) for half in block.split(1)]
        for name, value in together.items():
            halves = [each[name] for each in apart]
            for result, of in ((value, block), *zip(halves, block.split(1), strict=True)):
                if not isinstance(result, Tensor) or result.shape != of.shape:
                    is_tensor = isinstance(result, Tensor)
                    shape = tuple(result.shape) if is_tensor else type(result).__name__
                    raise ValueError(
                        f"{self.role} made {name!r} of {shape} from blocks of shape "
                        f"{tuple(of.shape)}: a rule is elementwise, and returns a block for each"
                    )
            both = torch.cat(halves).float()
            if not torch.allclose(value.float(), both, rtol=1e-4, equal_nan=True):
                raise ValueError(
                    f"{self.role} made another {name!r} of two elements than of each alone: a rule "
                    "is elementwise, and no element may depend on others"
                )
        return len(together)


def _count(returned: Any) -> str:
    if isinstance(returned, tuple):
        return str(len(returned))
    return f"{type(returned).__name__} in place of a tuple of"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.ndim == 0)


def _pair(returned: Any) -> tuple[Any, Any]:
    first, second = returned
    return first, second


def _called(what: str, taken: Callable[[Any], Any], function: Any, *arguments: Any) -> Any:
    """``taken(function(*arguments))``; raises ValueError if that fails or changes an argument."""
    given = (x for a in arguments for x in (a if isinstance(a, tuple) else (a,)))
    tensors = [x for x in given if isinstance(x, Tensor)]
    before = [x.clone() for x in tensors]
    try:
        result = taken(function(*arguments))
        if not all(map(torch.equal, tensors, before)):
            raise _Broken(
                f"{what}, changes in place one of its arguments, as `x += y` does on the CPU: "
                "write `x = x + y`"
            )
        return result
    except _Broken as error:
        raise ValueError(str(error)) from None
    except AttributeError as error:
        raise AttributeError(f"{what}: {error}") from error
    except (IndexError, NameError, TypeError, ValueError) as error:
        raise ValueError(
            f"{what}, does not keep to that: {type(error).__name__}: {error}"
        ) from error
    except RuntimeError as error:
        line = traceback.extract_tb(error.__traceback__)[-1]
        raise ValueError(
            f"{what}, is not elementwise at {line.filename}:{line.lineno}, `{line.line}`: {error}. "
            "There are many values at once, of elements or of parameters, so choose between them "
            "by tl.where(x > 0, a, b), not by `if x > 0`, nor by `and`, `or`, `not`, nor by "
            "`max` or `min`, but by maximum and minimum of ampopt_kernels"
        ) from error
