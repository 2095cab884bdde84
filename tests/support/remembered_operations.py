"""Cached operations of Triton's language, for the interpreter.

An operation of the language (``tl.where``, ``+``) was written for a compiler: it depends on the
types of its operands, not on their values, and asks a builder for instructions. In the interpreter
the builder computes with NumPy. So for operands of the same types, and the same Python numbers, the
builder's calls are the same. The first time they are recorded; from then on they are repeated
directly.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

__all__ = ["remembering"]

_Handle: Any = interpreter.TensorHandle
_Tensor: Any = core.tensor
_builder: Any = interpreter.interpreter_builder


def remembering(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``operation``, a builtin of the language, with recorded builder calls."""
    requests_of: dict[Any, _Requests | None] = {}

    def remembered(*args: Any, member: Any = operation, **kwargs: Any) -> Any:
        operands = args
        if kwargs:
            if kwargs.get("_semantic") is not None:  # an operation calls it, which is recorded
                return member(*args, **kwargs)
            kwargs.pop("_semantic", None)
            operands = (*args, *kwargs.values())
        key = *[x.type.name if type(x) is _Tensor else _described(x) for x in operands], *kwargs
        if key not in requests_of:
            result, requests_of[key] = _listened_to(member, args, kwargs)
            return result
        requests = requests_of[key]
        if requests is None:
            return member(*args, **kwargs, _semantic=interpreter.interpreter_semantic)
        return requests.repeated([x.handle for x in operands if type(x) is _Tensor])

    # ampopt_kernels.triton.uninterpreted finds the interpreter's replacements by their module.
    remembered.__module__ = interpreter.__name__
    return remembered


def _described(x: Any) -> Any:
    """A hashable key for an operand; operands with equal keys are treated identically."""
    kind = type(x)
    if kind is _Tensor:
        return x.type.name
    if kind is bool or kind is float or kind is slice:
        return kind, repr(x)  # in Python, 0.0 == -0.0 and True == 1
    if isinstance(x, core.dtype):
        return kind, x.name
    if isinstance(x, core.constexpr):
        return kind, _described(x.value)
    if isinstance(x, (list, tuple, core.tuple)):
        return kind, *map(_described, x)
    return kind, x


@dataclass
class _Requests:
    """The recorded builder calls of an operation.

    Attributes:
        values: the values in use, by position: after the operands, which are not stored, the
            constants; ``None`` for a result of the builder.
        calls: the builder calls: method, function that selects its arguments from the values, and
            position of its result.
        place: position of the operation's result; ``None`` if it returns nothing.
        tensor: attributes of the resulting tensor besides its handle.
    """

    values: list[Any]
    calls: list[tuple[Callable[..., Any], Callable[[list[Any]], Any], int]]
    place: int | None
    tensor: dict[str, Any]

    def repeated(self, handles: list[Any]) -> Any:
        """Repeat the calls with other operands, and return the operation's result."""
        values = handles + self.values
        for method, arguments, place in self.calls:
            values[place] = method(*arguments(values))
        if self.place is None:
            return None
        result = _Tensor.__new__(_Tensor)
        vars(result).update(self.tensor, handle=values[self.place])
        return result


def _listened_to(
    operation: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, _Requests | None]:
    """Run an operation; return its result, and the recorded calls if they can be repeated."""
    operands: list[Any] = []

    def apart(x: Any) -> Any:  # new handles, in case one tensor is passed as two operands
        if type(x) is not _Tensor:
            return x
        operands.append(_Handle(x.handle.data, x.handle.dtype))
        return _Tensor(operands[-1], x.type)

    args = tuple(map(apart, args))
    kwargs = {name: apart(x) for name, x in kwargs.items()}
    listener = _Listener(operands)
    result = operation(*args, **kwargs, _semantic=TritonSemantic(listener))
    place, tensor = None, {}
    if type(result) is _Tensor:
        place, tensor = listener.place_of(result.handle), vars(result).copy()
        del tensor["handle"]  # repeated() sets it
    if not listener.understood or type(result) not in (_Tensor, type(None)):
        return result, None
    constants = [x if i in listener.constant else None for i, x in enumerate(listener.values)]
    return result, _Requests(constants[len(operands) :], listener.calls, place, tensor)


class _Listener:
    """Forwards to the interpreter's builder, and records the calls; see :class:`_Requests`."""

    def __init__(self, operands: list[Any]) -> None:
        self.values: list[Any] = []
        self.places: dict[int, int] = {}
        self.constant: set[int] = set()
        self.calls: list[tuple[Callable[..., Any], Callable[[list[Any]], Any], int]] = []
        self.understood = True
        for handle in operands:
            self._place(handle)

    def __getattr__(self, name: str) -> Any:
        method = getattr(_builder, name)
        if not name.startswith(("create_", "get_")):
            return method

        def ask(*arguments: Any) -> Any:
            result = method(*arguments)
            places = [self.place_of(x) for x in arguments]
            place = self._place(result)
            if name.startswith("get_") or (
                name in ("create_splat", "create_make_range") and self.constant.issuperset(places)
            ):
                self.constant.add(place)  # a type, a number, or a block of constants
            else:
                self.calls.append((method, _those_at(places), place))
            return result

        return ask

    def place_of(self, x: Any) -> int:
        """The position of a value; if it is neither an operand nor a result, it is a constant."""
        if id(x) in self.places:
            return self.places[id(x)]
        handles = x if isinstance(x, (list, tuple)) else [x]
        self.understood &= not any(isinstance(handle, _Handle) for handle in handles)
        place = self._place(x)
        self.constant.add(place)
        return place

    def _place(self, x: Any) -> int:
        self.values.append(x)
        self.places[id(x)] = len(self.values) - 1
        return len(self.values) - 1


def _those_at(places: list[int]) -> Callable[[list[Any]], Any]:
    """Return a function that selects the values at ``places``."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda values: [values[place] for place in places]
