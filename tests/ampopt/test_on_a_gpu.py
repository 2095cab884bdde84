"""What only a device can show. Selected by ``pytest -m gpu``; not yet run on any.

The bodies of other tests run there too, where they name ``ON_A_GPU``.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gpus import DEVICE, needs_gpu, no_waiting
from optimizers import EVERY_RULE
from torch import Tensor
from torch.nn import Parameter

import ampopt
from ampopt import DynamicLossScale
from ampopt.testing.bits import bits, everything

INF = float("inf")


def made(cls: Any, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, list[Any]]:
    """An optimizer of two parameters, of which one is more than a chunk long."""
    sizes = ((130, 257), (3,))
    params = [
        Parameter(torch.linspace(-1, 1, torch.Size(s).numel(), device=DEVICE).to(dtype).reshape(s))
        for s in sizes
    ]
    return cls(params, **options), params


def give(params: list[Any], value: float) -> None:
    for p in params:
        p.grad = torch.full_like(p, 0.5)
    params[-1].grad[-1] = value


@needs_gpu
@pytest.mark.parametrize("cls", EVERY_RULE)
def test_no_control_point_waits(cls):
    optimizer, params = made(cls)
    scale: Any = DynamicLossScale(init_scale=4.0)
    for i, value in enumerate((1.0, 1.0, INF, 2.0, INF)):
        give(params, value)
        if i < 2:  # kernels are compiled, constants and tables sent
            scale = optimizer.unscale_and_step(grads_scaled_by=scale, max_norm=1.0).scale
            continue
        with no_waiting():
            scale = optimizer.unscale_and_step(grads_scaled_by=scale, max_norm=1.0).scale
            optimizer.unscale(grads_scaled_by=scale)
            scale = optimizer.step_after_unscale().scale
            optimizer.step()
    assert scale.item() == 4.0 / 2**4  # two overflows, each seen by both control points


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("master_weights", [False, True])
def test_a_skip_changes_nothing(dtype, master_weights):
    optimizer, params = made(ampopt.AdamW, dtype, master_weights=master_weights)
    for value in (1.0, INF, 1.0, float("nan")):
        give(params, value)
        before = everything(optimizer)
        result = optimizer.unscale_and_step(grads_scaled_by=1.0)
        assert result.skipped == (value != 1.0)
        assert not result.skipped or everything(optimizer) == before


@needs_gpu
def test_a_step_captured_by_hand_replays_through_overflow_and_growth():
    runs = []
    for capture in (False, True):
        optimizer, params = made(ampopt.AdamW)
        lr = optimizer.param_groups[0]["lr"] = torch.tensor(0.125, device=DEVICE)
        first = DynamicLossScale(init_scale=4.0, growth_interval=2, device=DEVICE)
        value, counters = first._value.clone(), first._counters.clone()  # type: ignore[union-attr]
        give(params, 1.0)

        def step(optimizer: Any = optimizer, scale: Any = first, kept: Any = (value, counters)):
            result = optimizer.unscale_and_step(
                grads_scaled_by=scale._successor(*kept), max_norm=1.0
            )
            kept[0].copy_(result.scale._value)
            kept[1].copy_(result.scale._counters)

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        again: Any = step
        if capture:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=side):
                step()
            again = graph.replay
        seen: list[Tensor] = []
        for number in (1.0, INF, 1.0, 1.0, 1.0, INF, INF, 1.0):
            params[-1].grad[-1] = number
            lr.mul_(0.5)
            again()
            seen += [value.clone(), counters.clone()]
        runs.append((bits(seen), everything(optimizer)))
    assert runs[0] == runs[1]


@needs_gpu
def test_a_capture_that_would_send_tables_is_refused():
    optimizer, params = made(ampopt.SGD)
    give(params, 1.0)
    optimizer.unscale_and_step(grads_scaled_by=DynamicLossScale(device=DEVICE))
    scale = DynamicLossScale(device=DEVICE)
    kept = [p.grad for p in params]
    give(params, 1.0)  # elsewhere
    with pytest.raises(RuntimeError, match="a CUDA graph cannot capture this step"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.zeros(1, device=DEVICE)  # torch warns of a graph with nothing in it
            optimizer.unscale_and_step(grads_scaled_by=scale)
    assert len(kept) == 2


@needs_gpu
def test_steps_on_streams_of_their_own():
    """Two optimizers, each on a stream, give what they give one after the other."""
    runs = []
    for apart in (False, True):
        pairs = [made(ampopt.AdamW, lr=lr) for lr in (0.5, 0.25)]
        here = torch.cuda.current_stream()
        streams = [torch.cuda.Stream() if apart else here for _ in pairs]
        for stream in streams:
            stream.wait_stream(here)
        for value in (1.0, 2.0, INF, 0.5):
            for stream, (optimizer, params) in zip(streams, pairs, strict=True):
                with torch.cuda.stream(stream):
                    give(params, value)
                    optimizer.unscale_and_step(grads_scaled_by=2.0, max_norm=1.0)
        torch.cuda.synchronize()
        runs.append([everything(optimizer) for optimizer, _ in pairs])
    assert runs[0] == runs[1]


@needs_gpu
def test_more_elements_than_32_bits_count():
    n = 2**31 + 8
    torch.cuda.empty_cache()  # of the tests before
    free = torch.cuda.mem_get_info()[0]
    if free < (needed := 6 * n + 2**30):
        pytest.skip(f"needs {needed >> 30} GiB of free device memory, has {free >> 30}")
    param = Parameter(torch.zeros(n, dtype=torch.bfloat16, device=DEVICE))
    param.grad = torch.ones_like(param)
    optimizer = ampopt.SGD([param], lr=0.5)
    assert not optimizer.unscale_and_step(grads_scaled_by=1.0).skipped
    assert bool((param == -0.5).all())
    param.grad[-1] = INF
    assert optimizer.unscale_and_step(grads_scaled_by=1.0).skipped
    assert bool((param == -0.5).all())


@needs_gpu
def test_a_profile_counts_launches_and_waits():
    optimizer, params = made(ampopt.AdamW)
    for _ in range(2):
        give(params, 1.0)
        optimizer.unscale_and_step(grads_scaled_by=1.0)
    with ampopt.profile(optimizer) as report:
        optimizer.unscale_and_step(grads_scaled_by=1.0).found_inf.item()
    assert report.launches == {"detect": 1, "control": 1, "update": 1}
    assert report.kernels is not None and len(report.kernels) >= 3
    assert report.looks.total() == 1
    assert "by the rule, on the triton backend" in str(report)


CHECKED = """
import torch, ampopt
for dtype in (torch.float32, torch.bfloat16):
    params = [torch.nn.Parameter(torch.ones(n, device="cuda", dtype=dtype)) for n in (1, 1000, 40000)]
    optimizer = ampopt.AdamW(params, master_weights=True)
    for value in (1.0, float("inf"), 2.0):
        for p in params:
            p.grad = torch.full_like(p, value)
        optimizer.unscale_and_step(grads_scaled_by=2.0, max_norm=1.0)
torch.cuda.synchronize()
"""  # noqa: E501


@needs_gpu
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck", "synccheck"])
def test_the_sanitizer_finds_nothing(tool, tmp_path):
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    script = tmp_path / "checked.py"
    script.write_text(CHECKED, encoding="utf-8")
    root = Path(__file__).parents[2]
    settings = {
        "PYTHONPATH": f"{root}:{root / 'kernels'}",
        "TRITON_INTERPRET": "0",
        # Else tensors lie in blocks of torch's, and a kernel that leaves one is still in a block.
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    }
    done = subprocess.run(
        [sanitizer, "--tool", tool, "--error-exitcode", "99", sys.executable, str(script)],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=900,
    )
    if "not supported" in done.stdout + done.stderr and done.returncode != 99:
        pytest.skip(f"compute-sanitizer does not run here: {done.stdout[-300:]}")
    assert done.returncode == 0, done.stdout + done.stderr
