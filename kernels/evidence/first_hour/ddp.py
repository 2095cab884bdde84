"""A model in ``DistributedDataParallel``, on one rank with NCCL."""

import tempfile
from typing import Any

import torch
import torch.distributed as dist

import ampopt
from evidence.first_hour.record import PartRecord

__all__ = ["run"]


def run(record: PartRecord, device: torch.device) -> None:
    """Train by ``TrainStep``, which must refuse a CUDA graph around the model."""
    if device.type != "cuda" or not dist.is_nccl_available():
        record.skip("DDP", f"no NCCL for {device}")
        return
    where = f"file://{tempfile.mkdtemp()}/store"
    dist.init_process_group("nccl", init_method=where, rank=0, world_size=1)
    ddp: Any = torch.nn.parallel.DistributedDataParallel
    model = ddp(torch.nn.Linear(64, 10).to(device), device_ids=[device.index or 0])
    loss_fn, optimizer = torch.nn.CrossEntropyLoss(), ampopt.AdamW(model.parameters())
    try:
        ampopt.TrainStep(model, loss_fn, optimizer, 1.0, cuda_graph=True)
    except TypeError as error:
        record.check("a graph around DDP is refused", "DistributedDataParallel" in str(error))
    else:
        record.check("a graph around DDP is refused", False)
    step = ampopt.TrainStep(model, loss_fn, optimizer, ampopt.DynamicLossScale())
    inputs = torch.randn(32, 64, device=device)
    targets = torch.randint(0, 10, (32,), device=device)
    losses = [step(inputs, targets).loss.item() for _ in range(12)]
    record.check("TrainStep around DDP", losses[-1] < losses[0], losses[-1])
    dist.destroy_process_group()
