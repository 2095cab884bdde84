"""Optimizers whose states are tensor subclasses, and whose steps are compiled.

``Coded`` stands for the states of torchao, which implement no operator more than they need.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

import ampopt
from ampopt._step.tensor_subclasses import copy_of, memory_of
from ampopt.testing.bits import bits

INF = float("inf")
pytestmark = pytest.mark.usefixtures("as_on_a_device")


class Coded(Tensor):
    """Numbers as 8-bit codes with one scale; implements ``copy_`` and ``to``, and nothing else."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> "Coded":
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    def decoded(self) -> Tensor:
        return self.codes * self.scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> "Coded":
        return Coded(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            to, numbers = args
            to.scale.copy_(numbers.abs().amax() / 127)
            to.codes.copy_((numbers / to.scale).round())
            return to
        if func is torch.ops.aten._to_copy.default:
            return Coded(args[0].codes, args[0].scale)  # as torchao's: it shares them
        raise NotImplementedError(f"{func} of Coded")


def update(p: Tensor, momentum: Tensor) -> None:
    p.sub_(0.25 * momentum)


class Momentum(torch.optim.Optimizer):
    """SGD whose momentum is a ``Coded`` tensor."""

    update = staticmethod(update)

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = None if closure is None else closure()
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                zeros = torch.zeros(p.shape, dtype=torch.int8)
                state["momentum"] = Coded(zeros, torch.ones(()))
            momentum = state["momentum"].decoded() * 0.5 + p.grad
            state["momentum"].copy_(momentum)
            self.update(p, momentum)
        return loss


def made(cls: Any = Momentum, skip_by: str = "auto") -> tuple[Any, Tensor]:
    param = torch.nn.Parameter(torch.linspace(-1.0, 1.0, 8))
    optimizer = ampopt.extend(cls)([param])
    optimizer.skip_by = skip_by
    return optimizer, param


def seen(optimizer: Any, param: Tensor) -> Any:
    return bits([t for of in (param, *_states(optimizer, param)) for t in memory_of(of)])


def _states(optimizer: Any, param: Tensor) -> Any:
    return optimizer.state.get(param, {}).values()


def stepped(optimizer: Any, param: Tensor, number: float = 1.0) -> Any:
    param.grad = torch.linspace(0.0, number, 8)
    return optimizer.unscale_and_step(grads_scaled_by=1.0)


def test_a_skip_restores_what_is_inside():
    optimizer, param = made()
    for _ in range(3):
        assert not stepped(optimizer, param).skipped
    policy = optimizer._ampopt.skip_policy
    assert (policy.mode, policy.reason) == ("transaction", None)
    before = seen(optimizer, param)
    assert stepped(optimizer, param, INF).skipped
    assert seen(optimizer, param) == before
    assert not stepped(optimizer, param).skipped and seen(optimizer, param) != before


def test_a_skipped_first_step_that_makes_subclass_states_leaves_nothing():
    optimizer, param = made(skip_by="transaction")
    before = seen(optimizer, param)
    assert stepped(optimizer, param, INF).skipped
    assert seen(optimizer, param) == before


def test_a_loaded_state_is_the_saved_one_and_shares_nothing_with_it():
    optimizer, param = made()
    stepped(optimizer, param)
    loaded, other = made()
    loaded.load_state_dict(optimizer.state_dict())
    (state,), (own,) = _states(optimizer, param), _states(loaded, other)
    assert type(own) is Coded and bits(memory_of(own)) == bits(memory_of(state))
    saved = bits(memory_of(state))
    stepped(loaded, other)
    assert bits(memory_of(state)) == saved != bits(memory_of(own))


def test_a_closure_that_fails_changes_nothing():
    optimizer, param = made()
    stepped(optimizer, param)
    before = seen(optimizer, param)

    def closure(scale: Any) -> Any:
        param.grad = torch.full_like(param, INF)
        return 1.0

    with pytest.raises(ampopt.NonFiniteGradientError):
        optimizer.unscale_and_step(closure, 1024.0, max_replays=2)
    assert seen(optimizer, param) == before


def test_copies_share_no_memory():
    original = Coded(torch.ones(2, dtype=torch.int8), torch.ones(()))
    twin = copy_of(original)
    assert type(twin) is Coded and bits(memory_of(twin)) == bits(memory_of(original))
    original.codes.zero_()
    assert memory_of(twin)[0].tolist() == [1, 1]


# --- steps that torch.compile compiles ------------------------------------------------------------

runs: list[str] = []
"""Compiled functions append to it when they run."""


def past_the_dispatcher(graph: Any, inputs: Any) -> Any:
    """A compiler backend whose code bypasses dispatch modes when it writes, as Inductor's does."""

    def run(*args: Any) -> Any:
        runs.append("compiled")
        with _disable_current_modes():
            return graph(*args)

    return run


class Compiled(Momentum):
    """Compiles its update within the step, as the optimizers of torchao do."""

    def update(self, p: Tensor, momentum: Tensor) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        torch.compile(update, fullgraph=True, backend=past_the_dispatcher)(p.detach(), momentum)


@pytest.mark.parametrize("skip_by", ["auto", "transaction", "host"])
def test_a_compiled_step(skip_by):
    """Compiled code bypasses the dispatcher, and what it writes is undone nevertheless."""
    torch._dynamo.reset()
    runs.clear()
    optimizer, param = made(Compiled, skip_by)
    plain, other = made()
    for number in (1.0, INF, 2.0, 0.5, INF, 1.0):
        before = seen(optimizer, param)
        skipped = stepped(optimizer, param, number).skipped
        assert skipped is (number == INF) and (seen(optimizer, param) == before) is skipped
        stepped(plain, other, number)
        assert seen(optimizer, param) == seen(plain, other)
    assert optimizer._ampopt.skip_policy.reason is None
    assert len(runs) == (4 if skip_by == "host" else 6)
