"""A sequence of calls that has failed, to be repeated within other claims."""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch

from ampopt.testing.blueprints import number_of
from ampopt.testing.claims import Claims
from ampopt.testing.failures import Failure, explanations_of
from ampopt.testing.state_machine.changes import Changes
from ampopt.testing.state_machine.machine import Call

__all__ = ["CallSequence", "machine_of"]


def machine_of(contract: type[Claims], of_float64: bool) -> type[Changes]:
    """Return the state machine class for the optimizer that ``contract`` makes."""
    # Hypothesis prints calls of `state = <this name>()`, which is then how to run them again.
    name = f"{contract.__name__}.{'float64_machine' if of_float64 else 'machine'}"
    return type(name, (Changes,), {"claims": contract, "of_float64": of_float64})


class CallSequence(NamedTuple):
    """A sequence of calls.

    Attributes:
        contract: the class of the optimizer and its claims.
        of_float64: whether the optimizer is compared with a float64 reference.
        calls: the calls.
    """

    contract: type[Claims]
    of_float64: bool
    calls: list[Call]

    def passes(self) -> bool:
        """Whether those of the calls pass that the contract's claims include."""
        machine = machine_of(self.contract, self.of_float64)()
        try:
            machine.repeat(self.calls)
        except (Exception, pytest.fail.Exception):
            return False
        finally:
            machine.teardown()
        return True

    def failure(self, test: str, error: BaseException, claims: Iterable[str]) -> Failure:
        """Describe the failure of a test that needs ``claims``; the sequence is shrunk."""
        calls = max(len(self.calls) - 1, 0)
        explanations = ()
        if self.calls:  # else no optimizer was made
            explanations = explanations_of(self, claims, _LIMITS, CallSequence.passes)
        return Failure(test, number_of(calls, "call"), (calls,), str(error), explanations)

    def claiming(self, **claims: Any) -> "CallSequence":
        """The sequence for a contract with other claims."""
        contract = self.contract
        return self._replace(contract=type(contract.__name__, (contract,), claims))

    @property
    def begin(self) -> dict[str, Any]:
        """The arguments of the first call."""
        return self.calls[0].arguments

    def beginning(self, **arguments: Any) -> "CallSequence":
        """The sequence with other arguments of the first call."""
        first, *others = self.calls
        return self._replace(calls=[Call(first.name, {**self.begin, **arguments}), *others])

    def in_single_precision(self, dtypes: Iterable[torch.dtype]) -> "CallSequence":
        """The sequence with float32 parameters, if their dtype is one of ``dtypes``."""
        limited = self.begin["dtype"] in dtypes
        return self.beginning(dtype=torch.float32) if limited else self

    def in_full_precision(self) -> "CallSequence":
        """The sequence with states of 32 bits."""
        return self.beginning(state_bits=32)


_OF_CALLS = ("deepcopies", "checkpoints", "accumulates", "several_groups", "tensor_learning_rates")
_LIMITS: dict[str, Callable[[CallSequence], CallSequence]] = {
    "state_bits = (32,)": CallSequence.in_full_precision,
    "half_precision = ()": lambda s: s.in_single_precision(s.contract.half_precision),
    "dtypes = (torch.float32,)": lambda s: s.in_single_precision(s.contract.dtypes),
    **{
        f"{claim} = False": functools.partial(CallSequence.claiming, **{claim: False})
        for claim in _OF_CALLS
    },
}
"""Claims that limit the sequences, and how a sequence is changed to keep within each."""
