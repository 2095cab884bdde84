"""Streams, captures and copies, with fake modules of devices that this machine lacks."""

from contextlib import contextmanager
from typing import Any
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.overrides import TorchFunctionMode

import ampopt
from ampopt._step.closure_replay import Replay
from ampopt_kernels.devices import captures, carried_into, to_device
from ampopt_kernels.language import HAS_TRITON

META = torch.device("meta")
each_accelerator = pytest.mark.parametrize("kind", ["cuda", "xpu"])


class Elsewhere(TorchFunctionMode):
    """Records copies to a device, and leaves the tensors on the CPU.

    An asynchronous copy from memory that is not pinned is an error.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pinned: list[Tensor] = []
        self.copies: list[tuple[bool, bool]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.pin_memory:
            self.pinned.append(args[0].clone())
            return self.pinned[-1]
        if func is Tensor.copy_ or (func is Tensor.to and not isinstance(args[1], torch.dtype)):
            source = args[1] if func is Tensor.copy_ else args[0]
            pinned = any(source is t for t in self.pinned)
            goes_on = kwargs.pop("non_blocking", False)
            assert pinned or not goes_on or not source.is_cpu
            self.copies.append((pinned, goes_on))
            if func is Tensor.to:
                assert len(args) < 3 or args[2] == source.dtype or not pinned
                to = torch.device(args[1])
                return source.to(to, *args[2:]) if to.type in ("cpu", "meta") else source.clone()
        return func(*args, **kwargs)


@given(
    kind=st.sampled_from(["cuda:1", "xpu:0", "mps", "hpu:2", "meta", "cpu"]),
    dtype=st.sampled_from([None, torch.float32, torch.float64]),
    values=st.lists(st.floats(width=32), max_size=3),
)
def test_only_from_pinned_memory_the_host_goes_on(kind, dtype, values):
    tensor = torch.tensor(values, dtype=torch.float32)
    with Elsewhere() as elsewhere:
        result = to_device(tensor, torch.device(kind), dtype)
    goes_on = kind in ("cuda:1", "xpu:0")
    is_there = kind == "cpu" and dtype != torch.float64
    assert (result is tensor) == is_there
    assert elsewhere.copies == ([] if is_there else [(goes_on, goes_on)])


def test_nothing_is_sent_from_the_host_while_a_graph_is_captured(monkeypatch):
    """Each replay of the graph would read the host's memory again, which may have changed."""
    monkeypatch.setattr("ampopt_kernels.devices.captures", lambda device: device.type == "cuda")
    with Elsewhere() as elsewhere:
        with pytest.raises(RuntimeError, match="on its way from the host"):
            to_device(torch.ones(2), torch.device("cuda"))
    assert not elsewhere.pinned and not elsewhere.copies


def test_what_is_written_over_is_waited_for_where_nothing_pins():
    with Elsewhere() as elsewhere:
        carried_into(torch.empty(2, device=META), torch.ones(2))
    assert elsewhere.copies == [(False, False)]


def test_on_its_way_to_the_host_a_tensor_is_waited_for():
    with Elsewhere() as elsewhere:
        with mock.patch.multiple(Tensor, is_cpu=False, device=torch.device("cuda:1")):
            to_device(torch.ones(2), torch.device("cpu"))
            to_device(torch.ones(2), torch.device("cuda:0"))
    assert elsewhere.copies == [(False, False), (False, True)]


def test_scales_wait_where_nothing_pins():
    a, b = (ampopt.DynamicLossScale() for _ in range(2))
    there = ampopt.DynamicLossScale(device="meta")
    with Elsewhere() as elsewhere:
        a._place("meta")
        ampopt.next_scale(there, b)
        ampopt.next_scale(there.value, b.value)
    assert len(elsewhere.copies) == 5


@pytest.fixture
def current(monkeypatch, kind):
    """The index of the current device; only the last device captures a graph."""
    now = [0]

    @contextmanager
    def device(wanted):
        before, now[0] = now[0], torch.device(wanted).index
        yield
        now[0] = before

    module = torch.get_device_module(kind)
    monkeypatch.setattr(module, "device", device)
    monkeypatch.setattr(module, "is_initialized", lambda: True)
    monkeypatch.setattr(module, "current_device", lambda: now[0])
    monkeypatch.setattr(module, "is_current_stream_capturing", lambda: now[0] == 1)
    return now


@each_accelerator
def test_a_device_that_is_not_the_current_one_is_asked_whether_it_captures(kind, current):
    answers = [captures(torch.device(kind, index)) for index in (0, 1)]
    current[0] = 1
    answers += [captures(torch.device(kind, index)) for index in (0, 1)]
    assert answers == [False, True, False, True]


@each_accelerator
@pytest.mark.skipif(not HAS_TRITON, reason="Triton cannot be imported here")
def test_a_launch_is_on_the_device_of_its_tensors(kind, current):
    from ampopt_kernels.triton.launch import _on

    with _on(torch.device(kind, 1)):
        assert current == [1]
    assert current == [0]


@each_accelerator
def test_a_replay_draws_again_what_the_device_drew(kind, monkeypatch):
    state: dict[torch.device, int] = {torch.device(kind, 1): 5}
    module = torch.get_device_module(kind)
    monkeypatch.setattr(module, "get_rng_state", state.__getitem__)
    monkeypatch.setattr(module, "set_rng_state", lambda value, d: state.__setitem__(d, value))
    replay = Replay(
        lambda scale: (None, lambda: (None, None, None)),
        None,
        max_replays=1,
        preserve_rng=True,
        devices=list(state),
        offenders=lambda: (),
        discard=lambda decision: None,
    )
    state[torch.device(kind, 1)] = 6
    replay.restore_rng()
    assert state[torch.device(kind, 1)] == 5


def test_what_has_no_graphs_captures_nothing():
    assert not any(captures(torch.device(kind)) for kind in ("cpu", "meta", "mps"))
