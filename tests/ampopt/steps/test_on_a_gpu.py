"""Tests that need a device: ``pytest -m gpu``; not yet run on any.

The bodies of other tests run there too, where they name ``ON_A_GPU``.
"""

import copy
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gpus import DEVICE, needs_gpu, no_waiting
from support.optimizers import EVERY_RULE, Signed
from torch import Tensor
from torch.nn import Parameter

import ampopt
from ampopt import DynamicLossScale
from ampopt.testing.bits import bits, everything

INF = float("inf")


def made(cls: Any, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, list[Any]]:
    """An optimizer of two parameters; one of them is longer than a chunk."""
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


MASTERS = {"master_weights": True}
SMALL: list[tuple[torch.dtype, dict[str, Any]]] = [
    (torch.float32, {"state_bits": 8}),
    (torch.bfloat16, {**MASTERS, "state_bits": 16}),
    (torch.bfloat16, {**MASTERS, "master_bits": 24, "state_bits": 8}),
    (torch.float16, {**MASTERS, "master_bits": 24}),
]
"""Small states and 24-bit masters: the dtype of the parameters, and options."""


@needs_gpu
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        *(
            (dtype, options)
            for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16)
            for options in ({}, MASTERS)
        ),
        *SMALL,
    ],
)
def test_a_skip_changes_nothing(dtype, options):
    optimizer, params = made(ampopt.AdamW, dtype, **options)
    for value in (1.0, INF, 1.0, float("nan")):
        give(params, value)
        before = everything(optimizer)
        result = optimizer.unscale_and_step(grads_scaled_by=1.0)
        assert result.skipped == (value != 1.0)
        assert not result.skipped or everything(optimizer) == before


@needs_gpu(with_real="graphs")
def test_a_step_captured_by_hand_replays_through_overflow_and_growth():
    runs = []
    for capture in (False, True):
        optimizer, params = made(ampopt.AdamW)
        lr = optimizer.param_groups[0]["lr"] = torch.tensor(0.125, device=DEVICE)
        first = DynamicLossScale(init_scale=4.0, growth_interval=2, device=DEVICE)
        value, counters = first._value.clone(), first._counters.clone()  # type: ignore[union-attr]
        give(params, 1.0)

        def step(optimizer: Any = optimizer, scale: Any = first, kept: Any = (value, counters)):
            result = optimizer.unscale_and_step(grads_scaled_by=scale._with(*kept), max_norm=1.0)
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


@needs_gpu(with_real="graphs")
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


@needs_gpu(with_real="streams")
def test_steps_on_streams_of_their_own():
    """Two optimizers on two streams give the results of the same steps on one stream."""
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


@needs_gpu(with_real="streams")
@pytest.mark.parametrize("make", [lambda: 2.0, lambda: DynamicLossScale(init_scale=2.0)])
def test_no_stream_reads_tables_that_were_sent_on_another(make):
    """Tables are copied on the first stream, which is slow; the second stream overtakes it."""
    slow, fast, warm = (made(ampopt.SGD, lr=0.5) for _ in range(3))
    for _, params in (slow, fast, warm):
        give(params, 1.0)
    warm[0].unscale_and_step(grads_scaled_by=make())  # compiles
    streams = [torch.cuda.Stream() for _ in range(2)]
    with torch.cuda.stream(streams[0]):  # poison what its tables will be put in
        poison = [torch.full((64,), 0.5, dtype=torch.float64, device=DEVICE) for _ in range(64)]
        del poison
    torch.cuda.synchronize()
    with torch.cuda.stream(streams[0]):
        torch.cuda._sleep(2_000_000_000)
        slow[0].unscale_and_step(grads_scaled_by=make())
    with torch.cuda.stream(streams[1]):
        result = fast[0].unscale_and_step(grads_scaled_by=make())
    streams[1].synchronize()
    assert [float(result.scale), float(result.found_inf)] == [2.0, 0.0]
    torch.cuda.synchronize()
    assert everything(slow[0]) == everything(fast[0]) == everything(warm[0])


@needs_gpu
@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "not aligned"])
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.float64, {}),
        (torch.bfloat16, {}),
        (torch.bfloat16, MASTERS),
        (torch.float16, MASTERS),
        *SMALL[::2],  # the part `parity` of the first hour compares all
    ],
)
@pytest.mark.parametrize("cls", [cls for cls in EVERY_RULE if cls is not Signed])
def test_compiled_kernels_give_the_results_of_torch_operations(cls, dtype, options, shift):
    """With a skip, growth and clipping, for parameters of many sizes and alignments."""
    ends = []
    for backend in ("triton", "eager"):
        ampopt.set_backend(backend)
        torch.manual_seed(0)  # small states and 24-bit masters are rounded by chance
        params = [drawn(n, dtype, shift, seed) for seed, n in enumerate((1, 3, 1000, 1025, 40000))]
        optimizer: Any = cls(params, **options)
        scale: Any = DynamicLossScale(init_scale=64.0, growth_interval=2)
        for attempt in range(4):
            kept = params[1].grad.clone()
            if attempt == 2:
                params[1].grad[1] = INF
            before = bits(params)
            result = optimizer.unscale_and_step(grads_scaled_by=scale, max_norm=1.0)
            scale = result.scale
            assert result.skipped == (attempt == 2)
            assert not result.skipped or bits(params) == before
            params[1].grad.copy_(kept)
        ends.append((params, float(scale)))
    rtol = {torch.float32: 1e-5, torch.float64: 1e-12}.get(dtype, 1e-2)
    rtol = 1e-2 if "state_bits" in options else rtol  # one rounding of a code is 0.05
    for ours, reference in zip(ends[0][0], ends[1][0], strict=True):
        torch.testing.assert_close(ours, reference, rtol=rtol, atol=1e-3 * rtol)
    assert ends[0][1] == ends[1][1]


def drawn(n: int, dtype: torch.dtype, shift: int, seed: int) -> Any:
    """A parameter of ``n`` elements with a gradient, both ``shift`` elements into their memory."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    param, grad = (
        torch.randn(n + shift, device=DEVICE, generator=generator).mul(factor).to(dtype)[shift:]
        for factor in (1, 64)
    )
    made = Parameter(param)
    made.grad = grad
    return made


def trained(model: Any, steps: int = 8, **options: Any) -> list[Any]:
    """The result of each step of a :class:`ampopt.TrainStep` over random batches."""
    optimizer = ampopt.AdamW(model.parameters())
    step = ampopt.TrainStep(
        model, torch.nn.CrossEntropyLoss(), optimizer, DynamicLossScale(), max_norm=1.0, **options
    )
    targets = torch.randint(0, 10, (32,), device=DEVICE)
    return [step(torch.randn(32, 64, device=DEVICE), targets) for _ in range(steps)]


@needs_gpu(with_real="graphs and pinned memory")
def test_a_capture_survives_a_thread_that_pins_memory():
    stop = threading.Event()

    def pin() -> None:
        n = 0
        while not stop.is_set():
            torch.empty(1 << (10 + n % 16)).pin_memory().to(DEVICE, non_blocking=True)
            n += 1

    thread = threading.Thread(target=pin)
    thread.start()
    try:
        layers = torch.nn.Linear(64, 256), torch.nn.Dropout(0.1), torch.nn.Linear(256, 10)
        model = torch.nn.Sequential(*layers).to(DEVICE)
        results = trained(model, steps=30, cuda_graph=True, micro_batches=2)
    finally:
        stop.set()
        thread.join()
    assert all(result.loss.isfinite() for result in results)


@needs_gpu(with_real="NCCL")
def test_a_model_under_ddp_is_trained_and_not_captured():
    dist: Any = torch.distributed
    if not dist.is_nccl_available():
        pytest.skip("this build of torch has no nccl")
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        alone = torch.nn.Linear(64, 10).to(DEVICE)
        model = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(alone), device_ids=[0])
        with pytest.raises(TypeError, match="under DistributedDataParallel"):
            trained(model, cuda_graph=True)
        losses = []
        for each in (alone, model):
            torch.manual_seed(0)
            losses.append([float(result.loss) for result in trained(each)])
        assert losses[0] == losses[1]
    finally:
        dist.destroy_process_group()


@needs_gpu(with_real="memory of its own, 13 GB")
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


@needs_gpu(with_real="activities for torch's profiler")
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


@needs_gpu(with_real="launches for compute-sanitizer")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck", "synccheck"])
def test_the_sanitizer_finds_nothing(tool, tmp_path):
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    script = tmp_path / "checked.py"
    script.write_text(CHECKED, encoding="utf-8")
    root = Path(__file__).parents[3]
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
