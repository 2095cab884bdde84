"""Steps whose findings are on their way from an accelerator, which is played by the CPU."""

from collections import Counter
from typing import Any

import pytest
import torch
from support.counted_operations import counted, silent_launches
from torch.nn import Parameter

import ampopt
from ampopt.watching import background_copy


class Events:
    """Copies to the host that arrive when :meth:`arrive` is called, or when somebody waits."""

    def __init__(self) -> None:
        self.on_their_way: list[Any] = []
        self.n_copied: list[int] = []

    def copied_together(self, tensors: Any) -> Any:
        copies = [None if x is None else torch.full_like(x, 7) for x in tensors]
        self.n_copied.append(sum(x is not None for x in tensors))
        kept = [None if x is None else x.clone() for x in tensors]
        event = Event(self, copies, kept)
        self.on_their_way.append(event)
        return copies, [event]

    def arrive(self) -> None:
        for event in self.on_their_way:
            event.synchronize()
        self.on_their_way.clear()


class Event:
    def __init__(self, events: Events, copies: Any, kept: Any) -> None:
        self._events, self._copies, self._kept = events, copies, kept
        self._happened = False

    def query(self) -> bool:
        return self._happened

    def synchronize(self) -> None:
        for copy, kept in zip(self._copies, self._kept, strict=True):
            if copy is not None:
                copy.copy_(kept)
        self._happened = True


@pytest.fixture
def events(monkeypatch):
    events = Events()
    monkeypatch.setattr(background_copy, "copied_together", events.copied_together)
    return events


pytestmark = pytest.mark.parametrize("backend", ["eager on a device", "triton"], indirect=True)


def made() -> Any:
    params = [Parameter(torch.ones(4)), Parameter(torch.ones(9000))]
    optimizer = ampopt.AdamW([("a", params[0]), ("b", params[1])])
    ampopt.skip_when(optimizer, norm=1e9)
    return optimizer, params, ampopt.Watch(optimizer, last=3)


def step(optimizer: Any, params: Any, value: float) -> None:
    for param in params:
        param.grad = torch.full_like(param, value)
    scale = ampopt.StaticLossScale(2.0)
    optimizer.unscale_and_step(grads_scaled_by=scale, loss=torch.tensor(3.0))


VALUES = (1.0, float("inf"), 4.0, 6.0, 2.0)


def test_what_arrives_late_is_recorded_as_what_is_there_at_once(backend, events, monkeypatch):
    optimizer, params, watch = made()
    later = []
    for number, value in enumerate(VALUES):
        step(optimizer, params, value)
        later.append(watch.read_later())
        if number == 2:
            assert not any(reading.done() for reading in later)
            events.arrive()
            assert all(reading.done() for reading in later)
    assert not later[-1].done()
    reads = [reading.result() for reading in later]
    assert reads[-1] == watch.read()
    monkeypatch.undo()
    optimizer, params, watch = made()
    for value, read in zip(VALUES, reads, strict=True):
        step(optimizer, params, value)
        assert watch.read() == read
    assert reads[-1]["parameters"]["b"]["last_overflow"] == 2


def test_a_loaded_state_does_not_hear_of_the_steps_before(backend, events):
    optimizer, params, watch = made()
    state = watch.state_dict()
    step(optimizer, params, float("inf"))
    watch.load_state_dict(state)
    events.arrive()
    assert watch.read()["parameters"]["a"]["overflows"] == 0


def test_logs_that_have_not_arrived_are_written_when_the_watch_is_closed(backend, events):
    optimizer, params, watch = made()
    logged = []
    watch.log_to(logged.append)
    step(optimizer, params, 1.0)
    assert not logged
    watch.close()
    assert [numbers["step"] for numbers in logged] == [1]


def test_the_norms_at_the_start_are_not_waited_for(backend, events):
    optimizer, params, watch = made()
    params[0].data.fill_(3.0)
    optimizer.add_param_group({"params": [("c", Parameter(torch.full((4,), 2.0)))]})
    assert not watch.read_later().done()
    rows = watch.state_dict()["parameters"]
    assert [rows[name][4] for name in ("a", "c")] == [2.0, 4.0]


def test_recording_is_a_few_copies_and_no_launch(backend, events, monkeypatch):
    if backend != "triton":
        return  # whose launches are torch operations
    optimizer, params, watch = made()
    events.n_copied.clear()
    with silent_launches(monkeypatch) as launches:
        step(optimizer, params, 1.0)
        with_watch = counted(lambda: step(optimizer, params, 1.0))
        copied = sum(events.n_copied) // 2
        watch.close()
        without = counted(lambda: step(optimizer, params, 1.0))
    assert copied <= 8
    played = Counter({"clone": copied, "full_like": copied})  # by which copying is played
    assert with_watch - without - played <= Counter(
        record_function_enter_new=1, record_function_exit=1
    )
    assert launches == dict.fromkeys(("detect_kernel", "control_kernel", "update_kernel"), 3)
