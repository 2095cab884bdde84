"""The table, and the page around it."""

import warnings
from collections.abc import Iterable
from typing import Any

import torch

from ampopt import optim
from ampopt.matrix.cells import CELLS, NotRunHere

__all__ = ["optimizers", "page", "verdict"]

_ABOUT = """\
# What works with what

For those who ask whether an optimizer does what they need.

`python -m ampopt.matrix examples/guides/matrix.md` has written this page, with torch {torch}, by
running each cell: a model of one weight of four by four, on the CPU, with an overflow in between,
compared with what should come of it. The tests run them again. ✔ means that it does it; a number
leads to what it refuses with, or to what is missing.

- **float16 parameters**, **bfloat16 parameters**: without master weights; **master weights**:
  float16 with `master_weights=True`. An overflowed step leaves no trace, bit for bit.
- **clipping**: `max_norm=`. **closure**: run again where it overflows. **accumulate**: two calls
  with scales of their own.
- **graph**: `TrainStep(cuda_graph=True)`, by a stand-in for the graph: a step in which the host
  looks at nothing, as capturing asks. **compile**: the step under `torch.compile`.
- **DDP**, **FSDP2**, **TP**: in a group of one rank; the tests of each have more.
- **from torch**, **to torch**: a state dict of `torch.optim`'s optimizer of that name, in the
  middle of training, is gone on from, and the other way round.

"""


def optimizers() -> list[type[Any]]:
    """All that ampopt has, in alphabetical order."""
    return [getattr(optim, name) for name in sorted(optim.__all__, key=str.lower)]


def verdict(cls: type[Any], column: str) -> str:
    """What the cell says: ``"✔"``, ``"refused: why"``, or ``"not run here: why"``.

    Without the name of the class, so that what many refuse alike reads alike.

    Raises:
        AssertionError: the optimizer does something else than it should.
    """
    try:
        # Of torch and of ours, which say what to look out for, and not that it does not work.
        with torch.random.fork_rng(devices=()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            CELLS[column](cls)
    except NotRunHere as why:
        return f"not run here: {why}"
    except AssertionError:
        raise
    except Exception as error:
        return f"refused: {_first_sentence(error).replace(cls.__name__, '…')}"
    return "✔"


def page(classes: Iterable[type[Any]]) -> str:
    """Run all cells of these optimizers, and write the page.

    Raises:
        AssertionError: an optimizer does something else than it should; a note names the cell.
    """
    reasons: dict[str, int] = {}
    lines = [["", *CELLS], ["---", *("---" for _ in CELLS)]]
    for cls in classes:
        lines.append([f"`{cls.__name__}`"])
        for column in CELLS:
            try:
                said = verdict(cls, column)
            except AssertionError as error:
                raise AssertionError(f"{cls.__name__}, {column}: {error}") from error
            kind, _, why = said.partition(": ")
            number = f" ({reasons.setdefault(why, len(reasons) + 1)})" if why else ""
            lines[-1].append(kind + number)
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    notes = "\n".join(f"{number}. {why}" for why, number in reasons.items())
    version = ".".join(torch.__version__.split(".")[:2])
    return f"{_ABOUT.format(torch=version)}{table}\n\n{notes}\n"


def _first_sentence(error: Exception) -> str:
    line = str(error).strip().partition("\n")[0]
    return line.partition("; ")[0].partition(". ")[0].rstrip(".:")
