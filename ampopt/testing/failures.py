"""Failures of a contract: the claims that would explain each, and a summary."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from ampopt.testing.blueprints import Blueprint, History, number_of

__all__ = [
    "Failure",
    "Summary",
    "explanations_of",
    "of_example",
    "summary_of",
]

Example = TypeVar("Example")
_LINES = 24
"""Maximum length of a summary: one screen."""
_WIDTH = 100
_PLUGIN = "ampopt.testing summary"
_Limit = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Changes the arguments of an invariant, so that they keep within a claim."""


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
    explanations: tuple[str, ...] = ()

    @property
    def lines(self) -> Iterator[str]:
        """The lines of the summary about this failure."""
        yield f"{self.test} ({self.size})"
        lines = [line.strip() for line in self.message.splitlines() if line.strip()]
        first, *more = lines or ["no message"]
        # Below a message, pytest shows the values of the assertion, as in "assert not 1".
        told = [line for line in more[:1] if not line.startswith("assert ")]
        yield "    " + _cut(" ".join([first, *told]))
        if self.explanations:
            yield "    " + _cut(f"if it is not meant to: {', or '.join(self.explanations)}")


def of_example(
    test: str,
    error: BaseException,
    example: Mapping[str, Any],
    claims: Iterable[str],
    passes: Callable[[Mapping[str, Any]], bool],
) -> Failure:
    """Describe the failure of an invariant that needs ``claims`` on the arguments ``example``.

    Args:
        test: name of the test.
        error: the failure.
        example: the arguments, shrunk; ``history`` is one of them.
        claims: claims that the invariant needs.
        passes: whether the invariant holds for other arguments.
    """
    history = example["history"]
    elements = sum(p.numel for p in history.params)
    order = elements, len(history.params), len(history.steps)
    explanations = explanations_of(example, claims, _LIMITS, passes)
    return Failure(test, history.size, order, str(error), explanations)


def explanations_of(
    example: Example,
    claims: Iterable[str],
    limits: Mapping[str, Callable[[Example], Example]],
    passes: Callable[[Example], bool],
) -> tuple[str, ...]:
    """The claims that would exclude the failure of a test, the likeliest first.

    A claim that limits the examples, such as ``any_layout``, is among them if the test passes once
    the example is changed to keep within it. A claim without which there is no such test comes
    last.

    Args:
        example: the shrunk example.
        claims: claims that the test needs.
        limits: for each claim that limits the examples, how to keep an example within it.
        passes: whether the test passes with another example.
    """
    others = ((hint, change(example)) for hint, change in limits.items())
    hints = [hint for hint, other in others if other != example and passes(other)]
    hints += [f"{claim} = False" for claim in claims if claim != "plain_steps"]
    return tuple(dict.fromkeys(hints))


def _of_history(change: Callable[[History], History]) -> _Limit:
    """``change``, applied to the history of an example."""
    return lambda example: {**example, "history": change(example["history"])}


def _of_tensors(change: Callable[[Blueprint], Blueprint]) -> _Limit:
    """``change``, applied to each parameter and gradient of an example."""
    return _of_history(lambda history: history.with_tensors(change))


def _in_full_precision(example: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments ``example``, with states of 32 bits."""
    return {name: 32 if name in ("state_bits", "bits") else x for name, x in example.items()}


def _with_elements(tensor: Blueprint) -> Blueprint:
    """``tensor``, with one element if it has none."""
    if tensor.numel:
        return tensor
    return replace(tensor, shape=tuple(side or 1 for side in tensor.shape), numbers=(1.0,))


def _single(tensor: Blueprint) -> Blueprint:
    """``tensor`` in float32, if it is float64 and its numbers fit."""
    largest = max(map(abs, tensor.numbers), default=0.0)
    fits = tensor.dtype == torch.float64 and largest <= torch.finfo(torch.float32).max
    return replace(tensor, dtype=torch.float32) if fits else tensor


def _contiguous(tensor: Blueprint) -> Blueprint:
    """``tensor`` with a contiguous layout, if it is a dense one of another layout."""
    laid_out = tensor.layout in ("strided", "transposed", "channels_last")
    return replace(tensor, layout="contiguous") if laid_out else tensor


def _small(tensor: Blueprint) -> Blueprint:
    """``tensor`` with 1 in place of huge numbers."""
    numbers = tuple(1.0 if abs(x) > _HUGE else x for x in tensor.numbers)
    return replace(tensor, numbers=numbers)


_HUGE = 1e15
"""Larger finite gradients are drawn only with the claim ``huge_gradients``."""
_LIMITS: dict[str, _Limit] = {
    "state_bits = (32,)": _in_full_precision,
    "shapes = strategies.shapes(min_side=1)": _of_tensors(_with_elements),
    "dtypes = (torch.float32,)": _of_tensors(_single),
    "huge_gradients = False": _of_tensors(_small),
    "any_layout = False": _of_tensors(_contiguous),
    "several_groups = False": _of_history(lambda history: replace(history, groups=())),
}
"""Claims that limit the examples, and how an example is changed to keep within each."""


def _cut(line: str) -> str:
    """``line``, cut to the width of the summary."""
    return line if len(line) <= _WIDTH else line[: _WIDTH - 3] + "..."


class Summary:
    """A pytest plugin that lists the failures of each contract at the end of the report."""

    def __init__(self) -> None:
        """Start with no failures."""
        self._failures: dict[str, list[Failure]] = {}

    def note(self, contract: str, failure: Failure) -> None:
        """Record a failure of the class named ``contract``."""
        self._failures.setdefault(contract, []).append(failure)

    def lines(self) -> Iterator[str]:
        """The failures of each contract, the smallest example first, at most a screen."""
        for contract, failures in self._failures.items():
            failures = sorted(failures, key=lambda failure: failure.order)
            number = number_of(len(failures), "invariant")
            lines = [line for failure in failures for line in failure.lines]
            whole = len(lines) < _LINES
            yield f"{contract}: {number} not kept; the smallest example first"
            yield from lines if whole else lines[: _LINES - 2]
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
