"""Run a rule on two numbers, and compile it with Triton, before its first step."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

from ampopt_kernels.check_rule import by_cpp, by_source, by_triton, codecs
from ampopt_kernels.check_rule.function import Broken, Function
from ampopt_kernels.rule import Rule, keep, keep_all
from ampopt_kernels.state import shape_of_lines

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
            an ``if`` on a gradient; or cannot be compiled by Triton, if Triton can be imported. Or
            a codec of a state does not keep to what :class:`ampopt_kernels.Codec` says.
        AttributeError: the rule uses a function of ``tl`` that not every backend has.
    """
    # This reads its own CPU tensors. Dispatch modes of the caller must not see that, such as
    # assert_no_sync, nor change the tensors, such as FakeTensorMode.
    with no_dispatch():
        by_source.check(rule, owner)
        _try_out(rule, flags, n_hyper, owner)
        codecs.check(rule, owner)
        known_to_compile = rule.update.fn.__module__.startswith("ampopt_kernels.rules.")
        if not known_to_compile or any(codecs.functions_of(rule)):
            by_triton.check(rule, flags, n_hyper, owner)
            by_cpp.check(rule, flags, n_hyper, owner)


def _try_out(rule: Rule, flags: tuple[bool, ...], n_hyper: int, owner: str) -> None:
    """Run every function of the rule under one set of flags; see :func:`try_out`."""
    flags_text = f"flags {dict(zip(rule.flags, flags, strict=True))}"
    scalars = [part.name for part in rule.scalar_state]
    states = [part.name for part in rule.state_for(flags)]
    inputs = list(rule.inputs_for(flags))
    of_state = (2, len(inputs), f"declares {len(inputs)}, state={inputs} under {flags_text}")
    of_scalars = (0, len(scalars), f"declares {len(scalars)}, scalar_state={scalars}")
    of_hyper = (n_hyper, f"declares {n_hyper}, hyper={rule.hyper}")
    of_flags = (len(flags), f"declares {len(flags)}, flags={rule.flags}")

    def function(name: str, *declarations: tuple[int, int, str]) -> Function:
        return Function(name, owner, getattr(rule, name).fn, declarations)

    one, two = (torch.ones(n, dtype=torch.float64, device="cpu") for n in ((), 2))
    s, h, of_two = (one,) * len(scalars), (one * 0.5,) * n_hyper, (two,) * len(scalars)
    given_two, sums, in_norm = (of_two, h), (), []
    of_sums: tuple[tuple[int, int, str], ...] = ()
    if rule.reduces:
        call = function("before_reduce", of_scalars, (1, *of_hyper), (2, *of_flags))
        before = rule.torch_before_sums
        s, h = call(_pair, before, s, h, flags)
        _check_scalars(call, s, h, scalars)
        given_two = call(_pair, before, *given_two, flags)
        of_hyper = _given_h(rule.before_reduce is not keep_all, "before_reduce", h, of_hyper)
        of_blocks = (of_state, (3, *of_hyper), (4, *of_flags))
        if rule.averages_for(flags):
            _try_averages(rule, flags, h, function("averages", *of_blocks))
        terms = _Blocks(function("reduce", *of_blocks), h, flags, inputs)
        n_terms = terms.check(rule.torch_reduce_in(torch.float32), _terms)
        sums = (one,) * n_terms
        in_norm = [("before_reduce", "h", len(h), "reduce"), ("reduce", "terms", n_terms, "terms")]
        of_sums = tuple(
            (i, n_terms, f"gets {n_terms} sums, one for each term of reduce") for i in (3, 4)
        )
    n_arguments = rule.scalars_arguments
    declarations = (of_scalars, (1, *of_hyper), (2, *of_flags), *of_sums)[:n_arguments]
    call = function("scalars", *declarations)
    s, h = call(_pair, rule.torch_scalars, s, h, flags, sums, sums)
    # Backends may pass the scalars of several parameters as vectors; totals stay 0-d.
    call(_pair, rule.torch_scalars, *given_two, flags, (two,) * len(sums), sums)
    _check_scalars(call, s, h, scalars)
    for role, kind, n, name in (*in_norm, ("scalars", "h", len(h), "update")):
        without_flags = getattr(rule.widths(n_hyper), name)
        _check_number(f"{role} of {owner}'s rule", kind, n, without_flags, flags_text)
    of_hyper = _given_h(rule.scalars is not keep, "scalars", h, of_hyper)
    of_blocks = (of_state, (3, *of_hyper), (4, *of_flags))
    if rule.averages_for(flags) and not rule.reduces:
        _try_averages(rule, flags, h, function("averages", *of_blocks))
    call = function("update", *of_blocks)

    def updated(result: Any) -> dict[str, Any]:
        p, new = _pair(result, f"the new p and a tuple of {len(states)} states, {states}")
        if not isinstance(new, tuple) or len(new) != len(states):
            raise Broken(
                f"returned {_count(new)} states, but under {flags_text} the rule "
                f"declares {len(states)}, {states}: return one for each, in their order"
            )
        return dict(zip(("p", *states), (p, *new), strict=True))

    update = _Blocks(call, h, flags, inputs, rule.draws)
    update.check(rule.torch_update_in(torch.float32), updated)


def _given_h(
    is_written: bool, name: str, h: tuple[Any, ...], before: tuple[int, str]
) -> tuple[int, str]:
    """Length and declaration of the ``h`` that the function after ``name`` gets.

    Args:
        is_written: whether the author wrote the function ``name``, which returns ``h``.
        name: ``"before_reduce"`` or ``"scalars"``.
        h: the numbers that it returned.
        before: length and declaration of the ``h`` that it got itself.
    """
    return (len(h), f"gets {len(h)} numbers, the h that {name} returns") if is_written else before


def _try_averages(
    rule: Rule, flags: tuple[bool, ...], h: tuple[Any, ...], averages: Function
) -> None:
    """Refuse ``averages`` that do not return a term for each mean, and unusable ``factors``."""
    states, over = [part.name for part in rule.state_for(flags)], rule.averages_for(flags)
    function = rule.torch_averages_in(torch.float32)
    n_terms = _Blocks(averages, h, flags, states).check(function, _terms)
    if n_terms != len(over):
        raise ValueError(
            f"{averages.title} returned {n_terms} terms, which are averaged over {over}: return "
            "one for each of averages_over, or else for each state that has a shape, in their order"
        )
    if rule.factors is not None:
        _try_factors(rule, flags, tuple(map(float, h)), averages.owner)


def _try_factors(rule: Rule, flags: tuple[bool, ...], h: tuple[float, ...], owner: str) -> None:
    """Refuse ``factors`` with other shapes than those of the states and means.

    Or whose results for a matrix in a stack of two differ from those for the matrix alone.
    """
    over, parts = rule.averages_for(flags), rule.row_column_states_for(flags)
    names, kinds = [part.name for part in parts], [str(part.shape) for part in parts]
    declarations = (
        (0, len(over), f"gets {len(over)} means, over {over}"),
        (1, len(parts), f"declares {len(parts)}, states of rows and columns={names}"),
        (2, len(h), f"gets {len(h)} numbers, the h of averages"),
        (3, len(flags), f"declares {len(flags)}, flags={rule.flags}"),
    )
    factors = Function("factors", owner, rule.factors, declarations)

    def results(*arguments: Any) -> tuple[tuple[Tensor, ...], ...]:
        return factors(lambda pair: tuple(map(tuple, _pair(pair))), rule.factors, *arguments)

    def stack_of(lines: Sequence[str]) -> tuple[Tensor, ...]:
        shapes = [(2, *shape_of_lines((2, 3), over)) for over in lines]
        return tuple(torch.arange(1.0, 1 + math.prod(s), device="cpu").view(s) for s in shapes)

    stacks, numbers = (stack_of(over), stack_of(kinds)), torch.tensor(h, device="cpu")
    arguments = (numbers[:, None, None, None].expand(-1, 2, 1, 1).unbind(), flags)
    stacked = results(*stacks, *arguments)
    for place in range(2):
        given = tuple(tuple(x[place] for x in stack) for stack in stacks)
        alone = results(*given, h, flags)
        for role, values, like in zip(("states", "factors"), alone, given[::-1], strict=True):
            shapes = [tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in values]
            if shapes != [tuple(x.shape) for x in like]:
                raise ValueError(
                    f"{factors.title} returned {role} of the shapes {shapes} for a parameter of "
                    f"shape (2, 3): return one for each of {names if role == 'states' else over}, "
                    "with its shape"
                )
        for whole, each in zip((*stacked[0], *stacked[1]), (*alone[0], *alone[1]), strict=True):
            is_alike = whole.shape == (2, *each.shape) and torch.allclose(
                whole[place], each, rtol=1e-4, atol=1e-6, equal_nan=True
            )
            if not is_alike:
                raise ValueError(
                    f"{factors.title} has other results for a matrix in a stack of two "
                    "than for the matrix alone: count dimensions from the last, and pass dim= to "
                    "each mean, as in row_var.mean(-2, keepdim=True)"
                )


def _check_scalars(function: Function, s: Any, h: Any, scalars: list[str]) -> None:
    """Refuse scalar states ``s``, or numbers ``h``, that are not tuples of numbers as declared."""
    if not isinstance(s, tuple) or len(s) != len(scalars):
        raise ValueError(
            f"{function.title} returned {_count(s)} scalar states, but the rule declares "
            f"{len(scalars)}, {scalars}: return one for each, in their order"
        )
    for what, values in (("scalar states", s), ("h", h)):
        if not isinstance(values, tuple) or not all(map(_is_number, values)):
            raise ValueError(
                f"{function.title} returned {values!r} as {what}: return a tuple of "
                "numbers, one for each that update takes"
            )


def _check_number(role: str, what: str, n: int, without_flags: int, flags_text: str) -> None:
    """Refuse a function that returns another number of numbers than without flags."""
    if n != without_flags:
        raise ValueError(
            f"{role} returned {n} numbers as {what} under {flags_text}, and {without_flags} "
            "without flags: return as many whatever the flags are"
        )


def _terms(result: Any) -> dict[str, Any]:
    """The terms that ``reduce`` returned, by name."""
    if not isinstance(result, tuple):
        got = None if result is None else f"a {type(result).__name__}"
        raise Broken(f"returned {got}: return a tuple of terms, as (g * g,)")
    return {f"term {i}": term for i, term in enumerate(result)}


@dataclass
class _Blocks:
    """A function of blocks, such as ``update``, and the arguments to check it with.

    Attributes:
        function: the function of the rule.
        h: numbers or 0-d tensors.
        flags: values of ``rule.flags``.
        states: names of the states in the ``state`` argument.
        draws: whether the function takes ``at``.
    """

    function: Function
    h: tuple[Any, ...]
    flags: tuple[bool, ...]
    states: list[str]
    draws: bool = False

    def check(self, function: Any, by_name: Callable[[Any], dict[str, Any]]) -> int:
        """Raise ValueError if ``function`` is not elementwise.

        Args:
            function: the function, on torch tensors.
            by_name: turns what the function returns into blocks by name.

        Returns:
            The number of blocks.
        """

        def call(block: Tensor) -> dict[str, Any]:
            numbers = tuple(float(x) for x in self.h)
            state = tuple(block + i for i in range(1, 1 + len(self.states)))
            arguments = (block + 0, -block, state, numbers, self.flags)
            arguments += ((block.to(torch.int64), block),) * self.draws
            return self.function(by_name, function, *arguments)

        block = torch.tensor([0.5, 2.0], device="cpu")
        return len(self.function.elementwise(call, block))


def _count(result: Any) -> str:
    """How many values ``result`` has, in words for a message."""
    if isinstance(result, tuple):
        return str(len(result))
    return f"{type(result).__name__} in place of a tuple of"


def _is_number(value: Any) -> bool:
    """Whether ``value`` is a number or a 0-d tensor."""
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.ndim == 0)


def _pair(result: Any, what: str = "two tuples, as (s, h)") -> tuple[Any, Any]:
    """``result``, if it is a pair; ``what`` says in the message what it should be."""
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        n = f" of {len(result)}" if isinstance(result, (tuple, list)) else ""
        got = None if result is None else f"a {type(result).__name__}{n}"
        raise Broken(f"returned {got}: return {what}")
    first, second = result
    return first, second
