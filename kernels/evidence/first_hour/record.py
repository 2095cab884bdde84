"""The results of a part: lines of JSON, each written at once, so that a crash loses none."""

import json
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["PartRecord", "read"]


class PartRecord:
    """The results of one part, in a file of its own."""

    def __init__(self, path: Path) -> None:
        """Store ``path``, the file that results are appended to."""
        self._path = path

    def check(self, what: str, passed: bool, detail: Any = None) -> None:
        """Report whether the check ``what`` passed, with values as ``detail``."""
        self._write({"kind": "passed" if passed else "FAILED", "what": what, "detail": detail})

    def skip(self, what: str, why: str) -> None:
        """Report that the check ``what`` did not run, and why."""
        self._write({"kind": "skipped", "what": what, "detail": why})

    def figure(self, what: str, value: float, unit: str, predicted: float | None = None) -> None:
        """Report a measurement, and what ``kernels/PREDICTIONS.md`` predicts, if anything."""
        line = {"kind": "figure", "what": what, "value": value, "unit": unit}
        self._write(line if predicted is None else {**line, "predicted": predicted})

    @contextmanager
    def trying(self, what: str) -> Iterator[None]:
        """Report an exception raised within as a failure of ``what``, and continue after it."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.check(what, False, f"{type(error).__name__}: {error}")

    def _write(self, line: dict[str, Any]) -> None:
        """Print a line, and append it to the file."""
        text = json.dumps(line, default=str)
        print(text, flush=True)
        with self._path.open("a") as file:
            file.write(text + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """All complete lines of a record; an empty list if there is no such file."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]
