"""The optimizer under test, and the machine's records of what is expected of it."""

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize
from torch import Tensor
from torch.nn import Parameter

import ampopt
from ampopt.results import StepResult
from ampopt.testing.blueprints import Blueprint, Scale, set_gradients
from ampopt.testing.checkpoints import from_bytes, to_bytes
from ampopt.testing.claims import Claims
from ampopt.testing.invariants.training import seed
from ampopt.testing.isolation import apart
from ampopt.testing.making import maker, maker_of_reference
from ampopt.testing.state_machine.float64 import Float64
from ampopt.testing.state_machine.machine import Machine, by_machine, call
from ampopt.testing.state_machine.reference_training import Plain, ReferenceTraining

__all__ = ["BEGIN", "Checkpoint", "Records", "kinds", "some_shape"]

FLOOR, CEILING, INTERVAL = 2.0**-2, 2.0**4, 2
"""``min_scale``, ``max_scale`` and ``growth_interval`` of the dynamic scales in use."""
BEGIN = (1.0, -0.5, 2.0)
"""Initial elements of every parameter, repeated as needed."""

kinds = st.sampled_from(["number", "tensor", "static", "dynamic", "none"])
"""Strategy of the kinds of loss scale; see :meth:`Records.use_scale`."""

some_shape = by_machine(
    lambda self: self.claims.shapes.filter(lambda shape: torch.Size(shape).numel() > 0)
)
"""Strategy of the shape of a parameter."""


class Checkpoint(NamedTuple):
    """A checkpoint of the training and of the machine's own records.

    Attributes:
        optimizer: the optimizer's state dict, as the bytes of a file.
        params: copies of the parameters.
        scale: kind of scale, the scale, its expected number, and the finite steps since it changed.
        moment: position in the reference training; see :meth:`ReferenceTraining.back_to`.
        mode: mode of the optimizer, one of ``Claims.modes``.
    """

    optimizer: bytes
    params: list[Tensor]
    scale: tuple[str, Any, float, int]
    moment: int
    mode: str | None


class Records(Machine):
    """An optimizer under a loss scale, compared with a reference training after every call.

    The machine records in Python what is expected: the scale, whether an unscale is pending, and
    which gradients are present.

    Attributes:
        claims: the contract class of the optimizer.
        of_float64: whether the reference training is in float64.
        gradients: the unscaled gradient of each parameter, or ``None``.
        pending: what ``unscale`` returned; ``None`` if no unscale is pending.
        sums: the sums of the gradients that ``accumulate`` got; ``None`` outside of a cycle.
    """

    claims: ClassVar[type[Claims]]
    of_float64: ClassVar[bool]

    def __init__(self) -> None:
        """Start without an optimizer; :meth:`begin` makes it."""
        super().__init__()
        self.params: list[Parameter] = []
        self.contexts = ExitStack()
        self.forget()
        self.scale: Any = 1.0
        self.kind, self.number, self.finite = "number", 1.0, 0
        self.last_checkpoint: Checkpoint | None = None

    @initialize(
        shapes=st.lists(some_shape, min_size=1, max_size=2),
        dtype=by_machine(lambda self: st.sampled_from(self.dtypes)),
        options=by_machine(lambda self: self.options),
        on_device=by_machine(lambda self: st.sampled_from(self.claims.on_device)),
        state_bits=by_machine(lambda self: st.sampled_from(self.state_bits)),
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
        state_bits: int = 32,
    ) -> None:
        """Make the optimizer, and a reference training."""
        contract = self.claims()
        params = [Blueprint(shape, BEGIN, dtype) for shape in shapes]
        self.make = maker(contract, options, state_bits=state_bits)
        self.dtype = dtype

        def begin_reference() -> Any:
            if self.of_float64:
                return Float64(maker_of_reference(contract, options), params, dtype)
            return Plain(self.make, params)

        self.contexts.enter_context(apart(on_device))
        seed()
        self.mode = self.claims.modes[0] if self.claims.modes else None
        self.params = [p.parameter() for p in params]
        self.optimizer = self.make(list(self.params))
        self.reference_training = ReferenceTraining(begin_reference)
        self.forget()
        self.use_scale(kind, 2.0)
        if self.claims.checkpoints:
            self.last_checkpoint = self.checkpoint()

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes of parameters."""
        return self.claims.dtypes + (() if self.of_float64 else self.claims.half_precision)

    @property
    def options(self) -> st.SearchStrategy[dict[str, Any]]:
        """Strategy of the keyword arguments of the optimizer."""
        return st.just({}) if self.claims.options is None else self.claims.options

    @property
    def state_bits(self) -> tuple[int, ...]:
        """The numbers of bits of states."""
        # Float64 states cannot be small, and those of sparse gradients are torch's.
        large = self.of_float64 or not self.claims.dense_gradients
        return (32,) if large else self.claims.state_bits

    def teardown(self) -> None:
        """Leave the contexts that :meth:`begin` entered."""
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
            if not any(self.gradients):  # nothing would be unscaled twice
                methods = ()
        for out_of_order in methods:
            with pytest.raises(RuntimeError, match="unscale"):
                out_of_order()
        if not (self.trains or self.overflows) and any(self.gradients):
            with pytest.raises(RuntimeError):
                self.optimizer.unscale_and_step(grads_scaled_by=self.number)
            set_gradients(self.params, self.gradients, self.number)
            self.reference_training.training.check(self.params, self.optimizer)
        if self.sums is not None:
            with pytest.raises(RuntimeError, match="accumulate"):
                self.optimizer.state_dict()

    # --- what is present -------------------------------------------------------------------------

    @property
    def overflows(self) -> bool:
        """Whether one of the gradients is non-finite."""
        return any(grad and not grad.is_finite for grad in self.gradients)

    @property
    def is_idle(self) -> bool:
        """Whether no unscaled or accumulated gradients wait for a step."""
        return self.pending is None and self.sums is None

    @property
    def trains(self) -> bool:
        """Whether the optimizer is in its first mode, the one to step in."""
        return self.mode in (None, *self.claims.modes[:1])

    @property
    def may_step(self) -> bool:
        """Whether nothing is pending and the optimizer is in its training mode."""
        return self.pending is None and self.trains

    def forget(self) -> None:
        """Record that there are no gradients, nothing is pending, and there is no cycle."""
        self.pending: Any = None
        self.sums: Sequence[Blueprint | None] | None = None
        self.gradients: Sequence[Blueprint | None] = [None for _ in self.params]

    def drop(self) -> None:
        """Drop the gradients: the contents of ``p.grad`` after a step are unspecified."""
        for p in self.params:
            p.grad = None
        self.forget()

    def end_cycle(self) -> None:
        """Record that the accumulated gradients are now part of the present ones."""
        if self.sums is not None:
            pairs = zip(self.sums, self.gradients, strict=True)
            self.gradients = [_sum_of(a, b) if a and b else a or b for a, b in pairs]
        self.sums = None

    # --- what a call has done --------------------------------------------------------------------

    def use_scale(self, kind: Any, number: float) -> None:
        """Make a scale of ``kind``, and record what it is expected to be."""
        self.kind = "number" if kind == "tensor" else kind
        self.number, self.finite = 1.0 if kind == "none" else number, 0
        if kind == "dynamic":
            self.scale = ampopt.DynamicLossScale(
                init_scale=number, growth_interval=INTERVAL, min_scale=FLOOR, max_scale=CEILING
            )
        else:
            self.scale = Scale(kind, number).make()

    def use_gradients(
        self, call: Callable[[], Any], name: str = "step", max_norm: float | None = None
    ) -> None:
        """Call the optimizer, let the reference do the same, and record the next scale.

        Args:
            call: a step, or a call of ``Claims.calls``.
            name: the method that the reference training calls, unless the call has to be skipped.
            max_norm: the norm that it clips to.
        """
        overflows, gradients, before = self.overflows, any(self.gradients), torch.get_rng_state()
        result = call() or self.pending  # plain step() returns nothing
        assert bool(result.found_inf > 0) is overflows
        if isinstance(result, StepResult):
            assert result.skipped is overflows
        if overflows or not gradients:
            same = torch.equal(torch.get_rng_state(), before)
            assert same, "a skipped step drew random numbers"
        else:
            done = "call", name, self.gradients, max_norm
            after = self.reference_training.tell(*done, random_state=before)
            same = self.of_float64 or torch.equal(torch.get_rng_state(), after)
            assert same, "the step drew other random numbers than a plain one"
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

    # --- checkpoints -----------------------------------------------------------------------------

    def checkpoint(self) -> Checkpoint:
        """Copy all that a training saves."""
        params = [p.detach().clone() for p in self.params]
        scale = self.kind, copy.deepcopy(self.scale), self.number, self.finite
        state = to_bytes(self.optimizer.state_dict())
        return Checkpoint(state, params, scale, self.reference_training.now, self.mode)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Load the optimizer's state and the scale."""
        self.optimizer.load_state_dict(from_bytes(checkpoint.optimizer))
        self.kind, scale, self.number, self.finite = checkpoint.scale
        self.mode = checkpoint.mode
        self.scale = copy.deepcopy(scale)
        if isinstance(scale, ampopt.LossScale):
            self.scale.load_state_dict(scale.state_dict())


def _sum_of(a: Blueprint, b: Blueprint) -> Blueprint:
    """The sum of two gradients, as a blueprint."""
    numbers = (a.tensor() + b.tensor()).flatten().tolist()
    return Blueprint(a.shape, tuple(numbers), a.dtype)
