"""Reference trainings: an optimizer that takes only the steps that should have been applied."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ampopt.options import STATE_BITS
from ampopt.testing.blueprints import Blueprint
from ampopt.testing.invariants.training import Trained, assert_same_training

__all__ = ["Plain", "ReferenceTraining", "add_group", "set_learning_rate"]


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
        """Call ``begin``, which returns a training with the methods of :class:`Plain`."""
        self.begin = begin
        self.training = begin()
        self.events: list[tuple[str, tuple[Any, ...], Tensor | None]] = []

    def tell(self, what: str, *arguments: Any, random_state: Tensor | None = None) -> Tensor:
        """Call the method ``what`` of the training, and record the call.

        Args:
            what: the name of the method.
            arguments: its arguments.
            random_state: torch's random state before the call; ``None`` for the present one.

        Returns:
            The random state after the call. That of the test is left alone.
        """
        self.events.append((what, arguments, random_state))
        with torch.random.fork_rng(devices=[]):
            if random_state is not None:
                torch.set_rng_state(random_state)
            getattr(self.training, what)(*arguments)
            return torch.get_rng_state()

    @property
    def now(self) -> int:
        """The number of calls so far, which is what :meth:`back_to` takes."""
        return len(self.events)

    def back_to(self, moment: int) -> None:
        """Return to the state after the first ``moment`` calls."""
        before, self.events, self.training = self.events[:moment], [], self.begin()
        for what, arguments, random_state in before:
            self.tell(what, *arguments, random_state=random_state)


class Plain:
    """An optimizer with parameters of its own that is stepped by plain ``step()`` only.

    As the reference of an optimizer in its own dtype, the two must agree bitwise.
    """

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

    def set_gradients(self, gradients: Sequence[Blueprint | None] | None) -> None:
        """Set gradients, rounded to their own dtype and then converted to the parameters'.

        ``None`` leaves those that are set.
        """
        for p, grad in zip(self.params, gradients, strict=True) if gradients is not None else ():
            p.grad = None if grad is None else grad.tensor().to(p.dtype)

    def call(
        self,
        name: str,
        gradients: Sequence[Blueprint | None] | None = None,
        max_norm: float | None = None,
    ) -> None:
        """Call the optimizer's method ``name`` with ``gradients``, clipped to a norm if given."""
        self.set_gradients(gradients)
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.params, max_norm)
        getattr(self.optimizer, name)()

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of all groups."""
        set_learning_rate(self.optimizer, lr)

    def add(self, param: Blueprint, lr: float) -> None:
        """Add a parameter in a group of its own, with learning rate ``lr``."""
        self.params.append(self._parameter(param))
        add_group(self.optimizer, self.params[-1], lr)

    def check(self, params: Sequence[Parameter], optimizer: Any) -> None:
        """Compare ``params`` bitwise, and every state tensor that both optimizers have."""
        own = Trained(self.params, self.optimizer)
        assert_same_training(
            Trained(list(params), optimizer), own, "compared with a plain training"
        )
