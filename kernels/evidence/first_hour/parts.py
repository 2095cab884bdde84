"""The parts of the first hour; those that decide whether others can run come first."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PARTS", "Part"]


@dataclass(frozen=True)
class Part:
    """One thing to test or measure.

    Attributes:
        name: the name of the part's module and files, and the value of ``--part``.
        tells: what the part tests or measures, for the summary.
        seconds: the timeout, after which its process is killed.
        command: returns the command line, given the folder of results and the device; ``None`` to
            call ``run(record, device)`` of the module of the same name in this package.
        ends: whether a failure of the part ends the hour.
    """

    name: str
    tells: str
    seconds: float
    command: Callable[[Path, str], list[str]] | None = None
    ends: bool = False

    def arguments(self, folder: Path, device: str) -> list[str]:
        """The command line, for ``subprocess``."""
        if self.command is not None:
            return self.command(folder, device)
        here = "evidence.first_hour.one_part"
        return [sys.executable, "-m", here, self.name, str(folder), device]


def _figures(folder: Path, device: str) -> list[str]:
    """The command line of the part ``figures``: the benchmark, with its rows as JSON."""
    arguments = ["--seconds", "500", "--json", str(folder / "figures_rows.json")]
    return [sys.executable, "-m", "ampopt.bench", "--device", device, *arguments]


PARTS = (
    Part("start", "ampopt imports, compiles its kernels, and steps", 300, ends=True),
    Part("races", "no stream reads a table before the copy of it has ended on another", 120),
    Part("capture", "steps are captured as CUDA graphs, and a replay equals a step", 300),
    Part("parity", "every rule gives the results of eager operations, in every storage", 900),
    Part("devices", "several devices step together; states on the CPU follow or are refused", 200),
    Part("ddp", "a model in DDP trains", 200),
    Part("gpu_tests", "the tests marked gpu pass (in a checkout)", 1200),
    Part("bandwidth", "the bandwidth of each launch, compared with a copy and predictions", 400),
    Part("host", "the host time of a step, with and without C++ loops", 200),
    Part("figures", "all rows of the benchmark, compared with torch", 800, _figures),
)
