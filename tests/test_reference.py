"""Everything public is in the reference, with a docstring that describes its arguments."""

import importlib
import inspect
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ampopt

ROOT = Path(__file__).parent.parent

MODULES = (
    "ampopt",
    "ampopt.integrations",
    "ampopt.testing",
    "ampopt.testing.strategies",
    "ampopt.testing.survey",
    "ampopt_kernels",
)
"""Public modules, except those that import a framework."""

_OURS = ("ampopt.", "ampopt_kernels.")


def described(module: str) -> Iterator[tuple[str, Any, str]]:
    """Name, object and docstring of each public object, and of the methods of public classes."""
    shown = importlib.import_module(module)
    for name in shown.__all__:
        value = getattr(shown, name)
        if not callable(value) or not getattr(value, "__module__", "").startswith(_OURS):
            continue  # a constant, or somebody else's
        yield f"{module}.{name}", value, value.__doc__ or ""
        if not isinstance(value, type):
            continue
        theirs = [cls for cls in value.__mro__[:-1] if not cls.__module__.startswith(_OURS)]
        inherited = {key for cls in theirs for key in vars(cls)} - {"__init__"}
        for cls in value.__mro__:
            if not cls.__module__.startswith(_OURS):
                continue
            for key, member in vars(cls).items():
                if key.startswith("test_") or key in inherited:
                    continue  # run by pytest; or described where it is from
                member = getattr(member, "fget", None) or getattr(member, "__func__", member)
                if inspect.isfunction(member) and (key == "__init__" or not key.startswith("_")):
                    said = inspect.getdoc(member) or ""
                    if key == "__init__":
                        said += f"\n{cls.__doc__}"
                    yield f"{module}.{name}.{key}", member, said


def undescribed_arguments(function: Any, said: str) -> list[str]:
    """Those that the docstring names nowhere: not in ``Args:``, and not in its sentences.

    None where it sends the reader to another docstring.
    """
    if re.search(r"\bsee (:\w+:|the class)", said):
        return []
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    ignored = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    names = [p.name for p in parameters if p.kind not in ignored and not p.name.startswith("_")]
    return [
        name
        for name in names
        if name not in ("self", "cls")
        if not re.search(rf"``[^`]*\b{name}\b[^`]*``", said)
        if not re.search(rf"^\s*(\*{{0,2}}\w+,\s+)*\*{{0,2}}{name}(,\s+\w+)*:", said, re.MULTILINE)
    ]


@pytest.mark.parametrize("module", MODULES)
def test_everything_public_has_a_docstring(module):
    assert [name for name, _, said in described(module) if not said.strip()] == []


@pytest.mark.parametrize("module", MODULES)
def test_everything_public_is_on_a_page_of_the_reference(module):
    """By name, or with the whole of its module."""
    pages = (ROOT / "examples" / "reference").glob("*.md")
    lines = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    if re.search(rf"automodule:: {re.escape(module)}$", lines, re.MULTILINE):
        return
    names = set(re.findall(r"(?:auto\w+|py:\w+):: (?:[\w.]+\.)?(\w+)$", lines, re.MULTILINE))
    shown = importlib.import_module(module)
    modules = {name for name in shown.__all__ if inspect.ismodule(getattr(shown, name))}
    assert set(shown.__all__) - modules - names == set()


@pytest.mark.parametrize("module", MODULES)
def test_every_argument_is_described(module):
    missing = {
        name: left
        for name, value, said in described(module)
        if not isinstance(value, type) and (left := undescribed_arguments(value, said))
    }
    assert missing == {}


@pytest.mark.parametrize(
    "cls, argument, times", [(ampopt.TrainStep, "micro_batches", 1), (ampopt.AdamW, "Args", 1)]
)
def test_the_site_shows_the_arguments_of_constructors_once(cls, argument, times):
    site = runpy.run_path(str(ROOT / "examples" / "site" / "conf.py"))
    lines = inspect.cleandoc(cls.__doc__).splitlines()
    site["_describe_the_constructor"](None, "class", cls.__name__, cls, None, lines)
    assert sum(line.strip().startswith(f"{argument}:") for line in lines) == times


SAID = """Take ``x``.

Args:
    least, most: bounds.
"""


def test_missing_descriptions_are_found():
    def function(x, depth, *rest, least=0, most=1): ...

    assert undescribed_arguments(function, SAID) == ["depth"]
    assert undescribed_arguments(function, SAID.replace("bounds", "see :func:`other`")) == []
