"""The interpreter that the tests run is Triton's, but for where it looks."""

import inspect
from typing import Any

import pytest
import torch

from ampopt_kernels.language import HAS_TRITON, INTERPRETED, kernel, tl

pytestmark = pytest.mark.skipif(
    not (HAS_TRITON and INTERPRETED), reason="there is no interpreter here"
)


class Replaced:
    """A scope of the interpreter's: what it replaces, to be put back."""

    def __init__(self) -> None:
        self.originals: dict[str, Any] = {}

    def set_attr(self, obj: Any, name: str, value: Any) -> None:
        self.originals[name] = getattr(obj, name)
        setattr(obj, name, value)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("name", ["", "tensor", "math", "core.tensor_descriptor_base"])
def test_the_same_builtins_are_replaced(name, again):
    """Also within a kernel, where those that are replaced already stay."""
    from triton.runtime import interpreter

    ours: Any = interpreter
    package: Any = tl
    for part in filter(None, name.split(".")):
        package = getattr(package, part)
    found = []
    for patch in (ours._patch_builtin, inspect.unwrap(ours._patch_builtin)):
        scopes = [Replaced() for _ in range(1 + again)]
        for scope in scopes:
            patch(package, None, scope)
        found.append([scope.originals for scope in scopes])
        for attribute, original in scopes[0].originals.items():
            setattr(package, attribute, original)
    assert found[0] == found[1]
    assert ours._patch_builtin is not inspect.unwrap(ours._patch_builtin)
    assert found[0][0]
    assert not again or not found[0][1]


@kernel
def _spread(out, numbers):
    column = tl.load(numbers + tl.arange(0, 2))[:, None]
    tl.store(out + 4 * tl.arange(0, 2)[:, None] + tl.arange(0, 4)[None, :], column + column * 1)


def test_what_is_narrower_is_spread():
    out = torch.zeros(2, 4)
    _spread[(1,)](out, torch.tensor([1.0, 2.0]))
    assert out.tolist() == [[2.0] * 4, [4.0] * 4]


@pytest.mark.parametrize("number", [0.0, -0.0, 1, 1.0, True, 1.5, -3, 2**31])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64"])
def test_operands_become_what_they_become_at_first(number, dtype):
    """Of numbers that Python takes for equal, too: 0.0 is -0.0, and 1 is 1.0."""
    from triton.runtime import interpreter

    ours: Any = interpreter.interpreter_semantic
    remembering = ours.binary_op_type_checking_impl
    one = ours.scalar_constant(1, getattr(tl, dtype))

    def become(convert: Any, *operands: Any) -> Any:
        try:
            made = convert(*operands)
        except ValueError as error:  # 2**31 is no int32
            return str(error)
        return [(operand.type.name, operand.handle.data.tobytes()) for operand in made]

    for other in (number, ours.to_tensor(number)):
        for operands in ((one, other), (other, one)):
            expected = become(inspect.unwrap(remembering), *operands)
            assert become(remembering, *operands) == expected
            assert become(remembering, *operands) == expected


def test_types_are_those_of_triton():
    from triton.language import core

    float4, double4, float8 = (
        core.block_type(dtype, [n])
        for dtype, n in ((core.float32, 4), (core.float64, 4), (core.float32, 8))
    )
    for made, dtype, n in ((float4, "fp32", 4), (double4, "fp64", 4), (float8, "fp32", 8)):
        assert made.name == str(made) == f"<[{str(n)!r}], {dtype}>"
        assert made.element_ty.name == dtype and made.numel == n and list(made.shape) == [n]
    assert float4 == core.block_type(core.float32, [4])
    assert float4 != double4 and float4 != float8
    for _ in range(2):
        with pytest.raises(ValueError, match="power of 2"):
            core.block_type(core.float32, [3])


def test_tuples_have_their_types():
    from triton.language import core

    ours: Any = core
    pair = ours.tuple([1, ours.float32])
    assert pair.type == ours.tuple_type([ours.constexpr_type(1), ours.constexpr_type(ours.float32)])
    assert pair.type is pair.type
    named = ours.tuple([1], ours.tuple_type([ours.constexpr_type(1)], ["one"]))
    assert named.type.fields == ["one"] and named.one == 1
