"""The matrix in the guides is what runs now, and its cells detect wrong optimizers."""

import re
from typing import Any

import pytest
import torch
from support.readme import ROOT

import ampopt
from evidence.matrix.cells import CELLS
from evidence.matrix.page import optimizers, page, verdict

COMMITTED = ROOT / "examples" / "guides" / "matrix.md"
RUN_AGAIN = f"run python -m evidence.matrix {COMMITTED.relative_to(ROOT)}"


@pytest.fixture(autouse=True, scope="module")
def eager():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ampopt.backend._chosen", "eager")
        yield


def table(text: str) -> dict[str, str]:
    """The cells of each optimizer, without the numbers of footnotes."""
    rows = [line.split(" | ", 1) for line in text.splitlines() if line.startswith("| `")]
    return {
        name: re.sub(r" \(\d+\)", "", cells)
        for names, cells in rows
        for name in re.findall(r"`(\w+)`", names)
    }


def test_the_committed_page_is_what_runs_now():
    committed, now = COMMITTED.read_text(encoding="utf-8"), page(optimizers())
    assert table(now) == table(committed), RUN_AGAIN
    if re.findall("torch [0-9.]+", now) == re.findall("torch [0-9.]+", committed):
        assert now == committed, RUN_AGAIN  # other versions of torch refuse in other words


def test_it_has_every_optimizer():
    of_torch = {
        name
        for name, cls in vars(torch.optim).items()
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)
    } - {"Optimizer"}
    assert {cls.__name__ for cls in optimizers()} >= of_torch


def deaf(base: Any) -> Any:
    """A wrong subclass of ``base``: it never skips, and loads no state."""

    def unscale_and_step(self: Any, closure: Any = None, scale: Any = None, **options: Any) -> Any:
        scale = options.get("grads_scaled_by", scale)
        loss = None if closure is None else closure(scale)
        self.step()
        return ampopt.StepResult(loss, torch.zeros(()), scale)

    changed = {"unscale_and_step": unscale_and_step, "load_state_dict": lambda self, state: None}
    return type(base.__name__, (base,), changed)


# Compiled or not, it does the same; and what it saves is right.
@pytest.mark.parametrize("column", sorted(CELLS.keys() - {"compile", "to torch", "accumulate"}))
def test_a_wrong_optimizer_fails_its_cell(column):
    with pytest.raises(AssertionError):
        verdict(deaf(ampopt.AdamW if column == "from torch" else ampopt.SGD), column)


def test_a_refusal_is_shown_with_its_message():
    class Refusing(ampopt.SGD):
        def unscale_and_step(self, *args: Any, **options: Any) -> Any:
            raise ValueError("not today: it is Sunday; come tomorrow. Or later")

    assert verdict(Refusing, "DDP") == "refused: not today: it is Sunday"
    assert verdict(type("Unheard", (ampopt.SGD,), {}), "to torch") == (
        "not run here: torch has no optimizer of that name"
    )
    with pytest.raises(AssertionError, match="^SGD, float16 parameters: "):
        page([deaf(ampopt.SGD)])
