"""An ordinary step undone on the device: exact, or noticed not to be; see transaction.py."""

import contextlib
import random
import types
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import fewer
from torch import Tensor
from torch.nn import Parameter

import ampopt
from ampopt import judge, ordinary
from ampopt.host_state import HostState
from ampopt.testing.bits import bits
from ampopt.testing.no_sync import assert_no_sync
from ampopt.transaction import Skipper, Writes
from ampopt_kernels.eager import Eager
from ampopt_kernels.language import HAS_TRITON

INF = float("inf")


@pytest.fixture(autouse=True)
def as_on_a_device(monkeypatch):
    """The host may not look at CPU tensors at no cost; else there would be no transactions."""
    for module in (ordinary, judge):
        monkeypatch.setattr(module, "backend_for", lambda _: Eager(reads_cpu=False))


# --- steps that authors write --------------------------------------------------------------------


class Author(ampopt.Optimizer):
    """Someone's optimizer. A subclass says what a step does to one parameter."""

    def __init__(self, params: Any, lr: float = 0.125) -> None:
        super().__init__(params, {"lr": lr})
        self.begin()

    def begin(self) -> None:
        pass

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert closure is None
        self.update(
            [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        )

    def update(self, params: list[Parameter]) -> None:
        for p in params:
            assert p.grad is not None
            self.one(p, p.grad, self.state[p])

    def one(self, p: Parameter, g: Tensor, state: dict[str, Any]) -> None:
        raise NotImplementedError

    @property
    def average(self) -> dict[Parameter, Tensor]:
        return {
            p: self.state[p].setdefault("average", torch.zeros_like(p))
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None
        }


class Foreach(Author):
    def update(self, params):
        grads, average = [p.grad for p in params], list(self.average.values())
        torch._foreach_lerp_(average, grads, 0.25)  # pyright: ignore
        torch._foreach_add_(params, average, alpha=-0.125)  # pyright: ignore


class Fused(ampopt.Optimizer, torch.optim.Adam):
    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.125, fused=True)


class Tensors(ampopt.Optimizer, torch.optim.NAdam):
    """Step counts and products in tensors, and many kinds of operators."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.125, foreach=True, weight_decay=0.25)


class Views(Author):
    def one(self, p, g, state):
        average = self.average[p]
        p.view(-1)[::2].sub_(g.view(-1)[::2])
        average.view(-1).flip(0)  # a copy, not a view
        average.view(-1)[1:].unsqueeze(0).copy_(g.view(-1)[1:])
        p.detach().t().mul_(0.5)


class Data(Author):
    def one(self, p, g, state):
        p.data.add_(g, alpha=-0.125)
        p.data[0] = p.data.mean()
        self.average[p].data.copy_(g)


class Out(Author):
    def one(self, p, g, state):
        average = self.average[p]
        torch.add(average, g, out=average)
        torch.mul(average, 0.5, out=p.data)
        torch.linalg.qr(average, out=(torch.empty(0), average.new_empty(0)))


class Scattered(Author):
    def one(self, p, g, state):
        p[torch.tensor([0, 1])] = -g[:2]
        p.masked_fill_(g > 2, 1.0)
        p.index_add_(0, torch.tensor([0]), g[:1])
        torch.nn.init.constant_(self.average[p], 3.0)


class Nested(Author):
    def one(self, p, g, state):
        parts = state.setdefault("parts", [torch.zeros_like(p), {"deep": (torch.zeros_like(p),)}])
        parts[0].add_(g)
        parts[1]["deep"][0].add_(parts[0])
        p.sub_(parts[1]["deep"][0])


class OneBuffer(Author):
    """All averages are views of one flat tensor, which is an attribute; so are some parameters."""

    def begin(self):
        params = self.param_groups[0]["params"]
        self.flat = torch.zeros(sum(p.numel() for p in params) + 3)
        parts = self.flat[:-3].split([p.numel() for p in params])
        self.parts = [part.view(p.shape) for p, part in zip(params, parts, strict=True)]

    def update(self, params):
        for p, part in zip(self.param_groups[0]["params"], self.parts, strict=True):
            if p.grad is not None:
                part.lerp_(p.grad, 0.5)
        self.flat[-3:] += 1
        for p, part in zip(self.param_groups[0]["params"], self.parts, strict=True):
            p.sub_(part)


class Slow(Author):
    """Something happens to tensors in every third step only."""

    def update(self, params):
        for p in params:
            state = self.state[p]
            if not state:
                state.update(count=torch.zeros(()), slow=p.detach().clone())
            state["count"] += 1
            p.sub_(p.grad, alpha=0.125)  # pyright: ignore[reportArgumentType]
            third = state["count"] % 3 == 0
            state["slow"].copy_(torch.where(third, p, state["slow"]))


class LearningRate(Author):
    """The learning rate is a tensor, and the step adapts it."""

    def begin(self):
        self.param_groups[0]["lr"] = torch.tensor(0.125)

    def one(self, p, g, state):
        p.sub_(g * self.param_groups[0]["lr"])
        self.param_groups[0]["lr"].mul_(0.75)


class Odd(Author):
    """Storages of any number of bytes."""

    def one(self, p, g, state):
        if not state:
            for n, dtype in enumerate((torch.uint8, torch.int16, torch.bool, torch.float64)):
                state[str(n)] = torch.zeros(2 * n + 1, dtype=dtype)
        for value in state.values():
            value.add_(1) if value.dtype != torch.bool else value.logical_not_()
        p.sub_(g)


TENSORS_ONLY = (
    Foreach, Fused, Tensors, Views, Data, Out, Scattered, Nested, OneBuffer, Slow, LearningRate, Odd
)  # fmt: skip


class InGroup(Foreach):
    def update(self, params):
        super().update(params)
        group = self.param_groups[0]
        group["step"] = group.get("step", 0) + 1
        group["lr"] *= 0.5


class InState(Foreach):
    def update(self, params):
        super().update(params)
        for p in params:
            self.state[p]["step"] = self.state[p].get("step", 0) + 1


class Attribute(Foreach):
    taken = 0

    def update(self, params):
        super().update(params)
        self.taken += 1


class Holding(Foreach):
    """Keeps ``self.held``, changed in place by ``change``."""

    make: Callable[[], Any]
    change: Callable[[Any], Any]

    def begin(self):
        self.held = type(self).make()  # pyright: ignore[reportAttributeAccessIssue]

    def update(self, params):
        super().update(params)
        type(self).change(self.held)


def holding(name: str, make: Callable[[], Any], change: Callable[[Any], Any]) -> type[Holding]:
    return type(name, (Holding,), {"make": staticmethod(make), "change": staticmethod(change)})


class Slotted:
    __slots__ = ("count", "later")

    def __init__(self) -> None:
        self.count = 0


def counter() -> Callable[[], int]:
    count = 0

    def counted() -> int:
        nonlocal count
        count += 1
        return count

    return counted


def increment(x: Any) -> None:
    x.count += 1


def add_one(array: Any) -> None:
    array += 1


HELD = (
    holding("InArray", lambda: np.zeros(3), add_one),
    holding("InDeque", lambda: deque([1, 2], maxlen=2), lambda x: x.append(len(x) + x[-1])),
    holding("InSet", set, lambda x: x.add(len(x))),
    holding("InList", list, lambda x: x.append(float(len(x)))),
    holding("InNestedList", lambda: {"a": ([0],)}, lambda x: x["a"][0].append(1)),
    holding("InBytes", lambda: bytearray(b"ab"), lambda x: x.append(len(x))),
    holding("InObject", lambda: types.SimpleNamespace(count=0), increment),
    holding("InSlots", Slotted, increment),
    holding("InClosure", counter, lambda x: x()),
    holding("OwnGenerator", torch.Generator, lambda x: torch.rand(2, generator=x)),
    holding("OwnPythonGenerator", lambda: random.Random(3), lambda x: x.gauss(0, 1)),
    holding("OwnNumpyGenerator", lambda: np.random.default_rng(3), lambda x: x.random()),
    holding("PythonRandom", object, lambda x: random.random()),
    holding("NumpyRandom", object, lambda x: np.random.rand()),
    holding("NegativeZero", lambda: [0.0], lambda x: x.__setitem__(0, -x[0])),
)  # fmt: skip


class Noise(Foreach):
    """Dropout-like noise, from torch's own generator."""

    def update(self, params):
        for p in params:
            torch.nn.functional.dropout(p, 0.25, inplace=True)
            p.add_(torch.randn_like(p), alpha=2.0**-10)
        super().update(params)


class Replaced(Author):
    """State tensors are replaced and not written."""

    def one(self, p, g, state):
        state["average"] = state.get("average", torch.zeros_like(p)) + g
        p.sub_(state["average"])


class NewMemory(Author):
    def one(self, p, g, state):
        p.data = p.data - g
        self.average[p].data = g.clone()


class Resized(Author):
    def one(self, p, g, state):
        history = state.setdefault("history", torch.zeros(2))
        history.resize_(history.numel() + 1).fill_(2.0)
        p.sub_(g)


class PastTheDispatcher(Author):
    """As a custom kernel does."""

    def one(self, p, g, state):
        p.detach().numpy()[...] -= g.numpy()
        self.average[p].add_(g)


class Sparse(Author):
    def begin(self):
        self.held = torch.zeros(4).to_sparse()

    def one(self, p, g, state):
        self.held.add_(torch.ones(4).to_sparse())
        p.sub_(g)


class Wrapping(Author):
    """Another optimizer does the work."""

    def begin(self):
        self.inner = torch.optim.SGD(self.param_groups[0]["params"], lr=0.5, momentum=0.5)

    def update(self, params):
        self.inner.param_groups[0]["lr"] *= 0.5
        self.inner.step()


class Iterating(Foreach):
    """Keeps something that cannot be looked into without changing it."""

    def begin(self):
        self.held = iter([0.5, 0.25, 0.125] * 9)

    def update(self, params):
        params[0].mul_(next(self.held))
        super().update(params)


class Sometimes(Foreach):
    """A counter on the host in every third step only."""

    def update(self, params):
        count = self.__dict__.setdefault("count", torch.zeros(()))
        count += 1
        super().update(params)
        if int(count) % 3 == 0:
            self.param_groups[0]["thirds"] = self.param_groups[0].get("thirds", 0) + 1


HOST_TOO = (
    InGroup, InState, Attribute, *HELD, Noise, Replaced, NewMemory, Resized, PastTheDispatcher,
    Sparse, Wrapping, Iterating, Sometimes,
)  # fmt: skip


class Fussy(Foreach):
    """Raises half way where gradients are not finite."""

    def update(self, params):
        for p in params:
            p.add_(1.0)
            self.state[p].setdefault("seen", torch.zeros_like(p)).add_(1)
        for p in params:
            if not p.grad.isfinite().all():
                raise FloatingPointError("not finite")
        super().update(params)


# --- whatever the step does, a skipped one has not been -------------------------------------------

SHAPES = ((2, 2), (3, 3))


def number() -> st.SearchStrategy[float]:
    return st.integers(-64, 64).map(lambda n: n / 16)


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[float | None, ...]]:
    """For each step, for each of two parameters, the number that its gradients are made of."""
    number_or_bad = st.one_of(number(), number(), number(), st.sampled_from([INF, float("nan")]))
    step = st.tuples(number_or_bad, st.none() | number_or_bad)
    return draw(st.lists(step, min_size=3, max_size=6))


def overflows(step: tuple[float | None, ...]) -> bool:
    return any(x is not None and not np.isfinite(x) for x in step)


def made(cls: type[ampopt.Optimizer]) -> tuple[Any, list[Parameter]]:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    numbers = torch.arange(13.0) / 8
    params = [Parameter(numbers[:4].clone().view(2, 2)), Parameter(numbers[4:].clone().view(3, 3))]
    return cls(params), params  # pyright: ignore[reportCallIssue]


def set_gradients(params: list[Parameter], step: tuple[float | None, ...]) -> None:
    for p, x in zip(params, step, strict=True):
        p.grad = None if x is None else torch.linspace(0.25, 1.0, p.numel()).view(p.shape) + x


def seen(optimizer: ampopt.Optimizer) -> Any:
    """All that a skip must leave, deep enough for what is in this file."""
    attributes = {
        name: value
        for name, value in vars(optimizer).items()
        if name in ("held", "flat", "taken", "count", "inner")
    }
    return frozen(
        [
            [group for group in optimizer.param_groups],
            [dict(optimizer.state.get(p, {})) for g in optimizer.param_groups for p in g["params"]],
            attributes,
            torch.get_rng_state(),
            random.getstate(),
            np.random.get_state(),
        ]
    )


def frozen(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return bits(value.get_state())
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, (np.ndarray, deque, set)):
        return frozen(list(value))
    if isinstance(value, dict):
        return {key: frozen(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [frozen(item) for item in value]
    if isinstance(value, Slotted):
        return [value.count]
    if isinstance(value, types.SimpleNamespace):
        return frozen(vars(value))
    if isinstance(value, types.FunctionType):
        return [cell.cell_contents for cell in value.__closure__ or ()]
    if isinstance(value, torch.optim.Optimizer):
        return frozen([value.param_groups, list(value.state.values())])
    if isinstance(value, Tensor):
        return bits(value)
    return repr(value) if isinstance(value, (float, int, str)) else None


def attempt(optimizer: ampopt.Optimizer, split: bool) -> bool:
    if split:
        optimizer.unscale(grads_scaled_by=1.0)
        return optimizer.step_after_unscale().skipped
    return optimizer.unscale_and_step(grads_scaled_by=1.0).skipped


@pytest.mark.parametrize("skip_by", ["auto", "transaction"])
@pytest.mark.parametrize("cls", [*TENSORS_ONLY, *HOST_TOO, Fussy], ids=lambda cls: cls.__name__)
@fewer(0.2)
@given(history=histories(), split=st.booleans())
def test_a_skipped_step_changes_nothing_and_a_finite_one_all_that_it_would(
    cls, skip_by, history, split
):
    if skip_by == "transaction" and cls in (PastTheDispatcher, Sparse, Iterating):
        return  # its author must not say so
    optimizer, params = made(cls)
    optimizer.skip_by = skip_by
    for step in history:
        set_gradients(params, step)
        before = seen(optimizer) if overflows(step) else None
        assert attempt(optimizer, split) is overflows(step)
        if before is not None:
            assert seen(optimizer) == before
    after = seen(optimizer)

    clean, params = made(cls)
    for step in history:
        set_gradients(params, step)
        if not overflows(step):
            clean.step()
    assert after == seen(clean)


# --- how it was skipped --------------------------------------------------------------------------


def after_steps(cls: type[ampopt.Optimizer], steps: int = 4) -> Skipper:
    optimizer, params = made(cls)
    for _ in range(steps):
        set_gradients(params, (1.0, 1.0))
        optimizer.unscale_and_step(grads_scaled_by=1.0)
    return optimizer._skipper


@pytest.mark.parametrize("cls", TENSORS_ONLY)
def test_a_step_that_keeps_all_in_tensors_is_undone_on_the_device(cls):
    skipper = after_steps(cls)
    assert (skipper.mode, skipper.reason) == ("transaction", None)


@pytest.mark.parametrize("cls", HOST_TOO)
def test_a_step_that_does_not_makes_the_host_look(cls):
    assert after_steps(cls, 7).mode == "host"


@pytest.mark.parametrize(
    "cls, reason",
    [
        (InGroup, "changes InGroup.param_groups[0]['lr']"),
        (InState, "changes InState.state[...]['step']"),
        (Attribute, "changes Attribute['taken']"),
        (Noise, "changes torch's random state"),
        (PastTheDispatcher, "writes tensors where torch's dispatcher is not told"),
        (Sparse, "cannot see what changes in Sparse.held, a Tensor of torch.sparse_coo"),
        (Iterating, "cannot see what changes in Iterating.held, a list_iterator"),
    ],
)
def test_what_makes_the_host_look_is_named(cls, reason, caplog):
    with caplog.at_level("INFO", logger="ampopt.transaction"):
        found = after_steps(cls).reason
    assert found is not None
    assert found == reason
    assert f"{cls.__name__}.step {found}: the host waits" in caplog.text


@pytest.mark.parametrize("skip_by", ["host", "transaction"])
@pytest.mark.parametrize("cls", [Foreach, InGroup])
def test_an_author_decides(cls, skip_by):
    decided = type(cls.__name__, (cls,), {"skip_by": skip_by})
    assert after_steps(decided).mode == skip_by


def test_an_unknown_way_to_skip_is_refused():
    optimizer, params = made(Foreach)
    optimizer.skip_by = "device"
    set_gradients(params, (1.0, 1.0))
    with pytest.raises(ValueError, match="'auto', 'host', 'transaction' or 'step', got 'device'"):
        optimizer.unscale_and_step(grads_scaled_by=1.0)


def test_where_the_host_sees_the_flag_anyway_it_looks(monkeypatch):
    monkeypatch.setattr(
        ordinary,
        "backend_for",
        lambda _: ampopt.backend._cpu_backend("eager"),  # pyright: ignore[reportAttributeAccessIssue]
    )
    skipper = after_steps(Foreach)
    assert (skipper.mode, skipper.reason) == ("host", None)


def test_parameters_that_get_gradients_later_put_the_step_on_probation_again():
    optimizer, params = made(Foreach)
    modes = []
    for step in [(1.0, None)] * 3 + [(1.0, 1.0)] * 3:
        set_gradients(params, step)
        optimizer.unscale_and_step(grads_scaled_by=1.0)
        modes.append(optimizer._skipper.mode)
    assert modes == ["probation", *["transaction"] * 2, "probation", *["transaction"] * 2]


def test_state_that_never_stops_growing_makes_the_host_look():
    class Logging(Foreach):
        def begin(self):
            self.log = {}

        def update(self, params):
            super().update(params)
            self.log[len(self.log)] = 0.5

    assert after_steps(Logging, 3).mode == "probation"
    assert after_steps(Logging, 40).mode == "host"


# --- exceptions and hooks ------------------------------------------------------------------------


def test_a_step_that_raises_on_finite_gradients_raises():
    class Raises(Foreach):
        def update(self, params):
            super().update(params)
            if self.param_groups[0]["lr"] == 0:
                raise KeyError("no step")

    optimizer, params = made(Raises)
    for lr in (0.5, 0.5, 0.5, 0):
        optimizer.param_groups[0]["lr"] = lr
        set_gradients(params, (1.0, 1.0))
        if lr:
            optimizer.unscale_and_step(grads_scaled_by=1.0)
    assert optimizer._skipper.mode == "transaction"
    with pytest.raises(KeyError, match="no step"):
        optimizer.unscale_and_step(grads_scaled_by=1.0)
    set_gradients(params, (INF, 1.0))
    before = seen(optimizer)
    assert optimizer.unscale_and_step(grads_scaled_by=1.0).skipped
    assert seen(optimizer) == before


@pytest.mark.parametrize("skip_by", ["host", "transaction", "auto"])
@pytest.mark.parametrize("scheduled", [False, True])
def test_what_step_hooks_do_is_theirs_and_not_undone(skip_by, scheduled):
    optimizer, params = made(Foreach)
    optimizer.skip_by = skip_by
    if scheduled:  # torch's schedulers put a wrapper around step
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    calls = torch.zeros(2)
    optimizer.calls = []

    def before(opt: Any, args: Any, kwargs: Any) -> None:
        calls[0] += 1
        opt.calls.append("before")
        opt.param_groups[0]["before"] = opt.param_groups[0].get("before", 0) + 1

    def after(opt: Any, args: Any, kwargs: Any) -> None:
        calls[1] += 1
        opt.calls.append("after")
        opt.state[params[0]].setdefault("hook", torch.zeros(())).add_(1)

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    history = [1.0, 1.0, 1.0, INF, 1.0, INF]
    for n, x in enumerate(history, 1):
        set_gradients(params, (x, x))
        before_step = bits(params)
        assert optimizer.unscale_and_step(grads_scaled_by=1.0).skipped is (x == INF)
        assert (bits(params) == before_step) is (x == INF)
        assert calls.tolist() == [n, n]
    assert optimizer.calls == ["before", "after"] * len(history)
    assert optimizer.param_groups[0]["before"] == len(history)
    assert float(optimizer.state[params[0]]["hook"]) == len(history)
    assert optimizer._skipper.mode == ("host" if skip_by == "host" else "transaction")


@pytest.mark.parametrize("bad", [False, True])
def test_a_hook_that_raises_is_heard(bad):
    optimizer, params = made(Foreach)
    optimizer.skip_by = "transaction"
    set_gradients(params, (INF if bad else 1.0, 1.0))

    def refuse(*_: Any) -> None:
        raise KeyError("hook")

    before = seen(optimizer)
    hook = optimizer.register_step_pre_hook(refuse)
    with pytest.raises(KeyError, match="hook"):
        optimizer.unscale_and_step(grads_scaled_by=1.0)
    assert seen(optimizer) == before
    hook.remove()
    optimizer.register_step_post_hook(refuse)
    with pytest.raises(KeyError, match="hook"):
        optimizer.unscale_and_step(grads_scaled_by=1.0)
    assert (seen(optimizer) == before) is bad


def test_a_step_that_somebody_put_on_the_instance_is_taken_and_undone():
    optimizer, params = made(Foreach)
    original = optimizer.step

    def doubled(self: Any, closure: Any = None) -> None:
        original()
        original()

    optimizer.step = types.MethodType(doubled, optimizer)
    for x in (1.0, 1.0, 1.0, INF):
        set_gradients(params, (x, x))
        before = bits(params)
        optimizer.unscale(grads_scaled_by=1.0)
        assert optimizer.step_after_unscale().skipped is (x == INF)
        assert (bits(params) == before) is (x == INF)
    assert optimizer._skipper.mode == "transaction"


# --- nothing is read back ------------------------------------------------------------------------


@pytest.fixture(params=["eager", "triton"])
def device(request, monkeypatch):
    if request.param == "triton":
        if not HAS_TRITON:
            pytest.skip("Triton cannot be imported here")
        monkeypatch.undo()
        ampopt.set_backend("triton")
    yield request.param
    ampopt.set_backend("auto")


@pytest.mark.parametrize("cls", [Foreach, Views, Data, Scattered, Nested, OneBuffer, Slow, Odd])
def test_a_transaction_reads_nothing_back(cls, device):
    optimizer, params = made(cls)
    for _ in range(3):
        set_gradients(params, (1.0, 1.0))
        optimizer.unscale_and_step(grads_scaled_by=1.0)
    before = [seen(optimizer)]
    with assert_no_sync():
        for x in (INF, float("nan")):
            set_gradients(params, (1.0, x))
            optimizer.unscale_and_step(grads_scaled_by=2.0)
    assert [seen(optimizer)] == before
    with assert_no_sync():
        set_gradients(params, (1.0, 1.0))
        optimizer.unscale(grads_scaled_by=2.0)
        optimizer.step_after_unscale()
    assert [seen(optimizer)] != before


def matrices(cls: Any) -> tuple[Any, list[Parameter]]:
    params = [Parameter(torch.eye(3)), Parameter(torch.ones(2, 4))]
    return cls(params), params


def give(params: list[Parameter], x: float, sparse: bool) -> None:
    for p in params:
        p.grad = torch.full_like(p, x)
        if sparse:
            indices, values = torch.tensor([[0, 0]]), torch.full((2, p.shape[1]), x)
            p.grad = torch.sparse_coo_tensor(indices, values, p.shape, check_invariants=True)


@pytest.mark.parametrize("cls", [ampopt.Muon, ampopt.Adafactor, ampopt.SparseAdam])
@pytest.mark.parametrize("first", [1.0, INF])
def test_optimizers_with_a_step_of_torchs_never_look(cls, first, device):
    optimizer, params = matrices(cls)
    sparse = cls is ampopt.SparseAdam
    made_before = bits(params)
    for x in (first, INF, 1.0):
        before = bits(params)
        give(params, x, sparse)
        with assert_no_sync():
            optimizer.unscale_and_step(grads_scaled_by=2.0)
        assert (bits(params) == before) is (x == INF)
        assert optimizer._skipper.mode == "transaction"
        if bits(params) == made_before:
            assert not any(t.any() for s in optimizer.state.values() for t in s.values())
    clean, clean_params = matrices(cls)
    for x in (first, 1.0):
        if x != INF:
            give(clean_params, x / 2, sparse)
            clean.step()
    assert bits(params) == bits(clean_params)


def test_what_is_known_of_a_step_is_not_known_of_one_that_overrides_it():
    class Counting(ampopt.Muon):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            self.taken = getattr(self, "taken", 0) + 1

    class Renamed(ampopt.Muon):
        pass

    for cls, mode in ((Counting, "probation"), (Renamed, "transaction")):
        optimizer, params = matrices(cls)
        assert optimizer._skipper.mode == mode
        give(params, INF, False)
        assert optimizer.unscale_and_step(grads_scaled_by=1.0).skipped
        assert "taken" not in vars(optimizer)


# --- the parts -----------------------------------------------------------------------------------


def test_what_is_written_in_the_hosts_memory_needs_the_host():
    """Undoing it by a flag on a device is a copy that nobody waits for."""
    count = torch.zeros(())
    writes = Writes([count])
    assert not writes.on_host(torch.ones((), dtype=torch.bool, device="meta"))
    with writes:
        count += 1
    assert writes.on_host(torch.ones((), dtype=torch.bool, device="meta"))
    assert not writes.on_host(torch.ones((), dtype=torch.bool))


def test_what_is_on_several_devices_is_put_back_on_each():
    here, elsewhere = torch.ones(3), torch.ones(3, device="meta")  # which has no values
    writes = Writes([here, elsewhere])
    with writes:
        here.add_(1)
        elsewhere.add_(1)
    assert writes.saw(elsewhere)
    writes.undo_where(torch.tensor(True))
    assert here.tolist() == [1.0] * 3


@pytest.mark.parametrize("flag", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("skip_by", ["host", "transaction", "auto"])
def test_a_sum_of_flags_skips(skip_by, flag):
    """As ``torch.amp.GradScaler`` makes of several devices, and fused kernels of torch's ignore."""
    optimizer, params = made(Foreach)
    optimizer.skip_by = skip_by
    for found_inf in (0.0, flag):
        set_gradients(params, (1.0, 1.0))
        before = seen(optimizer)
        optimizer.grad_scale, optimizer.found_inf = None, torch.tensor(found_inf)
        optimizer.step()
        assert (seen(optimizer) == before) is (found_inf > 0)


@given(st.lists(st.integers(0, 255), max_size=9), st.integers(0, 4), st.booleans())
def test_every_byte_of_a_storage_is_put_back(numbers, start, skip):
    storage = torch.tensor([0] * start + numbers, dtype=torch.uint8)
    tensor = storage[start:]
    writes = Writes([tensor])
    before = bits(storage)
    with writes:
        storage.add_(1)
    changed = bits(storage)
    assert writes.saw(tensor)
    writes.undo_where(torch.tensor(skip))
    assert bits(storage) == (before if skip else changed)
    writes.undo()
    assert bits(storage) == before


def test_an_operator_that_does_not_say_what_it_writes_may_write_all():
    tensor, other = torch.ones(2), torch.ones(2)
    writes = Writes([tensor])
    assert not writes.saw(tensor)
    with writes:
        torch.cond(torch.tensor(True), lambda x: x + 1, lambda x: x - 1, (other,))
    assert writes.saw(tensor)


leaves = st.one_of(
    st.integers(), st.floats(), st.text(max_size=2), st.booleans(), st.none(),
    st.builds(lambda n: torch.full((2,), n), st.floats(-1, 1, width=32)),
    st.builds(lambda n: np.full(2, n), st.floats(-1, 1)),
)  # fmt: skip


def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.lists(children, max_size=3).map(deque),
        st.dictionaries(st.text(max_size=2), children, max_size=3),
        st.builds(lambda x: types.SimpleNamespace(x=x), children),
    )


def changes(value: Any) -> list[Callable[[], Any]]:
    """Every small change that can be made to ``value`` in place."""
    found: list[Callable[[], Any]] = []
    if isinstance(value, (list, deque)):
        found.append(lambda: value.append(0))
        if value:
            found.append(lambda: value.pop())
            found.append(lambda: value.__setitem__(0, object()))
    if isinstance(value, dict):
        found.append(lambda: value.update({"new": 1}))
        if value:
            found.append(lambda: value.popitem())
    if isinstance(value, types.SimpleNamespace):
        found.append(lambda: setattr(value, "x", object()))
        found.append(lambda: delattr(value, "x"))
        found.append(lambda: setattr(value, "y", None))
    if isinstance(value, np.ndarray):
        found.append(lambda: value.__setitem__(0, 7.0))
    if isinstance(value, Tensor):
        found.append(lambda: setattr(value, "data", torch.zeros(2)))
        found.append(lambda: setattr(value, "data", value.data[:1]))
        found.append(lambda: setattr(value, "note", 1))
    items: Any = ()
    if isinstance(value, (list, tuple, deque)):
        items = value
    elif isinstance(value, dict):
        items = value.values()
    elif isinstance(value, types.SimpleNamespace):
        items = vars(value).values()
    for item in items:
        found += changes(item)
    return found


def exactly(value: Any) -> Any:
    """``value`` as nested tuples to compare, types and attributes of tensors included."""
    if isinstance(value, Tensor):
        return bits(value), dict(vars(value))
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, types.SimpleNamespace):
        return "namespace", exactly(vars(value))
    if isinstance(value, dict):
        return [(key, exactly(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return type(value), [exactly(item) for item in value]
    return repr(value)


@given(st.recursive(leaves, containers, max_leaves=8), st.data())
def test_any_change_to_the_host_state_is_noticed_and_put_back(value, data):
    optimizer, _ = made(Foreach)
    optimizer.held = [value]
    before = exactly(value)
    host = HostState(optimizer)
    assert host.changed() is None and host.only_grew() and host.hidden is None
    possible = changes(optimizer.held)
    data.draw(st.sampled_from(possible))()
    assert host.changed() is not None
    with contextlib.suppress(AttributeError, IndexError, KeyError):  # the first was there before
        data.draw(st.sampled_from(possible))()
    host.restore()
    assert exactly(optimizer.held) == exactly([value])
    assert exactly(value) == before
    assert host.changed() is None


def test_tensors_are_found_wherever_they_are():
    optimizer, params = made(Foreach)
    model = torch.nn.Linear(1, 1)
    inner = torch.optim.SGD([model.weight], momentum=0.5)
    inner.state[model.weight]["deep"] = deque([{"x": torch.ones(1)}])
    optimizer.model, optimizer.inner = model, inner
    params[0].noted = torch.zeros(1)  # pyright: ignore[reportAttributeAccessIssue]
    found = {id(t) for t in HostState(optimizer).tensors}
    expected = [*params, params[0].noted, *model.parameters()]  # pyright: ignore[reportAttributeAccessIssue]
    expected.append(inner.state[model.weight]["deep"][0]["x"])
    assert {id(t) for t in expected} <= found


def test_a_cycle_has_an_end():
    optimizer, _ = made(Foreach)
    optimizer.held = [optimizer]
    optimizer.held.append(optimizer.held)
    assert HostState(optimizer).changed() is None
