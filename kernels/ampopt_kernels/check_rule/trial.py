"""Try a rule out before its first step."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._mode_utils import no_dispatch

from ampopt_kernels import torch_language
from ampopt_kernels.check_rule import by_source, by_triton, codec_trial, factor_trial
from ampopt_kernels.check_rule.function import Function, described, functions_of, own_codecs
from ampopt_kernels.cpu.expressions import LANGUAGE, Expression, Program
from ampopt_kernels.rule import Rule, keep, keep_all

__all__ = ["try_out"]


@functools.cache
def try_out(
    rule: Rule, flags: tuple[bool, ...], n_hyper: int, owner: str, dtype: torch.dtype
) -> None:
    """Refuse a rule that does not keep to what it declares. Runs once for each set of arguments.

    Args:
        rule: the rule.
        flags: values of ``rule.flags``.
        n_hyper: number of hyperparameters, tuples flattened.
        owner: name of the optimizer class, for the message.
        dtype: the dtype that the rule computes in, float32 or float64.

    Raises:
        ValueError: a function of the rule reads a state, hyperparameter or flag that the rule does
            not declare; returns other states than the rule declares; is not elementwise, as with
            an ``if`` on a gradient; uses what not every backend has; or cannot be compiled by
            Triton, if Triton can be imported. Or a codec of a state does not keep to what
            :class:`ampopt_kernels.Codec` says.
    """
    functions, coding = functions_of(rule, owner), own_codecs(rule, owner)
    # This reads its own CPU tensors. Dispatch modes of the caller must not see that, such as
    # assert_no_sync, nor change the tensors, such as FakeTensorMode.
    with no_dispatch():
        of_codecs = (function for own in coding for function in (own.encode, own.decode))
        for function in (*functions.values(), *of_codecs):
            by_source.check(function)
        passed, without = (
            _passed_on(rule, each, n_hyper, functions) for each in (flags, (False,) * len(flags))
        )
        for name, values in passed.items():
            if len(values) != len(without[name]):
                raise functions[name].returned(
                    f"{len(values)} numbers{_under(rule, flags)}, and {len(without[name])} "
                    "without flags: return the same number whatever the flags are"
                )
        before_means = "before_reduce" if rule.reduces else "scalars"
        _check_averages(rule, flags, passed[before_means], functions)
        _check_update(rule, flags, passed["scalars"], functions["update"])
        for own in coding:
            _check_blocks(own.encode, {"code": _call(own.encode, _block(), _block())})
            _check_blocks(own.decode, {"x": _call(own.decode, _block())})
            codec_trial.check(own)
        known_to_compile = rule.update.fn.__module__.startswith("ampopt_kernels.rules.")
        if not known_to_compile or coding:
            by_triton.check(rule, flags, n_hyper, owner, dtype)


# A function runs on expressions, as when it is translated to C++. They have the operations that all
# backends have, which are elementwise, and no value that a branch could depend on.


class _Argument(Expression):
    """An expression that refuses to be changed in place, which would change a caller's tensor."""

    def _changed(self, _: Any) -> Any:
        raise TypeError("a rule changes an argument in place")

    __iadd__ = __isub__ = __imul__ = __itruediv__ = _changed


def _block() -> _Argument:
    """A number for each element."""
    return _Argument(Program(torch.float32), "x", torch.float32, varies=True)


def _numbers(name: str, n: int, declared: str) -> "_Given":
    """A tuple of ``n`` numbers, each the same for all elements."""
    number = _Argument(Program(torch.float64), "x", torch.float64, varies=False)
    return _Given(name, (number,) * n, declared)


class _Given(tuple[Any, ...]):
    """A tuple that a function of a rule gets.

    Attributes:
        name: the name of the argument in the docstring of ``Rule``.
        declared: what the rule declares of it.
    """

    name: str
    declared: str

    def __new__(cls, name: str, values: Any, declared: str) -> "_Given":
        """Make the tuple of ``values``."""
        given = super().__new__(cls, values)
        given.name, given.declared = name, declared
        return given

    def __getitem__(self, index: Any) -> Any:
        """The element; IndexError beyond the end says what is declared, and what is read."""
        try:
            return super().__getitem__(index)
        except IndexError:
            read = f"{self.name}[{index}]"
            raise IndexError(f"the rule {self.declared}, but reads {read}") from None


class _Flag(int):
    """A flag. Of Python's booleans and of Triton's flags, ``~`` is -1 or -2: true in any case."""

    def __invert__(self) -> int:
        raise TypeError("a rule inverts a flag by ~")


def _under(rule: Rule, flags: tuple[bool, ...]) -> str:
    """The flags by name, in words, after a space; empty if there are none."""
    return f" under flags {dict(zip(rule.flags, flags, strict=True))}" if flags else ""


def _given_flags(rule: Rule, flags: tuple[bool, ...]) -> _Given:
    """The argument ``flags``."""
    return _Given("flags", map(_Flag, flags), f"declares {len(flags)}, flags={rule.flags}")


def _given_states(rule: Rule, flags: tuple[bool, ...], names: Sequence[str]) -> _Given:
    """The argument ``state``, with a block for each of ``names``."""
    declared = f"declares {len(names)}, state={[*names]}{_under(rule, flags)}"
    return _Given("state", (_block(),) * len(names), declared)


def _passed_on(
    rule: Rule, flags: tuple[bool, ...], n_hyper: int, functions: Mapping[str, Function]
) -> dict[str, _Given]:
    """What ``before_reduce``, ``reduce`` and ``scalars`` pass on to the functions after them."""
    scalars = [part.name for part in rule.scalar_state]
    s = _numbers("s", len(scalars), f"declares {len(scalars)}, scalar_state={scalars}")
    flattened = ", with tuples flattened" * (n_hyper != len(rule.hyper))
    h = _numbers("h", n_hyper, f"declares {n_hyper}, hyper={rule.hyper}{flattened}")
    of_flags, sums = _given_flags(rule, flags), _numbers("sums", 0, "")

    def h_after(function: Function, *arguments: _Given) -> _Given:
        new_s, new_h = function.pair(_call(function, *arguments), "two tuples, as (s, h)")
        _check_states(function, new_s, scalars, "scalar states")
        _check_numbers(function, {"scalar states": new_s, "h": new_h})
        declared = f"gets {len(new_h)} numbers, the h that {function.name} returns"
        return _numbers("h", len(new_h), declared)

    if rule.before_reduce is not keep_all:
        h = h_after(functions["before_reduce"], s, h, of_flags)
    of_reduce = h
    if rule.reduces:
        state = _given_states(rule, flags, rule.inputs_for(flags))
        n = _count_terms(functions["reduce"], _block(), _block(), state, h, of_flags)
        sums = _numbers("sums", n, f"gets {n} sums, one for each term of reduce")
    if rule.scalars is not keep:
        arguments = (s, h, of_flags, sums, sums)[: rule.scalars_arguments]
        h = h_after(functions["scalars"], *arguments)
    return {"before_reduce": of_reduce, "reduce": sums, "scalars": h}


def _check_averages(
    rule: Rule, flags: tuple[bool, ...], h: _Given, functions: Mapping[str, Function]
) -> None:
    """Run ``averages`` and ``factors``, if there are means under ``flags``."""
    if not (over := rule.averages_for(flags)):
        return
    function, of_flags = functions["averages"], _given_flags(rule, flags)
    state = _given_states(rule, flags, [part.name for part in rule.state_for(flags)])
    n = _count_terms(function, _block(), _block(), state, h, of_flags)
    if n != len(over):
        raise function.returned(
            f"{n} terms, which are averaged over {over}: return one for each of averages_over, or "
            "else for each state that has a shape, in their order"
        )
    if rule.factors is not None:
        factor_trial.check(rule, flags, len(h), function.owner)


def _check_update(rule: Rule, flags: tuple[bool, ...], h: _Given, function: Function) -> None:
    """Run ``update``, the ``function``."""
    states = [part.name for part in rule.state_for(flags)]
    state = _given_states(rule, flags, rule.inputs_for(flags))
    at = (Program(torch.float32),) * rule.draws
    result = _call(function, _block(), _block(), state, h, _given_flags(rule, flags), *at)
    p, new = function.pair(result, f"the new p and a tuple of {len(states)} states, {states}")
    _check_states(function, new, states, f"states{_under(rule, flags)}")
    _check_blocks(function, {"p": p, **dict(zip(states, new, strict=True))})


def _call(function: Function, *arguments: Any) -> Any:
    """What ``function`` returns."""
    try:
        return torch_language.bind(function.jitted, LANGUAGE)(*arguments)
    except Exception as error:  # of any type, because the author's functions run here
        declared = [x.declared for x in arguments if isinstance(x, _Given)]
        raise function.failed(error, f"The rule {'; '.join(declared)}") from error


def _count_terms(function: Function, *arguments: Any) -> int:
    """The number of terms that a ``reduce`` or an ``averages`` returns."""
    result = _call(function, *arguments)
    if not isinstance(result, tuple) or not result:
        raise function.returned(f"{described(result)}: return a tuple of terms, as (g * g,)")
    _check_blocks(function, {f"term {i}": term for i, term in enumerate(result)})
    return len(result)


def _check_states(function: Function, new: Any, names: Sequence[str], what: str) -> None:
    """Refuse ``new`` states that are not a tuple with one for each of ``names``."""
    if not isinstance(new, tuple) or len(new) != len(names):
        comma = ". A tuple of one needs the comma" * (
            len(names) == 1 and not isinstance(new, tuple)
        )
        raise function.returned(
            f"{described(new)} as {what}, but the rule declares {len(names)}, {names}: return one "
            f"for each, in their order{comma}"
        )


def _check_numbers(function: Function, returned: Mapping[str, Any]) -> None:
    """Refuse results that are not tuples of numbers."""
    for what, values in returned.items():
        if not isinstance(values, tuple) or not all(map(_is_number, values)):
            raise function.returned(
                f"{described(values)} as {what}: return a tuple of numbers, one for each that "
                "update takes"
            )


def _check_blocks(function: Function, returned: Mapping[str, Any]) -> None:
    """Refuse results that are not blocks."""
    for name, value in returned.items():
        if not isinstance(value, Expression) or not value.varies:
            number = value if isinstance(value, (int, float)) else "number"
            raise function.returned(
                f"{described(value)} as {name!r}: a rule is elementwise, and returns a block for "
                f"each. A block that has a number for each element is p * 0 + {number}"
            )


def _is_number(value: Any) -> bool:
    """Whether ``value`` is one number for all elements."""
    return isinstance(value, (int, float)) or (isinstance(value, Expression) and not value.varies)
