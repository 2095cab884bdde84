"""Invariant: any sequence of calls ends where a training ends to which nothing of it happened."""

import functools
from collections.abc import Sequence
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule, run_state_machine_as_test

from ampopt.testing.beside import Double
from ampopt.testing.blueprints import Blueprint
from ampopt.testing.changes import Changes, kinds
from ampopt.testing.claims import Claims, check_claims, maker, settings_of
from ampopt.testing.failures import of_calls
from ampopt.testing.float64 import Float64
from ampopt.testing.machine import MOST, Machine, call

__all__ = ["Sequences"]

LARGE = 2.0**20
"""A norm that no gradient has: clipping to it changes no bit."""
BEGIN = (1.0, -0.5, 2.0)
"""Elements of a parameter, over and over."""


class Sequences(Claims):
    """The stateful part of the contract."""

    def test_any_sequence_of_calls(self) -> None:
        """Any calls in any order end where a plain training of the batches that counted ends.

        Gradients come and go, overflow, are accumulated, unscaled, edited, clipped, stepped with or
        dropped; scales, learning rates and groups change; the optimizer is saved, loaded, taken
        back to what was saved, and copied. Beside it the same optimizer, in its own dtype and so to
        the bit, takes ``step()`` with unscaled gradients where a step should have happened, and is
        never saved or copied; scale and pending flag are Python numbers.

        What two calls do, one by one, right, they may do wrong in a row, and a long run makes all
        of them.
        """
        _run(self, False, "plain_steps")

    def test_any_sequence_of_calls_is_near_float64(self) -> None:
        """Any calls in any order end near where a float64 ``reference`` ends with those batches.

        The calls are those of :meth:`test_any_sequence_of_calls`, and the reference takes the steps
        that should have happened. A bias correction in bfloat16, or a rate that is read once, is in
        a plain step too, so only other mathematics shows it: return an optimizer that you trust
        from ``reference``. How near: as rounding in the parameter's dtype may explain, see
        :class:`ampopt.testing.float64.Float64`.
        """
        _run(self, True, "plain_steps", "continuous")

    @classmethod
    def machine(cls) -> Changes:
        """The state machine of :meth:`test_any_sequence_of_calls`; a failure prints its calls."""
        return _machine_of(cls, False)()

    @classmethod
    def float64_machine(cls) -> Changes:
        """That of :meth:`test_any_sequence_of_calls_is_near_float64`."""
        return _machine_of(cls, True)()


def _run(contract: Sequences, of_float64: bool, *claims: str) -> None:
    cls = type(contract)
    check_claims(cls, claims)
    settings = hypothesis.settings(
        settings_of(cls),
        suppress_health_check=tuple(hypothesis.HealthCheck),  # pyright: ignore[reportArgumentType]
    )
    machine = _machine_of(cls, of_float64)
    try:
        run_state_machine_as_test(machine, settings=settings)
    except (Exception, pytest.fail.Exception) as error:
        test = f"test_any_sequence_of_calls{'_is_near_float64' * of_float64}"
        contract.failure = of_calls(test, error, Machine.last.called, claims)
        raise


@functools.cache
def _machine_of(contract: type[Sequences], of_float64: bool) -> type[Changes]:
    """The state machine of the optimizer that ``contract`` makes."""
    options = st.just({}) if contract.options is None else contract.options
    shapes = contract.shapes.filter(lambda shape: 0 < torch.Size(shape).numel() <= 12)
    dtypes = contract.dtypes if of_float64 else (*contract.dtypes, *contract.half_precision)

    norms = [None]
    if contract.dense_gradients:  # torch clips no sparse ones
        # What a norm is, to the bit, depends on the order of its sum.
        norms = [0.5, 2.0, None] if of_float64 else [None, LARGE]

    class OfContract(Changes):
        claims = contract

        @initialize(
            shapes=st.lists(shapes, min_size=1, max_size=2),
            dtype=st.sampled_from(dtypes),
            options=options,
            on_device=st.sampled_from(contract.on_device),
            kind=kinds,
        )
        def begin(
            self,
            shapes: list[Any],
            dtype: torch.dtype,
            options: dict[str, Any],
            on_device: bool,
            kind: str,
        ) -> None:
            make = maker(contract(), options)

            def beside(params: Sequence[Blueprint]) -> Any:
                if of_float64:
                    return Float64(maker(contract(), options, of_reference=True), params, dtype)
                return Double(make, params)

            params = [Blueprint(shape, BEGIN, dtype) for shape in shapes]
            self.begin_scaled(make, beside, params, on_device, kind)

        @precondition(lambda self: contract.several_groups and not self.pending)
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
        @rule(name=st.sampled_from(contract.calls or ("",)))
        @call
        def call_it(self, name: str) -> None:
            self.call_own(name)

    # Hypothesis prints calls of `state = <this name>()`, which is then how to run them again.
    name = "float64_machine" if of_float64 else "machine"
    OfContract.__name__ = OfContract.__qualname__ = f"{contract.__name__}.{name}"
    return OfContract
