"""``python -m ampopt.testing.survey``: which invariants optimizers of installed packages keep.

Every optimizer gets its loss scaling methods from ``ampopt.extend``, and is then tested with the
whole ``ampopt.testing.OptimizerContract`` and its default claims. That takes about a minute for
each optimizer; ``--examples 5`` gives a first impression of many.
"""

import argparse
import importlib
import inspect
import unittest
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis.errors import HypothesisException

import ampopt
from ampopt.testing.contract import OptimizerContract

__all__ = ["PACKAGES", "Finding", "found_in", "plot", "survey", "table"]

PACKAGES = (
    "torch.optim",
    "pytorch_optimizer",
    "timm.optim",
    "lion_pytorch",
    "schedulefree",
    "transformers.optimization",
)
"""Modules searched by default, if installed."""

INVARIANTS = tuple(name for name in dir(OptimizerContract) if name.startswith("test_"))

_KEPT, _BROKEN, _NOT_ASKED = "✔", "✘", "-"
_ARGUMENTS = {"lr": 1e-3, "learning_rate": 1e-3}
"""Values for arguments without a default that constructors require."""


@dataclass
class Finding:
    """The result for one optimizer.

    Attributes:
        name: name of package and class, such as ``"torch.Adam"``.
        verdicts: by invariant, named without ``test_``: ``"✔"`` kept, ``"✘"`` broken, ``"-"`` not
            tested because the default claims exclude it.
        why: by broken invariant, the first line of the failure.
        refused: why the optimizer could not be tested at all; ``None`` if it could.
    """

    name: str
    verdicts: dict[str, str] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    refused: str | None = None


def found_in(module: str) -> list[type[torch.optim.Optimizer]]:
    """The public optimizer classes of a module; empty if the module cannot be imported.

    Args:
        module: name of the module.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            members = vars(importlib.import_module(module))
    except ImportError:
        return []
    classes = {
        value
        for name, value in members.items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
        if not (name.startswith("_") or inspect.isabstract(value))
    } - {torch.optim.Optimizer}
    return sorted(classes, key=lambda cls: cls.__name__.lower())


def survey(
    classes: Iterable[type[torch.optim.Optimizer]],
    *,
    examples: int | None = None,
    invariants: Sequence[str] = INVARIANTS,
) -> Iterator[Finding]:
    """Run the contract on each class.

    Args:
        classes: optimizer classes, which need not know about loss scaling.
        examples: number of examples for each invariant, the same ones in every run; ``None`` for
            that of the active Hypothesis profile, as in a contract.
        invariants: names of the contract's tests.

    Yields:
        A finding for each class, once it has been tested.
    """
    health = hypothesis.HealthCheck
    settings = hypothesis.settings(
        max_examples=hypothesis.settings().max_examples if examples is None else examples,
        derandomize=True,
        database=None,
        phases=[hypothesis.Phase.generate],  # no shrinking: only kept or broken is reported
        suppress_health_check=[health.too_slow, health.filter_too_much, health.data_too_large],
    )
    for cls in classes:
        finding = Finding(f"{cls.__module__.partition('.')[0]}.{cls.__name__}")
        try:
            make = _maker(cls)
            make([torch.nn.Parameter(torch.ones(2, 2))])
        except Exception as error:  # a third-party constructor may raise anything
            finding.refused = _first_line(error)
        else:
            attributes = {
                "make": lambda self, params, make=make: make(params),
                "settings": settings,
                "__module__": __name__,
            }
            contract = type(f"Of{cls.__name__}", (OptimizerContract,), attributes)
            for name in invariants:
                _try(contract(), name, finding)
        yield finding


def table(findings: Sequence[Finding]) -> str:
    """Markdown table of how many invariants each optimizer keeps, and which it breaks.

    Args:
        findings: results of :func:`survey`.
    """
    lines = ["| Optimizer | Keeps | Breaks |", "|---|---|---|"]
    for finding in findings:
        if finding.refused is not None:
            lines.append(f"| {finding.name} | not tried: {_in_a_cell(finding.refused)} | |")
            continue
        verdicts = list(finding.verdicts.values())
        share = f"{verdicts.count(_KEPT)} of {len(verdicts) - verdicts.count(_NOT_ASKED)}"
        reasons = [f"`{name}`: {_in_a_cell(why)}" for name, why in finding.why.items()]
        lines.append(f"| {finding.name} | {share} | {'<br>'.join(reasons)} |")
    return "\n".join(lines) + "\n"


def plot(findings: Sequence[Finding], path: str) -> None:
    """Draw a square for each optimizer and invariant, colored by verdict. Needs matplotlib.

    Args:
        findings: results of :func:`survey`.
        path: path of the picture to write.
    """
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure  # which, unlike pyplot, needs no display

    tried_findings = [finding for finding in findings if finding.refused is None]
    names = list(dict.fromkeys(name for finding in tried_findings for name in finding.verdicts))
    colors = {_NOT_ASKED: "#e0e0e0", _BROKEN: "#c0392b", _KEPT: "#2e8b57"}
    order = list(colors)
    squares = [
        [order.index(finding.verdicts[name]) for name in names] for finding in tried_findings
    ]
    size = (3.0 + 0.22 * len(names), 4.0 + 0.2 * len(tried_findings))
    figure = Figure(figsize=size, layout="constrained")
    panel = figure.subplots()
    panel.imshow(squares, cmap=ListedColormap(list(colors.values())), vmin=0, vmax=2, aspect="auto")
    panel.set_xticks(range(len(names)), [n.replace("_", " ") for n in names], rotation=90)
    panel.set_yticks(range(len(tried_findings)), [finding.name for finding in tried_findings])
    panel.tick_params(labelsize=7)
    panel.set_title("kept (green), broken (red), not asked of every optimizer (grey)", fontsize=9)
    figure.savefig(path, dpi=150)


def _maker(cls: type[torch.optim.Optimizer]) -> Callable[[Any], Any]:
    """Return a function that makes the extended optimizer with its defaults.

    Raises:
        TypeError: the constructor requires arguments other than a learning rate, or ``extend``
            refuses the class.
    """
    required_names = [
        name
        for name, parameter in list(inspect.signature(cls).parameters.items())[1:]
        if parameter.default is parameter.empty
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    unknown = [name for name in required_names if name not in _ARGUMENTS]
    if unknown:
        raise TypeError(f"its constructor asks for {', '.join(unknown)}")
    optimizer_class = cls if issubclass(cls, ampopt.Optimizer) else ampopt.extend(cls)

    def make(params: Any) -> Any:
        optimizer: Any = optimizer_class(
            params, **{name: _ARGUMENTS[name] for name in required_names}
        )
        if callable(getattr(optimizer, "train", None)):  # schedule-free ones require it first
            optimizer.train()
        return optimizer

    return make


def _try(contract: Any, name: str, finding: Finding) -> None:
    """Run one invariant, and record the verdict."""
    short = name.removeprefix("test_")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            getattr(contract, name)()
    except (unittest.SkipTest, pytest.skip.Exception, HypothesisException):
        finding.verdicts[short] = _NOT_ASKED
    except (Exception, pytest.fail.Exception) as error:
        finding.verdicts[short] = _BROKEN
        finding.why[short] = _first_line(error)
    else:
        finding.verdicts[short] = _KEPT


def _in_a_cell(text: str) -> str:
    """``text`` for a cell of a Markdown table."""
    return text.replace("|", "\\|")


def _first_line(error: BaseException) -> str:
    """The first line of the message of ``error``, or its class."""
    return (str(error) or type(error).__name__).strip().partition("\n")[0]


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, run the survey, and print or write the table."""
    parser = argparse.ArgumentParser(prog="python -m ampopt.testing.survey", description=__doc__)
    parser.add_argument(
        "--package",
        action="append",
        help=f"a module to search; default: those that are installed of {', '.join(PACKAGES)}",
    )
    parser.add_argument("--optimizer", action="append", help="test only classes of this name")
    parser.add_argument(
        "--examples",
        type=int,
        help="how many are drawn for each invariant; default: as the Hypothesis profile says, 100",
    )
    parser.add_argument("--output", type=Path, help="write the table to this file")
    parser.add_argument("--plot", help="draw it to this file; needs matplotlib")
    options = parser.parse_args(arguments)
    if options.examples is not None and options.examples < 1:
        parser.error("--examples: draw 1 or more")
    classes = {
        cls: None  # a dict, as an ordered set: packages export each other's classes
        for package in options.package or PACKAGES
        for cls in found_in(package)
        if not options.optimizer or cls.__name__ in options.optimizer
    }
    if not classes:
        parser.error("no optimizer was found: is the package installed?")
    findings = []
    for finding in survey(classes, examples=options.examples):
        findings.append(finding)
        n_broken = list(finding.verdicts.values()).count(_BROKEN)
        print(finding.name, finding.refused or f"{n_broken} broken", flush=True)
    if options.output is None:
        print(table(findings))
    else:
        options.output.write_text(table(findings), encoding="utf-8")
    if options.plot:
        plot(findings, options.plot)


if __name__ == "__main__":
    main()
