"""``jit`` for Triton's compiler, with float32 division and square roots correctly rounded.

Triton compiles ``x / y`` to NVIDIA's ``div.full.f32``, which is up to 2 ulp off, and ``tl.sqrt``
and ``tl.rsqrt`` to ``sqrt.approx.ftz.f32`` and ``rsqrt.approx.ftz.f32``, which flush subnormal
numbers to 0. A rule would then train a little differently on each kind of device. Update kernels
are limited by memory bandwidth, so the correctly rounded operations cost registers but no time.

:class:`CorrectlyRounded` replaces these operations in the syntax tree that Triton compiles. The
source text and the line numbers, which error messages show, stay as the author wrote them.
"""

import ast
import types
from typing import Any

import triton.language as tl
from triton.language import core
from triton.runtime.jit import JITFunction

__all__ = ["CorrectlyRounded"]


class CorrectlyRounded(JITFunction):
    """A ``triton.jit`` function with correctly rounded ``/``, ``tl.sqrt`` and ``tl.rsqrt``."""

    def parse(self) -> Any:
        """The syntax tree of the function, as Triton compiles it."""
        tree: Any = super().parse()
        return ast.fix_missing_locations(_Exchange(self.get_capture_scope()).visit(tree))

    @property
    def cache_key(self) -> str:
        """Triton's key of the compiled code, which otherwise depends on the source text alone."""
        with self._hash_lock:
            if self.hash is None:
                try:
                    self.hash = f"{super().cache_key}-correctly-rounded"
                except BaseException:
                    self.hash = None  # Triton leaves a placeholder, and would not search again
                    raise
            return self.hash


class _Exchange(ast.NodeTransformer):
    """Replace Triton's operations by calls of the functions below.

    Args:
        scope: the globals and closure variables of the function, by name.
    """

    def __init__(self, scope: dict[str, Any]) -> None:
        """Store ``scope``."""
        self._scope = scope

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        """Replace ``x / y``."""
        self.generic_visit(node)
        return _call(node, _divided, node.left, node.right) if _divides(node) else node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        """Replace ``x /= y`` by an assignment of the quotient."""
        self.generic_visit(node)
        if not (_divides(node) and isinstance(node.target, ast.Name)):
            return node
        target = ast.copy_location(ast.Name(node.target.id, ast.Load()), node.target)
        value = _call(node, _divided, target, node.value)
        return ast.copy_location(ast.Assign([node.target], value), node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Replace ``tl.sqrt(x)`` and ``tl.rsqrt(x)``."""
        self.generic_visit(node)
        function = node.func
        if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
            module = self._scope.get(function.value.id)
            if isinstance(module, types.ModuleType) and module.__name__ == tl.__name__:
                exchanged = {"sqrt": _sqrt, "rsqrt": _rsqrt}.get(function.attr)
                if exchanged is not None:
                    return _call(node, exchanged, *node.args, keywords=node.keywords)
        return node


def _divides(node: ast.BinOp | ast.AugAssign) -> bool:
    """Whether ``node`` is a true division."""
    return isinstance(node.op, ast.Div)


def _call(node: Any, function: Any, *arguments: Any, keywords: Any = ()) -> ast.Call:
    """A call of ``function`` as a constant: the author's globals have no name for it."""
    call = ast.Call(ast.Constant(function), list(arguments), list(keywords))
    return ast.copy_location(call, node)


@core.builtin
def _divided(x: Any, y: Any, _semantic: Any = None) -> Any:
    """``x / y``. A number by a block is the number times the block's reciprocal, as in torch."""
    x, y = (v.value if isinstance(v, core.constexpr) else v for v in (x, y))
    dtypes: list[Any] = [v.dtype for v in (x, y) if isinstance(v, core.tensor)]
    if not dtypes:
        return core.constexpr(x / y)
    if tl.float32 not in dtypes or tl.float64 in dtypes:
        return _semantic.truediv(x, y)
    x, y = (_semantic.cast(_semantic.to_tensor(v), tl.float32) for v in (x, y))
    if x.type.is_block() or not y.type.is_block():
        return tl.div_rn(x, y, _semantic=_semantic)
    return _semantic.mul(tl.div_rn(1.0, y, _semantic=_semantic), x, False)


@core.builtin
def _sqrt(x: Any, _semantic: Any = None) -> Any:
    """The square root, correctly rounded."""
    x = _semantic.to_tensor(x)
    root = tl.sqrt_rn if x.type.scalar == tl.float32 else tl.sqrt
    return root(x, _semantic=_semantic)


@core.builtin
def _rsqrt(x: Any, _semantic: Any = None) -> Any:
    """``1 / sqrt(x)``, with the root and the quotient each correctly rounded."""
    return _divided(1.0, _sqrt(x, _semantic=_semantic), _semantic=_semantic)
