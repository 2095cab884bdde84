"""Invariant: any sequence of calls ends where a plain training with the applied batches ends."""

import hypothesis
import pytest
from hypothesis.errors import HypothesisException
from hypothesis.stateful import run_state_machine_as_test

from ampopt.testing.claims import Claims
from ampopt.testing.invariant import check_claims, settings_of
from ampopt.testing.state_machine.changes import Changes
from ampopt.testing.state_machine.machine import Machine
from ampopt.testing.state_machine.sequence import CallSequence, machine_of

__all__ = ["Sequences"]

LONGEST = 20
"""Maximum number of calls in a sequence, even if the settings allow more: they are what takes the
most time."""


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
        rounding in the parameter's dtype explains; see
        :class:`ampopt.testing.state_machine.float64.Float64`.
        """
        _run(self, True, "plain_steps", "continuous")

    @classmethod
    def machine(cls) -> Changes:
        """The state machine of :meth:`test_any_sequence_of_calls`; a failure prints its calls."""
        return machine_of(cls, False)()

    @classmethod
    def float64_machine(cls) -> Changes:
        """The state machine of :meth:`test_any_sequence_of_calls_is_near_float64`."""
        return machine_of(cls, True)()


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
        run_state_machine_as_test(machine_of(cls, of_float64), settings=settings)
    except HypothesisException:
        raise
    except (Exception, pytest.fail.Exception) as error:
        test = f"test_any_sequence_of_calls{'_is_near_float64' * of_float64}"
        sequence = CallSequence(cls, of_float64, Machine.last.calls)
        contract.failure = sequence.failure(test, error, claims)
        raise
