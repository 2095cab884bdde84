"""The parts of the first hour, in order of what would end it."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PARTS", "Part"]


@dataclass(frozen=True)
class Part:
    """One thing to find out.

    Attributes:
        name: of its files, and for ``--part``.
        tells: what it finds out.
        seconds: after which it is ended.
        command: what to run, given the folder of results and the device; ``None`` to run the
            function ``run(record, device)`` of the module of the same name here.
        ends: whether nothing else can be found out if it fails.
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
        here = "ampopt.bench.first_hour"
        return [sys.executable, "-m", here, self.name, str(folder), device]


def _figures(folder: Path, device: str) -> list[str]:
    found = ["--seconds", "500", "--json", str(folder / "figures_rows.json")]
    return [sys.executable, "-m", "ampopt.bench", "--device", device, *found]


PARTS = (
    Part("start", "ampopt is imported, compiles its kernels, and takes a step", 300, ends=True),
    Part("races", "what one stream sends is not read on another before it is there", 120),
    Part("capture", "steps are captured as CUDA graphs, and replays do what steps do", 300),
    Part("parity", "every rule gives what eager operations give, in every storage", 900),
    Part("devices", "several devices step together; states on the host harm nothing", 200),
    Part("ddp", "a model under DDP is trained", 200),
    Part("gpu_tests", "the tests marked gpu pass; in a checkout alone", 1200),
    Part("bandwidth", "each launch beside a copy, and beside what was predicted", 400),
    Part("host", "what the host takes, with and without its loops of C++", 200),
    Part("figures", "all rows of the benchmark, beside torch", 800, _figures),
)
