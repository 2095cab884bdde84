"""``master_bits=24``: steps, gradients, clipping and checkpoints."""

import copy
import io
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.drawn_steps import everything, stepped
from support.optimizers import BEYOND_TORCH, BY_RULE

import ampopt
from ampopt.testing.bits import bits

HALF = st.sampled_from([torch.float16, torch.bfloat16])
BFLOAT16: Any = {"param_dtype": torch.bfloat16, "compute_dtype": torch.bfloat16}
SHAPES = [(128, 64), (90, 100), (12, 5)]


@pytest.fixture(autouse=True)
def nothing_is_compiled():
    """Use torch operations, which need no compiler, unless a test sets another backend."""
    previous = ampopt.get_backend()
    ampopt.set_backend("eager")
    yield
    ampopt.set_backend(previous)


def params_of(shapes=SHAPES, *, seed=0, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def made(params, cls: Any = ampopt.AdamW, **options: Any) -> Any:
    return cls(params, **{"master_weights": True, "master_bits": 24, **options})


def masters_of(optimizer):
    return [full.detach().clone() for full in optimizer.master_params()]


# --- which parameters, and how many bytes ---------------------------------------------------------


def test_adamw_with_24_bit_masters_and_8_bit_states_has_7_1_bytes_a_parameter():
    n = 1 << 16
    (param,) = params_of([(256, 256)])
    optimizer = stepped(made([param], state_bits=8), 2)
    optimizer.unscale(1.0)
    optimizer.step_after_unscale()
    tensors = [param, param.grad, *optimizer.state[param].values()]
    assert optimizer.state[param]["master_param"].dtype == torch.int8
    assert sum(t.untyped_storage().nbytes() for t in tensors) <= 7.1 * n
    assert not optimizer._ampopt.masters.holders  # which would have float32 copies
    assert param.grad is not None and param.grad.dtype == torch.bfloat16


def test_small_parameters_and_those_of_other_groups_have_float32_masters():
    small, large, other, wide = params_of([(8191,), (8192,), (8192,), (8192,)])
    wide = torch.nn.Parameter(wide.detach().float())
    optimizer = made([{"params": [small, large, wide]}, {"params": [other], "master_bits": 32}])
    stepped(optimizer, 1)
    kept = [optimizer.state[p].get("master_param") for p in (small, large, other)]
    assert [master.dtype for master in kept] == [torch.float32, torch.int8, torch.float32]
    assert "master_param" not in optimizer.state[wide]
    assert "rounding_key" not in optimizer.state[small]
    optimizer.param_groups[0]["master_bits"], optimizer.param_groups[1]["master_bits"] = 32, 24
    before = masters_of(optimizer)
    assert {m.dtype for m in before} == {torch.float32}
    stepped(optimizer, 1)
    kept = [optimizer.state[p]["master_param"].dtype for p in (small, large, other)]
    assert kept == [torch.float32, torch.float32, torch.int8]


@pytest.mark.parametrize("value", [16, 23.5, "24", True])
def test_another_number_of_bits_is_refused_before_anything_changes(value):
    params = params_of()
    with pytest.raises(ValueError, match=r"master_bits must be 24 or 32, got"):
        made(params, master_bits=value)
    with pytest.raises(ValueError, match=r"master_bits must be 24 or 32, got"):
        ampopt.Precision(**BFLOAT16, master_bits=value, master_weights=True)
    optimizer = stepped(made(params), 1)
    optimizer.param_groups[0]["master_bits"] = value
    before = bits(params[0])
    with pytest.raises(ValueError, match=r"master_bits must be 24 or 32, got"):
        optimizer.step()
    assert bits(params[0]) == before


def test_master_bits_need_masters_and_go_through_precision():
    with pytest.raises(ValueError, match="pass master_weights=True too"):
        ampopt.AdamW(params_of(), master_bits=24)
    with pytest.raises(ValueError, match="pass master_weights=True too"):
        ampopt.AdamW([{"params": params_of(), "master_bits": 24}])
    ampopt.AdamW([{"params": params_of(), "master_bits": 32}])
    with_masters = {"params": params_of(), "master_weights": True}  # one such group is enough
    ampopt.AdamW([{"params": params_of(dtype=torch.float32)}, with_masters], master_bits=24)
    with pytest.raises(ValueError, match="needs master_weights=True"):
        ampopt.Precision(**BFLOAT16, master_bits=24)
    precision = ampopt.Precision(**BFLOAT16, master_weights=True, master_bits=24)
    model = precision.prepare(torch.nn.Linear(128, 64))
    optimizer = ampopt.AdamW(model.parameters(), **precision.optimizer_options)
    train = ampopt.TrainStep(model, torch.nn.MSELoss(), optimizer, precision=precision)
    train(torch.randn(4, 128), torch.randn(4, 64).bfloat16())  # older torch has no mixed losses
    assert optimizer.state[model.weight]["master_param"].dtype == torch.int8
    with pytest.raises(ValueError, match="requires master_bits=24, and AdamW was made with 32"):
        ampopt.TrainStep(
            model,
            torch.nn.MSELoss(),
            ampopt.AdamW(model.parameters(), master_weights=True),
            precision=precision,
        )
    groups = [{"params": [model.weight], "master_bits": 24}, {"params": [model.bias]}]
    optimizer = ampopt.AdamW(groups, master_weights=True)  # for some parameters is enough
    ampopt.TrainStep(model, torch.nn.MSELoss(), optimizer, precision=precision)


# --- steps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [*BY_RULE, *BEYOND_TORCH])
def test_every_rule_steps_and_skips(cls):
    """A skipped step changes no bit, and the split step gives the bits of the step in one call."""
    runs = []
    for split in (False, True):
        params = params_of(dtype=torch.float16)
        optimizer = stepped(made(params, cls, state_bits=8), 1)
        for bad in (False, True, False):
            for p in params:
                p.grad = torch.full_like(p, 1.0)
            if bad:
                assert params[0].grad is not None
                params[0].grad[3, 3] = math.inf
            before = everything(optimizer)
            if split:
                optimizer.unscale(4.0)
                optimizer.step_after_unscale()
            else:
                optimizer.unscale_and_step(grads_scaled_by=4.0)
            assert (everything(optimizer) == before) == bad
        runs.append(everything(optimizer))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("cls", [*BY_RULE, *BEYOND_TORCH])
def test_a_step_is_that_of_a_float32_master(cls):
    runs = []
    for bits_ in (24, 32):
        params = params_of([(128, 128)])
        runs.append(masters_of(stepped(made(params, cls, master_bits=bits_), 1))[0])
    start = params_of([(128, 128)])[0].float()
    moved, exact = (run - start for run in runs)
    assert ((moved - exact).abs() <= 2**-14.9 * runs[1].abs() + 1e-7 * exact.abs()).all()


@settings(max_examples=4)
@given(HALF, st.sampled_from([8, 32]))
def test_backends_make_the_same_bits(dtype, state_bits):
    runs = []
    for name in ("eager", "compiled", "triton"):
        ampopt.set_backend(name)
        params = params_of([(65, 129)], dtype=dtype)
        runs.append(everything(stepped(made(params, state_bits=state_bits), 2)))
    assert runs[0] == runs[1] == runs[2]


def test_memory_layout_changes_no_bit():
    (param,) = params_of([(8, 64, 4, 4)])
    other = torch.nn.Parameter(param.detach().clone(memory_format=torch.channels_last))
    one, two = (stepped(made([p]), 3) for p in (param, other))
    assert torch.equal(param, other)
    assert torch.equal(masters_of(one)[0], masters_of(two)[0])


def test_updates_far_below_the_last_place_add_up():
    """With float32 masters they add up, too; without masters they are lost."""
    (param,) = params_of([(8192,)])
    param.data.fill_(1.0)
    optimizer = made([param], ampopt.SGD, lr=2.0**-18)
    for _ in range(64):
        param.grad = torch.ones_like(param)
        optimizer.step()
    (master,) = masters_of(optimizer)
    assert abs((1 - master.mean().item()) - 64 * 2**-18) < 2**-18


def test_without_a_gradient_or_an_update_no_bit_moves():
    params = params_of([(8192,)])
    optimizer = stepped(made(params, ampopt.SGD, lr=0.1), 3)
    before = params[0].detach().clone(), optimizer.state[params[0]]["master_param"].clone()
    params[0].grad = torch.zeros_like(params[0])
    for _ in range(3):
        optimizer.step()
    after = params[0].detach(), optimizer.state[params[0]]["master_param"]
    assert all(map(torch.equal, before, after))


# --- gradients on masters, and values in them -----------------------------------------------------


def test_clipping_through_masters_is_clipping_in_the_step():
    runs = []
    for by_hand in (True, False):
        params = params_of(dtype=torch.float16)
        optimizer = made(params)
        for p in params:
            p.grad = torch.ones_like(p)
        if by_hand:
            optimizer.unscale(2.0)
            torch.nn.utils.clip_grad_norm_(optimizer.master_params(), 0.25)
            optimizer.step_after_unscale()
        else:
            optimizer.unscale_and_step(grads_scaled_by=2.0, max_norm=0.25)
        runs.append(masters_of(optimizer))
    for one, two in zip(*runs, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-7)


def test_values_written_to_a_master_in_the_loop_are_stored():
    params = params_of(dtype=torch.float16)
    optimizer = stepped(made(params), 1)
    for param, full in optimizer.params_and_masters():
        assert full is not param and full.dtype == torch.float32
        with torch.no_grad():
            full.mul_(1.0009765)
            param.copy_(full)
    with torch.no_grad():
        wanted = [
            m * 1.0009765 for m in masters_of(stepped(made(params_of(dtype=torch.float16)), 1))
        ]
    for master, exact in zip(masters_of(optimizer), wanted, strict=True):
        torch.testing.assert_close(master, exact, rtol=2**-14.9, atol=2**-32)


def test_schedule_free_goes_to_its_average_and_back():
    params = params_of(dtype=torch.float16)
    optimizer = stepped(made(params, ampopt.ScheduleFreeAdamW), 2)
    before = masters_of(optimizer)
    optimizer.eval()
    optimizer.train()
    for one, two in zip(masters_of(optimizer), before, strict=True):
        torch.testing.assert_close(one, two, rtol=2**-13, atol=2**-30)


def test_a_parameter_that_is_changed_from_outside_changes_its_master():
    params = params_of([(8192,)])
    optimizer = stepped(made(params), 1)
    with torch.no_grad():
        params[0].mul_(2)
        (master,) = masters_of(optimizer)
        assert ((master - params[0].float()).abs() <= params[0].float().abs() * 2**-8).all()


# --- checkpoints ----------------------------------------------------------------------------------


@settings(max_examples=3)
@given(HALF)
def test_a_resumed_run_is_bitwise_the_same(dtype):
    optimizer, loaded = (made(params_of(dtype=dtype), state_bits=8) for _ in range(2))
    stepped(optimizer, 2)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    for i, param in enumerate(loaded.param_groups[0]["params"]):  # in either order
        param.data.copy_(optimizer.param_groups[0]["params"][i])
    assert everything(loaded) == everything(optimizer)
    copied = copy.deepcopy(optimizer)
    assert everything(copied) == everything(optimizer)
    assert everything(stepped(loaded, 2)) == everything(stepped(optimizer, 2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("saved", "wanted"), [(32, 24), (24, 32)])
def test_the_number_of_bits_is_that_of_the_optimizer_that_loads(saved, wanted, dtype):
    saver = stepped(made(params_of(dtype=dtype), master_bits=saved), 3)
    full = ampopt.full_state_dict(saver)
    exact = masters_of(saver)
    assert all(s["master_param"].dtype == torch.float32 for s in full["state"].values())
    for state_dict in (saver.state_dict(), full):
        params = [torch.nn.Parameter(p.detach().clone()) for p in saver.param_groups[0]["params"]]
        loader = made(params, master_bits=wanted)
        loader.load_state_dict(state_dict)
        for master, value in zip(masters_of(loader), exact, strict=True):
            rtol, atol = (0, 0) if wanted == 32 else (2**-14.9, 2**-32)
            torch.testing.assert_close(master, value, rtol=rtol, atol=atol)
        assert list(map(bits, params)) == list(map(bits, saver.param_groups[0]["params"]))
        stepped(loader, 1)
        dtypes = {loader.state[p]["master_param"].dtype for p in params if p.numel() >= 8192}
        assert dtypes == {torch.int8 if wanted == 24 else torch.float32}


def test_masters_that_were_made_and_not_stepped_are_saved_only_if_they_differ():
    params = params_of()
    optimizer = made(params)
    list(optimizer.master_params())
    assert optimizer.state_dict()["state"] == {}


def test_an_optimizer_without_masters_drops_them():
    saver = stepped(made(params_of()), 1)
    loader = ampopt.AdamW(params_of())
    loader.load_state_dict(saver.state_dict())
    assert all("master_param" not in state for state in loader.state.values())


def test_a_master_of_another_dtype_is_refused():
    params = params_of()
    optimizer = stepped(made(params), 1)
    optimizer.state[params[0]]["master_param"] = torch.zeros(128, 64, dtype=torch.int16)
    with pytest.raises(TypeError, match="master_param of .* is torch.int16"):
        stepped(optimizer, 1)
