"""A closure that raises on one rank while the others are in collectives of the model."""

import contextlib
import os
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from support.local_ranks import Ranks, mesh_of

import ampopt


def raised(form: str) -> str:
    """The traceback of a step on this rank, if the closure raises on rank 0 alone."""
    from torch.distributed.fsdp import fully_shard

    rank = torch.distributed.get_rank()
    model: Any = torch.nn.Linear(4, 4)
    fully_shard(model, mesh=mesh_of(2))
    optimizer = ampopt.SGD(model.parameters(), lr=0.5)

    def closure(scale: Any) -> Any:
        if rank == 0 and form != "after backward":
            raise ZeroDivisionError("of the closure")
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean()
        ampopt.scale_outputs(loss, scale).backward()
        if rank == 0:
            raise ZeroDivisionError("of the closure")
        return (loss, *optimizer.unscale(scale)) if form == "unscaled" else loss

    try:
        if form == "unscaled":
            optimizer.step_after_unscale(closure, 4.0)
        else:
            optimizer.unscale_and_step(closure, 4.0)
    except (RuntimeError, ZeroDivisionError):
        return traceback.format_exc()
    return ""


def raised_before_the_process_ends(folder: str, form: str) -> None:
    """Write :func:`raised` to a file, and end the process, as an error that nobody catches does."""
    Path(folder, str(torch.distributed.get_rank())).write_text(raised(form))
    os._exit(1)


@pytest.mark.parametrize("form", ["before forward", "unscaled"])
def test_a_closure_that_raises_before_collectives_of_the_model(
    with_what_ranks_import, tmp_path, form
):
    with contextlib.closing(Ranks(2, with_what_ranks_import)) as ranks:
        with pytest.raises(AssertionError, match="the process has ended"):
            ranks.run(raised_before_the_process_ends, str(tmp_path), form, timeout=20)
    first, second = (tmp_path.joinpath(str(rank)).read_text() for rank in (0, 1))
    assert first.rstrip().endswith("ZeroDivisionError: of the closure")
    assert "RuntimeError" in second and "Connection" in second


def test_a_closure_that_raises_after_collectives_of_the_model(two_ranks):
    first, second = two_ranks.run(raised, "after backward", timeout=20)
    assert first.rstrip().endswith("ZeroDivisionError: of the closure")
    assert "the closure has raised on another rank" in second


def groups_of_a_backend() -> int:
    """How many groups of the backend of ``process_group`` there are after a step with a closure."""
    made = []

    def make(store: Any, rank: int, size: int, timeout: Any) -> Any:
        made.append(size)
        return torch.distributed.ProcessGroupGloo(store, rank, size, timeout)

    torch.distributed.Backend.register_backend("of_a_test", make, devices="cpu")
    group = torch.distributed.new_group(backend="of_a_test")
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = ampopt.SGD([param], lr=0.5, process_group=group)

    def closure(scale: Any) -> Any:
        optimizer.zero_grad()
        loss = param.sum()
        ampopt.scale_outputs(loss, scale).backward()
        return loss

    optimizer.unscale_and_step(closure, 4.0)
    return len(made)


def test_the_all_reduces_of_closures_have_the_backend_of_the_process_group(two_ranks):
    """That of the default group may know no all-reduce of these devices, as NCCL on a CPU."""
    assert two_ranks.run(groups_of_a_backend) == [2, 2]
