"""A plot of the statistics of a watch."""

from typing import Any

from ampopt.watching.report import worst_first

__all__ = ["draw"]

SHOWN = 30
"""The largest number of parameters in the plot."""


def draw(numbers: dict[str, Any], path: Any) -> None:
    """Plot scale, norm, loss and skips over the steps, and below them a heat map of the parameters.

    Args:
        numbers: the result of :meth:`ampopt.Watch.read`.
        path: the file to write.

    Raises:
        ImportError: matplotlib cannot be imported.
    """
    try:
        from matplotlib.figure import Figure  # which, unlike pyplot, needs no display
    except ImportError as error:
        raise ImportError(
            "watch.plot() draws with matplotlib, which cannot be imported here: pip install "
            "matplotlib, or print(watch) for a table"
        ) from error
    worst = worst_first(numbers)[:SHOWN]
    figure = Figure(figsize=(9, 4.5 + 0.22 * len(worst)), layout="constrained")
    over_steps, of_layers = figure.subplots(2, 1, height_ratios=[4, 1 + 0.22 * len(worst)])
    _draw_steps(over_steps, numbers["recent"])
    _draw_parameters(of_layers, worst)
    figure.savefig(path)


def _draw_steps(axes: Any, recent: list[dict[str, Any]]) -> None:
    """Draw scale, norm and loss of the last steps, and a red line at each skipped one."""
    for name, color in (("scale", "tab:blue"), ("norm", "tab:gray"), ("loss", "tab:green")):
        points = [(step["step"], step[name]) for step in recent if step[name] is not None]
        if points:
            axes.step(*zip(*points, strict=True), where="mid", label=name, color=color)
    axes.set_yscale("log", base=2)
    skipped_steps = [step["step"] for step in recent if step["skipped"]]
    for at in skipped_steps:
        axes.axvline(at, color="tab:red", linewidth=0.8, alpha=0.6)
    axes.set_title(f"{len(skipped_steps)} of the last {len(recent)} steps skipped (red)")
    axes.set_xlabel("step")
    if axes.get_legend_handles_labels()[0]:
        axes.legend()


def _draw_parameters(axes: Any, worst: list[tuple[str, dict[str, Any]]]) -> None:
    """Draw a row for each of the worst parameters, a column for each statistic."""
    columns = ("overflows", "largest", "underflow")
    values = [[stats[column] for column in columns] for _, stats in worst]
    tops = [max([row[i] for row in values], default=0) or 1 for i in range(len(columns))]
    shares = [[value / top for value, top in zip(row, tops, strict=True)] for row in values]
    if values:
        axes.imshow(shares, aspect="auto", cmap="OrRd", vmin=0, vmax=1)
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            text = f"{value:.1%}" if columns[x] == "underflow" else f"{value:.3g}"
            color = "white" if shares[y][x] > 0.6 else "black"
            axes.text(x, y, text, ha="center", va="center", fontsize=8, color=color)
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(worst)), [name for name, _ in worst], fontsize=8)
