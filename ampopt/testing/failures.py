"""Failures of a contract: the claims that would explain each, and a summary."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ampopt.testing.blueprints import History

__all__ = ["Failure", "Summary", "explanations", "of_calls", "of_example", "summary_of"]

_LINES = 24
"""Maximum length of a summary: one screen."""
_WIDTH = 100
_PLUGIN = "ampopt.testing summary"
_BY_CALL = {
    "save": "checkpoints",
    "load": "checkpoints",
    "accumulate": "accumulates",
    "deepcopy": "deepcopies",
    "add_group": "several_groups",
}
"""The claim behind each call of the state machine."""


@dataclass(frozen=True)
class Failure:
    """One broken invariant, with its shrunk example.

    Attributes:
        test: name of the test.
        size: size of the example, as text.
        order: sort key; the smallest example is reported first.
        message: the error message.
        explanations: claims to set if the optimizer is not meant to keep the invariant.
    """

    test: str
    size: str
    order: tuple[int, ...]
    message: str
    explanations: tuple[str, ...]

    @property
    def lines(self) -> Iterator[str]:
        """The lines of the summary about this failure."""
        yield f"{self.test} ({self.size})"
        found = [line.strip() for line in self.message.splitlines() if line.strip()]
        yield "    " + _cut(" ".join(found[:2]) or "no message")
        if self.explanations:
            yield "    " + _cut(f"if it is not meant to: {', or '.join(self.explanations)}")


def of_example(
    test: str, error: BaseException, drawn: Mapping[str, Any], claims: Iterable[str]
) -> Failure:
    """Describe the failure of an invariant that needs ``claims`` on the arguments ``drawn``."""
    history = drawn.get("history")
    size, order = "an example", (0,)
    if isinstance(history, History):
        steps, params = len(history.steps), len(history.params)
        size, order = history.size, (sum(p.numel for p in history.params), params, steps)
    return Failure(test, size, order, str(error), tuple(explanations(claims, drawn)))


def of_calls(
    test: str, error: BaseException, called: Iterable[str], claims: Iterable[str]
) -> Failure:
    """Describe the failure of a sequence of calls, given by their names."""
    called = list(called)
    by_call = (_BY_CALL[name] for name in called if name in _BY_CALL)
    size = f"{len(called)} call{'' if len(called) == 1 else 's'}"
    told = tuple(explanations(dict.fromkeys((*claims, *by_call)), {}))
    return Failure(test, size, (len(called),), str(error), told)


def explanations(claims: Iterable[str], drawn: Mapping[str, Any]) -> Iterator[str]:
    """The claims that would exclude a failure.

    Args:
        claims: claims that the invariant needs.
        drawn: the shrunk example: what it still contains is needed to fail.
    """
    yield from (f"{claim} = False" for claim in claims if claim != "plain_steps")
    history = drawn.get("history")
    if not isinstance(history, History):
        return
    tensors = [*history.params, *(grad for step in history.steps for grad in step if grad)]
    if not all(tensor.numel for tensor in tensors):
        yield "shapes = strategies.shapes(min_side=1), if it takes no empty parameters"
    if any(tensor.layout in ("strided", "transposed", "channels_last") for tensor in tensors):
        yield "any_layout = False"
    if history.groups:
        yield "several_groups = False"
    if any(tensor.dtype == torch.float64 for tensor in tensors):
        yield "dtypes = (torch.float32,)"


def _cut(line: str) -> str:
    return line if len(line) <= _WIDTH else line[: _WIDTH - 3] + "..."


class Summary:
    """A pytest plugin that lists the failures of each contract at the end of the report."""

    def __init__(self) -> None:
        """Start with no failures."""
        self._failed: dict[str, list[Failure]] = {}

    def note(self, contract: str, failure: Failure) -> None:
        """Record a failure of the class named ``contract``."""
        self._failed.setdefault(contract, []).append(failure)

    def lines(self) -> Iterator[str]:
        """The failures of each contract, the smallest example first, at most a screen."""
        for contract, failed in self._failed.items():
            failed = sorted(failed, key=lambda failure: failure.order)
            number = f"{len(failed)} invariant{'' if len(failed) == 1 else 's'}"
            shown = [line for failure in failed for line in failure.lines]
            whole = len(shown) < _LINES
            yield f"{contract}: {number} not kept; the smallest example first"
            yield from shown if whole else shown[: _LINES - 2]
            if not whole:
                yield "and more: fix the first, and run again"

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the summary; pytest calls this hook at the end of its report."""
        lines = list(self.lines())
        if lines:
            terminalreporter.section("ampopt.testing")
            for line in lines:
                terminalreporter.write_line(line)


def summary_of(config: Any) -> Summary:
    """Return the summary plugin of a pytest run, registered if it is not yet."""
    summary = config.pluginmanager.get_plugin(_PLUGIN)
    if summary is None:
        summary = Summary()
        config.pluginmanager.register(summary, _PLUGIN)
    return summary
