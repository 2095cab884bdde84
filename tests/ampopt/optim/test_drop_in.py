"""A built-in optimizer replaces torch's: ``isinstance``, constructor, signature and docstring."""

import ast
import contextlib
import inspect
import pydoc
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.fixtures import either_host
from support.optimizers import BEYOND_TORCH, BUILT_IN, BY_RULE, CLOSURE_FREE, torch_twin
from support.torch_options import INHERITED, OPTION_SETS, assert_train_alike, gradients, initial
from torch import Tensor
from torch.nn import Parameter
from typing_extensions import Unpack

import ampopt
from ampopt.options import OptimizerOptions, RuleOptions

backend = either_host
pytestmark = pytest.mark.usefixtures("backend")


def test_an_optimizer_is_an_instance_of_its_twin_and_of_the_base():
    for cls in (ampopt.SGD, ampopt.Adam, ampopt.AdamW, ampopt.LBFGS):
        optimizer = cls([Parameter(torch.ones(1))], lr=0.5)
        assert isinstance(optimizer, getattr(torch.optim, cls.__name__))
        assert isinstance(optimizer, ampopt.Optimizer)
        twin = getattr(torch.optim, cls.__name__)([Parameter(torch.ones(1))], lr=0.5)
        assert optimizer.defaults == twin.defaults


@pytest.mark.parametrize("cls", CLOSURE_FREE)
def test_a_parameter_without_elements_has_the_same_state_on_every_backend(cls):
    def states_after(step: Callable[[Any], Any]) -> list[set[str]]:
        params = [Parameter(torch.ones(rows, 3)) for rows in (0, 2)]
        optimizer = cls(params)
        for param in params:
            grad = torch.ones_like(param)
            param.grad = grad.to_sparse(1) if cls is ampopt.SparseAdam else grad
        step(optimizer)
        return [set(optimizer.state[param]) for param in params]

    by_step = states_after(lambda optimizer: optimizer.step())
    assert states_after(lambda optimizer: optimizer.unscale_and_step(None, 1.0)) == by_step


@pytest.mark.parametrize("backend", ["eager"], indirect=True)
@pytest.mark.parametrize("options", [s for s in OPTION_SETS if s.name in INHERITED], ids=str)
def test_a_step_of_torchs_own_has_every_option(options):
    ours, torchs = (make(initial(options)) for make in (options.ours, options.torchs))
    assert_train_alike(ours, torchs, gradients(options), range(3))


@pytest.mark.parametrize(("dampening", "flag"), [(0.0, set()), (0.5, {"stepped"})])
def test_a_loaded_state_of_sgd_has_a_flag_only_where_momentum_is_dampened(dampening, flag):
    param = Parameter(torch.ones(2))
    made = [
        cls([param], momentum=0.5, dampening=dampening) for cls in (torch.optim.SGD, ampopt.SGD)
    ]
    param.grad = torch.ones(2)
    made[0].step()
    made[1].load_state_dict(made[0].state_dict())
    made[1].step()
    assert set(made[1].state[param]) == {"momentum_buffer", *flag}
    assert set(made[1].state_dict()["state"][0]) == {"momentum_buffer"}


LATER = {ampopt.LBFGS: ("maximize",)}
"""Arguments that torch has only since 2.14.1."""


@pytest.mark.parametrize("cls", BUILT_IN)
def test_a_constructor_shows_the_arguments_that_it_takes(cls):
    """``help`` shows them, and code that looks for ``"fused"`` in the signature finds it."""
    torchs = inspect.signature(torch_twin(cls)).parameters
    shown = inspect.signature(cls).parameters
    assert list(shown.values())[: len(torchs)] == list(torchs.values())
    added = {name: shown[name] for name in list(shown)[len(torchs) :]}
    assert all(option.kind is inspect.Parameter.KEYWORD_ONLY for option in added.values())
    options = {"master_weights": False, "param_rounding": "nearest"}
    options |= {"state_bits": 32, "master_bits": 32}
    of_rules = options if cls in BY_RULE else {}
    assert {name: option.default for name, option in added.items()} == {
        **of_rules,
        "process_group": None,
    }

    class Author(cls):
        def __init__(self, params: Any, number: int = 3) -> None:
            super().__init__(params)

    assert list(inspect.signature(Author).parameters) == ["params", "number"]


def test_a_class_that_was_put_in_the_place_of_torchs_can_be_derived_from(monkeypatch):
    monkeypatch.setattr(torch.optim, "SGD", ampopt.SGD)

    class Author(torch.optim.SGD):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)

    assert isinstance(Author([Parameter(torch.ones(1))], lr=0.5), ampopt.SGD)


def test_zero_grad_shows_the_arguments_that_it_takes():
    """Accelerate passes ``set_to_none`` only to methods that show it."""
    param = Parameter(torch.ones(2))
    shown = inspect.signature(ampopt.AdamW([param]).zero_grad)
    assert shown == inspect.signature(torch.optim.AdamW([param]).zero_grad)


class OfAnAuthor(ampopt.Optimizer):
    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, {}, **options)


@pytest.mark.parametrize("cls", [*BUILT_IN, *BEYOND_TORCH, OfAnAuthor])
def test_an_unknown_argument_is_refused_in_the_name_of_the_class(cls):
    name = f"{cls.__name__}.__init__() got an unexpected keyword argument 'unknown'"
    with pytest.raises(TypeError, match=re.escape(name)):
        cls([Parameter(torch.ones(2, 2))], unknown=1)


class PassesOn(ampopt.Optimizer):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)


def test_a_hyperparameter_that_an_author_passes_by_name_is_refused_with_what_to_write():
    with pytest.raises(TypeError, match=r"'lr': pass it as super.*\(params, {'lr': lr}\)"):
        PassesOn([Parameter(torch.ones(2, 2))], lr=1.0)


@pytest.mark.parametrize("cls", BUILT_IN)
def test_type_checkers_are_shown_the_same_arguments(cls):
    tree = ast.parse(inspect.getsource(cls))
    (shown,) = (
        node.body[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    assert isinstance(shown, ast.FunctionDef)
    assert shown.args.kwarg is not None and shown.args.kwarg.annotation is not None
    names: dict[str, Any] = {"Any": Any, "ParamsT": Any, "Tensor": Tensor, "Unpack": Unpack}
    names |= {"RuleOptions": RuleOptions, "OptimizerOptions": OptimizerOptions}
    (shared,) = eval(ast.unparse(shown.args.kwarg.annotation), names).__args__
    exec(ast.unparse(shown), names)
    *found, _ = list(inspect.signature(names["__init__"]).parameters.values())[1:]
    taken = inspect.signature(cls).parameters
    found = [p for p in found if p.name in taken or p.name not in LATER.get(cls, ())]
    options = set(shared.__annotations__)
    own = [p for p in taken.values() if p.name not in options]
    told = [[(p.name, p.kind, p.default) for p in some] for some in (found, own)]
    assert told[0] == told[1]
    assert options <= set(taken)


def test_every_optimizer_of_torch_is_here():
    torchs = {name for name, cls in vars(torch.optim).items() if inspect.isclass(cls)}
    assert {cls.__name__ for cls in BUILT_IN} == torchs - {"Optimizer"}
    assert len(BUILT_IN) == 15


@pytest.mark.parametrize("cls", BUILT_IN)
def test_the_docstring_of_a_built_in_names_every_argument(cls):
    """Each argument has an entry, or is named in the one for arguments of torch's class."""
    doc = inspect.getdoc(cls) or ""
    assert f"as in ``torch.optim.{cls.__name__}``" in " ".join(doc.split())
    _, arguments = doc.split("Args:\n")
    documented = [
        name
        for entry in re.split(r"\n    (?=\S)", "\n" + arguments.split("\n\n")[0])
        for name in re.split(r",\s+", entry.split(":")[0])
    ]
    taken = inspect.signature(cls).parameters
    documented = [n for n in documented if n in taken or n not in LATER.get(cls, ())]
    assert sorted(filter(None, documented)) == sorted(taken)


@pytest.mark.parametrize("cls", [c for c in BUILT_IN if c is not ampopt.Muon])
def test_a_built_in_that_differs_says_how(cls):
    """All but Muon differ: rules round half precision once, and most keep counts on the device."""
    _, differs = (inspect.getdoc(cls) or "").split("Differs from torch: ")
    if cls in BY_RULE:
        assert "float16" in differs
    capturable = "capturable" in inspect.signature(cls).parameters
    assert ("capturable" in differs) == capturable
    if capturable:
        for optim in (ampopt, torch.optim):
            param = Parameter(torch.ones(1))
            optimizer = getattr(optim, cls.__name__)([param], capturable=True)
            param.grad = torch.ones(1)
            refused = optim is torch.optim
            with pytest.raises(AssertionError) if refused else contextlib.nullcontext():
                optimizer.step()


def test_help_begins_with_where_to_begin_and_dir_has_what_is_public():
    screen = pydoc.plain(pydoc.render_doc(ampopt)).splitlines()[:40]
    assert "from ampopt import AdamW" in "".join(screen[:8])
    assert any("ampopt.bench" in line for line in screen)  # the last line of the description
    shown = [name for name in dir(ampopt) if not name.startswith("__")]
    assert shown == sorted(ampopt.__all__)
    assert {"__all__", "__version__", "__doc__", "__path__"} <= set(dir(ampopt))


def test_rule_and_class_of_an_optimizer_are_in_files_of_one_name():
    def file_of(module):
        return module.rpartition(".")[2]

    classes = [getattr(ampopt.optim, name) for name in ampopt.optim.__all__]
    files = {
        (file_of(cls.__module__), file_of(cls.rule.update.fn.__module__))
        for cls in classes
        if hasattr(cls, "rule")
    }
    assert {pair for pair in files if len({*pair}) == 2} == {("adamw", "adam")}
    assert {cls.__name__ for cls in classes if not hasattr(cls, "rule")} == {
        "LBFGS",
        "Muon",
        "SparseAdam",
    }
