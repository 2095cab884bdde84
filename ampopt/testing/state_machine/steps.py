"""The state machine's calls of an iteration: gradients and steps."""

import functools
from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import rule

from ampopt.testing.blueprints import Blueprint, set_gradients
from ampopt.testing.state_machine.machine import by_machine, call, precondition
from ampopt.testing.state_machine.records import Records
from ampopt.testing.strategies import NON_FINITE, values

__all__ = ["MOST", "Steps", "bad_gradients", "some_gradients"]

MOST = 4
"""Maximum number of parameters; gradients are drawn for as many."""
ORDINARY = ((1.0, -0.5),) * MOST
"""Gradients of an iteration that is one call."""
LARGE = 2.0**20
"""A norm above that of any drawn gradient: clipping to it changes no bit."""

_numbers = st.lists(values(torch.float32), min_size=1, max_size=3).map(tuple)
some_gradients = st.tuples(*[_numbers | st.none()] * MOST)
"""Strategy of gradients: for each parameter its elements, repeated as needed, or ``None``."""

bad_gradients = st.one_of(
    st.none(), st.none(), st.tuples(st.integers(0, MOST), st.sampled_from(NON_FINITE))
)
"""Strategy of overflows: ``None``, or a parameter's index and the last element of its gradient.
The index ``MOST`` means all parameters."""

_norms = by_machine(lambda self: st.sampled_from(self.norms))


class Steps(Records):
    """The calls of an iteration."""

    @property
    def norms(self) -> tuple[float | None, ...]:
        """The norms to clip to."""
        if not self.claims.dense_gradients:  # torch does not clip sparse gradients
            return (None,)
        # The bits of a norm depend on the order of summation, so the bitwise test never clips.
        return (0.5, 2.0, None) if self.of_float64 else (None, LARGE)

    # --- gradients -------------------------------------------------------------------------------

    @precondition(lambda self: self.pending is None)
    @rule(numbers=some_gradients, bad=bad_gradients)
    @call
    def backward(self, numbers: tuple[Any, ...], bad: tuple[int, float] | None) -> None:
        """Set gradients of a scaled loss on some of the parameters, and record them unscaled."""
        gradients = []
        for i, (p, own) in enumerate(zip(self.params, numbers, strict=False)):
            sparse = p.ndim and not self.claims.dense_gradients
            layout: Any = "sparse" if sparse else "contiguous"
            spoils = bad is not None and (bad[0] == MOST or bad[0] % len(self.params) == i)
            spots = ((p.numel() - 1, bad[1]),) if bad and spoils else ()
            gradients.append(own and Blueprint(tuple(p.shape), own, self.dtype, layout, spots))
        self.gradients = gradients
        set_gradients(self.params, self.gradients, self.number)

    # Hypothesis prefers early rules, which it sorts by number of arguments and then by name. A
    # whole iteration named "advance" is therefore drawn often, so that the optimizer has state.
    @precondition(lambda self: self.may_step)
    @rule()
    @call
    def advance(self) -> None:
        """Run one whole iteration."""
        self.backward(numbers=ORDINARY, bad=None)
        self.unscale_and_step(max_norm=None)

    @precondition(lambda self: self.may_step and self.kind != "none" and self.splits)
    @rule()
    @call
    def advance_edited(self) -> None:
        """Run one whole iteration in two calls, with the gradients edited between them."""
        self.backward(numbers=ORDINARY, bad=None)
        self.unscale()
        self.edit_gradients(factor=0.5)
        self.step_after_unscale()

    @precondition(lambda self: self.may_step and self.of_float64 and self.claims.dense_gradients)
    @rule(max_norm=_norms)
    @call
    def advance_clipped(self, max_norm: float | None) -> None:
        """Run one whole iteration with clipping."""
        self.backward(numbers=ORDINARY, bad=None)
        self.unscale_and_step(max_norm=max_norm)

    @precondition(lambda self: not self.is_idle or any(self.gradients))
    @rule(set_to_none=st.booleans())
    @call
    def zero_grad(self, set_to_none: bool) -> None:
        """Drop gradients, or set them to zero; either discards a pending unscale."""
        before = self.gradients
        self.optimizer.zero_grad(set_to_none)
        self.forget()
        if set_to_none or not self.claims.dense_gradients:
            for p in self.params:
                p.grad = None  # a zeroed sparse gradient has no rows, unlike a blueprint's
        else:  # a gradient may exist only as a sum of accumulate, so look at p.grad
            self.gradients = [
                None if own is None or p.grad is None else replace(own, numbers=(0.0,), spots=())
                for p, own in zip(self.params, before, strict=True)
            ]

    # Not in half precision: accumulate sums in float32, the reference training in the dtype.
    @precondition(lambda self: self.claims.accumulates and self.claims.dense_gradients)
    @precondition(lambda self: self.may_step and self.dtype.itemsize > 2)
    @rule(numbers=some_gradients, bad=bad_gradients)
    @call
    def accumulate(self, numbers: tuple[Any, ...], bad: tuple[int, float] | None) -> None:
        """Set the gradients of a micro-batch and call ``accumulate``."""
        self.backward(numbers=numbers, bad=None if self.kind == "none" else bad)
        if not any(self.gradients):
            return
        found_inf, _ = self.optimizer.accumulate(grads_scaled_by=self.scale)
        assert bool(found_inf > 0) is self.overflows
        assert not any(p.grad is not None and p.grad.any() for p in self.params)
        self.end_cycle()
        sums = self.gradients
        self.forget()
        self.sums = sums

    # --- steps -----------------------------------------------------------------------------------

    @property
    def splits(self) -> bool:
        """Whether ``unscale`` may be called: it refuses float16 gradients, which may underflow."""
        return self.dtype != torch.float16

    @precondition(lambda self: self.may_step and self.kind != "none" and self.splits)
    @rule()
    @call
    def unscale(self) -> None:
        """Call ``unscale``, which ends the cycle, check its flag, and record that it is pending."""
        self.end_cycle()
        self.pending = self.optimizer.unscale(grads_scaled_by=self.scale)
        assert bool(self.pending.found_inf > 0) is self.overflows

    @precondition(lambda self: self.pending is not None)
    @rule(factor=st.sampled_from([0.5, 0.0]))
    @call
    def edit_gradients(self, factor: float) -> None:
        """Multiply the unscaled gradients, as clipping or weighting would."""
        for p in self.optimizer.master_params():
            if p.grad is not None:
                p.grad.mul_(factor)
        self.gradients = [grad and _multiplied(grad, factor) for grad in self.gradients]

    @precondition(lambda self: self.pending is not None)
    @rule()
    @call
    def step_after_unscale(self) -> None:
        """Call ``step_after_unscale``, and check what it did."""
        self.use_gradients(self.optimizer.step_after_unscale)

    # Without a scale, the call checks nothing, so gradients must be finite then.
    @precondition(lambda self: self.may_step and (self.kind != "none" or not self.overflows))
    @rule(max_norm=_norms)
    @call
    def unscale_and_step(self, max_norm: float | None) -> None:
        """Call ``unscale_and_step``, which ends the cycle, and check what it did."""
        self.end_cycle()
        if self.kind == "none" and not any(self.gradients):
            return  # without a scale this is step(), which may act without gradients
        step = functools.partial(self.optimizer.unscale_and_step, grads_scaled_by=self.scale)
        clipping = {} if max_norm is None else {"max_norm": max_norm}
        self.use_gradients(functools.partial(step, **clipping), max_norm=max_norm)

    @precondition(lambda self: self.pending is not None and any(self.gradients))
    @rule()
    @call
    def step(self) -> None:
        """Call plain ``step()`` on unscaled gradients."""
        self.use_gradients(self.optimizer.step)


def _multiplied(grad: Blueprint, factor: float) -> Blueprint:
    """``grad``, with each element multiplied by ``factor``."""
    spots = tuple((place, number * factor) for place, number in grad.spots)
    return replace(grad, numbers=tuple(n * factor for n in grad.numbers), spots=spots)
