"""``accumulate`` on two ranks: flags, scales and sums are those of one process with all parts."""

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.local_ranks import mesh_of
from support.optimizers import Plain
from torch.nn import Parameter

import ampopt

START = (torch.tensor([1.0, -2.0]), torch.tensor([4.0, 0.25]))
PARTS = st.sampled_from([set(), {0}, {1}, {0, 1}, {0, 1}, {0, 1}])
MICRO_BATCH = st.fixed_dictionaries(
    {
        "present": PARTS,
        "factor": st.sampled_from([1.0, 2.0, -4.0]),
        "bad": st.sampled_from([None, None, (0, "inf"), (1, "nan"), (1, "inf")]),
    }
)
WINDOW = st.fixed_dictionaries(
    {
        "drop": st.sampled_from(["window", "micro_batch"]),
        "micro_batches": st.lists(MICRO_BATCH, max_size=3),
        "last": MICRO_BATCH,
        "passes_on": st.booleans(),  # the scale that ``accumulate`` returns, to the next call
        "max_norm": st.sampled_from([None, 1.0]),
        "several": st.booleans(),
    }
)


def batch(present: Any = (0, 1), bad: Any = None, factor: float = 1.0) -> dict[str, Any]:
    return {"present": set(present), "factor": factor, "bad": bad}


def window(*micro_batches: dict[str, Any], last: Any = None, **changes: Any) -> dict[str, Any]:
    options = {"drop": "micro_batch", "passes_on": False, "max_norm": None, "several": False}
    last = batch(()) if last is None else last
    return {**options, "micro_batches": list(micro_batches), "last": last, **changes}


def trained(name: str, windows: list[Any], parts: tuple[int, ...], form: str) -> dict[str, Any]:
    """What every call returned, and the parameters, by part, after all windows."""
    params: Any = {part: Parameter(START[part].clone()) for part in parts}
    if form == "DTensor":  # of which this rank has one part
        from torch.distributed.tensor import DTensor, Shard

        own = START[torch.distributed.get_rank()].clone()
        params = {0: Parameter(DTensor.from_local(own, mesh_of(2), [Shard(0)]))}
    optimizer: Any = (Plain if name == "Plain" else getattr(ampopt, name))(
        list(params.values()), lr=0.25
    )
    if form == "process_group":
        optimizer.process_group = torch.distributed.group.WORLD
    scale: Any = ampopt.DynamicLossScale(init_scale=64.0, growth_interval=2)
    told: dict[str, Any] = {"calls": []}

    def give(micro_batch: dict[str, Any], scale: Any) -> None:
        for part, param in params.items():
            part = torch.distributed.get_rank() if form == "DTensor" else part
            param.grad = None
            if part in micro_batch["present"]:
                grad = micro_batch["factor"] * START[part].flip(0) * scale.item()
                if micro_batch["bad"] is not None and micro_batch["bad"][0] == part:
                    grad[0] = float(micro_batch["bad"][1])
                if form == "DTensor":
                    from torch.distributed.tensor import DTensor, Shard

                    grad = DTensor.from_local(grad, mesh_of(2), [Shard(0)])
                param.grad = grad

    for one in windows:
        passed_on = scale
        for micro_batch in one["micro_batches"]:
            give(micro_batch, passed_on)
            found_inf, after = optimizer.accumulate(grads_scaled_by=passed_on, drop=one["drop"])
            told["calls"].append((found_inf.item(), after.item()))
            passed_on = after if one["passes_on"] else passed_on
        give(one["last"], passed_on)
        options = {"grads_scaled_by": passed_on, "max_norm": one["max_norm"]}
        if one["several"]:
            _, found_inf, scale = ampopt.unscale_and_step([optimizer], **options)
        else:
            _, found_inf, scale = optimizer.unscale_and_step(**options)
        norm = optimizer.grad_norm
        told["calls"].append((found_inf.item(), scale.item(), repr(norm and norm.item())))
        told["calls"].append(repr(scale.state_dict()))
    local = {part: getattr(p.detach(), "to_local", p.detach)() for part, p in params.items()}
    if form == "DTensor":
        local = {torch.distributed.get_rank(): local[0]}
    told["params"] = {part: p.tolist() for part, p in local.items()}
    return told


def trained_by_parts(name: str, windows: list[Any], form: str) -> Any:
    return trained(name, windows, (torch.distributed.get_rank(),), form)


@pytest.mark.parametrize("form", ["process_group", "DTensor"])
@settings(max_examples=12)
@given(name=st.sampled_from(["SGD", "Plain"]), windows=st.lists(WINDOW, min_size=1, max_size=3))
@example(
    name="SGD", windows=[window(batch(), batch(bad=(1, "inf")), drop="window", passes_on=True)]
)
@example(name="SGD", windows=[window(batch(), batch(()), batch(bad=(0, "inf")))])
@example(name="SGD", windows=[window(batch(bad=(1, "inf")), batch(()))])
@example(name="SGD", windows=[window(batch({0}), last=batch({1}))])
def test_ranks_accumulate_as_one_process(two_ranks, form, name, windows):
    if form == "DTensor" and name == "Plain":
        name = "SGD"
    whole = trained(name, windows, (0, 1), "whole")
    first, second = two_ranks.run(trained_by_parts, name, windows, form)
    assert first.pop("params") | second.pop("params") == whole.pop("params")
    assert first == second == whole


def differing(drop: str) -> tuple[str, list[float], bool]:
    """The error of ``accumulate`` under scales that differ, the parameter, and whether it ended."""
    param = Parameter(torch.ones(2))
    optimizer = ampopt.SGD([param], lr=0.5, process_group=torch.distributed.group.WORLD)
    texts = []
    for own in (4.0, 4.0 + 4.0 * torch.distributed.get_rank()):
        param.grad = torch.ones(2)
        try:
            optimizer.accumulate(grads_scaled_by=own, drop=drop)
        except RuntimeError as error:
            texts.append(str(error))
    optimizer.zero_grad()
    return " ".join(texts), param.tolist(), len(texts) == 1


@pytest.mark.parametrize("drop", ["window", "micro_batch"])
def test_scales_that_differ_in_accumulate_raise_on_every_rank(two_ranks, drop):
    for text, param, once in two_ranks.run(differing, drop, timeout=10):
        assert "the scale of the gradients differs between ranks (rank 0: 4.0; rank 1: 8.0)" in text
        assert (param, once) == ([1.0, 1.0], True)
