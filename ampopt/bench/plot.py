"""The table as a picture; the only module of the benchmark that needs matplotlib."""

from collections.abc import Sequence

from ampopt.bench.rows import BenchRow

__all__ = ["plot"]


def plot(rows: Sequence[BenchRow], path: str) -> None:
    """Draw a panel for each workload, with each contender's time relative to torch's best."""
    from matplotlib.figure import Figure  # which, unlike pyplot, needs no display

    names = list(dict.fromkeys(row.workload for row in rows))
    height = 1.5 + 0.45 * max(sum(row.workload == name for row in rows) for name in names)
    figure = Figure(figsize=(5 * len(names), height), layout="constrained")
    panels = figure.subplots(1, len(names), squeeze=False)
    columns = list(dict.fromkeys(column for row in rows for column in row.times))
    for panel, name in zip(panels[0], names, strict=True):
        panel_rows = [row for row in rows if row.workload == name]
        thickness = 0.8 / max(1, len(columns))
        for i, column in enumerate(columns):
            there = [(y, row) for y, row in enumerate(panel_rows) if column in row.times]
            panel.barh(
                [y + i * thickness for y, _ in there],
                [row.times[column].median / _unit(row) for _, row in there],
                height=thickness,
                label=column,
            )
        labels = [f"{row.optimizer}{', clipped' if row.clip else ''}" for row in panel_rows]
        panel.set_yticks([y + 0.4 - thickness / 2 for y in range(len(panel_rows))], labels)
        panel.invert_yaxis()
        panel.axvline(1.0, color="black", linewidth=0.8)
        panel.set_title(name)
        panel.set_xlabel("time, torch's best = 1")
    panels[0][0].legend(fontsize="small")
    figure.savefig(path, dpi=150)


def _unit(row: BenchRow) -> float:
    """The time that counts as 1 in a row: that of torch's best, else of the fastest contender."""
    best = row.times.get(row.best or "ampopt")
    return min(t.median for t in row.times.values()) if best is None else best.median
