"""The kit from outside this repository, and its helpers."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import hypothesis
import pytest
import torch
from support import torch_options
from torch.nn import Parameter

import ampopt
from ampopt.testing import assert_bitwise_unchanged, inject_overflow
from ampopt.testing.saving import loaded, written

ROOT = Path(__file__).parents[3]
THEIRS = """
import hypothesis, torch, ampopt
from ampopt.testing import OptimizerContract

hypothesis.settings.register_profile("theirs", max_examples=2, database=None)
hypothesis.settings.load_profile("theirs")

class Stays(ampopt.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    def step(self, closure=None):
        return None if closure is None else closure()

class TestStays(OptimizerContract):
    closures = False

    def make(self, params):
        return Stays(params)

class TestNotOurs(OptimizerContract):
    def make(self, params):
        return torch.optim.SGD(params)
"""


def outside(folder, *arguments):
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_a_strangers_file_is_tested_and_reported(tmp_path):
    (tmp_path / "test_theirs.py").write_text(THEIRS, encoding="utf-8")
    options = ["-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-k"]
    done = outside(tmp_path, *options, "TestStays or no_scale_is_step")
    assert "not claimed: closures" in done.stdout
    assert "not claimed: complex_parameters" in done.stdout
    assert "make must return an ampopt.Optimizer, got SGD" in done.stdout
    assert "TestNotOurs().replay(" in done.stdout
    assert "1 failed" in done.stdout, done.stdout


def test_what_is_missing_is_named_and_only_asked_for_by_the_kit(tmp_path):
    code = "import sys; sys.modules['hypothesis'] = None; import ampopt; import ampopt.testing"
    done = outside(tmp_path, "-c", code)
    assert "ImportError: ampopt.testing needs hypothesis and pytest" in done.stderr
    assert "ampopt[testing]" in done.stderr


@pytest.mark.parametrize("where", [1, (1, 2), (-1, -1)])
def test_overflows_come_where_and_when_they_are_asked_for(where):
    params = [Parameter(torch.ones(2)), Parameter(torch.ones(1, 3))]
    bad = []
    with inject_overflow(params, where, at=[1]):
        for _ in range(3):
            for p in params:
                p.grad = None
            torch.cat([p.reshape(-1) for p in params]).sum().backward()
            bad.append([p.grad is not None and p.grad.isinf().sum().item() for p in params])
    assert bad == [[0, 0], [0, 1], [0, 0]]


@pytest.mark.parametrize(("where", "value"), [(2, float("inf")), ((0, 2), float("nan")), (0, 1.0)])
def test_an_overflow_that_cannot_be_is_refused(where, value):
    with pytest.raises(ValueError), inject_overflow([Parameter(torch.ones(2))], where, value=value):
        pass


def test_a_change_is_named():
    param = Parameter(torch.ones(2))
    optimizer = ampopt.SGD([param], lr=0.5)
    param.grad = torch.ones(2)
    with pytest.raises(AssertionError, match=r"\['parameters'\]\[0\]"):
        with assert_bitwise_unchanged(optimizer):
            optimizer.step()


def test_as_many_examples_are_drawn_as_the_profile_says():
    """Whatever else is imported: ``torch_options`` imports what loads a profile of torch's."""
    assert torch_options.OPTION_SETS
    asked = hypothesis.settings.get_profile(os.environ.get("AMPOPT_HYPOTHESIS_PROFILE", "default"))
    assert hypothesis.settings().max_examples == asked.max_examples
    assert hypothesis.settings().deadline == asked.deadline


def test_what_torch_warns_of_in_checkpoints_is_no_fault_of_the_optimizer(monkeypatch):
    """Of sparse tensors, as torch 2.15 does, whatever its user makes of warnings."""
    load = torch.load

    def warning(*args, **kwargs):
        warnings.warn("Validating sparse tensor invariants because weights_only=True", stacklevel=2)
        return load(*args, **kwargs)

    monkeypatch.setattr(torch, "load", warning)
    sparse = torch.eye(2).to_sparse()
    assert loaded(written([sparse]))[0].to_dense().equal(torch.eye(2))
