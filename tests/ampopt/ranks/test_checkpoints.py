"""FSDP2 with torch.distributed.checkpoint, saved and loaded on different numbers of ranks."""

import copy
from typing import Any

import pytest
import torch

import ampopt
from ampopt.testing.bits import bits


def model_of(dtype: torch.dtype) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3)).to(dtype)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def trained(model: Any, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        scale = 8.0
        data = torch.arange(12.0).view(2, 6).to(next(model.parameters()).dtype) / 16
        (model(data).float().square().mean() * scale).backward()
        if isinstance(optimizer, ampopt.Optimizer):
            optimizer.unscale_and_step(grads_scaled_by=scale, max_norm=1.0)
        else:
            optimizer.step()


def made(module: Any, masters: bool) -> tuple[Any, Any]:
    model = model_of(torch.bfloat16 if masters else torch.float32)
    options = {"master_weights": True} if masters else {}
    return model, module.AdamW(model.parameters(), lr=0.25, weight_decay=0.125, **options)


def whole(model: Any, optimizer: Any) -> dict[Any, Any]:
    """Parameters and states by name, gathered from all ranks."""
    import torch.distributed.checkpoint.state_dict

    dcp: Any = torch.distributed.checkpoint
    weights, states = dcp.state_dict.get_state_dict(model, optimizer)
    flat = {(name, k): v for name, state in states["state"].items() for k, v in state.items()}
    return {
        key: bits(v.full_tensor() if hasattr(v, "full_tensor") else v)
        for key, v in {**weights, **flat}.items()
    }


def saved(folder: str, made_by: str, masters: bool) -> dict[Any, Any]:
    """Save a checkpoint after two steps, and return the gathered parameters and states."""
    import torch.distributed.checkpoint.state_dict

    dcp: Any = torch.distributed.checkpoint
    model, optimizer = made(torch.optim if made_by == "torch" else ampopt, masters)
    trained(model, optimizer, 2)
    copy.deepcopy(optimizer.state_dict())  # as some trainers do, though states share a buffer
    weights, states = dcp.state_dict.get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)
    return whole(model, optimizer)


def loaded(folder: str, into: str, masters: bool) -> dict[Any, Any]:
    """Load the checkpoint, check that the optimizer can step, and return what was loaded."""
    import torch.distributed.checkpoint.state_dict

    dcp: Any = torch.distributed.checkpoint
    model, optimizer = made(torch.optim if into == "torch" else ampopt, masters)
    weights, states = dcp.state_dict.get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder)
    dcp.state_dict.set_state_dict(
        model, optimizer, model_state_dict=weights, optim_state_dict=states
    )
    found = whole(model, optimizer)
    trained(model, optimizer, 1)
    assert whole(model, optimizer) != found
    return found


@pytest.mark.parametrize(
    ("made_by", "into", "masters", "on_more"),
    [
        ("ampopt", "ampopt", False, False),
        ("ampopt", "ampopt", True, True),
        ("torch", "ampopt", False, True),
        ("ampopt", "torch", False, False),
    ],
)
def test_a_checkpoint_loads_on_another_number_of_ranks(
    four_ranks, two_ranks, tmp_path, made_by, into, masters, on_more
):
    first, then = (two_ranks, four_ranks) if on_more else (four_ranks, two_ranks)
    before = first.run(saved, str(tmp_path), made_by, masters, timeout=60)
    after = then.run(loaded, str(tmp_path), into, masters, timeout=60)
    assert all(seen == before[0] for seen in (*before, *after))


def initialized(cls: Any, options: dict[str, Any]) -> None:
    """Check that states are those that a skipped step makes, with the same shards."""
    states = []
    for initializes in (True, False):
        model = model_of(torch.bfloat16)
        optimizer = cls(model.parameters(), **options)
        if initializes:
            optimizer.initialize_states()
        else:
            for p in model.parameters():
                p.grad = torch.full_like(p, float("inf"))
            assert optimizer.unscale_and_step(grads_scaled_by=1.0).skipped
        states.append(
            {
                (key, name): (
                    bits(value.to_local() if hasattr(value, "to_local") else value),
                    getattr(value, "placements", None),
                    getattr(value, "device_mesh", None),
                )
                for key, state in optimizer.state_dict()["state"].items()
                for name, value in state.items()
            }
        )
    assert states[0] == states[1]


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (ampopt.AdamW, {"master_weights": True}),
        (ampopt.AdamW, {"param_rounding": "stochastic"}),
        (ampopt.Adafactor, {}),
        (ampopt.LAMB, {"master_weights": True}),
    ],
)
def test_initialized_states_are_sharded_as_those_of_a_step(two_ranks, cls, options):
    two_ranks.run(initialized, cls, options)


def misplaced() -> str:
    """The error of a step if the states of a sharded parameter are those of the whole parameter."""
    model, optimizer = made(ampopt, False)
    trained(model, optimizer, 1)
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].full_tensor()
    before = [bits(p.full_tensor()) for p in model.parameters()]
    try:
        trained(model, optimizer, 1)
    except RuntimeError as error:
        assert [bits(p.full_tensor()) for p in model.parameters()] == before
        return str(error)
    return ""


def test_states_that_are_not_placed_as_their_parameter_are_refused(two_ranks):
    for text in two_ranks.run(misplaced):
        assert "exp_avg of group 0, parameter 0 is a Tensor" in text
        assert "set_optimizer_state_dict" in text
