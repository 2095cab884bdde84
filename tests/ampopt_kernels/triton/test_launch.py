"""Launches of compiled kernels, recorded, in a separate process: this one interprets kernels."""

import json
import os
from types import SimpleNamespace

import pytest
import torch
from support.preloaded import python_path

from ampopt_kernels.language import HAS_TRITON

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton cannot be imported here")

PASSES = ["detect_kernel", "control_kernel", "update_kernel"]


@pytest.fixture(scope="module")
def recorded_steps(with_torch):
    """The arguments of the launches in three steps, and what a profiler's hook recorded."""
    variables = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment = {**variables, "PYTHONPATH": python_path()}
    process = with_torch.run("-m", "support.recorded_launches", environment=environment)
    assert process.returncode == 0, process.stdout + process.stderr
    records = json.loads(process.stdout)
    return records["launches"], records["hooked"]


def test_a_first_launch_is_refused_inside_the_capture_of_a_graph(monkeypatch):
    """A first launch compiles and loads the kernel, which is not allowed in a capture."""
    from ampopt_kernels.triton.launch import Variant, launch_compiled

    class Kernel:
        fn, params = SimpleNamespace(__name__="update_kernel"), ()

        def __getitem__(self, grid):
            return lambda **options: launched.append("compiled") or Compiled()

    class Compiled:
        def __getitem__(self, grid):
            return lambda: launched.append("launched")

    launched: list[str] = []
    first, second = Variant(Kernel(), {}), Variant(Kernel(), {})
    launch_compiled(torch.device("cpu"), first, 1, {}, {})
    monkeypatch.setattr("ampopt_kernels.devices.captures", lambda device: True)
    launch_compiled(torch.device("cpu"), first, 1, {}, {})
    with pytest.raises(RuntimeError, match="the first launch of update_kernel"):
        launch_compiled(torch.device("cpu"), second, 1, {}, {})
    assert launched == ["compiled", "launched"]


def test_every_launch_is_given_what_was_asked(recorded_steps):
    launches, _ = recorded_steps
    assert [launch["kernel"] for launch in launches] == PASSES * 3
    assert [launch["grid"] for launch in launches[:6]] == [[n, 1, 1] for n in (2, 1, 2, 1, 1, 1)]
    assert all(launch["as_asked"] and launch["stream"] == 7 for launch in launches)


def test_what_was_compiled_is_launched_by_addresses(recorded_steps):
    """The second step has other sizes. The third has a scale of another dtype, and compiles."""
    launches, _ = recorded_steps
    assert [launch["by_address"] for launch in launches] == [False] * 3 + [True] * 3 + [
        False,
        False,
        True,
    ]


def test_profilers_see_every_launch(recorded_steps):
    _, hooked = recorded_steps
    assert hooked == PASSES * 3
