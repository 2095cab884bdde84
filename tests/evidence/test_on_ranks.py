"""Ranks take the same rounds of the same steps, and their errors and doubts are shown."""

import json
from dataclasses import replace
from unittest import mock

import pytest
import torch

import ampopt
from ampopt.bench import contenders, measure, workloads
from evidence import on_ranks


@pytest.fixture(autouse=True)
def eager():
    ampopt.set_backend("eager")


def seen_on_ranks(rounds=5, waited=0.0):
    """The result that the first rank returns for a row."""
    times = measure.Times([1e-3] * rounds, [1e-3])
    there = {name: times for name in ("foreach", "ampopt")}
    return {"times": there, "missing": {"fused": "not here"}, "waited": waited}


def test_ranks_step_sharded_matrices_unless_asked_for_others(monkeypatch, capsys):
    asked = []

    def times(processes, given):
        asked.append((processes.ranks, given["workload"].shapes[0], given["backend"]))
        return [seen_on_ranks(), seen_on_ranks()]

    monkeypatch.setattr(on_ranks.Processes, "times", times)
    options = ("--optimizer", "SGD", "--seconds", "60")
    on_ranks.main(["2", *options])
    on_ranks.main(["3", *options, "--elements", "32"])
    assert asked == [(2, (64, 64), "eager"), (2, (512, 512), "eager"), (3, (2,), "eager")]
    printed = capsys.readouterr().out
    assert printed.count("ranks 2") == printed.count("ranks 3") == 1
    assert printed.count("SGD        50 x 64^2") == 2
    assert printed.count("SGD, fused: not here") == 2


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        (seen_on_ranks(rounds=4), "4 of 5 rounds"),
        (seen_on_ranks(waited=0.25), "25% of the time without a core"),
        (seen_on_ranks(waited=0.05), None),
    ],
)
def test_few_rounds_or_a_busy_machine_are_a_doubt(seen, said, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(on_ranks, "SHARDED", on_ranks.SHARDED[:1])
    monkeypatch.setattr(on_ranks.Processes, "times", lambda *_: [seen, seen])
    figures = str(tmp_path / "figures")
    on_ranks.main(["2", "--optimizer", "SGD", "--seconds", "60", "--json", figures])
    lines = [line for line in capsys.readouterr().out.splitlines() if "SGD, times" in line]
    assert lines == [f"SGD, times: {said}"] * bool(said)
    for row in json.loads((tmp_path / "figures").read_text())["rows"]:
        assert row["unknown"] == ({"times": said} if said else {})


REQUEST = {
    "optimizer": "RMSprop",
    "workload": workloads.Workload("some", ((4, 3), (1,))),  # of the second, one rank has nothing
    "dtype": torch.float32,
    "rounds": 2,
    "seconds": 60.0,
    "seconds_left": 60.0,
    "backend": "eager",
    "threads": 1,
}


def timed_on_ranks(seconds_left):
    try:
        return on_ranks._times(**{**REQUEST, "seconds_left": seconds_left})
    finally:
        ampopt.set_backend("auto")


def test_ranks_take_as_many_rounds_of_the_same_steps(two_ranks):
    for found in two_ranks.run(timed_on_ranks, 60.0):
        assert len(found) == 2
        for seen in found:
            rounds = {name: len(times.times) for name, times in seen["times"].items()}
            assert rounds == {"foreach": 2, "ampopt": 2}
            assert seen["missing"] == {"fused": "torch has no fused RMSprop"}
            assert 0 <= seen["waited"] <= 1


def test_ranks_begin_nothing_when_no_time_is_left(two_ranks):
    for found in two_ranks.run(timed_on_ranks, 0.0):
        for seen in found:
            assert not seen["times"]
            assert seen["missing"]["ampopt"].startswith("no time was left")
            assert seen["missing"]["fused"] == "torch has no fused RMSprop"


def test_rows_for_which_no_time_is_left_are_missing_and_start_nothing(monkeypatch, capsys):
    monkeypatch.setattr(on_ranks.Processes, "times", lambda *_: pytest.fail("a row has begun"))
    on_ranks.main(["2", "--optimizer", "SGD", "--seconds", "1e-6"])
    assert "SGD, ampopt: TimeoutError: no time was left for it" in capsys.readouterr().out


def test_an_error_of_a_rank_is_shown_and_the_next_rows_have_new_processes():
    processes = on_ranks.Processes(2, 60.0)
    with pytest.raises(RuntimeError, match="rank . has ended: .* no attribute 'RMSProb'"):
        processes.times({**REQUEST, "optimizer": "RMSProb"})
    for found in processes.times(REQUEST):
        assert found["times"].keys() == {"foreach", "ampopt"}


def test_a_step_that_torch_cannot_take_on_shards_is_missing(two_ranks):
    for found in two_ranks.run(refused_on_ranks):
        for seen in found:
            assert seen["missing"]["foreach"] == "it is not sharded"
            assert seen["times"].keys() == {"ampopt"}


def refused_on_ranks():
    def step():
        raise NotImplementedError("it is not sharded")

    def enter(name, *given):
        contender = made(name, *given)
        return replace(contender, step=step) if name == "foreach" else contender

    made = contenders.enter
    with mock.patch.object(contenders, "enter", enter):
        return timed_on_ranks(60.0)
