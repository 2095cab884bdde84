"""Any sequence of calls, checked against what should have happened."""

import copy
import io
from contextlib import ExitStack
from typing import Any, ClassVar

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch.nn import Parameter

import ampopt
from ampopt.testing.bits import assert_same, bits
from ampopt.testing.blueprints import Blueprint
from ampopt.testing.claims import Claims, apart, settings_of
from ampopt.testing.device import as_on_a_device
from ampopt.testing.strategies import NON_FINITE, values

__all__ = ["Sequences", "machine_of"]

MOST = 4
"""Parameters at most; gradients are drawn for so many."""
FLOOR, CEILING, INTERVAL = 2.0**-2, 2.0**4, 2
"""Of the dynamic scales that are used."""

_numbers = st.lists(values(torch.float32), min_size=1, max_size=3).map(tuple)
_gradients = st.tuples(*[st.none() | _numbers] * MOST)
_bad = st.none() | st.tuples(st.integers(0, MOST - 1), st.sampled_from(NON_FINITE))


class Sequences(Claims):
    """The stateful part of the contract."""

    def test_any_sequence_of_calls(self) -> None:
        """Any calls in any order end where a plain training of the batches that counted ends.

        Gradients come and go, overflow, are unscaled, clipped to nothing, stepped with or dropped;
        scales, learning rates and groups change; the optimizer is saved, loaded and copied. Beside
        it the same optimizer, in its own dtype and so to the bit, takes ``step()`` with unscaled
        gradients where a step should have happened; scale and pending flag are Python numbers.
        """
        cls = type(self)
        if not cls.plain_steps:
            pytest.skip("not claimed: plain_steps")
        settings = hypothesis.settings(
            settings_of(cls),
            suppress_health_check=tuple(hypothesis.HealthCheck),  # pyright: ignore[reportArgumentType]
        )
        run_state_machine_as_test(machine_of(cls), settings=settings)


def machine_of(contract: type[Claims]) -> type["Machine"]:
    """The state machine of the optimizer that ``contract`` makes."""
    options = st.just({}) if contract.options is None else contract.options
    shapes = contract.shapes.filter(lambda shape: 0 < torch.Size(shape).numel() <= 12)

    class OfContract(Machine):
        saves, copies = contract.checkpoints, contract.deepcopies

        @initialize(
            shapes=st.lists(shapes, min_size=1, max_size=2),
            dtype=st.sampled_from(contract.dtypes),
            options=options,
            on_device=st.sampled_from(contract.on_device),
        )
        def begin(
            self, shapes: list[Any], dtype: torch.dtype, options: dict[str, Any], on_device: bool
        ) -> None:
            self.begin_with(contract(), shapes, dtype, options, on_device)

        @precondition(lambda self: contract.several_groups and self.room and not self.pending)
        @rule(shape=shapes, lr=st.sampled_from([0.5, 0.0625]))
        def add_group(self, shape: tuple[int, ...], lr: float) -> None:
            self.add_group_of(shape, lr)

    OfContract.__name__ = OfContract.__qualname__ = f"{contract.__name__}Machine"
    return OfContract


class Machine(RuleBasedStateMachine):
    """An optimizer, and beside it what should have happened.

    Attributes:
        last: the machine that ran last.
        saves: the optimizer is saved and loaded.
        copies: the optimizer is copied.
    """

    last: ClassVar[Any] = None
    saves: ClassVar[bool] = True
    copies: ClassVar[bool] = True

    def __init__(self) -> None:
        """Nothing is made yet."""
        super().__init__()
        Machine.last = self
        self.calls = 0
        self.params: list[Parameter] = []
        self.entered = ExitStack()
        self.pending: bool | None = None  # whether an unscale is, and found an overflow
        self.held: list[Blueprint | None] = []
        self.overflows = False
        self.kind, self.scale, self.number, self.finite = "number", 1.0, 1.0, 0

    def begin_with(
        self,
        contract: Any,
        shapes: list[Any],
        dtype: torch.dtype,
        options: dict[str, Any],
        on_device: bool,
    ) -> None:
        """Make the optimizer and its double."""
        self.entered.enter_context(apart())
        if on_device:
            self.entered.enter_context(as_on_a_device())
        torch.manual_seed(0)
        self.make = lambda params: contract.make(params, **options)
        self.dtype, self.sparse = dtype, not contract.dense_gradients
        self.params = [self.parameter(shape) for shape in shapes]
        self.doubles = copy.deepcopy(self.params)
        self.optimizer, self.double = self.make(self.params), self.make(self.doubles)
        self.forget()

    def parameter(self, shape: tuple[int, ...]) -> Parameter:
        """A fresh one."""
        return Blueprint(tuple(shape), (1.0, -0.5, 2.0), self.dtype).parameter()

    def teardown(self) -> None:
        """Leave what was entered."""
        self.entered.close()

    @property
    def room(self) -> bool:
        """Whether there may be more parameters."""
        return len(self.params) < MOST

    # --- gradients -------------------------------------------------------------------------------

    @precondition(lambda self: self.pending is None)
    @rule(numbers=_gradients, bad=_bad)
    def backward(self, numbers: tuple[Any, ...], bad: tuple[int, float] | None) -> None:
        """Gradients of a scaled loss, of some of the parameters."""
        self.calls += 1
        self.held = []
        for p, own in zip(self.params, numbers, strict=False):
            sparse = self.sparse and p.ndim
            layout: Any = "sparse" if sparse else "contiguous"
            held = None if own is None else Blueprint(tuple(p.shape), own, self.dtype, layout)
            self.held.append(held)
        at = None if bad is None else bad[0] % len(self.params)
        self.overflows = bad is not None and self.held[at] is not None  # type: ignore[index]
        for i, (p, held) in enumerate(zip(self.params, self.held, strict=True)):
            p.grad = None if held is None else held.tensor(self.number)
            if self.overflows and bad is not None and i == at and p.grad is not None:
                (p.grad._values() if p.grad.is_sparse else p.grad).view(-1)[-1] = bad[1]

    @rule(set_to_none=st.booleans())
    def zero_grad(self, set_to_none: bool) -> None:
        """Drop gradients, and what was unscaled."""
        self.calls += 1
        self.optimizer.zero_grad(set_to_none)
        for p in self.params:
            p.grad = None  # zeros are gradients too, and would be stepped with
        self.forget()

    def forget(self) -> None:
        """No gradients, nothing pending."""
        self.pending, self.overflows = None, False
        self.held = [None for _ in self.params]

    # --- steps -----------------------------------------------------------------------------------

    @precondition(lambda self: self.pending is None and self.kind != "none")
    @rule()
    def unscale(self) -> None:
        """The first of the two calls."""
        self.calls += 1
        result = self.optimizer.unscale(grads_scaled_by=self.scale)
        assert bool(result.found_inf > 0) is self.overflows
        self.pending = self.overflows
        self.successor = result.scale

    @precondition(lambda self: self.pending is not None)
    @rule()
    def step_after_unscale(self) -> None:
        """The second."""
        self.calls += 1
        random_state = torch.get_rng_state()
        result = self.optimizer.step_after_unscale()
        self.stepped(result, random_state)

    @precondition(lambda self: self.pending is None and (self.kind != "none" or not self.overflows))
    @rule()
    def unscale_and_step(self) -> None:
        """Both at once."""
        self.calls += 1
        if self.kind == "none" and not any(self.held):
            return  # it is step() then, which may do something
        random_state = torch.get_rng_state()
        result = self.optimizer.unscale_and_step(grads_scaled_by=self.scale)
        self.stepped(result, random_state)

    @precondition(lambda self: self.pending is False and any(self.held))
    @rule()
    def step(self) -> None:
        """Plain ``step()`` with the gradients that were unscaled."""
        self.calls += 1
        random_state = torch.get_rng_state()
        self.optimizer.step()
        self.step_double(random_state)
        if self.kind == "dynamic":
            self.finite += 1
        self.scale = self.successor
        self.grow()
        self.drop()

    def stepped(self, result: Any, random_state: torch.Tensor) -> None:
        """Check what a step says, and do what it should have done."""
        overflows, gradients = self.overflows, any(self.held)
        assert bool(result.found_inf > 0) is overflows
        assert result.skipped is overflows
        if overflows or not gradients:
            same = torch.equal(torch.get_rng_state(), random_state)
            assert same, "a step that did not happen drew random numbers"
        else:
            self.step_double(random_state)
        self.scale = result.scale
        if overflows and self.kind in ("number", "dynamic"):
            floor = FLOOR if self.kind == "dynamic" else 0.0
            self.number, self.finite = max(self.number / 2, floor), 0
        elif gradients and self.kind == "dynamic":
            self.finite += 1
        self.grow()
        self.drop()

    def grow(self) -> None:
        """What the schedule does after so many finite steps."""
        if self.kind == "dynamic" and self.finite == INTERVAL:
            self.number, self.finite = min(self.number * 2, CEILING), 0

    def step_double(self, random_state: torch.Tensor) -> None:
        """A plain step, from the same random state, with gradients that were never scaled."""
        after = torch.get_rng_state()
        torch.set_rng_state(random_state)
        for p, held in zip(self.doubles, self.held, strict=True):
            p.grad = None if held is None else held.tensor()
        self.double.step()
        assert torch.equal(torch.get_rng_state(), after), "random numbers of a step"

    def drop(self) -> None:
        """What is in ``p.grad`` after a step is not to be relied upon."""
        for p in self.params:
            p.grad = None
        self.forget()

    # --- what is refused -------------------------------------------------------------------------

    @rule()
    def call_out_of_order(self) -> None:
        """Is an error, and changes nothing."""
        self.calls += 1
        if self.pending is None:
            refused: tuple[Any, ...] = (self.optimizer.step_after_unscale,)
        else:
            refused = (self.optimizer.unscale, self.optimizer.state_dict)
        for call in refused:
            with pytest.raises(RuntimeError, match="unscale"):
                call()

    # --- what changes between steps --------------------------------------------------------------

    @precondition(lambda self: not any(self.held) and self.pending is None)
    @rule(kind=st.sampled_from(["none", "number", "tensor", "static", "dynamic"]))
    def scale_by(self, kind: str) -> None:
        """Go on with another kind of scale."""
        self.calls += 1
        self.kind, self.number, self.finite = kind, 1.0 if kind == "none" else 2.0, 0
        made: dict[str, Any] = {
            "none": None,
            "number": 2.0,
            "tensor": torch.tensor(2.0),
            "static": ampopt.StaticLossScale(2.0),
            "dynamic": ampopt.DynamicLossScale(
                init_scale=2.0, growth_interval=INTERVAL, min_scale=FLOOR, max_scale=CEILING
            ),
        }
        self.scale = made[kind]
        if kind == "tensor":
            self.kind = "number"

    @rule(lr=st.sampled_from([0.25, 0.03125]))
    def set_learning_rate(self, lr: float) -> None:
        """As schedulers do."""
        self.calls += 1
        for optimizer in (self.optimizer, self.double):
            for group in optimizer.param_groups:
                group["lr"] = lr

    @precondition(lambda self: self.saves and self.pending is None)
    @rule()
    def save_and_load(self) -> None:
        """Into a new optimizer."""
        self.calls += 1
        file = io.BytesIO()
        torch.save(self.optimizer.state_dict(), file)
        file.seek(0)
        groups = [{"params": group["params"]} for group in self.optimizer.param_groups]
        self.optimizer = self.make(groups if len(groups) > 1 else groups[0]["params"])
        self.optimizer.load_state_dict(torch.load(file))
        if isinstance(self.scale, ampopt.LossScale):
            saved, self.scale = self.scale.state_dict(), copy.deepcopy(self.scale)
            self.scale.load_state_dict(saved)

    @precondition(lambda self: self.copies and self.pending is None)
    @rule()
    def deepcopy(self) -> None:
        """Go on with a copy, gradients included."""
        self.calls += 1
        gradients = [p.grad for p in self.params]
        self.params, self.optimizer = copy.deepcopy((self.params, self.optimizer))
        for p, grad in zip(self.params, gradients, strict=True):
            p.grad = grad

    def add_group_of(self, shape: tuple[int, ...], lr: float) -> None:
        """One more parameter, in a group of its own."""
        self.calls += 1
        p = self.parameter(shape)
        double = copy.deepcopy(p)
        for params, optimizer, new in (
            (self.params, self.optimizer, p),
            (self.doubles, self.double, double),
        ):
            params.append(new)
            optimizer.add_param_group({"params": [new], "lr": lr})
        self.held = [*self.held, None]

    # --- what holds throughout -------------------------------------------------------------------

    @invariant()
    def parameters_are_those_of_a_plain_training(self) -> None:
        """And so is each state that both have."""
        for i, (p, double) in enumerate(
            zip(self.params, self.doubles if self.params else [], strict=True)
        ):
            assert_same(bits(p), bits(double), f"parameter {i} beside a plain training")
            mine, theirs = (
                bits(dict(opt.state.get(of, {})))
                for opt, of in ((self.optimizer, p), (self.double, double))
            )
            if mine and theirs:
                assert_same(mine, theirs, f"state of parameter {i} beside a plain training")

    @invariant()
    def scale_and_pending_are_as_they_should_be(self) -> None:
        """As Python numbers have them."""
        if not self.params:
            return
        assert (self.optimizer.pending is not None) is (self.pending is not None)
        if self.kind == "none":
            assert self.scale is None
        else:
            assert float(self.scale) == self.number
