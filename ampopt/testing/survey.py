"""``python -m ampopt.testing.survey``: which invariants the optimizers of installed packages keep.

Every optimizer is given control points by :func:`ampopt.extend`, as its package has written it, and
the whole :class:`ampopt.testing.OptimizerContract` is run on it, with its default settings.
"""

import argparse
import importlib
import inspect
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
"""Modules that are looked into unless others are named, where they are installed."""

INVARIANTS = tuple(name for name in dir(OptimizerContract) if name.startswith("test_"))

_KEPT, _BROKEN, _NOT_ASKED = "✔", "✘", "-"
_ARGUMENTS = {"lr": 1e-3, "learning_rate": 1e-3}
"""For constructors that ask for them."""


@dataclass
class Finding:
    """What was found of one optimizer.

    Attributes:
        name: its module's name and its own.
        verdicts: of each invariant, without its ``test_``: ``"✔"``, ``"✘"``, or ``"-"`` where it
            is about what the contract does not claim of every optimizer.
        why: of each that is broken, the first line of the failure.
        refused: why it could not be tried at all; ``None`` if it could.
    """

    name: str
    verdicts: dict[str, str] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    refused: str | None = None


def found_in(module: str) -> list[type[torch.optim.Optimizer]]:
    """The optimizers that a module shows; none if it is not installed.

    Args:
        module: its name.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            shown = vars(importlib.import_module(module))
    except ImportError:
        return []
    classes = {
        value
        for name, value in shown.items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
        if not (name.startswith("_") or inspect.isabstract(value))
    } - {torch.optim.Optimizer}
    return sorted(classes, key=lambda cls: cls.__name__.lower())


def survey(
    classes: Iterable[type[torch.optim.Optimizer]],
    *,
    examples: int = 5,
    invariants: Sequence[str] = INVARIANTS,
) -> Iterator[Finding]:
    """Run the contract over optimizers, one after another.

    Args:
        classes: of optimizers that know nothing of scaling.
        examples: how many are drawn for each invariant. The same each time.
        invariants: names of the contract's tests.

    Yields:
        A finding for each class, as soon as it is there.
    """
    health = hypothesis.HealthCheck
    settings = hypothesis.settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        stateful_step_count=10,
        phases=[hypothesis.Phase.generate],  # that it is broken is enough; not by how little
        suppress_health_check=[health.too_slow, health.filter_too_much, health.data_too_large],
    )
    for cls in classes:
        finding = Finding(f"{cls.__module__.partition('.')[0]}.{cls.__name__}")
        try:
            make = _maker(cls)
            make([torch.nn.Parameter(torch.ones(2, 2))])
        except Exception as error:  # whatever a constructor of others raises
            finding.refused = _first_line(error)
        else:
            contract = type(f"Of{cls.__name__}", (OptimizerContract,), _attributes(make, settings))
            for name in invariants:
                _try(contract(), name, finding)
        yield finding


def table(findings: Sequence[Finding]) -> str:
    """A row in Markdown for each optimizer: how many invariants it keeps, and which it does not.

    Args:
        findings: of :func:`survey`.
    """
    lines = ["| Optimizer | Keeps | Breaks |", "|---|---|---|"]
    for finding in findings:
        if finding.refused is not None:
            lines.append(f"| {finding.name} | not tried: {_in_a_cell(finding.refused)} | |")
            continue
        said = list(finding.verdicts.values())
        kept = f"{said.count(_KEPT)} of {len(said) - said.count(_NOT_ASKED)}"
        broken = [f"`{name}`: {_in_a_cell(why)}" for name, why in finding.why.items()]
        lines.append(f"| {finding.name} | {kept} | {'<br>'.join(broken)} |")
    return "\n".join(lines) + "\n"


def plot(findings: Sequence[Finding], path: str) -> None:
    """Draw the table: a square for each optimizer and invariant. Needs matplotlib.

    Args:
        findings: of :func:`survey`.
        path: of the picture.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot
    from matplotlib.colors import ListedColormap

    tried = [finding for finding in findings if finding.refused is None]
    names = list(dict.fromkeys(name for finding in tried for name in finding.verdicts))
    colors = {_NOT_ASKED: "#e0e0e0", _BROKEN: "#c0392b", _KEPT: "#2e8b57"}
    order = list(colors)
    squares = [[order.index(finding.verdicts[name]) for name in names] for finding in tried]
    size = (3.0 + 0.22 * len(names), 4.0 + 0.2 * len(tried))
    figure, panel = pyplot.subplots(figsize=size, layout="constrained")
    panel.imshow(squares, cmap=ListedColormap(list(colors.values())), vmin=0, vmax=2, aspect="auto")
    panel.set_xticks(range(len(names)), [n.replace("_", " ") for n in names], rotation=90)
    panel.set_yticks(range(len(tried)), [finding.name for finding in tried])
    panel.tick_params(labelsize=7)
    panel.set_title("kept (green), broken (red), not asked of every optimizer (grey)", fontsize=9)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _maker(cls: type[torch.optim.Optimizer]) -> Callable[[Any], Any]:
    """Makes the optimizer, extended, with its defaults.

    Raises:
        TypeError: its constructor asks for more than can be guessed, or ``extend`` refuses it.
    """
    required = [
        name
        for name, parameter in list(inspect.signature(cls).parameters.items())[1:]
        if parameter.default is parameter.empty
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    unknown = [name for name in required if name not in _ARGUMENTS]
    if unknown:
        raise TypeError(f"its constructor asks for {', '.join(unknown)}")
    extended = cls if issubclass(cls, ampopt.Optimizer) else ampopt.extend(cls)

    def make(params: Any) -> Any:
        optimizer: Any = extended(params, **{name: _ARGUMENTS[name] for name in required})
        if callable(getattr(optimizer, "train", None)):  # as the schedule-free ask before a step
            optimizer.train()
        return optimizer

    return make


def _attributes(make: Callable[[Any], Any], settings: hypothesis.settings) -> dict[str, Any]:
    return {
        "make": lambda self, params: make(params),
        "settings": settings,
        "dtypes": (torch.float32,),
        "__module__": __name__,
    }


def _try(contract: Any, name: str, finding: Finding) -> None:
    """Run one invariant, and note what came of it."""
    short = name.removeprefix("test_")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            getattr(contract, name)()
    except (pytest.skip.Exception, HypothesisException):
        finding.verdicts[short] = _NOT_ASKED
    except (Exception, pytest.fail.Exception) as error:
        finding.verdicts[short] = _BROKEN
        finding.why[short] = _first_line(error)
    else:
        finding.verdicts[short] = _KEPT


def _in_a_cell(text: str) -> str:
    return text.replace("|", "\\|")


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).strip().partition("\n")[0]


def main(arguments: Sequence[str] | None = None) -> None:
    """Survey what the arguments name, and print or write the table."""
    parser = argparse.ArgumentParser(prog="python -m ampopt.testing.survey", description=__doc__)
    parser.add_argument(
        "--package",
        action="append",
        help=f"a module to look into; without, {', '.join(PACKAGES)}, where installed",
    )
    parser.add_argument("--optimizer", action="append", help="only those of this name")
    parser.add_argument("--examples", type=int, default=5, help="drawn for each invariant (5)")
    parser.add_argument("--output", type=Path, help="write the table there")
    parser.add_argument("--plot", help="draw it there; needs matplotlib")
    options = parser.parse_args(arguments)
    if options.examples < 1:
        parser.error("--examples: draw 1 or more")
    found = {
        cls: None  # in their order, and each once
        for package in options.package or PACKAGES
        for cls in found_in(package)
        if not options.optimizer or cls.__name__ in options.optimizer
    }
    if not found:
        parser.error("no optimizer was found: is the package installed?")
    findings = []
    for finding in survey(found, examples=options.examples):
        findings.append(finding)
        broken = list(finding.verdicts.values()).count(_BROKEN)
        print(finding.name, finding.refused or f"{broken} broken", flush=True)
    if options.output is None:
        print(table(findings))
    else:
        options.output.write_text(table(findings), encoding="utf-8")
    if options.plot:
        plot(findings, options.plot)


if __name__ == "__main__":
    main()
