"""Run the parts, each in its own process, and write their results to one folder."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from evidence.first_hour.parts import Part
from evidence.first_hour.record import read

__all__ = ["PartResult", "run"]


@dataclass(frozen=True)
class PartResult:
    """The result of one part.

    Attributes:
        name: the part's name.
        tells: what the part tests or measures.
        status: ``"passed"``, ``"FAILED"``, ``"not run: ..."``, or how its process ended.
        seconds: how long the part ran.
        results: the lines of its record; see ``record``.
    """

    name: str
    tells: str
    status: str
    seconds: float
    results: list[dict[str, Any]]

    @property
    def passed(self) -> bool:
        """Whether the part ran to its end and no check failed."""
        return self.status == "passed"


def run(
    parts: Sequence[Part], folder: Path, device: str, about: dict[str, Any]
) -> list[PartResult]:
    """Run ``parts`` in turn. A part that hangs or crashes does not stop the others.

    Writes to ``folder`` for each part ``NAME.log``, the output of its process, and ``NAME.jsonl``,
    its results; and ``summary.json`` and ``summary.md``, which are updated after each part.

    Args:
        parts: the parts, in the order in which they run.
        folder: the folder for the results; created if it does not exist.
        device: the device to run on, such as ``"cuda"``.
        about: the machine and the versions, for the summary.

    Returns:
        One outcome for each of ``parts``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    outcomes: list[PartResult] = []
    ended_by = None
    for part in parts:
        if ended_by is not None:
            outcomes.append(
                PartResult(part.name, part.tells, f"not run: {ended_by} failed", 0.0, [])
            )
        else:
            outcomes.append(_run(part, folder, device))
            ended_by = part.name if part.ends and not outcomes[-1].passed else None
        _sum_up(outcomes, folder, about)
        print(f"{outcomes[-1].name}: {outcomes[-1].status}", flush=True)
    return outcomes


def _run(part: Part, folder: Path, device: str) -> PartResult:
    """Run one part in a process of its own, and kill that process at its timeout."""
    record = folder / f"{part.name}.jsonl"
    record.unlink(missing_ok=True)
    start = time.monotonic()
    with (folder / f"{part.name}.log").open("w") as log:
        process = subprocess.Popen(
            part.arguments(folder, device),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,  # so that killpg ends its child processes too
        )
        try:
            code = process.wait(part.seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    results = read(record)
    status = _status(code, part.seconds, results)
    return PartResult(part.name, part.tells, status, round(time.monotonic() - start, 1), results)


def _status(code: int | None, seconds: float, results: list[dict[str, Any]]) -> str:
    """The status of a part, from the exit code (``None`` after a timeout) and its results."""
    if code is None:
        return f"hung: ended after {seconds:g} s"
    if code < 0:
        return f"crashed: {signal.Signals(-code).name}"
    if code:
        return f"ended with status {code}"
    return "FAILED" if any(line["kind"] == "FAILED" for line in results) else "passed"


def _sum_up(outcomes: list[PartResult], folder: Path, about: dict[str, Any]) -> None:
    """Write ``summary.json`` and ``summary.md``."""
    whole = {"environment": about, "parts": [asdict(outcome) for outcome in outcomes]}
    (folder / "summary.json").write_text(json.dumps(whole, indent=1, default=str) + "\n")
    lines = ["# The first hour", "", ", ".join(f"{k} {v}" for k, v in about.items()), ""]
    lines += ["| part | tests or measures | status | s |", "|---|---|---|---|"]
    for one in outcomes:
        lines.append(f"| {one.name} | {one.tells} | {one.status} | {one.seconds:.0f} |")
    for one in outcomes:
        lines += ["", f"## {one.name}: {one.status}", "", *_section(one)]
    (folder / "summary.md").write_text("\n".join(lines) + "\n")


def _section(outcome: PartResult) -> list[str]:
    """Lines of the summary: checks passed and failed, what was skipped, and figures."""
    kinds = Counter(line["kind"] for line in outcome.results)
    lines = [f"{kinds['passed']} checks passed, {kinds['FAILED']} failed; log: {outcome.name}.log"]
    for line in outcome.results:
        if line["kind"] in ("FAILED", "skipped"):
            lines.append(f"- {line['kind']}: {line['what']}: {line['detail']}")
    figures = [line for line in outcome.results if line["kind"] == "figure"]
    if figures:
        lines += ["", "| figure | measured | predicted |", "|---|---|---|"]
    for line in figures:
        predicted = line.get("predicted", "")
        lines.append(f"| {line['what']} | {line['value']:.4g} {line['unit']} | {predicted} |")
    return lines
