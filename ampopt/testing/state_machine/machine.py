"""A Hypothesis state machine that records its calls, and can repeat them with some left out."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

from hypothesis import stateful
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine

__all__ = ["Call", "Machine", "call", "by_machine", "precondition"]


class Call(NamedTuple):
    """A call of a rule of the machine.

    Attributes:
        name: the name of the rule.
        arguments: its arguments.
    """

    name: str
    arguments: dict[str, Any]


def by_machine(strategy: Callable[[Any], st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    """Strategy that ``strategy`` returns for the machine that draws from it."""
    return st.runner().flatmap(strategy)


def call(rule: Any) -> Any:
    """Make a Hypothesis rule of the machine record its calls, and check everything after each.

    A rule may call others. Their calls are part of its own: they are not recorded. The check is not
    a Hypothesis invariant, because those would be printed among the calls of a failure.
    """

    @functools.wraps(rule)
    def checked(self: "Machine", **arguments: Any) -> None:
        if self.is_in_a_call:
            rule(self, **arguments)
            return
        self.calls.append(Call(rule.__name__, arguments))
        self.is_in_a_call = True
        rule(self, **arguments)
        self.is_in_a_call = False
        self.check()

    return checked


def precondition(condition: Callable[[Any], bool]) -> Callable[[Any], Any]:
    """Hypothesis's ``precondition``, which :meth:`Machine.repeat` can read."""

    def conditional(rule: Any) -> Any:
        result: Any = stateful.precondition(condition)(rule)
        result.conditions = (*getattr(rule, "conditions", ()), condition)
        return result

    return conditional


class Machine(RuleBasedStateMachine):
    """A state machine whose rules are marked with :func:`call`.

    Attributes:
        calls: the calls made, of which the first makes the optimizer.
        is_in_a_call: whether a rule runs, so that a rule that it calls is part of it.
        last: the machine that ran last.
    """

    last: ClassVar[Any] = None

    def __init__(self) -> None:
        """Start without a call."""
        super().__init__()
        Machine.last = self
        self.calls: list[Call] = []
        self.is_in_a_call = False

    def check(self) -> None:
        """Raise if a call has done what it must not."""
        raise NotImplementedError

    def repeat(self, calls: Sequence[Call]) -> None:
        """Make the ``calls``, but for those that the claims or the calls before exclude."""
        for name, arguments in calls:
            method = getattr(self, name)
            if all(condition(self) for condition in getattr(method, "conditions", ())):
                method(**arguments)
