"""Cached operations of Triton's language, for the interpreter.

An operation of the language (``tl.where``, ``+``) was written for a compiler: it depends on the
types of its operands, not on their values, and asks a builder for instructions. In the interpreter
the builder computes with NumPy. So for operands of the same types, and the same Python numbers, the
builder's calls are the same. The first time they are recorded; from then on they are repeated
directly.
"""

from collections.abc import Callable
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
    functions: dict[Any, Callable[..., Any] | None] = {}

    def remembered(*args: Any, member: Any = operation, **kwargs: Any) -> Any:
        operands = args
        if kwargs:
            if kwargs.get("_semantic") is not None:  # an operation calls it, which is recorded
                return member(*args, **kwargs)
            kwargs.pop("_semantic", None)
            operands = (*args, *kwargs.values())
        key = *[x.type.name if type(x) is _Tensor else _described(x) for x in operands], *kwargs
        if key not in functions:
            result, functions[key] = _listened_to(member, args, kwargs)
            return result
        repeated = functions[key]
        if repeated is None:
            return member(*args, **kwargs, _semantic=interpreter.interpreter_semantic)
        return repeated(*[x.handle for x in operands if type(x) is _Tensor])

    # ampopt_kernels.triton.compiler finds the interpreter's replacements by their module.
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


def _listened_to(
    operation: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Callable[..., Any] | None]:
    """Run an operation, and record the builder's calls.

    Returns:
        The result, and a function that repeats the calls with the handles of other operands;
        ``None`` instead if they cannot be repeated.
    """
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
    ends, fields = "return None", {}
    if type(result) is _Tensor:
        ends = f"return made(fields, v{listener.place_of(result.handle)})"
        fields = {name: value for name, value in vars(result).items() if name != "handle"}
    if not listener.understood or type(result) not in (_Tensor, type(None)):
        return result, None
    parameters = ", ".join(f"v{i}" for i in range(len(operands)))
    names = {f"v{i}": listener.values[i] for i in listener.constant}
    names |= {"made": _made, "fields": fields}
    names |= {f"m{i}": method for i, method in enumerate(listener.methods)}
    exec(f"def repeated({parameters}): " + "; ".join([*listener.calls, ends]), names)
    return result, names["repeated"]


def _made(fields: dict[str, Any], handle: Any) -> Any:
    """A tensor of the language, with ``handle`` and other attributes."""
    tensor = _Tensor.__new__(_Tensor)
    tensor.__dict__ = {**fields, "handle": handle}
    return tensor


class _Listener:
    """Forwards to the interpreter's builder, and records the calls.

    Attributes:
        values: the handles of the operands, and all arguments and results of the builder's methods.
        places: the index of each in ``values``, by its ``id``.
        constant: the indices of values that are the same for other operands.
        methods: the builder's methods that were called.
        calls: the call of each as source, with ``m0`` for its method and ``v2`` for value 2.
        understood: whether the calls can be repeated.
    """

    def __init__(self, operands: list[Any]) -> None:
        self.values: list[Any] = []
        self.places: dict[int, int] = {}
        self.constant: set[int] = set()
        self.methods: list[Callable[..., Any]] = []
        self.calls: list[str] = []
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
                self.methods.append(method)
                given = ", ".join(f"v{i}" for i in places)
                self.calls.append(f"v{place} = m{len(self.calls)}({given})")
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
