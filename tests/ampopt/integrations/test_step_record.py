"""``StepRecord``, without any framework; ``tests/frameworks`` has the callbacks that log it."""

import importlib
import os
import sys
from typing import Any

import pytest
import torch
from support.preloaded import python_path

import ampopt
from ampopt.integrations import StepRecord
from ampopt.testing import as_on_a_device, assert_no_sync

INF = float("inf")


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(3))


def stepped(optimizer: Any, param: Any, *factors: float, **options: Any) -> None:
    for factor in factors:
        param.grad = torch.ones(3) * factor
        optimizer.unscale_and_step(grads_scaled_by=1.0, **options)


def test_steps_and_skips_are_counted():
    param = parameter()
    optimizer = ampopt.AdamW([param])
    record = StepRecord(optimizer)
    assert record.read() == {"steps": 0}
    stepped(optimizer, param, 1.0, INF, 1.0, INF)
    assert record.read() == {"skipped": 1, "skips": 2, "steps": 4}
    before = record.numbers()
    param.grad = torch.ones(3)
    optimizer.step()
    assert record.read() == {"skipped": 0, "skips": 2, "steps": 5}
    stepped(optimizer, param, INF)
    assert float(before["skips"]) == 2  # what was read does not change afterwards
    record.remove()
    stepped(optimizer, param, INF)
    assert record.read()["steps"] == 6


def test_a_record_that_loads_counts_forgets_its_own():
    param = parameter()
    optimizer = ampopt.AdamW([param])
    record = StepRecord(optimizer)
    states = [record.state_dict()]
    stepped(optimizer, param, INF)
    states.append(record.state_dict())
    stepped(optimizer, param, INF, max_norm=1.0)
    record.load_state_dict(states[1])
    assert record.read() == {"skips": 1, "steps": 1}
    record.load_state_dict(states[0])
    assert record.read() == {"steps": 0}


def test_a_step_without_a_flag_leaves_the_counts_on_the_device():
    """A meta tensor has no numbers, so that a copy to the CPU, which waits, raises an error."""

    class Idle(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return None

    optimizer = Idle([parameter()])
    record = StepRecord(optimizer)
    optimizer.found_inf = torch.ones((), device="meta")  # pyright: ignore  # as a scaler does
    optimizer.step()
    del optimizer.found_inf  # pyright: ignore
    optimizer.step()
    numbers: Any = record.numbers()
    assert numbers["steps"] == 2
    assert numbers["skips"].is_meta and numbers["skipped"].is_meta


def test_a_step_within_the_step_of_a_subclass_is_not_counted():
    class Derived(ampopt.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    ampopt.SGD([parameter()])  # torch puts hooks around the step of a class that has instances
    param = parameter()
    optimizer = Derived([param], lr=0.1)
    record = StepRecord(optimizer)
    stepped(optimizer, param, 1.0, INF)
    optimizer.step()
    assert record.read() == {"skipped": 0, "skips": 1, "steps": 3}


def test_the_norm_is_that_of_the_optimizer():
    param = parameter()
    optimizer = ampopt.SGD([param], lr=0.1)
    record = StepRecord(optimizer)
    stepped(optimizer, param, 2.0, max_norm=1.0)
    assert record.read()["norm"] == pytest.approx(12**0.5)


@pytest.mark.parametrize("scaler_class", [ampopt.GradScaler, torch.amp.GradScaler])
def test_the_scale_is_that_of_the_scaler(scaler_class):
    param = parameter()
    optimizer = ampopt.SGD([param], lr=0.1)
    scaler = scaler_class("cpu", init_scale=8.0)
    record = StepRecord(optimizer, scaler)
    for factor in (1.0, INF):
        optimizer.zero_grad()
        scaler.scale((param * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert record.read() == {"scale": 4, "skipped": 1, "skips": 1, "steps": 2}


def test_an_optimizer_of_torch_has_no_flag():
    param = parameter()
    optimizer = torch.optim.SGD([param])
    record = StepRecord(optimizer)
    param.grad = torch.ones(3)
    optimizer.step()
    assert record.read() == {"skipped": 0, "skips": 0, "steps": 1}


@pytest.mark.parametrize("cls", [ampopt.AdamW, torch.optim.AdamW])
def test_a_step_of_torchs_scaler_without_gradients_is_counted(cls):
    optimizer = cls([parameter()], fused=True)
    record = StepRecord(optimizer)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    assert record.read() == {"skipped": 0, "skips": 0, "steps": 1}


def test_nothing_waits_until_it_is_read():
    with as_on_a_device():
        param = parameter()
        optimizer = ampopt.AdamW([param])
        record = StepRecord(optimizer, ampopt.GradScaler("cpu"))
        with assert_no_sync():
            stepped(optimizer, param, 1.0, INF, max_norm=1.0)
            numbers = record.numbers()
    assert set(numbers) == {"steps", "skips", "skipped", "norm", "scale"}


def test_the_numbers_of_a_watched_optimizer_are_those_that_its_watch_logs():
    param = parameter()
    optimizer = ampopt.AdamW([param])
    watch, told = ampopt.Watch(optimizer), []
    watch.log_to(told.append)
    record = StepRecord(optimizer, ampopt.GradScaler("cpu"))
    stepped(optimizer, param, 2.0, INF, INF)
    numbers = record.read()
    assert numbers == {"steps": told[-1].pop("step"), **told[-1]}
    assert (numbers["skips_in_a_row"], numbers["scale"], numbers["norm"]) == (2, 1.0, INF)
    record.remove()
    stepped(optimizer, param, 1.0)
    assert record.read() == numbers
    assert told[-1]["step"] == 4


@pytest.mark.parametrize("before", [False, True], ids=["", "watched before"])
@pytest.mark.parametrize("after", [False, True], ids=["", "watched after"])
def test_counts_are_continued_with_a_watch_and_without(before, after):
    states: Any = []
    for is_watched in (before, after):
        param = parameter()
        optimizer = ampopt.AdamW([param])
        watch = ampopt.Watch(optimizer) if is_watched else None
        record = StepRecord(optimizer)
        for state in [record.state_dict(), *states]:
            record.load_state_dict(state)
        stepped(optimizer, param, 1.0, INF)
        states.append(record.state_dict())
    numbers = record.read()
    assert (numbers["steps"], numbers["skips"]) == (4, 2)
    if watch is not None:
        assert watch.read()["steps"] == (4 if before else 2)


def test_no_framework_is_imported_unasked(with_torch):
    """Also torch's compiler is not imported: that would take longer than all other imports."""
    code = """
import sys, ampopt.integrations
assert not {"lightning", "accelerate", "transformers", "torch._dynamo"} & set(sys.modules)
"""
    done = with_torch.run("-c", code, environment={**os.environ, "PYTHONPATH": python_path()})
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["lightning", "accelerate", "transformers"])
def test_a_missing_framework_is_named(name, monkeypatch):
    for module in {name, *(m for m in sys.modules if m.startswith(f"{name}."))}:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, f"ampopt.integrations.{name}", raising=False)
    with pytest.raises(ImportError, match=f"ampopt.integrations.{name} needs .*pip install {name}"):
        importlib.import_module(f"ampopt.integrations.{name}")
