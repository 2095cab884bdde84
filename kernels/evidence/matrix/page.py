"""The table of the matrix, and the page around it."""

import warnings
from collections.abc import Iterable
from typing import Any

import torch

from ampopt import optim
from evidence.matrix.cells import CELLS, NotRunHere

__all__ = ["optimizers", "page", "verdict"]

_ABOUT = """\
# What works with what

`python -m evidence.matrix examples/guides/matrix.md` wrote this page with torch {torch}. Each cell
was run: a model of one 4 by 4 weight (96 by 96 for small states) trains on the CPU, with an
overflow in between, and the result is checked. The tests run every cell again. ✔ means that it
works; a number refers to the error message, or to what is missing, below the table. Optimizers with
the same cells share a row.

- **float16 parameters**, **bfloat16 parameters**: no master weights, so ✔ means that the step runs,
  although it loses small updates. **master weights**: float16 with `master_weights=True`. An
  overflowed step changes nothing, bit for bit.
- **8-bit states**: `state_bits=8`; **24-bit masters**: bfloat16 with `master_weights=True`,
  `master_bits=24` and `state_bits=8`.
- **clipping**: `max_norm=`. **closure**: run again with a lower scale when it overflows.
  **accumulate**: two calls, each with its own scale.
- **graph**: `TrainStep(cuda_graph=True)`, run on a CPU. The test checks that the step reads no
  tensor on the host, because a capture requires that. **compile**: the step under `torch.compile`.
- **DDP**, **FSDP2**, **TP**: in a process group of one rank; the tests in `tests/` use more.
- **from torch**, **to torch**: a state dict saved in the middle of training is loaded into ampopt's
  optimizer from torch's of that name, or the other way round, and training continues.

"""


def optimizers() -> list[type[Any]]:
    """All optimizers of ampopt, in alphabetical order."""
    return [getattr(optim, name) for name in sorted(optim.__all__, key=str.lower)]


def verdict(cls: type[Any], column: str) -> str:
    """Run one cell; return ``"✔"``, ``"refused: why"`` or ``"not run here: why"``.

    The name of the class is cut out of the reason, so that optimizers with the same reason share a
    note.

    Raises:
        AssertionError: the optimizer gives a wrong result.
    """
    try:
        # Warnings are ignored: they do not mean that a setting does not work.
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
    """Run all cells of the optimizers, and return the page as Markdown.

    Raises:
        AssertionError: an optimizer gives a wrong result; the message names the cell.
    """
    reasons: dict[str, int] = {}
    names: dict[tuple[str, ...], list[str]] = {}  # of the optimizers with these cells
    for cls in classes:
        cells = []
        for column in CELLS:
            try:
                text = verdict(cls, column)
            except AssertionError as error:
                raise AssertionError(f"{cls.__name__}, {column}: {error}") from error
            kind, _, why = text.partition(": ")
            number = f" ({reasons.setdefault(why, len(reasons) + 1)})" if why else ""
            cells.append(kind + number)
        names.setdefault(tuple(cells), []).append(f"`{cls.__name__}`")
    lines = [["", *CELLS], ["---", *("---" for _ in CELLS)]]
    lines += [[", ".join(alike), *cells] for cells, alike in names.items()]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    notes = "\n".join(f"{number}. {why}" for why, number in reasons.items())
    version = ".".join(torch.__version__.split(".")[:2])
    return f"{_ABOUT.format(torch=version)}{table}\n\n{notes}\n"


def _first_sentence(error: Exception) -> str:
    """The first sentence of the message of ``error``, without its full stop."""
    line = str(error).strip().partition("\n")[0]
    return line.partition("; ")[0].partition(". ")[0].rstrip(".:")
