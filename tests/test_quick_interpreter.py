"""The interpreter that the tests run is Triton's, but for where it looks."""

import inspect
from typing import Any

import pytest

from ampopt_kernels.language import HAS_TRITON, INTERPRETED, tl

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
