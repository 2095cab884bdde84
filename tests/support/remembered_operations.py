"""What an operation of Triton's language asks of the interpreter, remembered.

The front end of the language is a compiler's: it sees the types of tensors, never what is in them.
So what an operation asks of the builder, which in the interpreter computes with NumPy, stays the
same for operands of the same types and for the same numbers. The first time it is listened to; from
then on the builder is asked at once.
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
    """``operation``, a builtin of the language, as the interpreter calls it."""
    known: dict[Any, _Requests | None] = {}

    def remembered(*args: Any, member: Any = operation, **named: Any) -> Any:
        operands = args
        if named:
            if named.get("_semantic") is not None:  # called by another operation
                return member(*args, **named)
            named.pop("_semantic", None)
            operands = (*args, *named.values())
        key = *[x.type.name if type(x) is _Tensor else _described(x) for x in operands], *named
        if key not in known:
            made, known[key] = _listened_to(member, args, named)
            return made
        requests = known[key]
        if requests is None:
            return member(*args, **named, _semantic=interpreter.interpreter_semantic)
        return requests.repeated([x.handle for x in operands if type(x) is _Tensor])

    remembered.__module__ = interpreter.__name__  # as its own: see ``triton.uninterpreted``
    return remembered


def _described(x: Any) -> Any:
    """What tells an operand from others that an operation may take otherwise."""
    kind = type(x)
    if kind is _Tensor:
        return x.type.name
    if kind is bool or kind is float or kind is slice:
        return kind, repr(x)  # for Python, 0.0 is -0.0, and True is 1
    if isinstance(x, core.dtype):
        return kind, x.name
    if isinstance(x, core.constexpr):
        return kind, _described(x.value)
    if isinstance(x, (list, tuple, core.tuple)):
        return kind, *map(_described, x)
    return kind, x


@dataclass
class _Requests:
    """What an operation asks of the builder.

    Attributes:
        values: by their places, what the builder is given: first the operands, which are not here;
            where it is what the builder makes, ``None``.
        calls: of the builder: the method, its arguments among the values, and the place of what it
            makes.
        place: of what the operation gives; ``None`` if that is nothing.
        tensor: what else the tensor has that it gives.
    """

    values: list[Any]
    calls: list[tuple[Callable[..., Any], Callable[[list[Any]], Any], int]]
    place: int | None
    tensor: dict[str, Any]

    def repeated(self, handles: list[Any]) -> Any:
        """What the operation gives for other operands."""
        values = handles + self.values
        for method, arguments, place in self.calls:
            values[place] = method(*arguments(values))
        if self.place is None:
            return None
        made = _Tensor.__new__(_Tensor)
        vars(made).update(self.tensor, handle=values[self.place])
        return made


def _listened_to(
    operation: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[Any, _Requests | None]:
    """What an operation gives, and what it asked for if that can be repeated."""
    operands: list[Any] = []

    def apart(x: Any) -> Any:  # a tensor may be two of the operands
        if type(x) is not _Tensor:
            return x
        operands.append(_Handle(x.handle.data, x.handle.dtype))
        return _Tensor(operands[-1], x.type)

    args = tuple(map(apart, args))
    named = {name: apart(x) for name, x in named.items()}
    listener = _Listener(operands)
    made = operation(*args, **named, _semantic=TritonSemantic(listener))
    place, tensor = None, {}
    if type(made) is _Tensor:
        place, tensor = listener.place_of(made.handle), vars(made).copy()
        del tensor["handle"]  # which is of this time alone
    if not listener.understood or type(made) not in (_Tensor, type(None)):
        return made, None
    given = [x if i in listener.constant else None for i, x in enumerate(listener.values)]
    return made, _Requests(given[len(operands) :], listener.calls, place, tensor)


class _Listener:
    """The interpreter's builder, and a note of what it is asked for; see :class:`_Requests`."""

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
            made = method(*arguments)
            places = [self.place_of(x) for x in arguments]
            place = self._place(made)
            if name.startswith("get_") or (
                name in ("create_splat", "create_make_range") and self.constant.issuperset(places)
            ):
                self.constant.add(place)  # a type, a number, or so many of them
            else:
                self.calls.append((method, _those_at(places), place))
            return made

        return ask

    def place_of(self, x: Any) -> int:
        """That of what has been given or made; else of a constant."""
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
    """Takes the values at some places out of all."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda values: [values[place] for place in places]
