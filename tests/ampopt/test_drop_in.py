"""A built-in optimizer stands in for its twin in torch: as an instance, and by its arguments."""

import ast
import inspect
from typing import Any

import pytest
import torch
from optimizers import EVERY_RULE, torch_twin
from torch import Tensor
from torch.nn import Parameter

import ampopt

pytestmark = pytest.mark.usefixtures("backend")


def test_an_optimizer_is_an_instance_of_its_twin_and_of_the_base():
    for cls in (ampopt.SGD, ampopt.Adam, ampopt.AdamW, ampopt.LBFGS):
        optimizer = cls([Parameter(torch.ones(1))], lr=0.5)
        assert isinstance(optimizer, getattr(torch.optim, cls.__name__))
        assert isinstance(optimizer, ampopt.Optimizer)
        twin = getattr(torch.optim, cls.__name__)([Parameter(torch.ones(1))], lr=0.5)
        assert optimizer.defaults == twin.defaults


@pytest.mark.parametrize("cls", [c for c in EVERY_RULE if hasattr(torch.optim, c.__name__)])
def test_a_constructor_shows_the_arguments_that_it_takes(cls):
    """To ``help``, and to who asks whether ``"fused"`` is among them."""
    torchs = inspect.signature(torch_twin(cls)).parameters
    *shown, masters = inspect.signature(cls).parameters.values()
    assert shown == list(torchs.values())
    assert (masters.name, masters.kind, masters.default) == (
        "master_weights", inspect.Parameter.KEYWORD_ONLY, False,
    )  # fmt: skip

    class Author(cls):
        def __init__(self, params: Any, number: int = 3) -> None:
            super().__init__(params)

    assert list(inspect.signature(Author).parameters) == ["params", "number"]


@pytest.mark.parametrize("cls", [c for c in EVERY_RULE if hasattr(torch.optim, c.__name__)])
def test_type_checkers_are_shown_the_same_arguments(cls):
    tree = ast.parse(inspect.getsource(cls))
    (shown,) = (
        node.body[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    assert isinstance(shown, ast.FunctionDef)
    names: dict[str, Any] = {"ParamsT": Any, "Tensor": Tensor}
    exec(ast.unparse(shown), names)
    found = list(inspect.signature(names["__init__"]).parameters.values())[1:]
    taken = inspect.signature(cls).parameters.values()
    told = [[(p.name, p.kind, p.default) for p in parameters] for parameters in (found, taken)]
    assert told[0] == told[1]
