"""The survey of other packages' optimizers reports what the contract finds."""

import sys
import types
from typing import Any

import pytest
import torch

from ampopt.testing import survey as surveys
from ampopt.testing.survey import Finding, found_in, plot, survey, table

FEW = (
    "test_split_is_joined",
    "test_a_learning_rate_of_zero_moves_nothing",
    "test_sparse_gradients",
)


class Restless(torch.optim.SGD):
    """Changes parameters whatever the learning rate is."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(1.0)
        return loss


class Inquisitive(torch.optim.SGD):
    def __init__(self, params: Any, temperature: float) -> None:
        super().__init__(params)


class RestlessInFloat64(Restless):
    """Changes float64 parameters whatever the learning rate is; the contract draws some."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        params = [p for group in self.param_groups for p in group["params"]]
        if any(p.dtype == torch.float64 for p in params):
            return super().step(closure)
        return torch.optim.SGD.step(self, closure)


def test_what_a_contract_finds_with_its_default_claims_is_found():
    moves = ("test_a_learning_rate_of_zero_moves_nothing",)
    (finding,) = survey([RestlessInFloat64], examples=10, invariants=moves)
    assert list(finding.verdicts.values()) == ["✘"]


@pytest.fixture(scope="module")
def findings():
    return list(survey([torch.optim.Adagrad, Restless, Inquisitive], examples=2, invariants=FEW))


def test_the_survey_tells_kept_broken_and_not_tested_invariants(findings):
    kept, broken, refused = findings
    assert kept.name == "torch.Adagrad"
    names = [name.removeprefix("test_") for name in FEW]
    assert kept.verdicts == dict(zip(names, "✔✔-", strict=True))
    assert broken.verdicts == dict(zip(names, "✔✘-", strict=True))
    assert list(broken.why) == ["a_learning_rate_of_zero_moves_nothing"]
    assert refused.refused == "its constructor asks for temperature" and not refused.verdicts


def test_all_invariants_are_tested_unless_some_are_named():
    (finding,) = survey([torch.optim.SGD], examples=1)
    assert len(finding.verdicts) > 40
    assert "✘" not in finding.verdicts.values(), finding.why


def test_the_table_and_the_picture(findings, tmp_path):
    rows = table(findings).splitlines()
    assert rows[2] == "| torch.Adagrad | 2 of 2 |  |"
    assert rows[3].startswith(f"| {__name__.partition('.')[0]}.Restless | 1 of 2 | `a_learning_")
    assert rows[4].endswith("| not tried: its constructor asks for temperature | |")
    assert table([Finding("a.B", refused="x | y")]).endswith("| not tried: x \\| y | |\n")
    pytest.importorskip("matplotlib")
    plot(findings, str(tmp_path / "picture.png"))
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_the_optimizers_of_a_package_are_found(monkeypatch):
    assert torch.optim.AdamW in found_in("torch.optim")
    assert torch.optim.Optimizer not in found_in("torch.optim")
    assert found_in("no_such_package") == []


def test_the_command(monkeypatch, tmp_path, capsys):
    package = types.ModuleType("a_package")
    package.Adagrad, package.number = torch.optim.Adagrad, 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_package", package)
    monkeypatch.setattr(surveys.survey, "__kwdefaults__", {"examples": 1, "invariants": FEW[:1]})
    output = tmp_path / "table.md"
    surveys.main(["--package", "a_package", "--examples", "1", "--output", str(output)])
    assert capsys.readouterr().out == "torch.Adagrad 0 broken\n"
    assert "| torch.Adagrad | 1 of 1 |" in output.read_text(encoding="utf-8")
    for wrong in (["--examples", "0"], ["--package", "no_such_package"]):
        with pytest.raises(SystemExit):
            surveys.main(wrong)
