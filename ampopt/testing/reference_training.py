"""Reference trainings: an optimizer that takes only the steps that should have been applied."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ampopt.options import STATE_BITS
from ampopt.testing.bits import assert_same, bits
from ampopt.testing.blueprints import Blueprint

__all__ = ["ReferenceTraining", "Double", "Plain", "add_group", "set_learning_rate"]


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every group as torch's schedulers do: in place if it is a tensor."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def add_group(optimizer: torch.optim.Optimizer, param: Parameter, lr: float) -> None:
    """Add ``param`` in a group of its own, with states of as many bits as those of the others."""
    bits = {k: v for k, v in optimizer.param_groups[0].items() if k == STATE_BITS.name}
    optimizer.add_param_group({"params": [param], "lr": lr, **bits})


class ReferenceTraining:
    """A reference training that runs in parallel with a test, and can return to an earlier moment.

    It returns by repeating every call from the start, not by ``state_dict`` or ``deepcopy``: those
    are what it is used to test.
    """

    def __init__(self, begin: Callable[[], Any]) -> None:
        """Call ``begin``, which returns a training with the methods of :class:`Double`."""
        self.begin = begin
        self.training = begin()
        self.events: list[tuple[str, tuple[Any, ...]]] = []

    def tell(self, what: str, *arguments: Any) -> None:
        """Call the method ``what`` of the training, and record the call."""
        self.events.append((what, arguments))
        getattr(self.training, what)(*arguments)

    @property
    def now(self) -> int:
        """The number of calls so far, which is what :meth:`back_to` takes."""
        return len(self.events)

    def back_to(self, moment: int) -> None:
        """Return to the state after the first ``moment`` calls."""
        before, self.events, self.training = self.events[:moment], [], self.begin()
        for what, arguments in before:
            self.tell(what, *arguments)


class Plain:
    """An optimizer with parameters of its own that is stepped by plain ``step()`` only."""

    def __init__(
        self, make: Any, params: Iterable[Blueprint], dtype: torch.dtype | None = None
    ) -> None:
        """Call ``make(params)``, which returns the optimizer.

        Args:
            make: function from parameters to the optimizer.
            params: blueprints of the parameters.
            dtype: dtype of the parameters; ``None`` for their own.
        """
        self._dtype = dtype
        self.params = [self._parameter(p) for p in params]
        self.optimizer = make(list(self.params))

    def _parameter(self, param: Blueprint) -> Parameter:
        return Parameter(param.tensor().to(self._dtype or param.dtype))

    def set_gradients(self, gradients: Iterable[Blueprint | None]) -> None:
        """Set gradients, rounded to their own dtype and then converted to the parameters'."""
        for p, grad in zip(self.params, gradients, strict=True):
            p.grad = None if grad is None else grad.tensor().to(p.dtype)

    def step(self, max_norm: float | None) -> None:
        """Step with the gradients in ``p.grad``, clipped to a global norm if given."""
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.params, max_norm)
        self.optimizer.step()

    def call(self, name: str, gradients: Sequence[Blueprint | None] | None) -> None:
        """Call the optimizer's method ``name``, after setting ``gradients`` if given."""
        if gradients is not None:
            self.set_gradients(gradients)
        getattr(self.optimizer, name)()

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of all groups."""
        set_learning_rate(self.optimizer, lr)

    def add(self, param: Blueprint, lr: float) -> None:
        """Add a parameter in a group of its own, with learning rate ``lr``."""
        self.params.append(self._parameter(param))
        add_group(self.optimizer, self.params[-1], lr)


class Double:
    """The tested optimizer in its own dtype, on unscaled gradients; the test must agree bitwise."""

    def __init__(self, make: Any, params: Sequence[Blueprint]) -> None:
        """Call ``make`` with fresh parameters built from ``params``."""
        self.plain = Plain(make, params)
        self.set_learning_rate, self.add = self.plain.set_learning_rate, self.plain.add

    def step(
        self,
        gradients: Sequence[Blueprint | None],
        max_norm: float | None,
        before: Tensor,
        after: Tensor,
    ) -> None:
        """Take a step, and check that it draws the random numbers that the tested step drew.

        Args:
            gradients: one blueprint for each parameter, or ``None`` for no gradient.
            max_norm: the global norm to clip to; ``None`` for no clipping.
            before: torch's random state before the tested step.
            after: torch's random state after it.
        """
        self.plain.set_gradients(gradients)
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(before)
            self.plain.step(max_norm)
            same = torch.equal(torch.get_rng_state(), after)
        assert same, "the step drew other random numbers than a plain one"

    def call(self, name: str, gradients: Any, before: Tensor) -> None:
        """Call the optimizer's method ``name`` from torch's random state ``before``."""
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(before)
            self.plain.call(name, gradients)

    def check(self, params: Sequence[Parameter], optimizer: Any) -> None:
        """Compare ``params`` bitwise, and every state tensor that both optimizers have."""
        for i, (p, own) in enumerate(zip(params, self.plain.params, strict=True)):
            assert_same(bits(p), bits(own), f"parameter {i}, compared with a plain training")
            state, expected = (
                bits(dict(opt.state.get(of, {})))
                for opt, of in ((optimizer, p), (self.plain.optimizer, own))
            )
            if state and expected:
                assert_same(state, expected, f"state {i}, compared with a plain training")
