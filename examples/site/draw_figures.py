"""Draw the bars of README.md from the tables of kernels/RESULTS.md.

    python examples/site/draw_figures.py

Run it again when the tables change: a test compares them with what is written into the picture.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "kernels" / "RESULTS.md"
PICTURE = ROOT / "examples" / "step_times.png"

BARS = (
    ("H200: AdamW, 10$^9$ elements", "10^9 elements in 16 tensors", 0),
    ("the same, with clipping", "10^9 elements in 16 tensors", 1),
    ("CPU: AdamW, 16 Mi elements", "16 Mi elements in 8 tensors", 0),
    ("CPU: AdamW, 300 tensors of 64", "300 tensors of 64 elements", 0),
)
"""What a bar is called, the table that it is from, and whether it is of a clipped step."""


def figures() -> list[tuple[str, str, float, float]]:
    """Name of each bar, torch's best implementation, and milliseconds of it and of ampopt."""
    text, read = RESULTS.read_text(encoding="utf-8"), []
    for name, heading, clipped in BARS:
        section = text.split(f"### {heading}\n")[1].split("\n#")[0]
        (row,) = re.findall(r"^\| AdamW \|.*$", section, re.MULTILINE)
        cells = [cell.strip() for cell in row.strip("| ").split("|")][1:]
        best = [at for at, cell in enumerate(cells) if not re.fullmatch(r"[\d.]+", cell)][clipped]
        read.append((name, cells[best], float(cells[best + 1]), float(cells[best + 2])))
    return read


def main() -> None:
    """Draw; a bar's length is its time divided by torch's."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axes = figure.subplots()
    names, bests, torchs, ours = zip(*figures(), strict=True)
    y = range(len(names))
    ratios = [own / other for own, other in zip(ours, torchs, strict=True)]
    theirs = axes.barh([at - 0.19 for at in y], [1] * len(names), 0.36, color="#9a9a9a")
    bars = axes.barh([at + 0.19 for at in y], ratios, 0.36, color="#0072B2")
    names_of_theirs = [f"torch {best} {ms:g} ms" for best, ms in zip(bests, torchs, strict=True)]
    axes.bar_label(theirs, names_of_theirs, padding=4)
    axes.bar_label(bars, [f"ampopt {ms:g} ms" for ms in ours], padding=4)
    axes.set_yticks(y, names)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.35)
    axes.set_xticks([])
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    figure.savefig(PICTURE, dpi=110, metadata={"Description": str(figures()), "Software": None})


if __name__ == "__main__":
    main()
