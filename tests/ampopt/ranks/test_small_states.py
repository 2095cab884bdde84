"""Small states of sharded parameters have the blocks and random numbers of the whole one."""

from typing import Any

import pytest
import torch
from support.averaging_rules import Damped
from support.local_ranks import mesh_of
from support.requirements import skip_unless_it_runs
from support.shards import spread
from torch.nn import Parameter

import ampopt
from ampopt.testing.bits import bits

SHAPES = [(130, 128), (32, 512), (64, 512), (128, 64), (66, 256), (8192,)]


def places() -> list[tuple[Any, list[Any]]]:
    """Mesh and placements of each parameter, on four ranks."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    flat, square = mesh_of(4), mesh_of(2, 2, names=("dp", "tp"))
    rows, columns = Shard(0), Shard(1)
    return [
        (flat, [rows]),  # not as many on each
        (flat, [columns]),
        (square, [rows, columns]),
        (flat, [rows]),  # blocks of two rows
        (square, [_StridedShard(0, split_factor=2), rows]),
        (square, [Replicate(), rows]),
    ]


def numbers(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator)


def whole(value: Any) -> str:
    value = value.detach()
    return bits(value.full_tensor() if hasattr(value, "full_tensor") else value)


def stepped(
    state_bits: int, sharded: bool, cls: Any = ampopt.AdamW, backend: str = "eager"
) -> list[dict[str, str]]:
    """The bits of parameters and states after three steps, one of them skipped."""
    ampopt.set_backend(backend)
    of = places() if sharded else [(None, [])] * len(SHAPES)

    def placed(value: torch.Tensor, i: int) -> Any:
        return spread(value, *of[i]) if sharded else value

    params: Any = [Parameter(placed(numbers(shape, i), i)) for i, shape in enumerate(SHAPES)]
    optimizer = cls(params, lr=0.25, state_bits=state_bits)
    for step in range(3):
        for i, (p, shape) in enumerate(zip(params, SHAPES, strict=True)):
            grad = numbers(shape, 10 * step + i + 10)
            if cls is Damped:  # so that its sums are exact
                grad = grad.mul(4).round()
            if step == 1 and i == 0:
                grad[-1, -1] = float("inf")
            p.grad = placed(grad, i)
        optimizer.unscale_and_step(grads_scaled_by=1.0)
    ampopt.set_backend("auto")
    return [
        {"param": whole(p), **{k: whole(v) for k, v in optimizer.state[p].items()}} for p in params
    ]


@pytest.mark.parametrize("state_bits", [8, 16])
def test_ranks_keep_what_one_process_would(four_ranks, state_bits):
    alone = stepped(state_bits, sharded=False)
    for found in four_ranks.run(stepped, state_bits, True, timeout=60):
        for shape, ours, theirs in zip(SHAPES, found, alone, strict=True):
            assert ours == theirs, shape


@pytest.mark.parametrize("backend", ["eager", "compiled"])
@pytest.mark.parametrize("state_bits", [8, 16])
def test_ranks_keep_what_one_process_would_beside_means(four_ranks, state_bits, backend):
    skip_unless_it_runs(backend)
    alone = stepped(state_bits, False, Damped, backend)
    for found in four_ranks.run(stepped, state_bits, True, Damped, backend, timeout=60):
        for shape, ours, theirs in zip(SHAPES, found, alone, strict=True):
            assert ours == theirs, shape


def stepped_halves(sharded: bool) -> list[dict[str, str]]:
    """The result of :func:`stepped` for bfloat16 parameters with 24-bit masters."""
    ampopt.set_backend("eager")
    of = places() if sharded else [(None, [])] * len(SHAPES)

    def placed(seed: int, i: int) -> Any:
        value = numbers(SHAPES[i], seed).bfloat16()
        return spread(value, *of[i]) if sharded else value

    params: Any = [Parameter(placed(i, i)) for i in range(len(SHAPES))]
    optimizer = ampopt.AdamW(params, lr=0.25, master_weights=True, master_bits=24)
    for step in range(2):
        for i, p in enumerate(params):
            p.grad = placed(10 * step + i + 10, i)
        optimizer.unscale(2.0)
        optimizer.step_after_unscale()
    ampopt.set_backend("auto")
    masters = [whole(master) for master in optimizer.master_params()]
    kept = [{k: whole(v) for k, v in optimizer.state[p].items()} for p in params]
    assert optimizer.state[params[0]]["master_param"].dtype == torch.int8
    return [{"master": m, **state} for m, state in zip(masters, kept, strict=True)]


def test_ranks_keep_the_24_bit_masters_of_one_process(four_ranks):
    alone = stepped_halves(sharded=False)
    for found in four_ranks.run(stepped_halves, True, timeout=60):
        for shape, ours, theirs in zip(SHAPES, found, alone, strict=True):
            assert ours == theirs, shape


def refused(shape: tuple[int, ...], dim: int, option: int) -> str:
    """The error of a step on these shards, after a check that it has changed nothing."""
    from torch.distributed.tensor import Shard

    value = spread(numbers(shape, 0), mesh_of(4), [Shard(dim)])
    param: Any = Parameter(value)
    optimizer = ampopt.AdamW([param], state_bits=option)
    param.grad = spread(numbers(shape, 1), mesh_of(4), [Shard(dim)])
    before = whole(param)
    try:
        optimizer.step()
    except ValueError as error:
        assert whole(param) == before and not optimizer.state[param]
        return str(error)
    return ""


@pytest.mark.parametrize(("shape", "dim"), [((90, 100), 0), ((64, 256), 1), ((9000,), 0)])
def test_a_shard_that_would_cut_a_block_is_refused_on_all_ranks(four_ranks, shape, dim):
    for text in four_ranks.run(refused, shape, dim, 8):
        assert "would cut a block of 128 elements" in text
        assert "state_bits=16 or 32" in text
    assert four_ranks.run(refused, shape, dim, 16) == [""] * 4


def made(bits_: int) -> tuple[Any, Any]:
    """A sharded model, and its optimizer with 8-bit states, and 24-bit masters if asked for."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(128, 65), torch.nn.Linear(65, 3))
    options = {"master_weights": True, "master_bits": 24} if bits_ == 24 else {}
    model = model.bfloat16() if options else model
    n = torch.distributed.get_world_size()
    model = fully_shard(model, mesh=mesh_of(n))
    return model, ampopt.AdamW(model.parameters(), lr=0.25, state_bits=8, **options)


def trained(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    inputs = torch.arange(256.0).view(2, 128) / 256
    model(inputs.to(next(model.parameters()).dtype)).square().mean().backward()
    optimizer.step()


def everything(model: Any, optimizer: Any) -> dict[Any, str]:
    import torch.distributed.checkpoint.state_dict

    dcp: Any = torch.distributed.checkpoint
    weights, states = dcp.state_dict.get_state_dict(model, optimizer)
    flat = {(name, k): v for name, state in states["state"].items() for k, v in state.items()}
    return {key: whole(value) for key, value in {**weights, **flat}.items()}


def saved(folder: str, bits_: int) -> dict[Any, str]:
    import torch.distributed.checkpoint.state_dict

    dcp: Any = torch.distributed.checkpoint
    model, optimizer = made(bits_)
    trained(model, optimizer)
    trained(model, optimizer)
    weights, states = dcp.state_dict.get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)
    return everything(model, optimizer)


def loaded(folder: str, bits_: int) -> dict[Any, str]:
    import torch.distributed.checkpoint.state_dict

    dcp: Any = torch.distributed.checkpoint
    model, optimizer = made(bits_)
    weights, states = dcp.state_dict.get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder)
    dcp.state_dict.set_state_dict(
        model, optimizer, model_state_dict=weights, optim_state_dict=states
    )
    found = everything(model, optimizer)
    trained(model, optimizer)
    return found


@pytest.mark.parametrize("bits_", [8, 24])
def test_a_checkpoint_of_four_ranks_loads_on_two(four_ranks, two_ranks, tmp_path, bits_):
    first, *others = four_ranks.run(saved, str(tmp_path), bits_, timeout=60)
    assert any(name[-1] == "exp_avg_scale" for name in first if isinstance(name, tuple))
    for found in (*others, *two_ranks.run(loaded, str(tmp_path), bits_, timeout=60)):
        assert found == first


FORMS: dict[str, dict[str, Any]] = {
    "torch": {},
    "8": {"state_bits": 8},
    "masters": {"master_weights": True},
    "24-bit masters": {"master_weights": True, "master_bits": 24, "state_bits": 8},
}


def model_of(form: str) -> Any:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model: Any = torch.nn.Linear(128, 66)
    model = model.bfloat16() if "masters" in form else model
    return fully_shard(model, mesh=mesh_of(torch.distributed.get_world_size()))


def optimizer_of(form: str, model: Any) -> Any:
    cls = torch.optim.AdamW if form == "torch" else ampopt.AdamW
    return cls(model.parameters(), lr=0.25, **FORMS[form])


def full_states(optimizer: Any) -> dict[str, torch.Tensor]:
    """The gathered states of the weight, in full precision."""
    state = ampopt.full_state_dict(optimizer)["state"][0]
    return {name: getattr(x, "full_tensor", x.clone)() for name, x in state.items()}


def saved_as(folder: str, form: str) -> dict[str, torch.Tensor]:
    import torch.distributed.checkpoint.state_dict

    dcp: Any = torch.distributed.checkpoint
    model = model_of(form)
    optimizer = optimizer_of(form, model)
    trained(model, optimizer)
    trained(model, optimizer)
    weights, states = dcp.state_dict.get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)
    return full_states(optimizer)


def read(folder: str, model: Any, optimizer: Any) -> None:
    import torch.distributed.checkpoint.state_dict

    dcp: Any = torch.distributed.checkpoint
    weights, states = dcp.state_dict.get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder)
    dcp.state_dict.set_state_dict(
        model, optimizer, model_state_dict=weights, optim_state_dict=states
    )


def loaded_through(folder: str, form: str, into: str) -> tuple[str, dict[str, torch.Tensor]]:
    """The error of loading into an optimizer of other bits, and the states by way of ``form``."""
    model = model_of(form)
    optimizer, as_saved = optimizer_of(into, model), optimizer_of(form, model)
    try:
        read(folder, model, optimizer_of(into, model))
        said = "nothing"
    except BaseException as error:  # CheckpointException is no Exception
        said = str(error)
    read(folder, model, as_saved)
    optimizer.load_state_dict(ampopt.full_state_dict(as_saved))
    found = full_states(optimizer)
    trained(model, optimizer)
    return said, found


@pytest.mark.parametrize(
    ("form", "into"),
    [
        ("torch", "8"),
        ("8", "torch"),
        ("masters", "24-bit masters"),
        ("24-bit masters", "masters"),
    ],
)
def test_states_of_other_bits_come_through_an_optimizer_as_it_was_saved(
    two_ranks, tmp_path, form, into
):
    """Codes must not be taken for values: loading them directly is an error."""
    exact, _ = two_ranks.run(saved_as, str(tmp_path), form, timeout=60)
    for said, found in two_ranks.run(loaded_through, str(tmp_path), form, into, timeout=60):
        assert "Missing key in checkpoint" in said
        assert found.keys() == exact.keys()
        for name, value in exact.items():
            of_codes = "exp_avg" in name and into in ("8", "24-bit masters")
            atol = float(value.abs().max()) * 2e-3 * of_codes
            rtol = 0.06 * of_codes
            torch.testing.assert_close(found[name].float(), value.float(), rtol=rtol, atol=atol)
