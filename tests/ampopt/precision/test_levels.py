"""``ampopt.Precision``: the opt levels of other systems, alone and in a training step."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ampopt
from ampopt import DynamicLossScale, Precision, StaticLossScale
from ampopt.precision import presets

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32

# Parameters, computation, dtype of kept batch norms, masters, and the schedule or number of the
# scale, as each system has them.
TABLE = {
    "O0": (F32, F32, F32, False, 1.0),
    "torch": (F32, F16, F32, False, "torch"),
    "O1": (F32, F16, F32, False, "apex"),
    "paddle-O1": (F32, F16, F32, False, "paddle"),
    "fleet": (F32, F16, F32, False, "paddle-fleet"),
    "O2": (F16, F16, F32, True, "apex"),
    "paddle-O2": (F16, F16, F32, True, "paddle"),
    "O3": (F16, F16, F16, False, 1.0),
    "mindspore-O0": (F32, F32, F32, False, 1.0),
    "mindspore-O2": (F16, F16, F32, True, "mindspore"),
    "mindspore-O3": (F16, F16, F16, True, 1.0),
    "nnabla-half": (F32, F16, F32, False, "nnabla"),
}
X = torch.linspace(-1.0, 1.0, 32).reshape(4, 8)


def network() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.LayerNorm(4), nn.Linear(4, 3))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.linspace(-1.0, 0.75, p.numel()).reshape(p.shape))
    return model


def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets)


def test_every_level_has_its_row_and_its_source():
    assert set(presets.LEVELS) == set(TABLE)
    for name in TABLE:
        assert f"``{name}``" in str(presets.__doc__)


@pytest.mark.parametrize("name", TABLE)
def test_a_level_is_what_its_system_does(name):
    param, compute, norm, masters, scaling = TABLE[name]
    p = Precision.like(name)
    model = network()
    assert p.prepare(model) is model
    seen = []
    model[3].register_forward_hook(lambda _, args, out: seen.append(out.dtype))
    with p.autocast("cpu"):
        outputs = model(X)
        loss = loss_fn(outputs, torch.arange(4) % 3)
    assert model[0].weight.dtype == param and model[1].weight.dtype == norm
    assert model[2].weight.dtype == param  # apex keeps batch norm alone
    assert seen == [compute] and loss.dtype == F32
    assert outputs.dtype == (F32 if param == F16 else compute)
    assert p.optimizer_options == ({"master_weights": True} if masters else {})
    scale = p.loss_scale()
    if isinstance(scaling, str):
        expected = DynamicLossScale.like(scaling)
        assert isinstance(scale, DynamicLossScale)
        assert repr(scale) == repr(expected)
    else:
        assert isinstance(scale, StaticLossScale) and scale.item() == scaling
    assert p.loss_scale() is not scale


@pytest.mark.parametrize("name", ["O1", "fleet", "paddle-O1", "nnabla-half"])
def test_lists_deny_on_the_cpu_too(name):
    x = X.to(F16)
    with Precision.like(name).autocast("cpu"):
        assert x.softmax(-1).dtype == x.sum().dtype == F32
        assert (X @ X.T).dtype == F16


@given(name=st.sampled_from(["O1", "fleet", "torch", "nnabla-half"]), data=st.data())
def test_lists_add_to_those_of_the_level(name, data):
    level = Precision.like(name)
    operators = ["tanh", "softmax", "exp", "matmul", "mean", "cat"]
    allow = data.draw(st.lists(st.sampled_from(operators), unique=True))
    deny = [one for one in data.draw(st.lists(st.sampled_from(operators))) if one not in allow]
    p = Precision.like(name, allow=allow, deny=deny)
    assert set(p.allow) == {*level.allow, *allow} - {*deny}
    assert set(p.deny) == {*level.deny, *deny} - {*allow}
    assert len(set(p.deny)) == len(p.deny)
    assert p == Precision.like(name, allow=p.allow, deny=p.deny)


def test_a_list_that_adds_one_operator_leaves_the_others():
    x = X.to(F16)
    with Precision.like("fleet", deny=["tanh"], allow=["softmax"]).autocast("cpu"):
        assert [x.tanh().dtype, x.exp().dtype, x.softmax(-1).dtype] == [F32, F32, F16]
    with pytest.raises(ValueError, match="'tanh' is in both allow and deny"):
        Precision.like("fleet", deny=["tanh"], allow=["tanh"])
    with Precision.like("O3", deny=["tanh"]).autocast("cpu"):  # on for the list alone
        assert x.tanh().dtype == F32


@pytest.mark.parametrize("name", ["O1", "fleet", "torch", "paddle-O1", "nnabla-half"])
def test_kept_modules_run_in_float32_under_autocast(name):
    p = Precision.like(name, keep=["3", nn.LayerNorm])
    model = p.prepare(network())
    seen = []
    for module in model:
        module.register_forward_hook(lambda _, args, out: seen.append(out.dtype))
    with p.autocast("cpu"):
        model(X)
    assert [seen[0], *seen[2:]] == [F16, F32, F32]
    other = Precision.like(name)
    other.prepare(model)  # replaces the first
    with other.autocast("cpu"):
        assert model(X).dtype == F16


def test_kept_modules_run_in_float32_inside_a_half_model_with_lists():
    p = Precision.like("O3", keep=["3"], allow=["tanh"])
    model = p.prepare(network())
    with p.autocast("cpu"):
        expected = nn.functional.linear(model[:3](X.half()).float(), *model[3].parameters())
        with torch.autocast("cpu", enabled=False):
            exact = nn.functional.linear(model[:3](X.half()).float(), *model[3].parameters())
        assert not torch.equal(expected, exact)  # autocast would run it in float16
        assert torch.equal(model(X), exact.half().float())


def test_kept_modules_run_the_forward_of_the_instance():
    p = ampopt.Precision(compute_dtype=torch.bfloat16)
    norm: Any = nn.LayerNorm(4)
    model, x = nn.Sequential(norm), torch.arange(4.0)
    expected, before = model(x) * 100, norm.forward
    own = norm.forward = lambda x: before(x) * 100
    for _ in range(2):
        p.prepare(model)
        assert torch.equal(model(x), expected)
    ampopt.cast(model, torch.float32)
    assert norm.forward is own
    p.prepare(model)
    later = norm.forward = lambda x, inner=norm.forward: inner(x) * 2
    ampopt.cast(model, torch.float32)
    assert norm.forward is later and torch.equal(model(x), expected * 2)


def test_kept_modules_leave_the_dtype_that_run_in_gave():
    model = network()
    ampopt.run_in(model[3], BF16)
    p = Precision.like("O1", keep=["3", "1"])
    p.prepare(model)
    with p.autocast("cpu"):
        assert model(X).dtype == BF16


@pytest.mark.parametrize("name", TABLE)
def test_a_step_takes_a_level(name):
    p = Precision.like(name)
    losses = []
    for by_hand in (True, False):
        model = p.prepare(network())
        optimizer: Any = ampopt.SGD(model.parameters(), lr=0.1, **p.optimizer_options)
        targets = torch.arange(4) % 3
        step = ampopt.TrainStep(model, loss_fn, optimizer, precision=p)
        scale = p.loss_scale()
        losses.append([])
        for _ in range(4):
            if by_hand:
                optimizer.zero_grad()
                with p.autocast("cpu"):
                    loss = loss_fn(model(X), targets)
                ampopt.scale_outputs(loss, scale).backward()
                scale = optimizer.unscale_and_step(grads_scaled_by=scale).scale
            else:
                loss, _, scale = step(X, targets)
            losses[-1].append((loss.item(), scale.item()))
    assert losses[0] == losses[1]
    assert losses[0][-1][0] < losses[0][0][0] or name == "mindspore-O2"  # which skips at 2**24


def test_a_step_may_have_another_scale_or_none():
    model = network()
    optimizer = ampopt.SGD(model.parameters(), lr=0.1)
    p = Precision.like("torch")
    step = ampopt.TrainStep(model, loss_fn, optimizer, 8.0, precision=p)
    assert step.scale is not None and step.scale.item() == 8.0
    assert ampopt.TrainStep(model, loss_fn, optimizer, None, precision=p).scale is None


def test_a_train_step_refuses_what_contradicts_its_precision():
    p = Precision.like("O2")
    model = p.prepare(network())
    without = ampopt.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        ValueError, match=r"SGD was made without: create it with SGD\(params, \*\*precision\.optim"
    ):
        ampopt.TrainStep(model, loss_fn, without, precision=p)
    optimizer = ampopt.SGD(model.parameters(), lr=0.1, master_weights=True)
    with pytest.raises(ValueError, match="leave autocast= out"):
        ampopt.TrainStep(model, loss_fn, optimizer, precision=p, autocast=F16)
    with pytest.raises(TypeError, match="precision must be an ampopt.Precision, got str"):
        ampopt.TrainStep(model, loss_fn, optimizer, precision="O2")  # pyright: ignore
    with pytest.raises(
        TypeError, match="needs scale=, a loss scale or None to disable scaling, or precision="
    ):
        ampopt.TrainStep(model, loss_fn, optimizer)


def test_overrides_and_values():
    p = Precision.like("O2", param_dtype=BF16, compute_dtype=BF16, scaling=None, keep=["1"])
    assert p.loss_scale() is None and p.keep == ("1",) and p.master_weights
    assert p == dataclasses.replace(p) and hash(p) == hash(dataclasses.replace(p))
    with pytest.raises(dataclasses.FrozenInstanceError):
        p.scaling = 1.0  # pyright: ignore
    model = p.prepare(network())
    assert model[1].weight.dtype == F32 and model[2].weight.dtype == BF16


@given(scaling=st.sampled_from([None, 4.0, "flax", lambda: StaticLossScale(2.0)]))
def test_scaling_in_each_form(scaling):
    scale = Precision(scaling=scaling).loss_scale()
    expected = {None: None, 4.0: 4.0, "flax": 65536.0}.get(scaling, 2.0)
    assert (scale if scale is None else scale.item()) == expected


BAD = [
    ({"param_dtype": torch.int8}, ValueError, "param_dtype must be one of .* got torch.int8"),
    ({"output_dtype": "half"}, ValueError, "output_dtype must be .* got 'half'"),
    ({"output_dtype": False}, ValueError, "output_dtype must be .* got False"),
    ({"compute_dtype": torch.float64}, ValueError, "compute_dtype must be torch.float16"),
    ({"deny": ("softmax",)}, ValueError, "equal to param_dtype, got torch.float32"),
    ({"allow": ("softmax",)}, ValueError, "equal to param_dtype, got torch.float32"),
    ({"compute_dtype": F16, "deny": ("softmx",)}, ValueError, "'softmx': did you mean"),
    (
        {"compute_dtype": F16, "allow": "softmax"},
        TypeError,
        "allow must be a list or a tuple of names",
    ),
    ({"keep": nn.BatchNorm1d}, TypeError, "keep must be a list or a tuple"),
    ({"master_weights": True}, ValueError, "torch.float32 parameters need no master_weights"),
    ({"scaling": "apx"}, ValueError, "apx"),
    ({"scaling": -1.0}, ValueError, "-1"),
]


@pytest.mark.parametrize("fields, error, message", BAD)
def test_bad_values_say_what_is_allowed(fields, error, message):
    with pytest.raises(error, match=message):
        Precision(**fields)


def test_bad_names_and_bad_makers_of_scales():
    with pytest.raises(ValueError, match="no level is called 'O4': choose one of .*'O3'"):
        Precision.like("O4")
    with pytest.raises(TypeError, match="opt_level"):
        Precision.like("O1", opt_level="O2")
    with pytest.raises(TypeError, match="scaling must return a LossScale, got float"):
        Precision(scaling=lambda: 2.0).loss_scale()  # pyright: ignore
