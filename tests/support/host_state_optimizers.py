"""Optimizers with state outside of tensors."""

import random
import types
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

import ampopt
from ampopt.testing.bits import bits
from support.tensor_only_optimizers import Author, Foreach

__all__ = [
    "HOST_TOO",
    "Attribute",
    "InGroup",
    "InState",
    "InStorage",
    "Iterating",
    "Noise",
    "Sparse",
    "seen",
]


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
    """Keeps an object in ``self.held``, and changes it in place by ``change``."""

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


def transpose(array: Any) -> None:
    array.resize(array.shape[::-1], refcheck=False)


def counter_in_default() -> Callable[[], int]:
    def counted(numbers: Any = [0]) -> int:  # noqa: B006
        numbers[0] += 1
        return numbers[0]

    return counted


def counter_in_keyword() -> Callable[[], int]:
    def counted(*, numbers: Any = [0]) -> int:  # noqa: B006
        numbers[0] += 1
        return numbers[0]

    return counted


HELD = (
    holding("InArray", lambda: np.zeros(3), add_one),
    holding("InDeque", lambda: deque([1, 2], maxlen=2), lambda x: x.append(len(x) + x[-1])),
    holding("InSet", set, lambda x: x.add(len(x))),
    holding("InList", list, lambda x: x.append(float(len(x)))),
    holding("InNestedList", lambda: {"a": ([0],)}, lambda x: x["a"][0].append(1)),
    holding("InBytes", lambda: bytearray(b"ab"), lambda x: x.append(len(x))),
    holding("InOrder", lambda: OrderedDict(a=1, b=2), lambda x: x.move_to_end(next(iter(x)))),
    holding("InObject", lambda: types.SimpleNamespace(count=0), increment),
    holding("InSlots", Slotted, increment),
    holding("InClosure", counter, lambda x: x()),
    holding("InDefault", counter_in_default, lambda x: x()),
    holding("InKeyword", counter_in_keyword, lambda x: x()),
    holding("InSizeOfArray", lambda: np.ones(2), lambda x: x.resize(len(x) + 1, refcheck=False)),
    holding("InShapeOfArray", lambda: np.ones((2, 3)), transpose),
    holding("InArrayOfObjects", lambda: np.array([Slotted()]), lambda x: increment(x[0])),
    holding("BoundMethod", lambda: random.Random(3).random, lambda x: x()),
    holding("OwnGenerator", torch.Generator, lambda x: torch.rand(2, generator=x)),
    holding("OwnPythonGenerator", lambda: random.Random(3), lambda x: x.gauss(0, 1)),
    holding("OwnNumpyGenerator", lambda: np.random.default_rng(3), lambda x: x.random()),
    holding("PythonRandom", object, lambda x: random.random()),
    holding("NumpyRandom", object, lambda x: np.random.rand()),
    holding("NegativeZero", lambda: [0.0], lambda x: x.__setitem__(0, -x[0])),
)  # fmt: skip


class Noise(Foreach):
    """Random noise from torch's generator, as in dropout."""

    def update(self, params):
        for p in params:
            torch.nn.functional.dropout(p, 0.25, inplace=True)
            p.add_(torch.randn_like(p), alpha=2.0**-10)
        super().update(params)


class Replaced(Author):
    """Replaces state tensors instead of writing to them."""

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


class Sparse(Author):
    def begin(self):
        self.held = torch.zeros(4).to_sparse()

    def one(self, p, g, state):
        self.held.add_(torch.ones(4).to_sparse())
        p.sub_(g)


class Wrapping(Author):
    """Wraps another optimizer."""

    def begin(self):
        self.inner = torch.optim.SGD(self.param_groups[0]["params"], lr=0.5, momentum=0.5)

    def update(self, params):
        self.inner.param_groups[0]["lr"] *= 0.5
        self.inner.step()


class Iterating(Foreach):
    """Holds an iterator, which cannot be inspected without changing it."""

    def begin(self):
        self.held = iter([0.5, 0.25, 0.125] * 9)

    def update(self, params):
        params[0].mul_(next(self.held))
        super().update(params)


class InStorage(Foreach):
    """Holds memory that is no tensor, of a type that is written in C."""

    def begin(self):
        self.held = torch.zeros(2).untyped_storage()

    def update(self, params):
        torch.empty(0).set_(self.held).add_(1.0)  # pyright: ignore[reportArgumentType]
        super().update(params)


class Sometimes(Foreach):
    """Counts on the host in every third step only."""

    def update(self, params):
        count = self.__dict__.setdefault("count", torch.zeros(()))
        count += 1
        super().update(params)
        if int(count) % 3 == 0:
            self.param_groups[0]["thirds"] = self.param_groups[0].get("thirds", 0) + 1


HOST_TOO = (
    InGroup, InState, Attribute, *HELD, Noise, Replaced, NewMemory, Resized, Sparse, Wrapping,
    Iterating, InStorage, Sometimes,
)  # fmt: skip


def seen(optimizer: ampopt.Optimizer) -> Any:
    """All that a skipped step must not change, including what these optimizers hold."""
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
        return [(key, frozen(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [frozen(item) for item in value]
    if isinstance(value, Slotted):
        return [value.count]
    if isinstance(value, types.SimpleNamespace):
        return frozen(vars(value))
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return frozen([*cells, value.__defaults__, value.__kwdefaults__])
    if isinstance(value, types.BuiltinMethodType):
        return frozen(value.__self__)
    if isinstance(value, torch.UntypedStorage):
        return value.tolist()
    if isinstance(value, torch.optim.Optimizer):
        return frozen([value.param_groups, list(value.state.values())])
    if isinstance(value, Tensor):
        return bits(value)
    return repr(value) if isinstance(value, (float, int, str)) else None
