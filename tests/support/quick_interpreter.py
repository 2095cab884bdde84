"""Patches of Triton's interpreter that cache what it would compute again at each call."""

import dataclasses
import functools
from typing import Any

from torch import Tensor

from ampopt_kernels.language import HAS_TRITON, INTERPRETED

__all__ = ["make_it_quick"]


def make_it_quick() -> None:
    """Apply the patches if the interpreter is in use; each function below is one of them.

    Results stay the same. Tests of the triton backend take less than half of the time.
    """
    if not (HAS_TRITON and INTERPRETED):
        return
    _remember_operations()
    _remember_replacements()
    _remember_parameters()
    _remember_dtypes()
    _leave_overflows_unseen()
    _leave_sizes_unchecked()
    _ask_tuples_for_types_later()


def _remember_operations() -> None:
    """Cache what an operation does for operands of the same types.

    It takes half of the time of a small kernel; see ``support.remembered_operations``.
    """
    from triton.runtime import interpreter

    from support.remembered_operations import remembering

    ours: Any = interpreter
    quick = functools.cache(remembering)

    @functools.wraps(ours._patch_attr)
    def patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        scope.set_attr(obj, name, quick(member))

    ours._patch_attr = patch_attr


def _remember_replacements() -> None:
    """Cache what the interpreter replaces in the language when a function is called.

    It puts the same replacements in for each call, and none if the calling kernel has already done
    so.
    """
    from triton.runtime import interpreter

    ours: Any = interpreter
    tl, replace_all = ours.tl, ours._patch_lang
    languages: dict[Any, tuple[Any, ...]] = {}
    replacements: dict[Any, list[tuple[Any, str, Any]]] = {}
    originals: dict[Any, list[tuple[Any, str, Any]]] = {}

    @functools.wraps(replace_all)
    def patch_lang(function: Any) -> Any:
        if function not in languages:
            names = function.__globals__.values()
            languages[function] = tuple(it for it in names if it is tl or it is tl.core)
        modules = languages[function]
        if not any(tl.core.is_builtin(module.load) for module in modules):
            return ours._LangPatchScope()
        if modules not in replacements:
            scope = replace_all(function)
            originals[modules] = list(scope._changes)
            replacements[modules] = [(o, name, getattr(o, name)) for o, name, _ in scope._changes]
            return scope
        scope = ours._LangPatchScope()
        scope._changes = list(originals[modules])
        for obj, name, replacement in replacements[modules]:
            setattr(obj, name, replacement)
        return scope

    ours._patch_lang = patch_lang


def _remember_parameters() -> None:
    """Cache which parameters of a kernel are constexpr, and launch on CPU memory directly.

    The interpreter asks each tensor whether it has to be copied from and to another device.
    """
    from triton.runtime import interpreter

    ours: Any = interpreter
    kernel: Any = ours.InterpretedFunction
    original = kernel.run
    builder = ours.interpreter_builder
    constants: dict[Any, list[str]] = {}

    @functools.wraps(original)
    def run(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        by_name = not args and named.keys() == set(self.arg_names)
        elsewhere = any(isinstance(x, Tensor) and x.device.type != "cpu" for x in named.values())
        if not by_name or elsewhere or warmup or self.pre_run_hooks or len(grid) != 1:
            return original(self, *args, grid=grid, warmup=warmup, **named)
        function = self.rewrite()
        if function not in constants:
            constants[function] = ours.GridExecutor(function, self.arg_names, grid).constexprs
        constant = constants[function]
        scope = ours._patch_lang(function)
        try:
            given = {k: x if k in constant else ours._implicit_cvt(x) for k, x in named.items()}
            builder.set_grid_dim(*grid, 1, 1)
            for x in range(*grid):
                builder.set_grid_idx(x, 0, 0)
                function(**given)
        except Exception as error:
            raise ours.InterpreterError(repr(error)) from error
        finally:
            scope.restore()

    kernel.run = run


def _remember_dtypes() -> None:
    """Cache NumPy's dtype for each of Triton's; the original builds a table at each call."""
    from triton.runtime import interpreter

    ours: Any = interpreter
    original = ours._get_np_dtype
    known: dict[Any, Any] = {}

    @functools.wraps(original)
    def get_np_dtype(dtype: Any) -> Any:
        key = type(dtype), dtype.name
        if key not in known:
            known[key] = original(dtype)
        return known[key]

    ours._get_np_dtype = get_np_dtype


def _leave_overflows_unseen() -> None:
    """Do not compute integer sums twice to detect overflows, which only debug mode reports."""
    from triton.runtime import interpreter

    builder: Any = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _leave_sizes_unchecked() -> None:
    """Do not check that an array has its type's width, which the result of every operation has."""
    from triton.runtime import interpreter

    handle: Any = interpreter.TensorHandle

    def init(self: Any, data: Any, dtype: Any, attr: dict[str, Any] | None = None) -> None:
        self.data, self.dtype = data, dtype
        self.attr = {} if attr is None else attr

    handle.__init__ = init


def _ask_tuples_for_types_later() -> None:
    """Compute the type of a tuple when it is read: most tuples are only indexed or joined."""
    from triton.language import core

    ours: Any = core
    make_type, original = ours._type_for_tuple_values, ours.tuple.__init__

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
