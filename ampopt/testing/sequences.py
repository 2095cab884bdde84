"""Invariant: any sequence of calls ends where a plain training with the applied batches ends."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.errors import HypothesisException
from hypothesis.stateful import initialize, rule, run_state_machine_as_test

from ampopt.testing.blueprints import Blueprint, number_of
from ampopt.testing.claims import (
    Claims,
    check_claims,
    keeping_signed,
    maker,
    positive_states,
    settings_of,
    storing,
)
from ampopt.testing.failures import Failure, explained
from ampopt.testing.float64 import Float64
from ampopt.testing.reference_training import Double
from ampopt.testing.state_machine import Call, Machine, call, precondition
from ampopt.testing.state_machine_changes import Changes, kinds
from ampopt.testing.state_machine_steps import MOST, bad_gradients, some_gradients

__all__ = ["CallSequence", "Sequences"]

LONGEST = 20
"""Maximum number of calls in a sequence, even if the settings allow more: they are what takes the
most time."""
LARGE = 2.0**20
"""A norm above that of any drawn gradient: clipping to it changes no bit."""
BEGIN = (1.0, -0.5, 2.0)
"""Initial elements of every parameter, repeated as needed."""


class Sequences(Claims):
    """Sequences of calls, drawn by a state machine."""

    def test_any_sequence_of_calls(self) -> None:
        """Any calls in any order end, bitwise, where plain steps on the applied batches end.

        Gradients come and go, overflow, are accumulated, unscaled, edited, clipped, applied or
        dropped; scales, learning rates and groups change; the optimizer is saved, loaded, taken
        back to a checkpoint, and copied. In parallel, a second optimizer of the same dtype takes
        ``step()`` on unscaled gradients wherever a step should be applied, and is never saved or
        copied.

        Two calls that are each right alone may be wrong one after the other, and a long run makes
        every sequence.
        """
        _run(self, False, "plain_steps")

    def test_any_sequence_of_calls_is_near_float64(self) -> None:
        """Any calls in any order end near a float64 ``reference`` that takes the applied steps.

        The calls are those of :meth:`test_any_sequence_of_calls`. A bias correction in bfloat16, or
        a learning rate that is read only once, is also wrong in a plain step, so only another
        implementation shows it: return one that you trust from ``reference``. The tolerance is what
        rounding in the parameter's dtype explains; see :class:`ampopt.testing.float64.Float64`.
        """
        _run(self, True, "plain_steps", "continuous")

    @classmethod
    def machine(cls) -> Changes:
        """The state machine of :meth:`test_any_sequence_of_calls`; a failure prints its calls."""
        return _machine_of(cls, False)()

    @classmethod
    def float64_machine(cls) -> Changes:
        """The state machine of :meth:`test_any_sequence_of_calls_is_near_float64`."""
        return _machine_of(cls, True)()


def _run(contract: Sequences, of_float64: bool, *claims: str) -> None:
    """Run the state machine under the settings of ``contract``, and record a failure."""
    cls = type(contract)
    check_claims(cls, claims)
    settings = hypothesis.settings(
        settings_of(cls),
        stateful_step_count=min(settings_of(cls).stateful_step_count, LONGEST),
        suppress_health_check=tuple(hypothesis.HealthCheck),  # pyright: ignore[reportArgumentType]
    )
    try:
        run_state_machine_as_test(_machine_of(cls, of_float64), settings=settings)
    except HypothesisException:
        raise
    except (Exception, pytest.fail.Exception) as error:
        test = f"test_any_sequence_of_calls{'_is_near_float64' * of_float64}"
        sequence = CallSequence(cls, of_float64, Machine.last.calls)
        contract.failure = sequence.failure(test, error, claims)
        raise


class CallSequence(NamedTuple):
    """A sequence of calls.

    Attributes:
        contract: the class of the optimizer and its claims.
        of_float64: whether the optimizer is compared with a float64 reference.
        calls: the calls.
    """

    contract: type[Sequences]
    of_float64: bool
    calls: list[Call]

    def passes(self) -> bool:
        """Whether those of the calls pass that the contract's claims include."""
        machine = _machine_of(self.contract, self.of_float64)()
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
        failure = Failure(test, number_of(calls, "call"), (calls,), str(error))
        if not self.calls:  # no optimizer was made
            return failure
        signed = {}
        if self.in_full_precision() != self:
            names = positive_states(maker(self.contract(), self.begin["options"]))
            signed = {name: self.beginning(signed=name) for name in names}
        return explained(failure, self, claims, _LIMITS, signed, CallSequence.passes)

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

    def in_single_precision(self, *, of: Callable[[type[Sequences]], Any]) -> "CallSequence":
        """The sequence with float32 parameters, if ``of`` returns the dtype of its parameters."""
        limited = self.begin["dtype"] in of(self.contract)
        return self.beginning(dtype=torch.float32) if limited else self

    def in_full_precision(self) -> "CallSequence":
        """The sequence with states of 32 bits."""
        return self.beginning(state_bits=32)


_OF_CALLS = ("deepcopies", "checkpoints", "accumulates", "several_groups", "tensor_learning_rates")
_LIMITS: dict[str, Callable[[CallSequence], CallSequence]] = {
    "state_bits = (32,)": CallSequence.in_full_precision,
    "half_precision = ()": functools.partial(
        CallSequence.in_single_precision, of=lambda contract: contract.half_precision
    ),
    "dtypes = (torch.float32,)": functools.partial(
        CallSequence.in_single_precision, of=lambda contract: contract.dtypes
    ),
    **{
        f"{claim} = False": functools.partial(CallSequence.claiming, **{claim: False})
        for claim in _OF_CALLS
    },
}
"""Claims that limit the sequences, and how a sequence is changed to keep within each."""


@functools.cache
def _machine_of(contract: type[Sequences], of_float64: bool) -> type[Changes]:
    """Return the state machine class for the optimizer that ``contract`` makes."""
    options = st.just({}) if contract.options is None else contract.options
    shapes = contract.shapes.filter(lambda shape: 0 < torch.Size(shape).numel() <= 12)
    dtypes = contract.dtypes if of_float64 else (*contract.dtypes, *contract.half_precision)

    # Float64 states cannot be small, and those of sparse gradients are torch's.
    bits = (32,) if of_float64 or not contract.dense_gradients else contract.state_bits

    norms = [None]
    if contract.dense_gradients:  # torch does not clip sparse gradients
        # The bits of a norm depend on the order of summation, so the bitwise test never clips.
        norms = [0.5, 2.0, None] if of_float64 else [None, LARGE]

    class OfContract(Changes):
        claims = contract

        @initialize(
            shapes=st.lists(shapes, min_size=1, max_size=2),
            dtype=st.sampled_from(dtypes),
            options=options,
            on_device=st.sampled_from(contract.on_device),
            state_bits=st.sampled_from(bits),
            kind=kinds,
        )
        @call
        def begin(
            self,
            shapes: list[Any],
            dtype: torch.dtype,
            options: dict[str, Any],
            on_device: bool,
            kind: str,
            state_bits: int,
            signed: str | None = None,
        ) -> None:
            make = keeping_signed(maker(contract(), options), signed)
            make = storing(make, state_bits=state_bits)

            def make_reference(params: Sequence[Blueprint]) -> Any:
                if of_float64:
                    return Float64(maker(contract(), options, of_reference=True), params, dtype)
                return Double(make, params)

            params = [Blueprint(shape, BEGIN, dtype) for shape in shapes]
            self.begin_with(make, make_reference, params, on_device)
            self.use_scale(kind, 2.0)
            if contract.checkpoints:
                self.last_checkpoint = self.checkpoint()

        @precondition(lambda self: self.claims.several_groups and not self.pending)
        @precondition(lambda self: self.sums is None)
        @precondition(lambda self: len(self.params) < MOST)
        @rule(shape=shapes, lr=st.sampled_from([0.5, 0.0625]))
        @call
        def add_group(self, shape: tuple[int, ...], lr: float) -> None:
            self.add_group_of(Blueprint(shape, BEGIN, self.dtype), lr)

        @precondition(lambda self: self.may_step_at_once)
        @rule(max_norm=st.sampled_from(norms))
        @call
        def unscale_and_step(self, max_norm: float | None) -> None:
            self.take_a_step(max_norm)

        @precondition(lambda self: self.may_step and of_float64 and contract.dense_gradients)
        @rule(max_norm=st.sampled_from(norms))
        @call
        def advance_clipped(self, max_norm: float | None) -> None:
            self.give_gradients(((1.0, -0.5),) * MOST, None)
            self.take_a_step(max_norm)

        @precondition(lambda self: bool(contract.modes) and self.is_idle)
        @rule(mode=st.sampled_from(contract.modes or ("",)))
        @call
        def switch(self, mode: str) -> None:
            self.switch_to(mode)

        @precondition(lambda self: bool(contract.calls) and self.is_idle)
        @rule(
            name=st.sampled_from(contract.calls or ("",)),
            numbers=st.none() | some_gradients,
            bad=bad_gradients,
        )
        @call
        def call_it(self, name: str, numbers: Any, bad: Any) -> None:
            if numbers is not None:
                self.give_gradients(numbers, bad)
            self.call_own(name)

    # Hypothesis prints calls of `state = <this name>()`, which is then how to run them again.
    name = "float64_machine" if of_float64 else "machine"
    OfContract.__name__ = OfContract.__qualname__ = f"{contract.__name__}.{name}"
    return OfContract
