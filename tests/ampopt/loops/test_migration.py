"""Checkpoints of other systems, loaded as the guides say: the scale continues as it would there."""

import copy
import itertools
import runpy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from support.optimizers import Plain
from support.readme import ROOT, run
from support.schedules_of_others import FLOAT32_MAX, SYSTEMS, DeepSpeed, histories

import ampopt
from ampopt import AdamW
from ampopt.testing.bits import bits


class ConsecutiveDeepSpeed(DeepSpeed):
    consecutive_hysteresis = True


def deepspeed_without_zero(system):
    return {
        "cur_scale": system.scale,
        "cur_iter": system.cur_iter,
        "last_overflow_iter": system.last_overflow_iter,
        "scale_window": system.scale_window,
        "cur_hysteresis": system.cur_hysteresis,
    }


def deepspeed_under_zero(system):
    return SimpleNamespace(
        **deepspeed_without_zero(system),
        min_scale=1,
        delayed_shift=system.delayed_shift,
        consecutive_hysteresis=system.consecutive_hysteresis,
    )


def megatron(system):
    return {
        "scale": torch.tensor([system.scale]),
        "growth_tracker": system._growth_tracker,
        "hysteresis_tracker": system._hysteresis_tracker,
    }


ADOPTED = {
    "apex": (
        SYSTEMS["apex"],
        lambda page, it: page["scale_of"](
            "apex", it.scale, it._unskipped, growth_interval=it._scale_seq_len
        ),
    ),
    "nnabla": (
        SYSTEMS["nnabla"],
        lambda page, it: page["scale_of"]("nnabla", it.scale, it._counter, growth_interval=it.N),
    ),
    "paddle": (
        SYSTEMS["paddle"],
        lambda page, it: page["scale_of"](
            "paddle",
            it.scale,
            it._incr_count,
            budget=it._decr_every_n_nan_or_inf - it._decr_count,
            hysteresis=it._decr_every_n_nan_or_inf,
            growth_interval=it._incr_every_n_steps,
            backoff_factor=it.decr_ratio,
        ),
    ),
    "deepspeed without ZeRO": (
        DeepSpeed,
        lambda page, it: page["scale_of_deepspeed"](deepspeed_without_zero(it)),
    ),
    "deepspeed": (
        DeepSpeed,
        lambda page, it: page["scale_of_deepspeed"](deepspeed_under_zero(it)),
    ),
    "deepspeed, consecutive": (
        ConsecutiveDeepSpeed,
        lambda page, it: page["scale_of_deepspeed"](deepspeed_under_zero(it)),
    ),
    "megatron": (
        SYSTEMS["megatron"],
        lambda page, it: page["scale_of_megatron"](
            megatron(it), growth_interval=it.growth_interval, hysteresis=it.hysteresis
        ),
    ),
    "keras": (
        SYSTEMS["keras"],
        lambda page, it: page["scale_of"](
            "keras", it.scale, it.step_counter, growth_interval=it.dynamic_growth_steps
        ),
    ),
    "jmp": (
        SYSTEMS["jmp"],
        lambda page, it: page["scale_of"]("jmp", it.scale, it.counter, growth_interval=it.period),
    ),
    "flax": (
        SYSTEMS["flax"],
        lambda page, it: page["scale_of"](
            "flax", it.scale, it.fin_steps, growth_interval=it.growth_interval
        ),
    ),
}
"""The system, and how its scale is resumed, as the guide's table says."""


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    """Run the block of a guide once, and return the names that it defines."""
    kept = {}

    def of(heading):
        if heading not in kept:
            kept[heading] = run(heading, tmp_path_factory.mktemp("guide"))
        return kept[heading]

    return of


@pytest.mark.parametrize("case", ADOPTED)
@given(window=st.integers(1, 6), hysteresis=st.integers(1, 3), before=histories, after=histories)
@example(window=2, hysteresis=2, before=[True] * 5, after=[False] * 3 + [True] * 4)
@example(window=3, hysteresis=3, before=[False, True], after=[True, True, False])
@example(window=3, hysteresis=2, before=[True] + [False] * 9, after=[False] * 3 + [True] * 2)
def test_a_scale_continues_as_in_the_other_system(case, names, window, hysteresis, before, after):
    make, adopted = ADOPTED[case]
    if case == "deepspeed without ZeRO":
        hysteresis = 2  # which is not saved
    system = make(2.0**16, window, hysteresis)
    for overflow in before:
        system.update(overflow)
    assume(system.scale <= FLOAT32_MAX)
    scale = adopted(names("The loss scale of a checkpoint"), system)
    for overflow in after:
        scale = scale.next(overflow)
        system.update(overflow)
        if system.scale > FLOAT32_MAX:
            return
        assert scale.item() == system.scale


def loss_of(model, number):
    torch.manual_seed(number)
    with torch.autocast("cpu", torch.float16):
        return model(torch.randn(32, 64)).square().mean()


def train_with_torch(model, optimizer, scaler, numbers):
    for number in numbers:
        optimizer.zero_grad()
        scaler.scale(loss_of(model, number)).backward()
        scaler.step(optimizer)
        scaler.update()


def test_a_run_of_torch_continues_as_with_torch():
    """From the states of torch's optimizer and scaler, skips and growth of the scale included."""
    model = torch.nn.Linear(64, 10)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=5)
    train_with_torch(model, optimizer, scaler, range(20))

    here = torch.nn.Linear(64, 10)
    here.load_state_dict(model.state_dict())
    own, scale = AdamW(here.parameters()), ampopt.DynamicLossScale()
    own.load_state_dict(optimizer.state_dict())
    scale.load_state_dict(scaler.state_dict())
    for number in range(20, 40):
        own.zero_grad()
        ampopt.scale_outputs(loss_of(here, number), scale).backward()
        _, _, scale = own.unscale_and_step(grads_scaled_by=scale)

    train_with_torch(model, optimizer, scaler, range(20, 40))
    assert scale.item() == scaler.get_scale()
    torch.testing.assert_close(here.weight, model.weight, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("step_in", ["state", "param_groups"])
def test_megatrons_masters_and_states_continue_as_in_megatron(step_in, names):
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 3), (3,), (5,)]
    gradients = [
        [torch.randn(shape, generator=generator).half() for shape in shapes] for _ in range(8)
    ]
    model = [torch.nn.Parameter(torch.randn(shape, generator=generator).half()) for shape in shapes]
    masters = [p.detach().float().requires_grad_() for p in model]
    theirs = torch.optim.AdamW(
        [{"params": masters[:1], "lr": 0.1}, {"params": masters[1:], "lr": 0.01}]
    )

    def step_there(now):
        for master, gradient in zip(masters, now, strict=True):
            master.grad = gradient.float()
        theirs.step()
        for p, master in zip(model, masters, strict=True):
            p.data.copy_(master)

    for now in gradients[:4]:
        step_there(now)
    saved = copy.deepcopy(
        {"optimizer": theirs.state_dict(), "fp32_from_fp16_params": [masters[:1], masters[1:]]}
    )
    if step_in == "param_groups":
        for group in saved["optimizer"]["param_groups"]:
            steps = [saved["optimizer"]["state"][number].pop("step") for number in group["params"]]
            group["step"] = int(steps[0])

    here = [torch.nn.Parameter(p.detach().clone()) for p in model]
    groups = [{"params": here[:1], "lr": 0.1}, {"params": here[1:], "lr": 0.01}]
    optimizer = AdamW(groups, master_weights=True)
    names("From Megatron")["load_into"](optimizer, saved)
    for now in gradients[4:]:
        step_there(now)
        for p, gradient in zip(here, now, strict=True):
            p.grad = gradient * 8
        optimizer.unscale_and_step(grads_scaled_by=8.0)
    for own, master in zip(optimizer.master_params(), masters, strict=True):
        torch.testing.assert_close(own, master.detach(), rtol=1e-6, atol=1e-7)


# --- sharpness-aware minimization in two calls ----------------------------------------------------


@pytest.mark.parametrize("base", [ampopt.SGD, AdamW, Plain])
@pytest.mark.parametrize("bad", [(), (0,), (1,), (0, 1)], ids=str)
def test_the_recipe_for_sam_skips_an_overflow_of_either_gradient(base, bad):
    """The step of the example, in whose second call the gradients ``bad`` of the two overflow."""
    sam_step = runpy.run_path(str(ROOT / "examples" / "sam_in_two_calls.py"))["sam_step"]
    results = []
    for scaled in (True, False):
        torch.manual_seed(0)
        model: Any = torch.nn.Linear(3, 2)
        optimizer = base(model.parameters(), lr=0.25)
        params, evaluations = list(model.parameters()), itertools.count()
        scale: Any = ampopt.DynamicLossScale(init_scale=2.0**4) if scaled else None

        def backward(scale, model=model, optimizer=optimizer, evaluations=evaluations):
            optimizer.zero_grad()
            loss = model(torch.eye(3)).square().sum()
            ampopt.scale_outputs(loss, scale).backward()
            if scale is not None and next(evaluations) - 2 in bad:
                model.bias.grad[0] = float("inf")

        if scaled:
            for _ in range(10):
                scale = sam_step(optimizer, params, backward, scale)
            assert scale.item() == (2.0**3 if 1 in bad else 2.0**4)
        else:  # a first gradient that overflows moves nothing, a second one skips the step
            for i in range(10):
                backward(None)
                weights = [p.detach().clone() for p in params]
                grads = [p.grad for p in params if p.grad is not None]
                norm = torch.nn.utils.get_total_norm(grads)
                if i != 1 or 0 not in bad:
                    for p, grad in zip(params, grads, strict=True):
                        p.data += grad * 0.05 / norm
                backward(None)
                for p, weight in zip(params, weights, strict=True):
                    p.data.copy_(weight)
                if i != 1 or 1 not in bad:
                    optimizer.step()
        results.append(bits(params))
    assert results[0] == results[1]
