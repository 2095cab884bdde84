"""The results as tables for people, and as JSON."""

import datetime
import os
import platform
from collections.abc import Sequence
from typing import Any

import torch

import ampopt
from ampopt.bench.contenders import FLOAT32, SMALL
from ampopt.bench.rows import BenchRow
from ampopt.environment import cpu_model, version_of

__all__ = ["as_columns", "costs", "environment", "memory", "table"]


def environment(device: torch.device) -> dict[str, Any]:
    """The conditions of the figures: hardware, versions, load and settings."""
    conditions: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "ampopt": ampopt.__version__,
        "backend": ampopt.get_backend(),
    }
    if device.type == "cuda":
        conditions["gpu"] = torch.cuda.get_device_name(device)
        conditions["cuda"] = torch.version.cuda
    return conditions


def table(rows: Sequence[BenchRow]) -> str:
    """Table of milliseconds per step: median, and half of the interquartile range.

    The columns after the contenders are ratios: ampopt's time to torch's best, by medians and by
    fastest rounds, which a busy machine disturbs less, and to the floor; and of master weights, by
    fastest rounds, to ampopt's step of float32 parameters.
    """
    columns = list(dict.fromkeys(name for row in rows for name in (*row.times, *row.missing)))
    head = ["optimizer", "workload", "clip", *columns, "/best", "fastest", "/floor"]
    has_masters = FLOAT32 in columns
    lines = [[*head, *["/float32"] * has_masters]]
    for row in rows:
        cells = [row.optimizer, row.workload, "yes" if row.clip else "no"]
        for name in columns:
            times = row.times.get(name)
            cells.append("-" if times is None else _milliseconds(times.median, times.spread))
        shares = [row.ratio, row.ratio_of_least, row.to_floor]
        shares += [row.ratio_to_float32] * has_masters
        cells += ["-" if x is None else f"{x:.2f}" for x in shares]
        lines.append(cells)
    return as_columns(lines, left=(0, 1, 2))


def costs(rows: Sequence[BenchRow]) -> str:
    """Table of what each step costs besides time; the counts exist only on a GPU."""
    head = ["optimizer", "workload", "clip", "contender", "GB/s", "of copy", "host us"]
    lines = [[*head, "launches", "syncs", "extra MB"]]
    for row in rows:
        for name, times in row.times.items():
            cost = row.costs.get(name)
            ours = name == "ampopt"  # the bytes are counted from ampopt's rule
            lines.append(
                [
                    row.optimizer,
                    row.workload,
                    "yes" if row.clip else "no",
                    name,
                    f"{row.bytes / times.median / 1e9:.1f}" if ours else "-",
                    f"{1 / row.to_floor:.2f}" if ours and row.to_floor is not None else "-",
                    f"{times.host * 1e6:.0f}",
                    "-" if cost is None else str(cost.launches),
                    "-" if cost is None else str(cost.synchronizations),
                    "-" if cost is None else f"{cost.extra_bytes / 1e6:.1f}",
                ]
            )
    return as_columns(lines, left=(0, 1, 2, 3))


def memory(rows: Sequence[BenchRow]) -> str:
    """Table of the bytes allocated for each element of a parameter, with each contender.

    With small states also their time in units of that with 32 bits, in the same rounds.
    """
    columns = list(dict.fromkeys(name for row in rows for name in row.allocated))
    ratios = [f"{name} time" for name in SMALL]
    lines = [["optimizer", "workload", "clip", *columns, *ratios]]
    for row in rows:
        each = [row.allocated.get(name) for name in columns]
        cells = ["-" if n is None else f"{n / row.elements:.2f}" for n in each]
        shares = [_share(row, name) for name in SMALL]
        cells += ["-" if x is None else f"{x:.2f}" for x in shares]
        lines.append([row.optimizer, row.workload, "yes" if row.clip else "no", *cells])
    return as_columns(lines, left=(0, 1, 2))


def _share(row: BenchRow, name: str) -> float | None:
    """The median time of a contender in units of ampopt's."""
    inverse = row.ratio_to(name)
    return None if inverse is None else 1 / inverse


def _milliseconds(median: float, spread: float) -> str:
    """A time and its spread in milliseconds, as text."""
    digits = 3 if median < 0.01 else 2
    return f"{median * 1e3:.{digits}f} ±{spread * 1e3:.{digits}f}"


def as_columns(lines: list[list[str]], left: tuple[int, ...]) -> str:
    """``lines`` of cells as text in columns; those numbered in ``left`` are flush left."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
