"""Steps on parameters that are distributed over two processes, for the tests of ranks."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import Parameter

import ampopt
from support.local_ranks import mesh_of
from support.optimizers import Plain

__all__ = ["CLASSES", "FORMS", "ORDERS", "SPOILED", "outcomes_of_all"]

CLASSES = {
    "AdamW": ampopt.AdamW,
    "Adagrad": ampopt.Adagrad,
    "Plain": Plain,
}
FORMS = ("own", "split", "torch", "torch, unscaled", "ours")
ORDERS = ("replicated first", "sharded first", "on a mesh of two dimensions")
SPOILED = (None, float("inf"), float("nan"))

START = (torch.arange(4.0), torch.tensor([1.0, -1.0, 2.0, 0.5]))
NUMBERS = (torch.tensor([1.0, 2.0, -1.0, 0.5]), torch.tensor([0.5, -0.25, 3.0, 1.0]))


def spread(order: str, tensors: Any) -> list[Any]:
    """Make DTensors of two tensors: one replicated, one sharded."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    flat = mesh_of(2)
    whole, parts = [Replicate()], [Shard(0)]
    if order == "on a mesh of two dimensions":
        flat = mesh_of(1, 2, names=("a", "b"))
        whole, parts = [Replicate(), Replicate()], [Replicate(), Shard(0)]
    placements = [parts, whole] if order == "sharded first" else [whole, parts]
    return [distribute_tensor(t.clone(), flat, p) for t, p in zip(tensors, placements, strict=True)]


def stepped(form: str, optimizer: Any, params: Any) -> float:
    """Take one step under a scale of 4, and return the next scale."""
    if form == "own":
        return float(optimizer.unscale_and_step(grads_scaled_by=4.0).scale)
    if form == "split":
        scale = optimizer.unscale(grads_scaled_by=4.0).scale
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step_after_unscale()
        return float(scale)
    cls = ampopt.GradScaler if form == "ours" else torch.amp.GradScaler
    scaler = cls("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    if form == "torch, unscaled":
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale()


def outcomes() -> Iterator[tuple[Any, Any]]:
    for name, cls in CLASSES.items():
        for form in FORMS:
            for order in ("not spread", *ORDERS):
                for bad in SPOILED:
                    # The last element of the sharded gradient, which is on rank 1.
                    sharded = 0 if order == "sharded first" else 1
                    grads = [4.0 * n for n in NUMBERS]
                    if bad is not None:
                        grads[sharded][3] = bad
                    params = list(START)
                    if order != "not spread":
                        params, grads = spread(order, params), spread(order, grads)
                    params = [Parameter(p.clone()) for p in params]
                    for p, grad in zip(params, grads, strict=True):
                        p.grad = grad
                    optimizer = cls(params, lr=0.25)
                    scale = stepped(form, optimizer, params)
                    values: Any = [p.detach() for p in params]
                    if order != "not spread":
                        values = [value.full_tensor() for value in values]
                    yield (name, form, order, bad), (scale, values)


def outcomes_of_all() -> list[tuple[Any, Any]]:
    """The outcomes of all cases, on one of the two ranks."""
    return list(outcomes())
