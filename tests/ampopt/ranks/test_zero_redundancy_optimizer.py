"""``ZeroRedundancyOptimizer`` on two ranks gives the results of one process."""

from typing import Any

import pytest
import torch

import ampopt
from ampopt.testing.bits import bits


def model_of(spread: bool) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    return torch.nn.parallel.DistributedDataParallel(model) if spread else model


def trained(form: str, optimizer: Any, model: Any, rank: int | None) -> list[Any]:
    """Parameters, norm and scale after four steps, in the second of which rank 1 overflows."""
    scaler = ampopt.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scale: Any = ampopt.DynamicLossScale(init_scale=4.0)
    for step in range(4):
        optimizer.zero_grad()
        loss = model(torch.full((2, 3), 1.0 + step)).square().mean()
        ampopt.scale_outputs(loss, scaler._scale if "scaler" in form else scale).backward()
        if step == 1 and rank in (None, 1):
            next(model.parameters()).grad.view(-1)[0] = float("nan")
        if form == "accumulated":
            optimizer.accumulate(grads_scaled_by=scale)
        if form in ("own", "accumulated"):
            scale = optimizer.unscale_and_step(grads_scaled_by=scale, max_norm=0.5).scale
        elif form == "split":
            scale = optimizer.unscale(grads_scaled_by=scale).scale
            optimizer.step_after_unscale()
        else:
            scaler.step(optimizer)
            scaler.update()
    norm = None if optimizer.grad_norm is None else round(float(optimizer.grad_norm), 6)
    scale = scaler.get_scale() if form == "scaler" else scale.item()
    return [[p.tolist() for p in model.parameters()], norm, scale]


def options(name: str) -> tuple[Any, dict[str, Any]]:
    classes = {"ampopt": ampopt.AdamW, "fused": torch.optim.AdamW, "torch": torch.optim.AdamW}
    return classes[name], {"lr": 0.25, **({"fused": True} if name == "fused" else {})}


def trained_by_ranks(form: str, name: str, bucketed: bool) -> Any:
    model = model_of(True)
    cls, defaults = options(name)
    optimizer = ampopt.ZeroRedundancyOptimizer(
        model.parameters(), cls, parameters_as_bucket_view=bucketed, **defaults
    )
    assert sum(len(group["params"]) for group in optimizer.optim.param_groups) < 4
    return trained(form, optimizer, model, torch.distributed.get_rank())


@pytest.mark.parametrize("name", ["ampopt", "fused", "torch"])
@pytest.mark.parametrize("form", ["own", "accumulated", "split", "scaler"])
def test_ranks_end_where_one_process_does(two_ranks, form, name):
    model = model_of(False)
    alone = ampopt.AdamW(model.parameters(), lr=0.25)
    params, norm, scale = trained(form, alone, model, None)
    first, second = two_ranks.run(trained_by_ranks, form, name, form == "split")
    assert first == second
    assert first[1:] == [norm, scale] and scale == 2.0
    for mine, theirs in zip(first[0], params, strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs))


def saved_and_loaded() -> bool:
    """Whether a run that was saved and loaded ends as an uninterrupted run."""
    rank, runs = torch.distributed.get_rank(), []
    for interrupted in (False, True):
        model = model_of(True)
        made = [
            ampopt.ZeroRedundancyOptimizer(model.parameters(), ampopt.AdamW, lr=0.25)
            for _ in range(2)
        ]
        trained("own", made[0], model, rank)
        if interrupted:
            made[0].consolidate_state_dict()
            saved: list[Any] = [made[0].state_dict() if rank == 0 else None]
            torch.distributed.broadcast_object_list(saved)
            made[1].load_state_dict(saved[0])
        runs.append(trained("own", made[interrupted], model, rank))
    return runs[0] == runs[1]


def test_a_run_resumes_from_a_saved_state(two_ranks):
    assert two_ranks.run(saved_and_loaded) == [True, True]


def overlapping() -> str:
    try:
        ampopt.ZeroRedundancyOptimizer(
            model_of(True).parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.5
        )
    except ValueError as error:
        return str(error)
    return ""


def test_a_step_within_backward_is_refused(two_ranks):
    assert all("overlap_with_ddp=True steps" in text for text in two_ranks.run(overlapping))


def made_in_the_place_of_torchs() -> float:
    name = "torch.distributed.optim.ZeroRedundancyOptimizer"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(name, ampopt.ZeroRedundancyOptimizer)
        optimizer = ampopt.ZeroRedundancyOptimizer(
            model_of(True).parameters(), torch.optim.SGD, lr=0.5
        )
    return optimizer.param_groups[0]["lr"]


def test_may_replace_torchs_class_in_torch(two_ranks):
    assert two_ranks.run(made_in_the_place_of_torchs) == [0.5, 0.5]


def trained_with_small_states(cls_name: str, resumes: bool) -> Any:
    """Bits of masters after two steps, and of parameters after four.

    Saved and loaded in between if ``resumes``.
    """
    import torch.distributed.optim

    ampopt.set_backend("eager")
    packages: Any = {"ampopt": ampopt, "torch": torch.distributed.optim}
    options = {"state_bits": 8, "master_weights": True, "master_bits": 24}

    def made(start: list[torch.Tensor]) -> tuple[Any, Any]:
        params = [torch.nn.Parameter(x.clone()) for x in start]
        kind = packages[cls_name].ZeroRedundancyOptimizer
        return params, kind(params, optimizer_class=ampopt.AdamW, lr=0.1, **options)

    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(s, generator=generator).bfloat16() for s in ((64, 256), (130, 128), (5,))]
    (params, optimizer), masters = made(start), None
    for step in range(4):
        if resumes and step == 2:
            optimizer.consolidate_state_dict(0)
            box: Any = [None]
            if torch.distributed.get_rank() == 0:
                box = [optimizer.state_dict()]
                in_full = ampopt.full_state_dict(optimizer)["state"][0]
                assert {x.dtype for x in in_full.values()} == {torch.float32}
                assert in_full.keys() == {"step", "exp_avg", "exp_avg_sq", "master_param"}
            torch.distributed.broadcast_object_list(box, 0)
            params, optimizer = made([p.detach() for p in params])
            optimizer.load_state_dict(box[0])
        if step == 2:
            masters = bits([x.detach() for x in optimizer.optim.master_params()])
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).bfloat16()
        optimizer.step()
    ampopt.set_backend("auto")
    return masters, bits([p.detach() for p in params])


@pytest.mark.parametrize("cls_name", ["ampopt", "torch"])
def test_small_states_go_on_bit_for_bit(two_ranks, cls_name):
    straight = two_ranks.run(trained_with_small_states, cls_name, False, timeout=60)
    assert two_ranks.run(trained_with_small_states, cls_name, True, timeout=60) == straight
