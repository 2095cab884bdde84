"""The state machine's gradients and steps, compared with a reference training after every call."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import rule
from torch import Tensor
from torch.nn import Parameter

from ampopt._step.small_states import of_any_size
from ampopt.testing.blueprints import Blueprint, elements
from ampopt.testing.claims import Claims, apart
from ampopt.testing.pretended_device import as_on_a_device
from ampopt.testing.reference_training import ReferenceTraining
from ampopt.testing.state_machine import Machine, call, precondition
from ampopt.testing.strategies import NON_FINITE, values
from ampopt.testing.training import seed

__all__ = ["CEILING", "FLOOR", "INTERVAL", "MOST", "Steps"]

MOST = 4
"""Maximum number of parameters; gradients are drawn for as many."""
FLOOR, CEILING, INTERVAL = 2.0**-2, 2.0**4, 2
"""``min_scale``, ``max_scale`` and ``growth_interval`` of the dynamic scales in use."""

_numbers = st.lists(values(torch.float32), min_size=1, max_size=3).map(tuple)
some_gradients = st.tuples(*[_numbers | st.none()] * MOST)
"""Strategy of gradients: for each parameter its elements, repeated as needed, or ``None``."""

bad_gradients = st.one_of(
    st.none(), st.none(), st.tuples(st.integers(0, MOST), st.sampled_from(NON_FINITE))
)
"""Strategy of overflows: ``None``, or a parameter's index and the last element of its gradient.
The index ``MOST`` means all parameters."""


class Steps(Machine):
    """An optimizer under a loss scale, compared with a reference training after every call.

    The machine records in Python what is expected: the scale, whether an unscale is pending, and
    which gradients are present.

    Attributes:
        claims: the contract class of the optimizer.
        sums: the sums of the gradients that ``accumulate`` got; ``None`` outside of a cycle.
        spoilt: whether a summed gradient was non-finite.
    """

    claims: ClassVar[type[Claims]]

    def __init__(self) -> None:
        """Start without an optimizer; :meth:`begin_with` makes it."""
        super().__init__()
        self.params: list[Parameter] = []
        self.contexts = ExitStack()
        # None while idle; while an unscale is pending, whether it found an overflow.
        self.pending: bool | None = None
        self.unscaled_gradients: list[Blueprint | None] = []  # by parameter
        self.overflows = False
        self.sums: list[Blueprint | None] | None = None
        self.spoilt = False
        self.kind, self.scale, self.number, self.finite = "number", 1.0, 1.0, 0

    def begin_with(
        self, make: Any, make_reference: Any, params: Sequence[Blueprint], on_device: bool
    ) -> None:
        """Make the optimizer, and a reference training by ``make_reference(params)``."""
        self.contexts.enter_context(apart())
        self.contexts.enter_context(of_any_size())
        if on_device:
            self.contexts.enter_context(as_on_a_device())
        seed()
        self.make, self.dtype = make, params[0].dtype
        self.mode = self.claims.modes[0] if self.claims.modes else None
        self.params = [p.parameter() for p in params]
        self.optimizer = make(list(self.params))
        self.reference_training = ReferenceTraining(lambda: make_reference(params))
        self.forget()

    def teardown(self) -> None:
        """Leave the contexts that :meth:`begin_with` entered."""
        self.contexts.close()

    def check(self) -> None:
        """Check parameters, state, the scale, and that calls out of order raise."""
        self.reference_training.training.check(self.params, self.optimizer)
        if self.kind == "none":
            assert self.scale is None
        else:
            assert float(self.scale) == self.number
        methods: tuple[Any, ...] = (self.optimizer.step_after_unscale,)
        if self.pending is not None:
            methods = (self.optimizer.unscale, self.optimizer.accumulate, self.optimizer.state_dict)
            if not any(self.unscaled_gradients):  # nothing would be unscaled twice
                methods = ()
        for out_of_order in methods:
            with pytest.raises(RuntimeError, match="unscale"):
                out_of_order()
        if not (self.trains or self.overflows) and any(self.unscaled_gradients):
            with pytest.raises(RuntimeError):
                self.optimizer.unscale_and_step(grads_scaled_by=self.number)
            for p, grad in zip(self.params, self.unscaled_gradients, strict=True):
                p.grad = None if grad is None else grad.tensor(self.number)
            self.reference_training.training.check(self.params, self.optimizer)
        if self.sums is not None:
            with pytest.raises(RuntimeError, match="accumulate"):
                self.optimizer.state_dict()

    # --- gradients -------------------------------------------------------------------------------

    @precondition(lambda self: self.pending is None)
    @rule(numbers=some_gradients, bad=bad_gradients)
    @call
    def backward(self, numbers: tuple[Any, ...], bad: tuple[int, float] | None) -> None:
        """Set gradients of a scaled loss on some of the parameters."""
        self.give_gradients(numbers, bad)

    def give_gradients(self, numbers: tuple[Any, ...], bad: tuple[int, float] | None) -> None:
        """Set scaled gradients, and record them unscaled."""
        self.unscaled_gradients = []
        for p, own in zip(self.params, numbers, strict=False):
            sparse = p.ndim and not self.claims.dense_gradients
            layout: Any = "sparse" if sparse else "contiguous"
            grad = None if own is None else Blueprint(tuple(p.shape), own, self.dtype, layout)
            self.unscaled_gradients.append(grad)
        self.overflows = False
        for i, (p, grad) in enumerate(zip(self.params, self.unscaled_gradients, strict=True)):
            p.grad = None if grad is None else grad.tensor(self.number)
            if bad is None or p.grad is None:
                continue
            if bad[0] == MOST or bad[0] % len(self.params) == i:
                elements(p.grad).view(-1)[-1] = bad[1]
                self.overflows = True

    # Hypothesis prefers early rules, which it sorts by number of arguments and then by name. A
    # whole iteration named "advance" is therefore drawn often, so that the optimizer has state.
    @precondition(lambda self: self.may_step)
    @rule()
    @call
    def advance(self) -> None:
        """Run one whole iteration."""
        self.give_gradients(((1.0, -0.5),) * MOST, None)
        self.take_a_step(None)

    @precondition(lambda self: self.may_step and self.kind != "none" and self.splits)
    @rule()
    @call
    def advance_edited(self) -> None:
        """Run one whole iteration in two calls, with the gradients edited between them."""
        self.give_gradients(((1.0, -0.5),) * MOST, None)
        self.unscale_gradients()
        self.multiply_gradients(0.5)
        self.take_the_step()

    @property
    def has_gradients(self) -> bool:
        """Whether there are gradients: scaled, unscaled or accumulated."""
        return not self.is_idle or any(self.unscaled_gradients)

    @property
    def is_idle(self) -> bool:
        """Whether no unscaled or accumulated gradients wait for a step."""
        return self.pending is None and self.sums is None

    @precondition(lambda self: self.has_gradients)
    @rule(set_to_none=st.booleans())
    @call
    def zero_grad(self, set_to_none: bool) -> None:
        """Drop gradients, or set them to zero; either discards a pending unscale."""
        before = self.unscaled_gradients
        self.optimizer.zero_grad(set_to_none)
        self.forget()
        if set_to_none or not self.claims.dense_gradients:
            for p in self.params:
                p.grad = None  # a zeroed sparse gradient has no rows, unlike a blueprint's
        else:  # a gradient may exist only as a sum of accumulate, so look at p.grad
            self.unscaled_gradients = [
                None if own is None or p.grad is None else replace(own, numbers=(0.0,))
                for p, own in zip(self.params, before, strict=True)
            ]

    def forget(self) -> None:
        """Record that there are no gradients, nothing is pending, and there is no cycle."""
        self.pending, self.overflows = None, False
        self.sums, self.spoilt = None, False
        self.unscaled_gradients = [None for _ in self.params]

    # Not in half precision: accumulate sums in float32, the reference training in the dtype.
    @precondition(lambda self: self.claims.accumulates and self.claims.dense_gradients)
    @precondition(lambda self: self.may_step and self.dtype.itemsize > 2)
    @rule(numbers=some_gradients, bad=bad_gradients)
    @call
    def accumulate(self, numbers: tuple[Any, ...], bad: tuple[int, float] | None) -> None:
        """Set the gradients of a micro-batch and call ``accumulate``."""
        self.give_gradients(numbers, None if self.kind == "none" else bad)
        if not any(self.unscaled_gradients):
            return
        found_inf, _ = self.optimizer.accumulate(grads_scaled_by=self.scale)
        assert bool(found_inf > 0) is self.overflows
        assert not any(p.grad is not None and p.grad.any() for p in self.params)
        sums, spoilt = self.with_sums(), self.overflows or self.spoilt
        self.forget()
        self.sums, self.spoilt = sums, spoilt

    def with_sums(self) -> list[Blueprint | None]:
        """The present gradients plus the accumulated ones."""
        if self.sums is None:
            return self.unscaled_gradients
        pairs = zip(self.sums, self.unscaled_gradients, strict=True)
        return [_sum_of(a, b) if a and b else a or b for a, b in pairs]

    def end_window(self) -> None:
        """Record that the accumulated gradients are now part of the present ones."""
        self.unscaled_gradients, self.overflows = self.with_sums(), self.overflows or self.spoilt
        self.sums, self.spoilt = None, False

    # --- steps -----------------------------------------------------------------------------------

    @precondition(lambda self: self.may_step and self.kind != "none" and self.splits)
    @rule()
    @call
    def unscale(self) -> None:
        """Call ``unscale``."""
        self.unscale_gradients()

    def unscale_gradients(self) -> None:
        """Call ``unscale``, which ends the cycle, check its flag, and record that it is pending."""
        self.end_window()
        result = self.optimizer.unscale(grads_scaled_by=self.scale)
        assert bool(result.found_inf > 0) is self.overflows
        self.pending = self.overflows
        self.unscaled = result

    @property
    def splits(self) -> bool:
        """Whether ``unscale`` may be called: it refuses float16 gradients, which may underflow."""
        return self.dtype != torch.float16

    @precondition(lambda self: self.pending is not None)
    @rule(factor=st.sampled_from([0.5, 0.0]))
    @call
    def edit_gradients(self, factor: float) -> None:
        """Multiply the unscaled gradients, as clipping or weighting would."""
        self.multiply_gradients(factor)

    def multiply_gradients(self, factor: float) -> None:
        """Multiply the unscaled gradients, and the record of them."""
        for p in self.optimizer.master_params():
            if p.grad is not None:
                p.grad.mul_(factor)
        self.unscaled_gradients = [
            None if grad is None else replace(grad, numbers=tuple(n * factor for n in grad.numbers))
            for grad in self.unscaled_gradients
        ]

    @precondition(lambda self: self.pending is not None)
    @rule()
    @call
    def step_after_unscale(self) -> None:
        """Call ``step_after_unscale``."""
        self.take_the_step()

    def take_the_step(self) -> None:
        """Call ``step_after_unscale``, and check what it did."""
        before = torch.get_rng_state()
        result = self.optimizer.step_after_unscale()
        assert result.skipped is self.overflows
        self.account_for_step(result, before)

    @property
    def may_step(self) -> bool:
        """Whether nothing is pending and the optimizer is in its training mode."""
        return self.pending is None and self.trains

    @property
    def trains(self) -> bool:
        """Whether the optimizer is in its first mode, the one to step in."""
        return self.mode in (None, *self.claims.modes[:1])

    @property
    def may_step_at_once(self) -> bool:
        """Whether ``unscale_and_step`` may be called.

        Without a scale it checks nothing, so gradients must be finite then.
        """
        return self.may_step and (self.kind != "none" or not self.overflows)

    def take_a_step(self, max_norm: float | None) -> None:
        """Call ``unscale_and_step``, which ends the cycle, and check what it did."""
        self.end_window()
        if self.kind == "none" and not any(self.unscaled_gradients):
            return  # without a scale this is step(), which may act without gradients
        before = torch.get_rng_state()
        clipping = {} if max_norm is None else {"max_norm": max_norm}
        result = self.optimizer.unscale_and_step(grads_scaled_by=self.scale, **clipping)
        assert result.skipped is self.overflows
        self.account_for_step(result, before, max_norm)

    @precondition(lambda self: self.pending is not None and any(self.unscaled_gradients))
    @rule()
    @call
    def step(self) -> None:
        """Call plain ``step()`` on unscaled gradients."""
        before = torch.get_rng_state()
        self.optimizer.step()
        self.account_for_step(self.unscaled, before)

    def account_for_step(self, result: Any, before: Tensor, max_norm: float | None = None) -> None:
        """Check the result of a step, and take the reference step."""
        gradients, after = tuple(self.unscaled_gradients), torch.get_rng_state()
        self.account_for(result, before, "step", gradients, max_norm, before, after)

    def account_for(self, result: Any, before: Tensor, what: str, *arguments: Any) -> None:
        """Check the flag in a result, and record the next scale.

        Args:
            result: the result of a step, or of a call of ``Claims.calls``.
            before: torch's random state before the call.
            what: what the reference training does, unless the call had to be skipped; see
                :meth:`ReferenceTraining.tell`.
            arguments: the arguments of that.
        """
        overflows, gradients = self.overflows, any(self.unscaled_gradients)
        assert bool(result.found_inf > 0) is overflows
        if overflows or not gradients:
            same = torch.equal(torch.get_rng_state(), before)
            assert same, "a skipped step drew random numbers"
        else:
            self.reference_training.tell(what, *arguments)
        self.scale = result.scale
        if overflows and self.kind == "dynamic":
            self.number, self.finite = max(self.number / 2, FLOOR), 0
        elif overflows and self.kind == "number" and self.number != 1.0:  # which scales nothing
            self.number /= 2
        elif gradients and self.kind == "dynamic":
            self.finite += 1
            if self.finite == INTERVAL:
                self.number, self.finite = min(self.number * 2, CEILING), 0
        self.drop()

    def drop(self) -> None:
        """Drop the gradients: the contents of ``p.grad`` after a step are unspecified."""
        for p in self.params:
            p.grad = None
        self.forget()


def _sum_of(a: Blueprint, b: Blueprint) -> Blueprint:
    """The sum of two gradients, as a blueprint."""
    numbers = (a.tensor() + b.tensor()).flatten().tolist()
    return Blueprint(a.shape, tuple(numbers), a.dtype)
