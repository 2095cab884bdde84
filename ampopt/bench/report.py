"""The results as tables for people, and as JSON."""

import datetime
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import ampopt
from ampopt.bench.contenders import AMPOPT, FLOAT32, SMALL
from ampopt.bench.rows import BenchRow
from ampopt.environment import cpu_model, triton_version

__all__ = ["as_columns", "costs", "environment", "memory", "table", "write_json"]


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
        "triton": triton_version(),
        "ampopt": ampopt.__version__,
        "backend": ampopt.get_backend(),
    }
    if device.type == "cuda":
        conditions["gpu"] = torch.cuda.get_device_name(device)
        conditions["cuda"] = torch.version.cuda
    return conditions


def write_json(path: str | os.PathLike[str] | None, figures: dict[str, Any]) -> None:
    """Write figures to a file, if ``path`` is given: times in seconds, bandwidths in bytes/s."""
    if path is not None:
        Path(path).write_text(json.dumps(figures, indent=1) + "\n")


def table(rows: Sequence[BenchRow]) -> str:
    """Table of milliseconds per step: median, and half of the interquartile range.

    The columns after the contenders are ratios: ampopt's time to torch's best, by medians and by
    fastest rounds, which a busy machine disturbs less, and to the floor; and of master weights, by
    fastest rounds, to ampopt's step of float32 parameters.
    """
    columns = list(dict.fromkeys(name for row in rows for name in (*row.times, *row.missing)))
    has_masters = FLOAT32 in columns
    ratios = ["/best", "fastest", "/floor", *["/float32"] * has_masters]
    lines = [[*_WHICH, *columns, *ratios]]
    for row in rows:
        times = [row.times.get(name) for name in columns]
        shares = [row.ratio, row.ratio_of_least, row.to_floor]
        shares += [row.ratio_to_float32] * has_masters
        cells = ["-" if t is None else _milliseconds(t.median, t.iqr / 2) for t in times]
        lines.append([*_which(row), *cells, *map(_share, shares)])
    return as_columns(lines, left=(0, 1, 2))


def costs(rows: Sequence[BenchRow]) -> str:
    """Table of what each step costs besides time; the counts exist only on a GPU."""
    head = ["contender", "GB/s", "of copy", "host us", "launches", "syncs", "extra MB"]
    lines = [[*_WHICH, *head]]
    for row in rows:
        for name, times in row.times.items():
            cells = ["-"] * 3
            if cost := row.costs.get(name):
                cells = [str(cost.launches), str(cost.synchronizations)]
                cells.append(f"{cost.extra_bytes / 1e6:.1f}")
            speed, share = "-", None
            if name == AMPOPT:  # the bytes are counted from ampopt's rule
                speed = f"{row.bytes / times.median / 1e9:.1f}"
                share = row.to_floor and 1 / row.to_floor
            host = f"{times.host * 1e6:.0f}"
            lines.append([*_which(row), name, speed, _share(share), host, *cells])
    return as_columns(lines, left=(0, 1, 2, 3))


def memory(rows: Sequence[BenchRow]) -> str:
    """Table of the bytes allocated for each element of a parameter, with each contender.

    With small states also their time in units of that with 32 bits, in the same rounds.
    """
    columns = list(dict.fromkeys(name for row in rows for name in row.allocated))
    lines = [[*_WHICH, *columns, *(f"{name} time" for name in SMALL)]]
    for row in rows:
        each = [row.allocated.get(name) for name in columns]
        shares = [n and n / row.elements for n in each]
        shares += [ratio and 1 / ratio for ratio in map(row.ratio_to, SMALL)]
        lines.append([*_which(row), *map(_share, shares)])
    return as_columns(lines, left=(0, 1, 2))


_WHICH = ("optimizer", "workload", "clip")
"""The first columns of each table, which :func:`_which` fills."""


def _which(row: BenchRow) -> tuple[str, str, str]:
    """The cells that tell ``row`` from others."""
    return row.optimizer, row.workload, "yes" if row.clip else "no"


def _share(share: float | None) -> str:
    """A ratio as text."""
    return "-" if share is None else f"{share:.2f}"


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
