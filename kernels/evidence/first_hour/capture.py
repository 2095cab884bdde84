"""CUDA graphs of steps: by ``TrainStep``, while another thread pins memory, and by hand."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

import ampopt
from ampopt._synchronization import sync_debug_mode
from ampopt.bench.measure import host_seconds
from ampopt.train_step import cuda_graphs
from evidence.first_hour.record import PartRecord

__all__ = ["run"]


def run(record: PartRecord, device: torch.device) -> None:
    """Capture and replay steps in each of these ways; skipped where there are no graphs."""
    ampopt.set_backend("triton")
    if cuda_graphs.graphs_on(device) is None:
        record.skip("capture", f"{device} has no CUDA graphs")
        return
    with record.trying("TrainStep"):
        _train(record, device, "alone")
    how = "while a thread pins memory"
    with record.trying(f"TrainStep {how}"), _pinning(device):
        _train(record, device, how)
    with record.trying("a graph captured by hand"):
        _by_hand(record, device)


def _train(record: PartRecord, device: torch.device, how: str) -> None:
    """Train by a CUDA graph: check that it captures, learns, and replays without waiting."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 10)]
    model = torch.nn.Sequential(*layers, torch.nn.Dropout(0.1)).to(device)
    optimizer = ampopt.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    options: dict[str, Any] = {"max_norm": 1.0, "micro_batches": 2, "cuda_graph": True}
    loss_fn, scale = torch.nn.CrossEntropyLoss(), ampopt.DynamicLossScale()
    step = ampopt.TrainStep(model, loss_fn, optimizer, scale, **options)
    inputs = torch.randn(64, 256, device=device)
    targets = torch.randint(0, 10, (64,), device=device)
    losses = []
    for _ in range(30):
        losses.append(step(inputs, targets).loss)
        schedule.step()
    has_captured = step._captured_steps is not None and step._captured_steps._capture is not None
    record.check(f"TrainStep captures, {how}", has_captured)
    falls = bool(losses[-1] < losses[0])
    record.check(f"the loss falls, {how}", falls, [losses[0].item(), losses[-1].item()])
    if device.type == "cuda":
        with sync_debug_mode("error"):
            step(inputs, targets)
        record.check(f"a replay does not synchronize, {how}", True)
    times = sorted(host_seconds(lambda: step(inputs, targets), device) for _ in range(50))
    record.figure(f"replay, host, {how}", times[25] * 1e6, "us")


def _by_hand(record: PartRecord, device: torch.device) -> None:
    """Capture a step in a graph, and replay it between eager steps with other gradients.

    The eager steps must free no memory that the graph reads.
    """
    ends = []
    for captures in (False, True):
        params = [torch.nn.Parameter(torch.linspace(-1, 1, n, device=device)) for n in (7, 5000)]
        grads = [torch.full_like(p, 0.5) for p in params]
        optimizer = ampopt.AdamW(params)

        def step(values: Any, optimizer: Any = optimizer, params: Any = params) -> None:
            for p, value in zip(params, values, strict=True):
                p.grad = value
            optimizer.unscale_and_step(grads_scaled_by=2.0, max_norm=1.0)

        step(grads)
        replay: Any = lambda step=step, grads=grads: step(grads)  # noqa: E731
        if captures:
            graphs = cuda_graphs.graphs_on(device)
            assert graphs is not None
            with graphs.capture() as replay:
                step(grads)
        for _ in range(3):
            replay()
            step([grad.clone() for grad in grads])
            # Overwrite whatever memory was freed.
            [torch.full((n,), float("nan"), device=device) for n in range(1, 2000, 7)]
        replay()
        ends.append([p.detach() for p in params])
    same = all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
    record.check("a graph captured by hand, with other steps between replays", same)


@contextmanager
def _pinning(device: torch.device) -> Iterator[None]:
    """Within this, another thread pins memory and copies it to ``device``, as a DataLoader does."""
    stop = threading.Event()

    def pin() -> None:
        n = 0
        while not stop.is_set():
            torch.empty(1 << (10 + n % 16)).pin_memory().to(device, non_blocking=True)
            n += 1

    thread = threading.Thread(target=pin, daemon=True)
    if device.type == "cuda":
        thread.start()
    try:
        yield
    finally:
        stop.set()
        if thread.is_alive():
            thread.join(10)
