"""``state_bits``: which states have few bits, the steps with them, and checkpoints."""

import copy
import functools
import inspect
import io
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.drawn_steps import everything, stepped
from support.optimizers import BEYOND_TORCH, BY_RULE
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import ampopt
from ampopt.testing.bits import bits
from ampopt.testing.isolation import small_states_of_any_size
from ampopt_kernels import Codec, Rule, State, div_rn, jit, rules, sqrt_rn, tl
from evidence import fidelity


@jit
def _adam_without_corrections(p, g, state, h, flags):
    mean = state[0] + 0.1 * (g - state[0])
    square = state[1] + 0.001 * (g * g - state[1])
    return p - h[0] * div_rn(mean, sqrt_rn(square) + 1e-8), (mean, square)


SHAPES = [(128, 64), (90, 100), (12,)]
BITS = st.sampled_from([8, 16])


@pytest.fixture(autouse=True)
def nothing_is_compiled():
    """Use torch operations, which need no compiler, unless a test sets another backend."""
    previous = ampopt.get_backend()
    ampopt.set_backend("eager")
    yield
    ampopt.set_backend(previous)


def params_of(shapes=SHAPES, *, seed=0, dtype=torch.float32):
    """Parameters whose elements are drawn from a normal distribution."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


# --- which states, and how many bytes -------------------------------------------------------------


def test_large_states_have_8_bits_and_a_scale_for_128_of_them_and_others_stay():
    small, large = params_of([(8191,), (8192,)])
    optimizer = stepped(ampopt.AdamW([small, large], state_bits=8), 1)
    kept = {name: (value.dtype, value.shape) for name, value in optimizer.state[large].items()}
    assert kept == {
        "step": (torch.float32, ()),
        "exp_avg": (torch.int8, (8192,)),
        "exp_avg_scale": (torch.float32, (64,)),
        "exp_avg_sq": (torch.uint8, (8192,)),
        "exp_avg_sq_scale": (torch.float32, (64,)),
        "rounding_key": (torch.int64, ()),
    }
    assert optimizer.state[small].keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert all(value.dtype == torch.float32 for value in optimizer.state[small].values())


def test_16_bits_are_bfloat16_and_32_the_default():
    (large,) = params_of([(8192,)])
    for bits_, dtype in ((16, torch.bfloat16), (32, torch.float32)):
        optimizer = stepped(ampopt.AdamW([large], state_bits=bits_), 1)
        assert {optimizer.state[large][n].dtype for n in ("exp_avg", "exp_avg_sq")} == {dtype}
    assert "state_bits" not in ampopt.AdamW([large]).param_groups[0]


def test_float64_and_complex_parameters_and_copies_of_parameters_keep_their_states():
    for dtype in (torch.float64, torch.complex64):
        params = params_of([(8192,)], dtype=dtype)
        optimizer = stepped(ampopt.AdamW(params, state_bits=8), 1)
        assert optimizer.state[params[0]]["exp_avg"].dtype == dtype
    params = params_of([(8192,)])
    for cls, name in ((ampopt.ScheduleFreeAdamW, "z"), (ampopt.ASGD, "ax")):
        optimizer = stepped(cls(params, state_bits=8), 1)
        assert optimizer.state[params[0]][name].dtype == torch.float32


def test_adamw_with_masters_allocates_at_most_what_it_says():
    n = 1 << 16
    (param,) = params_of([(256, 256)], dtype=torch.bfloat16)
    optimizer = stepped(ampopt.AdamW([param], master_weights=True, state_bits=8), 1)
    tensors = [param, param.grad, *optimizer.state[param].values()]
    allocated = sum(t.untyped_storage().nbytes() for t in tensors)
    assert allocated <= n * (2 + 2 + 4 + 2 * (1 + 4 / 128)) + 64  # step count and key


def test_an_option_of_a_param_group_and_of_a_running_optimizer():
    first, second = params_of([(8192,), (8192,)])
    optimizer = ampopt.AdamW([{"params": [first]}, {"params": [second], "state_bits": 8}])
    stepped(optimizer, 1)
    assert optimizer.state[first]["exp_avg"].dtype == torch.float32
    assert optimizer.state[second]["exp_avg"].dtype == torch.int8
    optimizer.param_groups[0]["state_bits"] = 16
    optimizer.param_groups[1]["state_bits"] = 32
    stepped(optimizer, 1)
    assert optimizer.state[first]["exp_avg"].dtype == torch.bfloat16
    assert optimizer.state[second]["exp_avg"].dtype == torch.float32
    assert "exp_avg_scale" not in optimizer.state[second]


@pytest.mark.parametrize("value", [4, 8.0, "8", True])
def test_another_number_of_bits_is_refused_before_anything_changes(value):
    params = params_of([(8192,)])
    with pytest.raises(ValueError, match=r"state_bits must be 8, 16 or 32, got"):
        ampopt.AdamW(params, state_bits=value)
    optimizer = stepped(ampopt.AdamW(params), 1)
    optimizer.param_groups[0]["state_bits"] = value
    before = bits(params[0])
    with pytest.raises(ValueError, match=r"state_bits must be 8, 16 or 32, got"):
        optimizer.step()
    assert bits(params[0]) == before


def test_torchs_own_step_cannot_read_small_states():
    params = params_of([(8192,)])
    with pytest.raises(
        ValueError, match="state_bits below 32 cannot be combined with differentiable"
    ):
        ampopt.AdamW(params, differentiable=True, state_bits=8)


# --- steps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [*BY_RULE, *BEYOND_TORCH])
def test_every_rule_steps_and_skips_with_8_bits(cls):
    """A skipped step changes no bit, and the split step gives the bits of the step in one call."""
    runs = []
    for split in (False, True):
        params = params_of()
        optimizer = cls(params, state_bits=8)
        stepped(optimizer, 1)
        for grad_scale, bad in ((4.0, False), (4.0, True), (4.0, False)):
            for p in params:
                p.grad = torch.full_like(p, 0.25 * grad_scale)
            if bad:
                assert params[0].grad is not None
                params[0].grad[3, 3] = math.inf
            before = everything(optimizer)
            if split:
                optimizer.unscale(grad_scale)
                optimizer.step_after_unscale()
            else:
                optimizer.unscale_and_step(grads_scaled_by=grad_scale)
            assert (everything(optimizer) == before) == bad
        runs.append(everything(optimizer))
    assert runs[0] == runs[1]


@settings(max_examples=4)
@given(BITS, st.booleans())
def test_backends_make_the_same_bits(bits_, masters):
    runs = []
    for name in ("eager", "compiled", "triton"):
        ampopt.set_backend(name)
        dtype = torch.bfloat16 if masters else torch.float32
        params = params_of([(65, 128)], dtype=dtype)
        optimizer = ampopt.AdamW(params, master_weights=masters, state_bits=bits_)
        runs.append(everything(stepped(optimizer, 2)))
    assert runs[0] == runs[1] == runs[2]


# The order of sums, of norms and of rows, differs between backends.
WITHOUT_SUMS = [cls for cls in (*BY_RULE, *BEYOND_TORCH) if not cls.rule.reduces]


@pytest.mark.parametrize("cls", [cls for cls in WITHOUT_SUMS if cls is not ampopt.Adafactor])
def test_backends_make_the_same_bits_of_every_rule(cls):
    """Also for tensors whose size is no multiple of a block."""
    options = {"momentum": 0.5} if "momentum" in inspect.signature(cls).parameters else {}
    runs = []
    for name in ("eager", "triton"):
        ampopt.set_backend(name)
        params = params_of([(130, 3), (300,)], dtype=torch.bfloat16)
        with small_states_of_any_size():
            optimizer = cls(params, state_bits=8, master_weights=True, master_bits=24, **options)
            runs.append(everything(stepped(optimizer, 2)))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("name", ["eager", "compiled", "triton"])
def test_an_applied_nan_makes_its_block_nan_and_no_other(name):
    ampopt.set_backend(name)
    (param,) = params_of([(8192,)])
    optimizer = stepped(ampopt.AdamW([param], state_bits=8), 1)
    param.grad = torch.full_like(param, 0.5)
    param.grad[300] = math.nan
    optimizer.step()
    in_block = torch.arange(8192) // 128 == 300 // 128
    for name in ("exp_avg", "exp_avg_sq"):
        full = ampopt.full_state_dict(optimizer)["state"][0][name]
        assert torch.equal(full.isnan(), in_block)
    assert param.isnan().nonzero().tolist() == [[300]]


def test_memory_layout_changes_no_bit():
    (param,) = params_of([(8, 64, 4, 4)])
    other = torch.nn.Parameter(param.detach().clone(memory_format=torch.channels_last))
    runs = [stepped(ampopt.AdamW([p], state_bits=8), 3) for p in (param, other)]
    assert torch.equal(param, other)
    one, two = (run.state_dict()["state"][0] for run in runs)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_skipped_first_step_changes_no_state_that_torch_makes_beforehand():
    params = params_of()
    optimizer = ampopt.Adagrad(params, initial_accumulator_value=0.1, state_bits=8)
    before = everything(optimizer)
    for p in params:
        p.grad = torch.full_like(p, math.inf)
    optimizer.unscale_and_step(grads_scaled_by=1.0)
    assert everything(optimizer) == before
    assert optimizer.state[params[0]]["sum"].dtype == torch.uint8


def test_a_parameter_that_never_had_a_gradient_does_not_move():
    (param,) = params_of([(128, 128)])
    before = param.detach().clone()
    optimizer = ampopt.AdamW([param], lr=0.1, weight_decay=0.0, state_bits=8)
    for _ in range(3):
        param.grad = torch.zeros_like(param)
        param.grad[5] = torch.randn(128)
        optimizer.step()
    moved = (param != before).any(1)
    assert moved[5] and moved.sum() == 1


@pytest.mark.parametrize("bits_", [16, 8])
def test_different_elements_draw_different_numbers(bits_):
    """Equal values are rounded to both neighbours in each block; parameters draw independently."""
    params = params_of([(8192,), (8192,)])
    optimizer = ampopt.AdamW(params, state_bits=bits_)
    for p in params:
        p.grad = torch.full_like(p, 0.228)
    optimizer.step()
    first, second = (optimizer.state[p]["exp_avg"].view(-1, 128) for p in params)
    assert len(first.unique()) == 2
    assert (first.amin(1) < first.amax(1)).all()
    assert not torch.equal(first, second)
    assert not torch.equal(first[0], first[1])


@pytest.mark.parametrize(
    ("label", "error_of_8_bits"),
    [("noise 1e-2", 0.12), ("noise 1e-7", 0.12), ("mean 1e-3", 0.06), ("uneven 1e-3", 0.2)],
)
def test_no_step_of_adamw_is_misled(label, error_of_8_bits):
    makes = [fidelity.maker("AdamW", bits_) for bits_ in (32, 16, 8)]
    found = fidelity.compare(makes[0], makes[1:], *fidelity.KINDS[label], steps=40)
    for of, error in zip(found, (0.03, error_of_8_bits), strict=True):
        assert abs(of.length - 1) <= 0.03
        assert of.error <= error
        assert of.largest <= 2 * of.largest_exact


@pytest.mark.parametrize("name", sorted({*fidelity.optimizers()} - {"AdamW"}))
def test_no_step_of_another_rule_is_misled(name):
    makes = [fidelity.maker(name, bits_) for bits_ in (32, 8)]
    for label in ("noise 1e-2", "uneven 1e-3"):
        (of,) = fidelity.compare(makes[0], makes[1:], *fidelity.KINDS[label], steps=12)
        assert abs(of.length - 1) <= 0.05
        assert of.largest <= 3 * of.largest_exact


class Exact(ampopt.ElementwiseOptimizer):
    """Adam by a rule of an author, whose second moment is always in full precision."""

    rule = Rule(
        update=_adam_without_corrections,
        hyper=("lr",),
        state=(State("mean"), State("square", positive=True, full=True)),
    )

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, {"lr": fidelity.LR}, **options)


def amsgrad(params: Any, **options: Any) -> ampopt.Adam:
    return ampopt.Adam(params, lr=fidelity.LR, amsgrad=True, **options)


@pytest.mark.parametrize("cls", [amsgrad, Exact])
def test_no_step_is_misled_where_one_state_is_exact(cls):
    """Elements much smaller than others of their block have few digits in a signed code."""
    makes = [functools.partial(cls, state_bits=bits_) for bits_ in (32, 8)]
    (of,) = fidelity.compare(makes[0], makes[1:], "uneven", 1e-2, steps=60)
    assert of.largest <= 1.5 * of.largest_exact
    assert abs(of.length - 1) <= 0.01


# --- states of parameters that are rounded stochastically -----------------------------------------

STOCHASTIC = [
    (ampopt.AdamW, {}),
    (ampopt.Adam, {"amsgrad": True}),
    (ampopt.RMSprop, {"centered": True}),
    (ampopt.ScheduleFreeAdamW, {}),
]


@pytest.mark.parametrize(
    ("cls", "options", "n"), [*((*it, 64) for it in STOCHASTIC), (*STOCHASTIC[0], 8192)]
)
def test_averages_of_stochastically_rounded_parameters_fall(cls, options, n):
    """Rounded to the nearest, a second moment stays where it was when the gradients were large."""
    after = []
    for dtype in (torch.float32, torch.bfloat16):
        p = torch.nn.Parameter(torch.zeros(n, dtype=dtype))
        optimizer = cls([p], lr=1e-3, param_rounding="stochastic", **options)
        optimizer.param_groups[0]["betas"] = (0.9, 0.98)  # falls sooner
        for step in range(300):
            p.grad = torch.full_like(p, 1.0 if step < 20 else 0.01)
            optimizer.step()
        state = {name: x for name, x in optimizer.state[p].items() if x.ndim}
        after.append([x.float().mean() for x in (p, *state.values())])
    torch.testing.assert_close(*after, rtol=0.1, atol=1e-5)


@pytest.mark.parametrize("bits_", [8, 16, 32])
def test_states_of_stochastically_rounded_parameters_are_bfloat16_or_exact(bits_):
    small, large = params_of([(7,), (8192,)], dtype=torch.bfloat16)
    for cls, options in STOCHASTIC:
        optimizer = cls([small, large], param_rounding="stochastic", state_bits=bits_, **options)
        stepped(optimizer, 1)
        for part in optimizer.rule.state:
            for p in (small, large):
                if (state := optimizer.state[p].get(part.name)) is not None:
                    allowed = {torch.bfloat16, torch.float32}
                    allowed |= {torch.int8, torch.uint8} if bits_ == 8 and p is large else set()
                    assert state.dtype in allowed
        assert optimizer.state[small]["rounding_key"].dtype == torch.int64


def test_states_in_bfloat16_of_torch_are_loaded_and_rounded_from_then_on():
    (p,) = params_of([(64,)], dtype=torch.bfloat16)
    theirs = stepped(torch.optim.Adam([p], amsgrad=True), 2)
    ours = ampopt.Adam([p], amsgrad=True, param_rounding="stochastic")
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    for name, dtype in (("exp_avg", torch.bfloat16), ("max_exp_avg_sq", torch.float32)):
        assert ours.state[p][name].dtype == dtype
        assert torch.equal(ours.state[p][name].float(), theirs.state[p][name].float())
    torch.optim.Adam([p], amsgrad=True).load_state_dict(ampopt.full_state_dict(stepped(ours, 1)))


# --- checkpoints ----------------------------------------------------------------------------------


@settings(max_examples=4)
@given(BITS, st.booleans())
def test_a_resumed_run_is_bitwise_the_same(bits_, masters):
    def made():
        params = params_of(dtype=torch.bfloat16 if masters else torch.float32)
        return ampopt.AdamW(params, master_weights=masters, state_bits=bits_)

    optimizer, loaded = stepped(made(), 2), made()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    for i, param in enumerate(loaded.param_groups[0]["params"]):
        param.data.copy_(optimizer.param_groups[0]["params"][i])
    loaded.load_state_dict(torch.load(file, weights_only=True))
    assert everything(loaded) == everything(optimizer)
    copied = copy.deepcopy(optimizer)
    assert everything(copied) == everything(optimizer)
    assert everything(stepped(loaded, 2)) == everything(stepped(optimizer, 2))


@settings(max_examples=8)
@given(st.sampled_from([8, 16, 32]), st.sampled_from([8, 16, 32]))
def test_the_number_of_bits_is_that_of_the_optimizer_that_loads(saved, wanted):
    params = params_of()
    saver, loader = (ampopt.AdamW(params, state_bits=b) for b in (saved, wanted))
    fresh = stepped(ampopt.AdamW(params, state_bits=wanted), 1)
    stepped(saver, 3)
    full = ampopt.full_state_dict(saver)["state"]
    loader.load_state_dict(saver.state_dict())
    assert loader.param_groups[0].get("state_bits", 32) == wanted
    for index, p in enumerate(params):
        dtypes = {name: value.dtype for name, value in fresh.state[p].items()}
        loaded = {name: value.dtype for name, value in loader.state[p].items()}
        assert {**loaded, "rounding_key": None} == {**dtypes, "rounding_key": None}
        again = ampopt.full_state_dict(loader)["state"][index]
        for name in ("exp_avg", "exp_avg_sq"):
            exact = full[index][name]
            tolerance = 0.0 if wanted == saved else {32: 0.0, 16: 2**-8, 8: 0.05}[wanted]
            least = exact.abs().amax() * 2e-3 * (wanted == 8) * (tolerance > 0)
            torch.testing.assert_close(again[name], exact, rtol=tolerance, atol=float(least))
    stepped(loader, 1)


def test_codes_are_not_saved_under_the_names_of_states():
    """A loader that copies states by name, such as torch's, must not take codes for values."""
    params = [p for p in params_of(dtype=torch.bfloat16) if p.numel() >= 8192]
    optimizer = stepped(ampopt.AdamW(params, state_bits=8, master_weights=True, master_bits=24), 1)
    saved = optimizer.state_dict()
    names = {"exp_avg_codes", "exp_avg_scale", "exp_avg_sq_codes", "exp_avg_sq_scale"}
    assert saved["state"][0].keys() == {*names, "master_param_codes", "step", "rounding_key"}
    theirs = torch.optim.AdamW(params)
    theirs.load_state_dict(saved)
    with pytest.raises(KeyError, match="exp_avg"):
        theirs.step()


def test_entries_of_users_in_the_state_are_saved_and_loaded_unchanged():
    (param,) = params_of([(128, 64)])
    optimizer: Any = stepped(ampopt.AdamW([param], state_bits=8), 1)
    optimizer.state[param]["my_codes"] = torch.ones(3, dtype=torch.int8)
    optimizer.state["epoch"] = 5
    loaded: Any = ampopt.AdamW([param], state_bits=8)
    loaded.load_state_dict(optimizer.state_dict())
    assert loaded.state[param].keys() == optimizer.state[param].keys()
    in_full = ampopt.full_state_dict(loaded)["state"]
    assert loaded.state["epoch"] == in_full["epoch"] == 5
    assert in_full[0]["my_codes"].dtype == torch.int8


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_full_state_without_small_states_is_the_state(dtype):
    (param,) = params_of([(8192,)], dtype=dtype)
    optimizer = stepped(ampopt.SGD([param], momentum=0.5), 1)
    full, saved = ampopt.full_state_dict(optimizer), optimizer.state_dict()
    assert bits(full["state"]) == bits(saved["state"])


@pytest.mark.parametrize("master_bits", [24, 32])
def test_the_full_state_beside_a_master_is_float32(master_bits):
    (param,) = params_of([(8192,)], dtype=torch.bfloat16)
    options = {"master_weights": True, "master_bits": master_bits}
    optimizer = stepped(ampopt.AdamW([param], state_bits=16, **options), 1)
    full = ampopt.full_state_dict(optimizer)["state"][0]
    assert {name: value.dtype for name, value in full.items()} == dict.fromkeys(
        ("master_param", "step", "exp_avg", "exp_avg_sq"), torch.float32
    )


def test_torchs_optimizer_loads_the_full_state_and_ampopts_loads_torchs():
    params = params_of()
    ours = stepped(ampopt.AdamW(params, state_bits=8), 2)
    theirs = torch.optim.AdamW(params)
    theirs.load_state_dict(ampopt.full_state_dict(ours))
    state = theirs.state[params[0]]
    assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert state["exp_avg"].dtype == torch.float32
    stepped(theirs, 1)
    back = ampopt.AdamW(params, state_bits=8)
    back.load_state_dict(theirs.state_dict())
    assert back.state[params[0]]["exp_avg"].dtype == torch.int8
    stepped(back, 1)


@pytest.mark.parametrize("taken", [0, 1])
def test_dampening_knows_after_a_checkpoint_whether_a_step_is_the_first(taken):
    """A first step is recognized by the missing buffer, which only an applied step may create."""
    ends = []
    for resumes in (False, True):
        params = params_of([(8192,)])
        optimizer = ampopt.SGD(params, lr=0.5, momentum=0.5, dampening=0.5, state_bits=8)
        stepped(optimizer, taken)
        params[0].grad = torch.full_like(params[0], math.inf)
        optimizer.unscale_and_step(grads_scaled_by=1.0)
        if resumes:
            saved = optimizer.state_dict()
            optimizer = ampopt.SGD(params, lr=0.5, momentum=0.5, dampening=0.5, state_bits=8)
            optimizer.load_state_dict(saved)
        ends.append(everything(stepped(optimizer, 2, seed=2)))
    assert ends[0] == ends[1]


def test_codes_without_their_scales_are_refused():
    params = params_of()
    optimizer = stepped(ampopt.AdamW(params, state_bits=8), 1)
    del optimizer.state[params[0]]["exp_avg_scale"]
    with pytest.raises(TypeError, match="exp_avg of .* has 8-bit codes.*'exp_avg_scale' is None"):
        stepped(optimizer, 1)
    optimizer.state[params[0]]["exp_avg_scale"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"has scales of shape \(3,\), and must have \(64,\)"):
        stepped(optimizer, 1)


def test_values_computed_from_codes_are_refused():
    """As in Gaussian splatting, which pads states by zeros when it adds points."""
    params = params_of()
    optimizer = stepped(ampopt.AdamW(params, state_bits=8), 1)
    state = optimizer.state[params[0]]
    state["exp_avg"] = torch.cat([state["exp_avg"][1:], torch.zeros(1, 64)])
    before = bits(params)
    with pytest.raises(TypeError, match="exp_avg of .* is torch.float32 beside 'exp_avg_scale'"):
        stepped(optimizer, 1)
    assert bits(params) == before
    state["exp_avg"] = torch.zeros(128, 64)
    del state["exp_avg_scale"]
    stepped(optimizer, 1)
    assert state["exp_avg"].dtype == torch.int8


def test_a_checkpoint_with_scales_but_no_codes_is_refused():
    """Torchtitan's loader makes such a checkpoint: it keeps only states of the names in memory."""
    params = params_of()
    optimizer = stepped(ampopt.AdamW(params, state_bits=8), 1)
    saved = optimizer.state_dict()
    del saved["state"][0]["exp_avg_codes"]
    before = bits([*params, *optimizer.state[params[0]].values()])
    with pytest.raises(ValueError, match="has no 'exp_avg_codes' of parameter 0: .*'exp_avg'"):
        optimizer.load_state_dict(saved)
    assert bits([*params, *optimizer.state[params[0]].values()]) == before


def test_a_flattened_checkpoint_is_loaded_by_the_names_in_memory():
    """Torch's loader looks for states by these names; an error says what to do without them."""
    options: Any = {"options": StateDictOptions(flatten_optimizer_state_dict=True)}
    models, optimizers = [], []
    for _ in range(2):
        torch.manual_seed(0)
        model = torch.nn.Linear(128, 64, bias=False).half()
        optimizer = ampopt.AdamW(
            model.parameters(), lr=0.125, master_weights=True, master_bits=24, state_bits=8
        )
        models.append(model)
        optimizers.append(optimizer)

    def take_steps(i: int) -> None:
        for size in (1.0, -3.0):
            models[i].weight.grad = torch.full_like(models[i].weight, size)
            optimizers[i].unscale_and_step(grads_scaled_by=1.0)
            optimizers[i].zero_grad()

    take_steps(0)
    models[1].load_state_dict(models[0].state_dict())
    saved = copy.deepcopy(get_optimizer_state_dict(models[0], optimizers[0], **options))
    with pytest.raises(ValueError, match=r"no 'master_param_codes' .*key.removesuffix\('_codes'\)"):
        set_optimizer_state_dict(models[1], optimizers[1], saved, **options)
    by_memory = {key.removesuffix("_codes"): value for key, value in saved.items()}
    set_optimizer_state_dict(models[1], optimizers[1], by_memory, **options)
    take_steps(0)
    take_steps(1)
    assert bits([models[0].weight]) == bits([models[1].weight])


# --- authors --------------------------------------------------------------------------------------


@jit
def _encode(x, u):
    return tl.floor(x * 120.0 + u)


@jit
def _decode(code):
    return code * (1 / 120)


@jit
def _update(p, g, state, h, flags):
    lr, momentum = h
    buf = momentum * state[0] + g
    return p - lr * buf, (buf,)


def momentum_of(**declared):
    rule = Rule(update=_update, hyper=("lr", "momentum"), state=(State("buf", **declared),))

    class Momentum(ampopt.ElementwiseOptimizer):
        def __init__(self, params, lr=0.1, momentum=0.9, **options):
            super().__init__(params, {"lr": lr, "momentum": momentum}, **options)

    Momentum.rule = rule
    return Momentum


def test_a_codec_of_an_author_keeps_the_state():
    cls = momentum_of(codec=Codec(_encode, _decode, torch.int8, block=64))
    params = params_of()
    optimizer = stepped(cls(params, state_bits=8), 3)
    assert optimizer.state[params[0]]["buf_scale"].numel() == 128
    exact = stepped(cls(params_of()), 3)
    ours, theirs = (ampopt.full_state_dict(o)["state"][0]["buf"] for o in (optimizer, exact))
    assert (ours - theirs).norm() <= 0.05 * theirs.norm()


def test_states_of_a_rule_say_what_keeps_them_in_full_precision():
    names = {"amsgrad": True, "weight_decay": False, "decoupled_weight_decay": False}
    flags = tuple({**names, "maximize": False}[flag] for flag in rules.adam.flags)
    codecs = rules.adam.codecs_for(flags, 8)
    assert [codec is None for codec in codecs] == [False, True, True]
    with pytest.raises(ValueError, match="kept in full precision under 'nesterov'"):
        momentum_of(full="nesterov")
    not_a_codec: Any = 8
    with pytest.raises(TypeError, match="codec=8, which must be an ampopt_kernels.Codec"):
        State("buf", codec=not_a_codec)


@jit
def _encode_twice(x, u):
    return x * 2.0


@jit
def _decode_half(code):
    return code * 0.5


@pytest.mark.parametrize(
    "codec",
    [
        Codec(_encode_twice, _decode_half, torch.float16, block=256),  # floats that are codes
        Codec(_encode, _decode, torch.int8, block=1),  # codes without scales
        Codec(_encode, _decode, torch.int8, block=64),
    ],
)
def test_states_of_an_authors_codec_are_loaded_bit_for_bit_and_in_full_precision(codec):
    cls = momentum_of(codec=codec)
    straight = stepped(cls(params_of(), state_bits=8), 2)
    resumed = cls(params_of(), state_bits=8)
    resumed.load_state_dict(straight.state_dict())
    assert everything(resumed)[1] == everything(straight)[1]
    stepped(straight, 2, seed=2)
    stepped(resumed, 2, seed=2)
    assert everything(resumed)[1] == everything(straight)[1]
    in_full = ampopt.full_state_dict(resumed)["state"]
    exact = cls(params_of())
    exact.load_state_dict(resumed.state_dict())
    for i, p in enumerate(exact.param_groups[0]["params"]):
        assert in_full[i].keys() == {"buf"}
        assert in_full[i]["buf"].dtype == torch.float32
        p.grad = torch.zeros_like(p)
    exact.step()
    for i, p in enumerate(exact.param_groups[0]["params"]):
        assert torch.equal(exact.state[p]["buf"], in_full[i]["buf"] * 0.9)
