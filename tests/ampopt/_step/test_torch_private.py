"""Only ``torch_private`` uses private names of torch, and each does what is written there."""

import ast
from pathlib import Path

import pytest
import torch
from torch.nn import Parameter

import ampopt
from ampopt._step import torch_private

ROOM = Path(torch_private.__file__)
PACKAGE = Path(ampopt.__file__).parent
OVERRIDDEN = {"_patch_step_function", "_optimizer_step_code"}
"""Methods that torch calls on ampopt's classes. ``torch_private`` describes them, and uses none."""


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith(("__", "_foreach_"))


def _dotted(node: ast.AST) -> list[str]:
    """The names in an expression such as ``torch.a._b``; empty if it does not begin with a name."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) else []


def _private_in(source: str, known: set[str]) -> list[str]:
    """Torch's private names in ``source``: imported, reached from ``torch``, or among ``known``."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            found += filter(_is_private, names)
        elif isinstance(node, ast.Import):
            paths = (alias.name.split(".") for alias in node.names)
            found += [
                part
                for path in paths
                if path[0] == "torch"
                for part in path[1:2:]
                if _is_private(part)
            ]
        elif isinstance(node, ast.Attribute):
            path = _dotted(node)
            theirs = path[:1] != ["self"] and node.attr in known  # ours may be called alike
            if _is_private(node.attr) and (path[:1] == ["torch"] or theirs):
                found.append(node.attr)
        elif isinstance(node, ast.Constant) and node.value in known:
            found.append(node.value)
    return found


def _known() -> set[str]:
    """The private names that ``torch_private`` uses, as attributes or as strings."""
    nodes = list(ast.walk(ast.parse(ROOM.read_text(encoding="utf-8"))))
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    strings = {node.value for node in nodes if isinstance(node, ast.Constant)}
    names = attributes | {s for s in strings if isinstance(s, str) and s.isidentifier()}
    return set(filter(_is_private, names)) - OVERRIDDEN


def test_no_other_file_has_a_private_name_of_torchs():
    others = [path for path in sorted(PACKAGE.rglob("*.py")) if path != ROOM]
    private = {path: _private_in(path.read_text(encoding="utf-8"), _known()) for path in others}
    assert len(others) > 100 and {path: names for path, names in private.items() if names} == {}


@pytest.mark.parametrize(
    "source",
    [
        "from torch._compile import f",
        "from torch.nn import _reduction",
        "import torch._dynamo",
        "import torch\nx = torch.autograd._profiler_enabled()",
        "optimizer._opt_called = True",
        "hasattr(step, '_wrapped_by_lr_sched')",
    ],
)
def test_a_file_with_a_private_name_of_torch_is_found(source):
    assert _private_in(source, _known())


def test_functions_that_dynamo_treats_as_constant_are_marked_as_in_torch():
    def one():
        pass

    def other():
        pass

    assert vars(torch_private.constant_to_dynamo(one)) == {"_dynamo_marked_constant": True}
    assert vars(torch.compiler.assume_constant_result(other)) == vars(one)


def test_views_share_the_key_of_their_storage_and_writes_count():
    tensor = torch.ones(4)
    assert torch_private.storage_key(tensor[1:]) == torch_private.storage_key(tensor)
    assert torch_private.storage_key(tensor.clone()) != torch_private.storage_key(tensor)
    before = torch_private.version(tensor)
    tensor.add_(1)
    assert torch_private.version(tensor) == before + 1


def test_hooks_are_where_an_optimizer_keeps_them():
    optimizer = torch.optim.SGD([Parameter(torch.ones(1))])
    assert not any(torch_private.hooks_of(optimizer))
    optimizer.register_step_pre_hook(lambda *_: None)
    assert list(map(bool, torch_private.hooks_of(optimizer))) == [True, False]
    optimizer.register_step_post_hook(lambda *_: None)
    assert all(torch_private.hooks_of(optimizer))
    assert set(torch_private.HOOKS) <= set(vars(optimizer))


def test_the_marks_that_schedulers_set_and_look_for():
    optimizer = torch.optim.SGD([Parameter(torch.ones(1))])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert torch_private.is_wrapped_by_scheduler(optimizer.step)
    torch_private.mark_as_called(optimizer)
    scheduler.step()  # would warn that it comes before the first step


def test_an_operator_says_what_it_writes():
    written = []

    class Seen(torch_private.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            written.extend(torch_private.written_by(func, args, kwargs or {}))
            return func(*args, **(kwargs or {}))

    ones, out = torch.ones(2), torch.empty(2)
    with Seen():
        ones.mul_(2)
        torch.add(ones, 1, out=out)
        ones.exp()
    assert [id(tensor) for tensor in written] == [id(ones), id(out)]


def test_dispatch_functions_in_python_are_found():
    seen = []

    class Seen(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    bodies = torch_private.functional_bodies()
    x = torch.ones(2)
    with Seen():
        bodies[torch.nn.functional.softmax](x, dim=-1)
    assert seen == [torch.Tensor.softmax]
    assert torch.nn.functional.multi_head_attention_forward in bodies
