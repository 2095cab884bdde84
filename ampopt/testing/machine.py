"""A state machine that makes any calls of an optimizer, and keeps account of what should happen."""

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from torch import Tensor
from torch.nn import Parameter

from ampopt._step.torch_private import uncoalesced_values
from ampopt.testing.beside import Beside
from ampopt.testing.blueprints import Blueprint
from ampopt.testing.claims import Claims, apart
from ampopt.testing.device import as_on_a_device
from ampopt.testing.strategies import NON_FINITE, values
from ampopt.testing.training import seed

__all__ = ["MOST", "Machine", "bad_gradients", "call", "some_gradients"]

MOST = 4
"""Parameters at most; gradients are drawn for so many."""
FLOOR, CEILING, INTERVAL = 2.0**-2, 2.0**4, 2
"""Of the dynamic scales that are used."""

_numbers = st.lists(values(torch.float32), min_size=1, max_size=3).map(tuple)
some_gradients = st.tuples(*[_numbers | st.none()] * MOST)
"""Numbers for each parameter, or none."""

bad_gradients = st.one_of(
    st.none(), st.none(), st.tuples(st.integers(0, MOST - 1), st.sampled_from(NON_FINITE))
)
"""Which of them has a last element that is not finite, and that."""


def call(rule: Any) -> Any:
    """A rule that counts as a call, and after which all is checked.

    Hypothesis's own invariants would be printed among the calls of a failure.
    """

    @functools.wraps(rule)
    def counted(self: "Machine", *args: Any, **drawn: Any) -> None:
        self.calls += 1
        self.called.append(rule.__name__)
        rule(self, *args, **drawn)
        self.check()

    return counted


class Machine(RuleBasedStateMachine):
    """An optimizer under a scale, and beside it what should have happened.

    The account is kept in Python numbers: the scale, whether an unscale is pending, and which
    gradients there are.

    Attributes:
        claims: what is claimed of the optimizer.
        calls: how many were made.
        called: their names.
        last: the machine that ran last.
    """

    claims: ClassVar[type[Claims]]
    last: ClassVar[Any] = None

    def __init__(self) -> None:
        """Nothing is made yet."""
        super().__init__()
        Machine.last = self
        self.calls, self.called = 0, []
        self.params: list[Parameter] = []
        self.entered = ExitStack()
        self.pending: bool | None = None  # whether an unscale is, and found an overflow
        self.held: list[Blueprint | None] = []
        self.overflows = False
        self.kind, self.scale, self.number, self.finite = "number", 1.0, 1.0, 0

    def begin_with(
        self, make: Any, beside: Any, params: Sequence[Blueprint], on_device: bool
    ) -> None:
        """Make the optimizer and, by ``beside(params)``, what is trained beside it."""
        self.entered.enter_context(apart())
        if on_device:
            self.entered.enter_context(as_on_a_device())
        seed()
        self.make, self.dtype = make, params[0].dtype
        self.mode = self.claims.modes[0] if self.claims.modes else None
        self.params = [p.parameter() for p in params]
        self.optimizer = make(list(self.params))
        self.beside = Beside(lambda: beside(params))
        self.forget()

    def teardown(self) -> None:
        """Leave what was entered."""
        self.entered.close()

    def check(self) -> None:
        """All is as the training beside and the account have it, and no other call is due."""
        self.beside.training.check(self.params, self.optimizer)
        if self.kind == "none":
            assert self.scale is None
        else:
            assert float(self.scale) == self.number
        refused: tuple[Any, ...] = (self.optimizer.step_after_unscale,)
        if self.pending is not None:
            refused = (self.optimizer.unscale, self.optimizer.accumulate, self.optimizer.state_dict)
        for out_of_order in refused:
            with pytest.raises(RuntimeError, match="unscale"):
                out_of_order()
        if not (self.trains or self.overflows) and any(self.held):
            with pytest.raises(RuntimeError):
                self.optimizer.unscale_and_step(grads_scaled_by=self.number)
            for p, held in zip(self.params, self.held, strict=True):
                p.grad = None if held is None else held.tensor(self.number)
            self.beside.training.check(self.params, self.optimizer)

    # --- gradients -------------------------------------------------------------------------------

    @precondition(lambda self: self.pending is None)
    @rule(numbers=some_gradients, bad=bad_gradients)
    @call
    def backward(self, numbers: tuple[Any, ...], bad: tuple[int, float] | None) -> None:
        """Gradients of a scaled loss, of some of the parameters."""
        self.give_gradients(numbers, bad)

    def give_gradients(self, numbers: tuple[Any, ...], bad: tuple[int, float] | None) -> None:
        """And remember them."""
        self.held = []
        for p, own in zip(self.params, numbers, strict=False):
            sparse = p.ndim and not self.claims.dense_gradients
            layout: Any = "sparse" if sparse else "contiguous"
            held = None if own is None else Blueprint(tuple(p.shape), own, self.dtype, layout)
            self.held.append(held)
        at = None if bad is None else bad[0] % len(self.params)
        self.overflows = bad is not None and self.held[at] is not None  # type: ignore[index]
        for i, (p, held) in enumerate(zip(self.params, self.held, strict=True)):
            p.grad = None if held is None else held.tensor(self.number)
            if self.overflows and bad is not None and i == at and p.grad is not None:
                (uncoalesced_values(p.grad) if p.grad.is_sparse else p.grad).view(-1)[-1] = bad[1]

    # Hypothesis takes the first rule most often, and orders them by arguments and then by name.
    @precondition(lambda self: self.may_step)
    @rule()
    @call
    def advance(self) -> None:
        """An ordinary iteration, which other calls in a row seldom make, so that there is state."""
        self.give_gradients(((1.0, -0.5),) * MOST, None)
        self.take_a_step(None)

    @precondition(lambda self: self.may_step and self.kind != "none" and self.splits)
    @rule()
    @call
    def advance_edited(self) -> None:
        """An iteration by two calls and what is between, which single calls hardly ever make."""
        self.give_gradients(((1.0, -0.5),) * MOST, None)
        self.unscale_gradients()
        self.multiply_gradients(0.5)
        self.take_the_step()

    @property
    def has_gradients(self) -> bool:
        """There are some, whether unscaled or not."""
        return self.pending is not None or any(self.held)

    @precondition(lambda self: self.has_gradients)
    @rule(set_to_none=st.booleans())
    @call
    def zero_grad(self, set_to_none: bool) -> None:
        """Drop gradients, or have zeros in their place; and drop what was unscaled."""
        held = self.held
        self.optimizer.zero_grad(set_to_none)
        self.forget()
        if set_to_none or not self.claims.dense_gradients:
            for p in self.params:
                p.grad = None  # a sparse gradient of zeros has no rows, where a blueprint's has
        else:  # where a sum stood for a gradient, there may have been none
            self.held = [
                None if own is None or p.grad is None else replace(own, numbers=(0.0,))
                for p, own in zip(self.params, held, strict=True)
            ]

    def forget(self) -> None:
        """No gradients, nothing pending."""
        self.pending, self.overflows = None, False
        self.held = [None for _ in self.params]

    # --- steps -----------------------------------------------------------------------------------

    @precondition(lambda self: self.may_step and self.kind != "none" and self.splits)
    @rule()
    @call
    def unscale(self) -> None:
        """The first of the two calls."""
        self.unscale_gradients()

    def unscale_gradients(self) -> None:
        """And see whether they overflow."""
        result = self.optimizer.unscale(grads_scaled_by=self.scale)
        assert bool(result.found_inf > 0) is self.overflows
        self.pending = self.overflows
        self.successor = result.scale

    @property
    def splits(self) -> bool:
        """Whether gradients may be unscaled in place; those of float16 would be flushed to zero."""
        return self.dtype != torch.float16

    @precondition(lambda self: self.pending is not None)
    @rule(factor=st.sampled_from([0.5, 0.0]))
    @call
    def edit_gradients(self, factor: float) -> None:
        """What is unscaled is the caller's, to clip or to weigh."""
        self.multiply_gradients(factor)

    def multiply_gradients(self, factor: float) -> None:
        """And remember it."""
        for p in self.params:
            if p.grad is not None:
                p.grad.mul_(factor)
        self.held = [
            None if held is None else replace(held, numbers=tuple(n * factor for n in held.numbers))
            for held in self.held
        ]

    @precondition(lambda self: self.pending is not None)
    @rule()
    @call
    def step_after_unscale(self) -> None:
        """The second."""
        self.take_the_step()

    def take_the_step(self) -> None:
        """Or skip it."""
        before = torch.get_rng_state()
        self.stepped(self.optimizer.step_after_unscale(), before)

    @property
    def may_step(self) -> bool:
        """Nothing is pending, and the mode is that to step in."""
        return self.pending is None and self.trains

    @property
    def trains(self) -> bool:
        """Whether the mode is that to step in."""
        return self.mode in (None, *self.claims.modes[:1])

    @property
    def may_step_at_once(self) -> bool:
        """It may; and without a scale, which checks nothing, gradients are finite."""
        return self.may_step and (self.kind != "none" or not self.overflows)

    def take_a_step(self, max_norm: float | None) -> None:
        """Both at once, and clipping between."""
        if self.kind == "none" and not any(self.held):
            return  # it is step() then, which may do something
        before = torch.get_rng_state()
        clipping = {} if max_norm is None else {"max_norm": max_norm}
        result = self.optimizer.unscale_and_step(grads_scaled_by=self.scale, **clipping)
        self.stepped(result, before, max_norm)

    @precondition(lambda self: self.pending is False and any(self.held))
    @rule()
    @call
    def step(self) -> None:
        """Plain ``step()`` with the gradients that were unscaled."""
        before = torch.get_rng_state()
        self.optimizer.step()
        self.happened(before)
        if self.kind == "dynamic":
            self.finite += 1
        self.scale = self.successor
        self.grow()
        self.drop()

    def stepped(self, result: Any, before: Tensor, max_norm: float | None = None) -> None:
        """Check what a step says, and do what it should have done."""
        assert result.skipped is self.overflows
        self.account_for(result, before, functools.partial(self.happened, before, max_norm))

    def account_for(self, result: Any, before: Tensor, happened: Callable[[], None]) -> None:
        """Check what is said of gradients; if they are to be used, it has ``happened``."""
        overflows, gradients = self.overflows, any(self.held)
        assert bool(result.found_inf > 0) is overflows
        if overflows or not gradients:
            same = torch.equal(torch.get_rng_state(), before)
            assert same, "a step that did not happen drew random numbers"
        else:
            happened()
        self.scale = result.scale
        if overflows and self.kind in ("number", "dynamic"):
            floor = FLOOR if self.kind == "dynamic" else 0.0
            self.number, self.finite = max(self.number / 2, floor), 0
        elif gradients and self.kind == "dynamic":
            self.finite += 1
        self.grow()
        self.drop()

    def happened(self, before: Tensor, max_norm: float | None = None) -> None:
        """A step was taken, from the random state ``before``."""
        self.beside.tell("step", tuple(self.held), max_norm, before, torch.get_rng_state())

    def grow(self) -> None:
        """What the schedule does after so many finite steps."""
        if self.kind == "dynamic" and self.finite == INTERVAL:
            self.number, self.finite = min(self.number * 2, CEILING), 0

    def drop(self) -> None:
        """What is in ``p.grad`` after a step is not to be relied upon."""
        for p in self.params:
            p.grad = None
        self.forget()
