"""Triton's interpreter, which looks up at each call what stays the same, told to remember it."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

from ampopt_kernels.language import HAS_TRITON, INTERPRETED

__all__ = ["make_it_quick"]


def make_it_quick() -> None:
    """Have the interpreter, if it runs here, give what it gives in half of the time.

    See the functions below.
    """
    if not (HAS_TRITON and INTERPRETED):
        return
    _remember_builtins()
    _remember_dtypes()
    _remember_shapes()
    _remember_blocks()
    _spread_what_is_narrower()
    _remember_operands()
    _leave_overflows_unseen()
    _ask_tuples_for_types_later()


def _remember_builtins() -> None:
    """Look once for the builtins that the interpreter replaces at each call of a function.

    Two fifths of the time of a small kernel go into that. What is replaced, and when, is as ever;
    a Triton that does it otherwise is left alone.
    """
    from triton.runtime import interpreter

    ours: Any = interpreter
    replace: Callable[..., None] | None = getattr(ours, "_patch_attr", None)
    original = getattr(ours, "_patch_builtin", None)
    replace_all = getattr(ours, "_patch_lang", None)
    if replace is None or original is None or replace_all is None:
        return
    if list(inspect.signature(original).parameters) != ["pkg", "builder", "scope"]:
        return
    tl = ours.tl
    is_builtin = tl.core.is_builtin
    names: dict[Any, list[str]] = {}
    languages: dict[Any, list[Any]] = {}

    @functools.wraps(original)
    def patch_builtin(pkg: Any, builder: Any, scope: Any) -> None:
        if pkg not in names:  # nothing of it has been replaced yet
            names[pkg] = [name for name, it in inspect.getmembers(pkg) if is_builtin(it)]
        for name in names[pkg]:
            if is_builtin(member := getattr(pkg, name)):
                replace(pkg, name, member, builder, scope)

    @functools.wraps(replace_all)
    def patch_lang(function: Any) -> Any:
        if function not in languages:
            seen = function.__globals__.values()
            languages[function] = [it for it in seen if it is tl or it is tl.core]
        if any(is_builtin(language.load) for language in languages[function]):
            return replace_all(function)
        return ours._LangPatchScope()  # a kernel, which has called the function, has replaced them

    ours._patch_builtin, ours._patch_lang = patch_builtin, patch_lang


def _remember_dtypes() -> None:
    """Look once which of NumPy's dtypes is which of Triton's: a table is made for each look."""
    from triton.runtime import interpreter

    ours: Any = interpreter
    original = getattr(ours, "_get_np_dtype", None)
    if original is None:
        return
    known: dict[Any, Any] = {}

    @functools.wraps(original)
    def get_np_dtype(dtype: Any) -> Any:
        key = type(dtype), dtype.name
        if key not in known:
            known[key] = original(dtype)
        return known[key]

    ours._get_np_dtype = get_np_dtype


def _remember_shapes() -> None:
    """Make the shape and the size of a type once, not for each tensor that is of it.

    A Triton whose tensors have other attributes is left alone.
    """
    from triton.language import core

    tensor: Any = core.tensor
    original = tensor.__init__
    known: dict[str, Any] = {}

    @functools.wraps(original)
    def init(self: Any, handle: Any, type: Any) -> None:
        key = type.name if type.is_block() else "scalar"
        if key in known:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = known[key]
            return
        original(self, handle, type)
        if set(vars(self)) == {"handle", "type", "dtype", "shape", "numel"}:
            known[key] = self.shape, self.numel

    tensor.__init__ = init


def _remember_blocks() -> None:
    """Check each shape of blocks once, and have all types of blocks of a shape share it."""
    from triton.language import core

    block: Any = core.block_type
    original = block.__init__
    known: dict[Any, dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], Any] = {}

    @functools.wraps(original)
    def init(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *shape)
        if key not in known:
            original(self, element_ty, shape)
            self.shape = shapes.setdefault(tuple(self.shape), self.shape)
            known[key] = dict(vars(self))
        vars(self).update(known[key], element_ty=element_ty)

    block.__init__ = init


def _spread_what_is_narrower() -> None:
    """Leave tensors of one shape as they are before they are asked for their sizes, one by one."""
    from triton.language import semantic

    ours: Any = semantic.TritonSemantic
    original = ours.broadcast_impl_value

    @functools.wraps(original)
    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        if getattr(lhs.type, "shape", None) is getattr(rhs.type, "shape", None):
            return lhs, rhs
        return original(self, lhs, rhs)

    ours.broadcast_impl_value = broadcast


def _remember_operands() -> None:
    """Ask once what an operation makes of operands of two types, or of a type and a number.

    Mostly it leaves them as they are, but for the number, which is a tensor then.
    """
    from triton.language import core
    from triton.runtime import interpreter

    # Of the interpreter's own: a compiler's tensors belong to what it compiles.
    ours: Any = interpreter.interpreter_semantic
    original = ours.binary_op_type_checking_impl
    tensor: Any = core.tensor
    known: dict[Any, list[Any]] = {}

    def described(operand: Any) -> Any:
        is_tensor = isinstance(operand, tensor)
        return operand.type.name if is_tensor else (type(operand), repr(operand))

    @functools.wraps(original)
    def operands(lhs: Any, rhs: Any, *allowed: Any, **named: Any) -> Any:
        key = (described(lhs), described(rhs), allowed, *named.items())
        if key not in known:
            made = original(lhs, rhs, *allowed, **named)
            pairs = list(zip((lhs, rhs), made, strict=True))
            if any(isinstance(x, tensor) and new is not x for x, new in pairs):
                return made
            known[key] = [None if new is x else new for x, new in pairs]
        left, right = known[key]
        return lhs if left is None else left, rhs if right is None else right

    ours.binary_op_type_checking_impl = operands


def _leave_overflows_unseen() -> None:
    """Compute no sum of integers a second time, to see an overflow that only debugging tells."""
    from triton.runtime import interpreter

    builder: Any = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _ask_tuples_for_types_later() -> None:
    """Make the type of a tuple where it is asked for: kernels add up tuples and take them apart."""
    from triton.language import core

    ours: Any = core
    make_type = getattr(ours, "_type_for_tuple_values", None)
    original = ours.tuple.__init__
    if make_type is None:
        return

    class Type:
        """Makes it once; what an instance has comes first."""

        def __get__(self, owner: Any, _: Any = None) -> Any:
            return vars(owner).setdefault("type", make_type(owner.values))

    @functools.wraps(original)
    def init(self: Any, args: Any, type: Any = None) -> None:
        if type is None:
            self.values = list(args)
        else:
            original(self, args, type)

    ours.tuple.type, ours.tuple.__init__ = Type(), init
