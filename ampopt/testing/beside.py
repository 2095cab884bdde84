"""What should have happened: a plain training of the batches that counted."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ampopt.testing.bits import assert_same, bits
from ampopt.testing.blueprints import Blueprint, set_gradients

__all__ = ["Beside", "Double", "Plain", "set_learning_rate"]


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """As torch's schedulers set it, which write into a tensor where there is one."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


class Beside:
    """A training that is told what happens, and can go back to any moment.

    It goes back by doing all of it again from the start: what should have happened must not hang
    on ``state_dict`` or ``deepcopy``, which are to be tested by it.
    """

    def __init__(self, begin: Callable[[], Any]) -> None:
        """``begin`` makes the training, a :class:`Plain` one or one with its methods."""
        self.begin = begin
        self.training = begin()
        self.happened: list[tuple[str, tuple[Any, ...]]] = []

    def tell(self, what: str, *arguments: Any) -> None:
        """Call the method ``what`` of the training."""
        self.happened.append((what, arguments))
        getattr(self.training, what)(*arguments)

    @property
    def now(self) -> int:
        """A moment to go back to."""
        return len(self.happened)

    def back_to(self, moment: int) -> None:
        """Be as at that moment, which is in the past."""
        before, self.happened, self.training = self.happened[:moment], [], self.begin()
        for what, arguments in before:
            self.tell(what, *arguments)


class Plain:
    """An optimizer of parameters of its own, which only ever takes ``step()``."""

    def __init__(self, make: Any, params: Iterable[Parameter]) -> None:
        """``make`` makes the optimizer of ``params``."""
        self.params = list(params)
        self.optimizer = make(list(self.params))

    def step(self, max_norm: float | None) -> None:
        """Step with the gradients that are there, clipped to a global norm if one is given."""
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.params, max_norm)
        self.optimizer.step()

    def call(self, name: str, gradients: Sequence[Blueprint | None] | None) -> None:
        """A call of the optimizer's own, by name, with these gradients if it takes some."""
        if gradients is not None:
            set_gradients(self.params, gradients)
            for p in self.params:
                if p.grad is not None:
                    p.grad = p.grad.to(p.dtype)
        getattr(self.optimizer, name)()

    def set_learning_rate(self, lr: float) -> None:
        """Of all groups."""
        set_learning_rate(self.optimizer, lr)

    def add(self, param: Parameter, lr: float) -> None:
        """One more parameter, in a group of its own."""
        self.params.append(param)
        self.optimizer.add_param_group({"params": [param], "lr": lr})


class Double:
    """The same optimizer in its own dtype, whose gradients were never scaled: the same bits."""

    def __init__(self, make: Any, params: Sequence[Blueprint]) -> None:
        """``make`` makes the optimizer that is tested."""
        self.plain = Plain(make, (p.parameter() for p in params))
        self.set_learning_rate = self.plain.set_learning_rate

    def add(self, param: Blueprint, lr: float) -> None:
        """One more parameter, in a group of its own."""
        self.plain.add(param.parameter(), lr)

    def step(
        self,
        gradients: Sequence[Blueprint | None],
        max_norm: float | None,
        before: Tensor,
        after: Tensor,
    ) -> None:
        """A step that began and ended with torch's random state ``before`` and ``after``."""
        set_gradients(self.plain.params, gradients)
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(before)
            self.plain.step(max_norm)
            same = torch.equal(torch.get_rng_state(), after)
        assert same, "the step drew other random numbers than a plain one"

    def call(self, name: str, gradients: Any, before: Tensor) -> None:
        """A call of the optimizer's own, which began with torch's random state ``before``."""
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(before)
            self.plain.call(name, gradients)

    def check(self, params: Sequence[Parameter], optimizer: Any) -> None:
        """Parameters are the same bits, and so is each state that both have."""
        for i, (p, own) in enumerate(zip(params, self.plain.params, strict=True)):
            assert_same(bits(p), bits(own), f"parameter {i} beside a plain training")
            state, expected = (
                bits(dict(opt.state.get(of, {})))
                for opt, of in ((optimizer, p), (self.plain.optimizer, own))
            )
            if state and expected:
                assert_same(state, expected, f"state of parameter {i} beside a plain training")
