"""Invalid arguments raise an error with the value and the fix, and change nothing."""

import copy
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any, cast

import numpy as np
import pytest
import torch
from support.optimizers import SOME_RULES, Plain
from torch import Tensor
from torch.nn import Parameter

import ampopt
from ampopt.testing.bits import assert_bitwise_unchanged, bits, everything
from ampopt_kernels import Rule, jit, rules

INF = float("inf")
NAN = float("nan")
META = torch.device("meta")


@jit
def weighted(p, g, state, h, flags):
    return p - h[0] * h[len(h) - 1] * g, ()


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "unscale": lambda opt, scale: opt.unscale(grads_scaled_by=scale),
    "unscale_and_step": lambda opt, scale: opt.unscale_and_step(grads_scaled_by=scale),
    "unscale_and_step(closure)": lambda opt, scale: opt.unscale_and_step(never, scale),
    "step_after_unscale(closure)": lambda opt, scale: opt.step_after_unscale(never, scale),
}


def never(scale: Any) -> Any:
    raise AssertionError("the closure ran")


def trained(cls: Any) -> tuple[Parameter, Any]:
    """A parameter and an optimizer with state, and a gradient for the next step."""
    param = Parameter(torch.tensor([1.0, -2.0, 3.0]))
    optimizer = cls([param])
    param.grad = torch.ones(3)
    optimizer.step()
    param.grad = torch.tensor([0.5, -0.0, INF])
    return param, optimizer


def refused(
    call: Callable[[], Any], error: type[Exception], match: str, param: Parameter, optimizer: Any
) -> None:
    """Check that ``call`` raises, and changes no parameter, state, gradient or pending step."""
    before = everything(optimizer), bits(param.grad)
    with pytest.raises(error, match=match):
        call()
    assert (everything(optimizer), bits(param.grad)) == before
    with pytest.raises(RuntimeError, match="nothing is unscaled"):
        optimizer.step_after_unscale()


# Scales are refused before any backend is asked, gradients need not be.
both_backends = pytest.mark.usefixtures("backend")
every_call = pytest.mark.parametrize("call", CALLS)
some_optimizers = pytest.mark.parametrize("cls", [ampopt.AdamW, Plain])


# --- scales ---------------------------------------------------------------------------------------


@every_call
@some_optimizers
@pytest.mark.parametrize("number", [0, 0.0, -0.0, -1.0, NAN, INF, -INF, 1e-40, 1e39, -(10**400)])
def test_a_number_that_cannot_be_a_scale_is_refused(call, cls, number):
    param, optimizer = trained(cls)
    shown = re.escape(f"got {number!r}")
    refused(lambda: CALLS[call](optimizer, number), ValueError, shown, param, optimizer)
    if number == number:
        with pytest.raises(ValueError, match="positive, finite.*None instead of a number turns"):
            CALLS[call](optimizer, number)


@every_call
@some_optimizers
@pytest.mark.parametrize("thing", [True, False, "2.0", [2.0], {"scale": 2.0}, 2j, object])
def test_an_object_that_is_no_scale_is_refused(call, cls, thing):
    param, optimizer = trained(cls)
    match = (
        f"None, a positive number, a one-element tensor or a LossScale, got {type(thing).__name__}"
    )
    refused(lambda: CALLS[call](optimizer, thing), TypeError, match, param, optimizer)


@every_call
@some_optimizers
@pytest.mark.parametrize(
    "tensor, shown",
    [
        (torch.ones(2), r"shape \(2,\) of torch.float32"),
        (torch.ones(0), r"shape \(0,\) of torch.float32"),
        (torch.ones(1, 2), r"shape \(1, 2\) of torch.float32"),
        (torch.tensor(2), r"shape \(\) of torch.int64"),
        (torch.tensor(True), r"shape \(\) of torch.bool"),
        (torch.tensor(2 + 0j), r"shape \(\) of torch.complex64"),
    ],
)
def test_a_tensor_of_another_shape_or_kind(call, cls, tensor, shown):
    param, optimizer = trained(cls)
    match = f"one floating-point element, got {shown}"
    refused(lambda: CALLS[call](optimizer, tensor), ValueError, match, param, optimizer)


def scaler_of_torch() -> Any:
    return torch.amp.GradScaler("cpu")  # pyright: ignore[reportPrivateImportUsage]


LOADED = r"scale = ampopt.DynamicLossScale\(\), scale.load_state_dict\("
MISPLACED = {
    "StepResult": (
        lambda opt: opt.unscale_and_step(grads_scaled_by=2.0),
        TypeError,
        "got StepResult, which has one: pass its .scale",
    ),
    "Unscaled": (
        lambda _: ampopt.SGD([Parameter(torch.ones(1))]).unscale(2.0),
        TypeError,
        "got Unscaled, which has one: pass its .scale",
    ),
    "torch's scaler": (
        lambda _: scaler_of_torch(),
        TypeError,
        rf"got GradScaler: either call scaler.step.*{LOADED}scaler.state_dict\(\)",
    ),
    "ampopt's scaler": (lambda _: ampopt.GradScaler("cpu"), TypeError, "got GradScaler: either"),
    "a scaler's state": (
        lambda _: scaler_of_torch().state_dict(),
        TypeError,
        rf"got dict: if it is a saved state, load it: {LOADED}state\)",
    ),
    "found_inf": (
        lambda opt: opt.unscale_and_step(grads_scaled_by=2.0).found_inf,
        ValueError,
        "this is the found_inf that an earlier call returned, not its scale, which comes last",
    ),
    "found_inf of unscale": (
        lambda _: ampopt.SGD([Parameter(torch.ones(1))]).unscale(2.0).found_inf,
        ValueError,
        "this is the found_inf",
    ),
    "found_inf of several": (
        lambda opt: ampopt.unscale_and_step([opt], 2.0).found_inf,
        ValueError,
        "this is the found_inf",
    ),
    "found_inf of a closure": (
        lambda opt: opt.unscale_and_step(lambda scale: opt.zero_grad(), None).found_inf,
        ValueError,
        "this is the found_inf",
    ),
}


@every_call
@some_optimizers
@pytest.mark.parametrize("thing", MISPLACED)
def test_an_object_that_contains_a_scale_is_refused_with_the_fix(call, cls, thing):
    make, error, match = MISPLACED[thing]
    param, optimizer = trained(cls)
    given = make(optimizer)
    param.grad = torch.tensor([0.5, -0.0, INF])
    refused(lambda: CALLS[call](optimizer, given), error, match, param, optimizer)
    with pytest.raises(error, match=match):
        ampopt.scale_outputs(torch.ones(()), given)


def test_a_train_step_refuses_them_with_the_fix():
    optimizer = ampopt.SGD([Parameter(torch.ones(1))])
    with pytest.raises(TypeError, match="got GradScaler: either call scaler.step"):
        ampopt.TrainStep(torch.nn.Linear(1, 1), torch.nn.MSELoss(), optimizer, scaler_of_torch())


@every_call
@some_optimizers
def test_a_tensor_on_meta(call, cls):
    param, optimizer = trained(cls)
    scale = torch.tensor(2.0, device=META)
    match = "the scale is on meta, where it has no number; make it on 'cpu', where the parameters"
    refused(lambda: CALLS[call](optimizer, scale), ValueError, match, param, optimizer)


def test_parameters_that_to_empty_has_replaced_are_told_of_once():
    model = torch.nn.Linear(2, 1, device="meta")
    optimizer = ampopt.AdamW(model.parameters())
    model.to_empty(device="cpu")
    model(torch.ones(1, 2)).sum().backward()
    with pytest.warns(RuntimeWarning, match="make the optimizer after to_empty") as caught:
        for _ in range(2):
            optimizer.unscale_and_step(grads_scaled_by=1.0)
    assert len(caught) == 1


@every_call
@some_optimizers
@pytest.mark.parametrize(
    "make",
    [
        lambda: ampopt.DynamicLossScale(device="meta"),
        lambda: ampopt.StaticLossScale(2.0, device="meta"),
    ],
)
def test_a_loss_scale_on_meta(call, cls, make):
    param, optimizer = trained(cls)
    scale = make()
    match = "lives on meta, where it has no number, but is used on cpu: make it without device="
    refused(lambda: CALLS[call](optimizer, scale), ValueError, match, param, optimizer)
    with pytest.raises(ValueError, match="on meta, where it has no number; make it without device"):
        ampopt.scale_outputs(torch.ones(()), scale)


@some_optimizers
@pytest.mark.parametrize(
    ("scale", "match"),
    [
        (
            torch.tensor(2.0),
            r"is on cpu, the parameters on meta; move it there with scale.to\(",
        ),
        (ampopt.StaticLossScale(2.0, device="cpu"), "lives on cpu, but is used on meta. Make one"),
    ],
)
def test_a_scale_on_another_device(cls, scale, match):
    optimizer = cls([Parameter(torch.ones(1, device=META))])
    with pytest.raises(ValueError, match=match):
        optimizer.unscale_and_step(grads_scaled_by=scale)


# --- clipping -------------------------------------------------------------------------------------


@some_optimizers
@pytest.mark.parametrize("closure", [None, never])
@pytest.mark.parametrize("scale", [None, 2.0])
@pytest.mark.parametrize("bad", [-1.0, NAN, True, "1", torch.ones(())])
def test_a_norm_that_nothing_can_be_clipped_to(cls, closure, scale, bad):
    param, optimizer = trained(cls)
    refused(
        lambda: optimizer.unscale_and_step(closure, scale, max_norm=bad),
        ValueError,
        "max_norm must be a number, 0 or more, or None, got ",
        param,
        optimizer,
    )


@pytest.mark.parametrize(
    "max_norm", [np.float32(1.0), Fraction(1), 10**400], ids=lambda n: type(n).__name__
)
def test_a_norm_that_is_a_number_of_any_type(max_norm):
    results = []
    for norm in (max_norm, INF if max_norm > 1 else 1.0):
        param, optimizer = trained(ampopt.SGD)
        param.grad = torch.full((3,), 2.0)
        optimizer.unscale_and_step(grads_scaled_by=1.0, max_norm=norm)
        results.append(everything(optimizer))
    assert results[0] == results[1]


# --- gradients ------------------------------------------------------------------------------------


class Misplaced(Parameter):
    """A parameter whose gradient is on another device, as after moving a model too late."""

    @property
    def grad(self) -> Tensor:
        return torch.ones(3, device=META)

    @grad.setter
    def grad(self, value: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        raise AssertionError("the gradient was replaced")


@both_backends
@pytest.mark.parametrize("cls", [*SOME_RULES, Plain])
@pytest.mark.parametrize(
    "call",
    [
        lambda opt: opt.unscale(grads_scaled_by=2.0),
        lambda opt: opt.unscale_and_step(grads_scaled_by=2.0),
        lambda opt: opt.unscale_and_step(lambda scale: 1.0, 2.0),
        lambda opt: opt.step_after_unscale(lambda scale: (1.0, *opt.unscale(scale)), 2.0),
    ],
)
def test_a_gradient_on_another_device(cls, call):
    params = [Parameter(torch.ones(3)), Misplaced(torch.ones(3))]
    optimizer = cls([("near", params[0]), ("far", params[1])])
    params[0].grad = torch.ones(3)
    before = everything(optimizer), bits(params[0].grad)
    match = "gradient of far is on meta, the parameter on cpu: move the model before"
    with pytest.raises(RuntimeError, match=match):
        call(optimizer)
    assert (everything(optimizer), bits(params[0].grad)) == before
    assert optimizer._ampopt.phase.pending is None


class Elsewhere(Tensor):
    """A tensor whose values are in another one."""

    elsewhere: Tensor

    @staticmethod
    def __new__(cls, elsewhere: Tensor) -> "Elsewhere":
        return Tensor._make_wrapper_subclass(cls, elsewhere.shape, dtype=elsewhere.dtype)

    def __init__(self, elsewhere: Tensor) -> None:
        self.elsewhere = elsewhere

    def __tensor_flatten__(self) -> Any:
        return ["elsewhere"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls(args[0].elsewhere)  # of detach


@pytest.mark.parametrize("backend", ["eager", "compiled", "triton"], indirect=True)
@pytest.mark.parametrize("steps", [0, 2])
def test_a_tensor_whose_values_are_in_another_is_refused(backend, steps):
    """It has no address, and a gradient without one would count as absent."""
    param = Parameter(torch.ones(3))
    optimizer = ampopt.AdamW([param])
    for _ in range(steps):
        param.grad = torch.ones(3)
        optimizer.unscale_and_step(grads_scaled_by=1.0)
    before = bits(param)
    param.grad = Elsewhere(torch.ones(3))
    calls = optimizer.unscale_and_step, optimizer.unscale, optimizer.accumulate
    for call in calls:
        with pytest.raises(TypeError, match="the gradient of .* is a Elsewhere, whose values are"):
            call(grads_scaled_by=1.0)
    param.grad = torch.ones(3)
    optimizer.initialize_states()
    optimizer.state[param]["exp_avg"] = Elsewhere(torch.ones(3))
    with pytest.raises(TypeError, match="exp_avg of .* is a Elsewhere, whose values are"):
        optimizer.unscale_and_step(grads_scaled_by=1.0)
    assert bits(param) == before


@both_backends
@pytest.mark.parametrize("cls", [ampopt.AdamW, Plain])
@pytest.mark.parametrize(
    ("dtype", "of_grad", "match"),
    [
        (torch.float32, torch.int32, "int32; float16, bfloat16, .*: convert it"),
        (torch.float32, torch.complex64, "complex64, the parameter torch.float32: convert it"),
        (torch.complex64, torch.float32, "float32, the parameter torch.complex64: convert it"),
    ],
)
def test_gradients_of_a_dtype_that_does_not_suit(cls, dtype, of_grad, match):
    param = Parameter(torch.ones(3, dtype=dtype))
    param.grad_dtype = None  # type: ignore[attr-defined]  # any will do
    optimizer = cls([param])
    param.grad = torch.ones(3, dtype=of_grad)
    match = f"the gradient of group 0, parameter 0 is torch.{match}"
    for call in (lambda: optimizer.unscale(2.0), lambda: optimizer.unscale_and_step(None, 2.0)):
        refused(call, TypeError, match, param, optimizer)


@both_backends
@pytest.mark.parametrize("cls", [ampopt.Adam, ampopt.AdamW])
@pytest.mark.parametrize("how", ["step", "joined", "split"])
def test_sparse_gradients_where_torch_takes_none(cls, how):
    param = Parameter(torch.ones(2, 1))
    optimizer = cls([("embedding", param)])
    indices, values = torch.tensor([[1]]), torch.ones(1, 1)
    param.grad = torch.sparse_coo_tensor(indices, values, (2, 1), check_invariants=True)
    before = everything(optimizer)
    with pytest.raises(RuntimeError, match="not support sparse gradients, which embedding has"):
        if how == "step":
            optimizer.step()
        elif how == "joined":
            optimizer.unscale_and_step(grads_scaled_by=2.0)
        else:
            optimizer.unscale(grads_scaled_by=2.0)
            optimizer.step_after_unscale()
    assert everything(optimizer) == before


@both_backends
@pytest.mark.parametrize("cls", [ampopt.SGD, ampopt.Adagrad])
def test_sparse_gradients_with_weight_decay_are_refused_before_any_parameter_is_stepped(cls):
    dense, table = Parameter(torch.ones(3)), Parameter(torch.ones(2, 1))
    optimizer = cls([{"params": [dense]}, {"params": [table], "weight_decay": 0.5}])
    dense.grad, table.grad = torch.ones(3), torch.ones(2, 1).to_sparse()
    before = everything(optimizer)
    with pytest.raises(RuntimeError, match=r"with weight_decay=0\.5 does not support sparse grad"):
        optimizer.unscale_and_step(grads_scaled_by=2.0)
    assert everything(optimizer) == before


@both_backends
@pytest.mark.parametrize("cls", [*SOME_RULES, Plain])
def test_float16_gradients_cannot_be_unscaled_in_place(cls):
    params = [Parameter(torch.ones(3)), Parameter(torch.ones(3, dtype=torch.float16))]
    optimizer = cls([("wide", params[0]), ("narrow", params[1])])
    for p in params:
        p.grad = torch.ones_like(p)
    before = everything(optimizer), bits([p.grad for p in params])
    with pytest.raises(RuntimeError, match="gradient of narrow is float16.*unscale_and_step"):
        optimizer.unscale(grads_scaled_by=2.0)
    assert (everything(optimizer), bits([p.grad for p in params])) == before
    assert optimizer._ampopt.phase.pending is None


# --- hyperparameters ------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "compiled", "triton"], indirect=True)
@pytest.mark.parametrize("steps", [0, 2])
def test_a_hyperparameter_that_is_no_number(backend, steps):
    params = [Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = ampopt.AdamW([{"params": [p]} for p in params])
    last = optimizer.param_groups[1]  # the others are not to be updated before it is looked at
    for _ in range(steps):
        step_with_ones(optimizer, params)
    for entry, bad, error, allowed in (
        ("lr", "0.1", TypeError, "a number or a tensor of one element"),
        ("lr", None, TypeError, "a number or a tensor of one element"),
        ("lr", 1j, TypeError, "a number or a tensor of one element"),
        ("eps", np.ones(1), TypeError, "a number or a tensor of one element"),
        ("betas", (0.9, "x"), TypeError, "a tuple of 2, each a number or a tensor of one element"),
        ("betas", 0.9, TypeError, "a tuple of 2, each a number or a tensor of one element"),
        ("betas", (0.9,), ValueError, "a tuple of 2, each a number or a tensor of one element"),
        (
            "betas",
            (0.9, torch.ones(2)),
            ValueError,
            "a tuple of 2, each a number or a tensor of one element",
        ),
    ):
        good, last[entry] = last[entry], bad
        match = re.escape(f"{entry} of group 1 must be {allowed}, got {bad!r}")
        with assert_bitwise_unchanged(optimizer), pytest.raises(error, match=match):
            step_with_ones(optimizer, params)
        last[entry] = good
    last["lr"] = torch.ones(2)
    match = re.escape("Tensor lr of group 1 must be 1-element, got tensor([1., 1.])")
    with assert_bitwise_unchanged(optimizer), pytest.raises(ValueError, match=match):
        step_with_ones(optimizer, params)
    for entry, value in (("lr", np.float64(0.5)), ("lr", torch.ones(1)), ("betas", [0.5, 0.5])):
        last[entry] = value
        step_with_ones(optimizer, params)


class Weighted(ampopt.ElementwiseOptimizer):
    """A rule whose hyperparameter ``weights`` has no default."""

    rule = Rule(update=weighted, hyper=("lr", "weights"))

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 1.0})


@pytest.mark.parametrize("backend", ["eager", "compiled", "triton"], indirect=True)
def test_a_tuple_without_default_that_is_longer_in_another_group(backend):
    params = [Parameter(torch.ones(2)) for _ in range(2)]
    weights = [(1.0, 2.0), (1.0, 2.0, 3.0)]
    optimizer = Weighted(
        [{"params": [p], "weights": w} for p, w in zip(params, weights, strict=True)]
    )
    match = re.escape("weights of group 1 must be a tuple of 2")
    with assert_bitwise_unchanged(optimizer), pytest.raises(ValueError, match=match):
        step_with_ones(optimizer, params)


def step_with_ones(optimizer: Any, params: list[Parameter]) -> None:
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.unscale_and_step(grads_scaled_by=1.0)


def test_a_rule_replaced_by_something_else_between_steps():
    params = [Parameter(torch.ones(2))]
    optimizer: Any = ampopt.AdamW(params)
    step_with_ones(optimizer, params)
    optimizer.rule = "adam"
    with (
        assert_bitwise_unchanged(optimizer),
        pytest.raises(TypeError, match="no rule: it is 'adam'"),
    ):
        step_with_ones(optimizer, params)


def test_a_rule_in_a_class_whose_base_runs_no_rules():
    with pytest.raises(TypeError, match="derive it from ampopt.ElementwiseOptimizer"):

        class Wrong(ampopt.Optimizer):
            rule = Rule(update=weighted, hyper=("weights",))


# --- bools ----------------------------------------------------------------------------------------

SWITCHED: dict[str, Callable[[Any], Any]] = {
    "master_weights": lambda yes: adamw(master_weights=yes),
    "master_weights of a Precision": lambda yes: ampopt.Precision(
        param_dtype=torch.float16, compute_dtype=torch.float16, master_weights=yes
    ),
    "master_weights of a group": lambda yes: ampopt.AdamW(
        [{"params": [Parameter(torch.ones(1))], "master_weights": yes}]
    ),
    "master_weights of a group added": lambda yes: adamw().add_param_group(
        {"params": [Parameter(torch.ones(1))], "master_weights": yes}
    ),
    "drop_overflow_update": lambda yes: ampopt.StaticLossScale(2.0, yes),
    "preserve_rng": lambda yes: adamw().unscale_and_step(never, 2.0, preserve_rng=yes),
    "preserve_rng of the split": lambda yes: adamw().step_after_unscale(
        never, 2.0, preserve_rng=yes
    ),
    "preserve_rng of a TrainStep": lambda yes: train_step(on_overflow="replay", preserve_rng=yes),
    "cuda_graph": lambda yes: train_step(cuda_graph=yes),
    "raises": lambda yes: ampopt.Watch(adamw()).alarm(skips_in_a_row=2, raises=yes),
    "maximize": lambda yes: ampopt.Lion([Parameter(torch.ones(1))], maximize=yes),
    "no_prox": lambda yes: ampopt.Adan([Parameter(torch.ones(1))], no_prox=yes),
    "adapt": lambda yes: ampopt.LARS([Parameter(torch.ones(1))], adapt=yes),
    "bias_correction": lambda yes: ampopt.LAMB([Parameter(torch.ones(1))], bias_correction=yes),
    "grad_averaging": lambda yes: ampopt.NovoGrad([Parameter(torch.ones(1))], grad_averaging=yes),
}


def adamw(**options: Any) -> ampopt.AdamW:
    return ampopt.AdamW([Parameter(torch.ones(1))], **options)


def train_step(**options: Any) -> ampopt.TrainStep:
    return ampopt.TrainStep(torch.nn.Linear(1, 1), torch.nn.MSELoss(), adamw(), None, **options)


@pytest.mark.parametrize("switch", SWITCHED)
@pytest.mark.parametrize("bad", ["yes", "False", 1, 0, None, np.True_], ids=repr)
def test_a_flag_that_is_neither_true_nor_false_is_refused(switch, bad):
    with pytest.raises(
        TypeError, match=rf"{switch.split()[0]}.* must be True or False, got {bad!r}"
    ):
        SWITCHED[switch](bad)


def test_master_weights_of_a_group_that_become_no_bool_between_steps():
    params = [Parameter(torch.ones(2, dtype=torch.bfloat16))]
    optimizer = ampopt.AdamW(params)
    step_with_ones(optimizer, params)
    optimizer.param_groups[0]["master_weights"] = "no"
    with assert_bitwise_unchanged(optimizer), pytest.raises(TypeError, match="got 'no'"):
        step_with_ones(optimizer, params)


# --- constructors and backends --------------------------------------------------------------------


@pytest.mark.parametrize("cls", [ampopt.SGD, ampopt.Adam, ampopt.AdamW, ampopt.LBFGS])
@pytest.mark.parametrize(
    "options", [{"lr": -1.0}, {"weight_decay": -1.0}, {"betas": (1.5, 0.9)}, {"unknown": 1}]
)
def test_constructors_validate_as_torchs_do(cls, options):
    def error(of: Any) -> str:
        try:
            of([Parameter(torch.ones(1))], **options)
        except (TypeError, ValueError) as e:
            return f"{type(e).__name__}: {e}"
        return "none"

    assert error(cls) == error(getattr(torch.optim, cls.__name__))


@pytest.mark.parametrize("thing", [None, 3, [torch.ones(1)], torch.ones(1)], ids=str)
def test_a_param_group_that_is_no_dict_is_refused_as_by_torch(thing):
    param, optimizer = trained(ampopt.AdamW)
    match = "param_group must be a dict"
    refused(lambda: optimizer.add_param_group(thing), TypeError, match, param, optimizer)


@pytest.mark.parametrize(
    ("thing", "error", "match"),
    [
        (None, TypeError, "takes what state_dict.. returned, got None"),
        (
            {"model": {}, "optimizer": {}},
            ValueError,
            r"keys \['model', 'optimizer'\]: if this is a",
        ),
    ],
    ids=str,
)
def test_a_state_dict_of_something_else_is_refused(thing, error, match):
    param, optimizer = trained(ampopt.AdamW)
    refused(lambda: optimizer.load_state_dict(thing), error, match, param, optimizer)


def test_the_full_states_of_a_model_are_refused():
    with pytest.raises(TypeError, match="full_state_dict takes an optimizer, got Linear"):
        ampopt.full_state_dict(torch.nn.Linear(1, 1))  # type: ignore[arg-type]


@pytest.mark.parametrize("made", [{"device": META}, {"dtype": torch.complex64}], ids=str)
@pytest.mark.parametrize("cls", [ampopt.SGD, ampopt.Adagrad, ampopt.Adam, ampopt.AdamW])
def test_fused_with_parameters_that_torch_refuses_is_its_error(cls, made):
    def error(of: Any, step: Any) -> str:
        param = Parameter(torch.ones(2, **made))
        optimizer = of([param], fused=True)
        param.grad = torch.ones_like(param)
        with pytest.raises(RuntimeError) as caught:
            step(optimizer)
        return str(caught.value).replace("'cuda', ", "")  # where torch 2.11 has no fused Adagrad

    torchs = error(getattr(torch.optim, cls.__name__), lambda optimizer: optimizer.step())
    assert torchs.startswith("`fused=True` requires")
    assert error(cls, lambda optimizer: optimizer.step()) == torchs
    assert error(cls, lambda optimizer: optimizer.unscale_and_step(grads_scaled_by=2.0)) == torchs


# --- arguments that torch takes silently, or refuses without naming them --------------------------

NAN = float("nan")


def _other_model_and_optimizer():
    return torch.nn.Linear(2, 2), lambda y: y, ampopt.AdamW([torch.nn.Parameter(torch.zeros(2))])


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda p: ampopt.SGD(p, lr=NAN), ValueError, "lr is nan"),
        (lambda p: ampopt.SGD(p, weight_decay=NAN), ValueError, "weight_decay is nan"),
        (lambda p: ampopt.SGD(p, lr=torch.tensor(NAN)), ValueError, "lr is nan"),
        (lambda p: ampopt.SGD([{"params": p, "lr": NAN}]), ValueError, "lr is nan"),
        (
            lambda p: ampopt.Lion(
                [{"params": p, "betas": (NAN, 0.9)}], betas=cast(Any, [0.9, 0.99])
            ),
            ValueError,
            "betas is nan",
        ),
        (
            lambda p: ampopt.Adafactor([{"params": p, "eps": (NAN, 1e-3)}]),
            ValueError,
            "eps is nan",
        ),
        (
            lambda p: ampopt.Adafactor([{"params": p, "eps": (None, "x")}]),
            TypeError,
            "eps must be a tuple of 2",
        ),
        (
            lambda p: ampopt.Adam(p, amsgrad=cast(Any, "no")),
            TypeError,
            "amsgrad must be True or False",
        ),
        (
            lambda p: ampopt.Adam(p, maximize=cast(Any, 2)),
            TypeError,
            "maximize must be True or False, got 2",
        ),
        (
            lambda p: ampopt.Adam(p, betas=cast(Any, (0.9,))),
            ValueError,
            "betas must be a tuple of 2",
        ),
        (lambda p: ampopt.AdamW(p, betas=cast(Any, 3)), TypeError, "betas must be a tuple of 2"),
        (lambda p: ampopt.AdamW(p, lr=cast(Any, "1")), TypeError, "lr must be a number"),
        (lambda p: ampopt.AdamW([{"lr": 1.0}]), ValueError, "has only .'lr'.*add \"params\""),
        (lambda p: ampopt.AdamW(p).step(5), TypeError, "closure must be callable, got int"),
        (
            lambda p: ampopt.ScheduleFreeAdamW(p, warmup_steps=cast(Any, 1.5)),
            ValueError,
            "a whole number",
        ),
        (lambda p: ampopt.autocast(cast(Any, 3)), TypeError, "device_type must be .* got 3"),
        (lambda p: ampopt.GradScaler(cast(Any, 3)), TypeError, "device must be .* got 3"),
        (
            lambda p: ampopt.skip_when(ampopt.SGD(p), norm_deviations=1.0, warmup=1),
            ValueError,
            "warmup must be from 2 to",
        ),
        (
            lambda p: ampopt.TrainStep(*_other_model_and_optimizer(), scale=1.0),
            ValueError,
            "steps none of the model's parameters .weight, bias",
        ),
    ],
)
def test_an_argument_without_a_meaning_is_refused_by_name(make: Any, error, message):
    with pytest.raises(error, match=message):
        make([torch.nn.Parameter(torch.zeros(2))])


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (ampopt.Adam, {"lr": torch.tensor(0.1), "amsgrad": np.bool_(True), "maximize": 1}),
        (ampopt.AdamW, {"lr": np.float32(0.1), "betas": [0.9, 0.99], "weight_decay": 0}),
        (ampopt.SGD, {"lr": 1, "momentum": 0.5, "nesterov": True}),
        (ampopt.Adafactor, {"eps": (None, 1e-3)}),
        (ampopt.AdamW, {"foreach": True, "fused": None}),
    ],
)
def test_what_torch_takes_and_means_something_is_taken(cls, options):
    param = torch.nn.Parameter(torch.zeros(2, 2))
    optimizer = cls([param], **options)
    param.grad = torch.ones(2, 2)
    optimizer.step()
    assert param.detach().any()


def test_an_epsilon_of_a_group_may_be_none_whatever_that_of_other_groups_is():
    params = [torch.nn.Parameter(torch.ones(2, 2)) for _ in range(2)]
    groups: Any = [
        {"params": params[:1], "eps": (None, 1e-3)},
        {"params": params[1:], "eps": (1.0, 1e-3)},
    ]
    optimizer = ampopt.Adafactor(groups, eps=(1e-3, 1e-3))
    for param in params:
        param.grad = torch.full((2, 2), 1e-3)
    optimizer.step()
    assert not torch.equal(*params)


# --- state dicts ----------------------------------------------------------------------------------


def _saved(cls: Any) -> dict[str, Any]:
    param = torch.nn.Parameter(torch.zeros(3))
    optimizer = cls([param])
    param.grad = torch.ones(3)
    optimizer.step()
    return copy.deepcopy(optimizer.state_dict())


def _refused(state_dict: dict[str, Any], error: Any, message: str) -> None:
    param = torch.nn.Parameter(torch.zeros(3))
    optimizer = ampopt.AdamW([param], lr=0.5)
    with pytest.raises(error, match=message):
        optimizer.load_state_dict(state_dict)
    assert not optimizer.state and optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (ampopt.Adamax, "'exp_inf' for parameter 0, a state of another optimizer; AdamW has"),
        (torch.optim.NAdam, "has no 'amsgrad', which AdamW reads"),
        (ampopt.LAMB, "has no 'amsgrad', which AdamW reads. It has .*'bias_correction'"),
        (torch.optim.SGD, "has no 'amsgrad', which AdamW reads. It has .*'momentum'"),
    ],
)
def test_the_state_of_another_optimizer_is_refused_when_it_is_loaded(cls, message):
    _refused(_saved(cls), ValueError, message)


def test_the_state_of_an_optimizer_that_keeps_more_is_refused_when_it_is_loaded():
    optimizer = ampopt.Lion([torch.nn.Parameter(torch.zeros(3))])
    with pytest.raises(ValueError, match="'exp_avg_sq' for .*, a state of another optimizer; Lion"):
        optimizer.load_state_dict(_saved(ampopt.AdamW))


@pytest.mark.parametrize("bits_", [8, 32])
def test_entries_whose_names_another_optimizer_uses_are_loaded(bits_):
    param = torch.nn.Parameter(torch.zeros(8192))
    param.grad = torch.ones(8192)
    optimizer = ampopt.AdamW([param], state_bits=bits_)
    optimizer.step()
    optimizer.run_rule(rules.sophia_hessian)  # its state is also Sophia's
    optimizer.state[param]["prev"] = torch.ones(2)  # a user's own; Rprop has one
    loaded = ampopt.AdamW([param], state_bits=bits_)
    loaded.load_state_dict(optimizer.state_dict())
    for each in (optimizer, loaded):
        each.run_rule(rules.sophia_hessian)
    assert bits(dict(loaded.state[param])) == bits(dict(optimizer.state[param]))
    assert {"hessian", "prev"} <= loaded.state[param].keys()
    full = ampopt.full_state_dict(optimizer)["state"][0]
    assert full["hessian"].dtype == torch.float32
    assert not {"hessian_codes", "hessian_scale"} & full.keys()


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("exp_avg_codes", None, TypeError, "has None, .*'exp_avg_codes' of .* must be a tensor"),
        ("exp_avg_codes", torch.zeros(3), TypeError, "are codes: do not cast them"),
        ("step", -1.0, ValueError, "has -1.0, .*'step' of .* must be a whole number, 0 or more"),
        ("step", torch.tensor(NAN), ValueError, "'step' of .* must be a whole number"),
        ("step", 1.5, ValueError, "'step' of .* must be a whole number"),
        ("step", None, ValueError, "has None, .*'step' of .* must be a whole number"),
        ("step", torch.tensor(1j), ValueError, "'step' of .* must be a whole number"),
        ("rounding_key", NAN, ValueError, "'rounding_key' of .* must be a whole number"),
        ("exp_avg", [0.0, 1.0], TypeError, "of type list, for 'exp_avg' of .* must be a tensor"),
        ("exp_avg", torch.zeros(3, device="meta"), ValueError, "has no values: load it onto"),
    ],
)
def test_an_entry_of_the_wrong_kind_is_refused_when_it_is_loaded(name, value, error, message):
    saved = _saved(ampopt.AdamW)
    saved["state"][0][name] = value
    _refused(saved, error, message + ".*Nothing was loaded")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"state": None}, TypeError, "the 'state' to be loaded must be a dict, got None.*Nothing"),
        ({"param_groups": "x"}, TypeError, "'param_groups' to be loaded must be a list, got 'x'"),
        ({"state": {0: 5}}, TypeError, "state of parameter 0 .* must be a dict, got 5.*Nothing"),
        ({"state": {0: torch.zeros(2)}}, TypeError, "state of parameter 0 .* must be a dict"),
        ({"state": {0: {"step": 10**400}}}, OverflowError, "too large"),
    ],
    ids=str,
)
def test_a_state_dict_of_another_form_changes_nothing(change, error, message):
    _refused(_saved(ampopt.AdamW) | change, error, message)


@pytest.mark.parametrize("suffix", ["", "_codes"])
def test_a_state_without_its_count_of_steps_is_refused_when_it_is_loaded(suffix):
    saved = _saved(ampopt.AdamW)
    for name in ("exp_avg", "exp_avg_sq"):
        saved["state"][0][name + suffix] = saved["state"][0].pop(name).to(torch.int8)
    del saved["state"][0]["step"]
    _refused(saved, ValueError, "has no 'step' for parameter 0")


def test_an_incomplete_state_is_refused_when_it_is_loaded():
    saved = _saved(ampopt.AdamW)
    del saved["state"][0]["exp_avg_sq"]
    _refused(saved, ValueError, r"has no 'exp_avg_sq' for parameter 0, only \['exp_avg', 'step'\]")
    saved = _saved(ampopt.AdamW)
    del saved["param_groups"][0]["eps"]
    _refused(saved, ValueError, "param group 0 .* has no 'eps', which AdamW reads")


def test_flags_that_older_versions_of_torch_did_not_save_are_added():
    saved = _saved(torch.optim.AdamW)
    for name in ("amsgrad", "maximize", "decoupled_weight_decay", "foreach", "fused"):
        saved["param_groups"][0].pop(name, None)
    optimizer = ampopt.AdamW([torch.nn.Parameter(torch.zeros(3))])
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["amsgrad"] is False
