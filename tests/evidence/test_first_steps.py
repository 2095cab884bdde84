"""First steps are counted where nothing is compiled, and where all is."""

import pytest
import torch

import ampopt
from evidence import first_steps


@pytest.fixture(autouse=True)
def eager():
    ampopt.set_backend("eager")


def test_first_steps_are_counted_where_nothing_is_compiled_and_where_all_is(monkeypatch, capsys):
    """Each in a new process: without a cache, with an empty one, and with a full one."""
    asked, kept = [], []

    def process(given, cache):
        asked.append((given["backend"], given.get("steps", first_steps.STEPS)))
        kept.append(cache)
        return {"for-loop": 0.002, "foreach": 0.004, "ampopt": 0.006 / len(asked)}

    monkeypatch.setattr(first_steps, "_in_a_process", process)
    monkeypatch.setattr(first_steps, "cpp_compiler", lambda: "g++")
    first_steps.main(["--optimizer", "SGD", "--workload", "small"])
    assert asked == [("auto", 20), ("compiled", 1), ("auto", 20)]
    assert len(set(kept)) == 1
    row = capsys.readouterr().out.splitlines()[-1]
    assert row.split() == ["SGD", "small", "2.0", "4.0", "6.0", "2.0", "3.00", "1.00"]


def test_each_contender_takes_its_first_steps():
    threads = torch.get_num_threads()
    asked = {"optimizer": "SGD", "shapes": [[2], []], "dtype": "float32", "threads": threads}
    found = first_steps.times(**asked, backend="eager", steps=2)
    assert list(found) == ["for-loop", "foreach", "ampopt"]
    assert all(seconds > 0 for seconds in found.values())


def test_first_steps_of_a_machine_that_compiles_nothing_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(first_steps, "cpp_compiler", lambda: None)
    with pytest.raises(SystemExit):
        first_steps.main([])
    assert "C++ compiler" in capsys.readouterr().err
