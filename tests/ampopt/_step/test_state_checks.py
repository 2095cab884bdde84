"""States that do not fit their parameter, or the rule, are refused before anything changes.

Kernels go by the size of the parameter, so that a state of another size would be read and written
past its end.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import ampopt
from ampopt._step.sharding import dtensor
from ampopt.testing.bits import bits, everything

every_backend = pytest.mark.parametrize("backend", ["eager", "compiled", "triton"], indirect=True)


def plain(optimizer: Any) -> None:
    optimizer.step()


def joined(optimizer: Any) -> None:
    optimizer.unscale_and_step(grads_scaled_by=2.0)


def split(optimizer: Any) -> None:
    optimizer.unscale(grads_scaled_by=2.0)
    optimizer.step_after_unscale()


def with_another(optimizer: Any) -> None:
    other = ampopt.SGD([Parameter(torch.ones(2))])
    for p in other.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    before = everything(other)
    try:
        ampopt.unscale_and_step([other, optimizer], grads_scaled_by=2.0)
    except Exception:
        assert everything(other) == before
        raise


def by_scaler(cls: Any) -> Callable[[Any], None]:
    def step(optimizer: Any) -> None:
        scaler = cls("cpu")
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)

    return step


WAYS = {
    "step": plain,
    "unscale_and_step": joined,
    "split": split,
    "two optimizers": with_another,
    "GradScaler of torch": by_scaler(torch.amp.GradScaler),  # pyright: ignore
    "GradScaler": by_scaler(ampopt.GradScaler),
}
each_way = pytest.mark.parametrize("way", WAYS)

MAKERS: dict[str, Callable[[Any], Any]] = {
    "AdamW": lambda params: ampopt.AdamW(params, amsgrad=True),
    "masters": lambda params: ampopt.AdamW(params, master_weights=True),
    "SGD": lambda params: ampopt.SGD(params, momentum=0.9),
    "Adafactor": ampopt.Adafactor,
    "ScheduleFreeAdamW": ampopt.ScheduleFreeAdamW,
}


def give(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)


def trained(name: str, shape: tuple[int, ...] = (6, 2)) -> tuple[Any, list[Parameter]]:
    """An optimizer of three parameters that has stepped once, and their next gradients."""
    dtype = torch.bfloat16 if name == "masters" else torch.float32
    params = [Parameter(torch.ones(shape, dtype=dtype)) for _ in range(3)]
    optimizer = MAKERS[name]([(f"layer{i}", p) for i, p in enumerate(params)])
    give(optimizer)
    optimizer.step()
    give(optimizer)
    return optimizer, params


def assert_refused(optimizer: Any, way: str, error: Any, match: str) -> None:
    before = everything(optimizer)
    with pytest.raises(error, match=match):
        WAYS[way](optimizer)
    optimizer.zero_grad()  # also drops what was unscaled
    assert everything(optimizer) == before


# --- the size of a parameter and of its states ----------------------------------------------------

STATES = [
    ("AdamW", "exp_avg"),
    ("AdamW", "max_exp_avg_sq"),
    ("masters", "exp_avg"),
    ("masters", "master_param"),
    ("SGD", "momentum_buffer"),
    ("Adafactor", "row_var"),
    ("Adafactor", "col_var"),
    ("ScheduleFreeAdamW", "z"),
]


OTHER_SHAPES = [(5, 2), (7, 2), (2, 6), (12,), ()]
# One of them with each backend: the check comes before any of them.
SHAPES = [*(("eager", x) for x in OTHER_SHAPES), ("compiled", (5, 2)), ("triton", (5, 2))]


@pytest.mark.parametrize("backend, shape", SHAPES, indirect=["backend"], ids=str)
@pytest.mark.parametrize("name, key", STATES)
def test_a_state_of_another_shape_is_refused(backend, name, key, shape):
    optimizer, params = trained(name)
    state = optimizer.state[params[1]]
    right = state[key]
    state[key] = torch.ones(shape, dtype=right.dtype)
    wanted = str(tuple(right.shape)).replace("(", r"\(").replace(")", r"\)")
    assert_refused(
        optimizer, "unscale_and_step", ValueError, f"{key} of layer1 has shape .*have {wanted}"
    )
    state[key] = right
    give(optimizer)
    optimizer.step()


@each_way
@pytest.mark.parametrize("rows", [5, 7])
@pytest.mark.parametrize("name", MAKERS)
def test_a_parameter_that_was_resized_is_refused(name, way, rows):
    """Users resize embeddings between two steps."""
    optimizer, params = trained(name)
    params[1].grad = None
    params[1].data = torch.ones(rows, 2, dtype=params[1].dtype)
    params[1].grad = torch.ones_like(params[1])
    match = rf"of layer1 has shape \(6, .*parameter has shape \({rows}, 2\)"
    if name == "Adafactor":
        match = rf"of layer1 has shape .*parameter has shape \({rows}, 2\)"
    assert_refused(optimizer, way, ValueError, match)
    del optimizer.state[params[1]]  # which is what the message says
    give(optimizer)
    WAYS[way](optimizer)
    assert torch.isfinite(params[1]).all()


@every_backend
def test_a_resized_parameter_with_its_old_gradient_is_refused(backend):
    optimizer, params = trained("AdamW")
    params[1].data = torch.ones(7, 2)
    for way in ("step", "unscale_and_step", "split"):
        give_others = [p for p in params if p is not params[1]]
        for p in give_others:
            p.grad = torch.ones_like(p)
        params[1].data = torch.ones(6, 2)
        params[1].grad = torch.ones(6, 2)
        params[1].data = torch.ones(7, 2)
        assert_refused(optimizer, way, ValueError, "gradient of layer1 has shape")


@pytest.mark.parametrize("rows", [5, 7])
def test_a_checkpoint_of_another_size_is_refused(rows):
    saved = trained("AdamW")[0].state_dict()
    optimizer, params = trained("AdamW", (rows, 2))
    optimizer.load_state_dict(saved)
    give(optimizer)
    assert_refused(optimizer, "step", ValueError, "exp_avg of layer0")
    assert [bits(p) for p in params] == [bits(p) for p in trained("AdamW", (rows, 2))[1]]


@pytest.mark.parametrize("way", ["accumulate", "unscale_and_step", "step"])
def test_a_parameter_that_is_resized_while_gradients_are_accumulated_is_refused(way):
    optimizer, params = trained("AdamW")
    optimizer.accumulate()
    params[1].data = torch.ones(7, 2)
    del optimizer.state[params[1]]
    give(optimizer)
    before = everything(optimizer)
    with pytest.raises(RuntimeError, match=r"sum .* of layer1 has shape \(6, 2\).*\(7, 2\)"):
        getattr(optimizer, way)()
    optimizer.zero_grad()
    assert everything(optimizer) == before


def test_gradients_that_become_float64_are_added_to_the_sum_of_those_before():
    param = Parameter(torch.ones(2))
    param.grad_dtype = None
    optimizer = ampopt.SGD([param], lr=1.0)
    for dtype in (torch.float32, torch.float64, torch.float32):
        param.grad = torch.ones(2, dtype=dtype)
        optimizer.accumulate()
    optimizer.step()
    assert param.tolist() == [-2.0, -2.0]


def test_the_average_of_another_shape_is_refused_before_a_mode_changes():
    optimizer, params = trained("ScheduleFreeAdamW")
    optimizer.state[params[1]]["z"] = torch.ones(2)  # which would be broadcast
    before = everything(optimizer)
    with pytest.raises(ValueError, match="z of layer1 has shape"):
        optimizer.eval()
    assert everything(optimizer) == before


# --- what states are made of ----------------------------------------------------------------------


def replaced(key: str, by: Any) -> Callable[[Any, Any], None]:
    def mangle(state: Any, param: Any) -> None:
        state[key] = by(state[key]) if callable(by) else by

    return mangle


def shared(state: Any, param: Any) -> None:
    state["exp_avg_sq"] = state["exp_avg"]


def overlapping(state: Any, param: Any) -> None:
    buffer = torch.zeros(13)
    state["exp_avg"], state["exp_avg_sq"] = buffer[:12].view(6, 2), buffer[1:].view(6, 2)


def of_the_parameter(state: Any, param: Any) -> None:
    state["exp_avg"] = param.detach()


MANGLED: dict[str, tuple[Callable[[Any, Any], None], type[Exception], str]] = {
    "int64": (replaced("exp_avg", lambda s: s.long()), TypeError, "is torch.int64"),
    "bool": (replaced("exp_avg", lambda s: s.bool()), TypeError, "is torch.bool"),
    "complex": (
        replaced("exp_avg", lambda s: s.to(torch.complex64)),
        TypeError,
        "exp_avg of layer1 is torch.complex64",
    ),
    "a string": (replaced("exp_avg", "none"), TypeError, "is 'none', of type str"),
    "a number": (replaced("exp_avg", 0.0), TypeError, "is 0.0, of type float"),
    "sparse": (replaced("exp_avg", lambda s: s.to_sparse()), TypeError, "is torch.sparse_coo"),
    "elsewhere": (
        replaced("exp_avg", lambda s: s.to("meta")),
        RuntimeError,
        r"exp_avg of layer1 is on meta, the parameter on cpu.*optimizer\.load_state_dict\(",
    ),
    "shared": (shared, ValueError, "exp_avg(_sq)? of layer1 shares memory with"),
    "overlapping": (overlapping, ValueError, "exp_avg_sq of layer1 shares memory with"),
    "of the parameter": (of_the_parameter, ValueError, "layer1 shares memory with.*layer1"),
    "a complex count": (replaced("step", torch.tensor(1j)), TypeError, "step .*complex64"),
    "two counts": (replaced("step", torch.ones(2)), ValueError, r"step .* shape \(2,\)"),
    "no count": (replaced("step", torch.ones(0)), ValueError, r"step .* shape \(0,\)"),
    "a count as a string": (replaced("step", "3"), TypeError, "step of layer1 is '3'"),
}


@every_backend
@pytest.mark.parametrize("mangled", MANGLED)
def test_mangled_states_are_refused(backend, mangled):
    optimizer, params = trained("AdamW")
    mangle, error, match = MANGLED[mangled]
    mangle(optimizer.state[params[1]], params[1])
    if mangled == "elsewhere":  # has no bits to compare
        with pytest.raises(error, match=match):
            optimizer.step()
        assert optimizer.state[params[0]]["step"] == 1
        return
    assert_refused(optimizer, "unscale_and_step", error, match)


@pytest.mark.parametrize("mangled", ["two counts", "int64"])
def test_a_mangled_checkpoint_is_refused_by_the_step(mangled):
    optimizer, params = trained("AdamW")
    mangle, error, match = MANGLED[mangled]
    saved = copy.deepcopy(optimizer.state_dict())
    mangle(saved["state"][1], params[1])
    optimizer.load_state_dict(saved)
    assert_refused(optimizer, "step", error, match)


@pytest.mark.parametrize("key", ["exp_avg", "step"])
def test_a_checkpoint_with_a_string_is_not_loaded(key):
    optimizer, _ = trained("AdamW")
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["step"] += 1
    saved["state"][1][key] = "3"
    before = everything(optimizer)
    with pytest.raises(TypeError, match=f"'3', of type str, for '{key}' of parameter 1"):
        optimizer.load_state_dict(saved)
    assert everything(optimizer) == before


@pytest.mark.parametrize(
    "name, entry, match",
    [
        (
            "AdamW",
            {"betas": (2.0, 0.9)},
            r"AdamW refuses param group 0 of the state to be loaded: .*index 0: 2\.0",
        ),
        ("AdamW", {"eps": -1.0}, "refuses.*-1.0"),
        ("SGD", {"momentum": -0.5}, "refuses.*-0.5"),
        ("ScheduleFreeAdamW", {"betas": (0.9, 1.5)}, "refuses.*1.5"),
    ],
)
def test_hyperparameters_that_the_constructor_refuses_are_not_loaded(name, entry, match):
    optimizer, _ = trained(name)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0].update(entry)
    before = everything(optimizer)
    with pytest.raises(ValueError, match=match):
        optimizer.load_state_dict(saved)
    assert everything(optimizer) == before


def test_a_learning_rate_of_a_schedule_is_loaded_whatever_it_is():
    optimizer, _ = trained("AdamW")
    saved = optimizer.state_dict()
    saved["param_groups"][0]["lr"] = -1e-20
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == -1e-20


def test_states_of_two_parameters_that_share_memory_are_refused():
    optimizer, params = trained("AdamW")
    first, last = (optimizer.state[params[i]] for i in (0, 2))
    first["exp_avg"] = last["exp_avg_sq"]
    assert_refused(optimizer, "step", ValueError, "of layer. shares memory with .* of layer.")


@every_backend
def test_interleaved_states_are_accepted(backend):
    optimizer, params = trained("AdamW")
    twin = copy.deepcopy(optimizer)
    state = optimizer.state[params[1]]
    buffer = torch.stack([state["exp_avg"], state["exp_avg_sq"]], -1)
    state["exp_avg"], state["exp_avg_sq"] = buffer[..., 0], buffer[..., 1]
    give(twin)
    for each in (optimizer, twin):
        each.step()
    assert everything(optimizer) == everything(twin)


SAID_OTHERWISE: dict[str, Callable[[Any], None]] = {
    "an int64 count": lambda s: s.update(step=s["step"].long()),
    "a count as a number": lambda s: s.update(step=1),
    "a count of shape (1,)": lambda s: s.update(step=s["step"].reshape(1)),
    "float64": lambda s: s.update(exp_avg=s["exp_avg"].double()),
    "transposed": lambda s: s.update(exp_avg=s["exp_avg"].T.contiguous().T),
    "expanded": lambda s: s.update(exp_avg=s["exp_avg"][:1, :1].expand(6, 2)),
    "negated on reading": lambda s: s.update(exp_avg=(-s["exp_avg"])._neg_view()),
}


@every_backend
@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("how", SAID_OTHERWISE)
def test_a_state_with_one_right_reading_is_read_so(backend, how, loaded):
    """All elements of each state are equal here, so that an expanded tensor can replace it."""
    optimizer, params = trained("AdamW")
    twin, _ = trained("AdamW")
    if loaded:
        saved = optimizer.state_dict()
        SAID_OTHERWISE[how](saved["state"][1])
        optimizer.load_state_dict(saved)
    else:
        SAID_OTHERWISE[how](optimizer.state[params[1]])
    for each in (optimizer, twin):
        give(each)
        each.step()
    for p, q in zip(params, twin.param_groups[0]["params"], strict=True):
        torch.testing.assert_close(p, q)
        for key, value in twin.state[q].items():
            torch.testing.assert_close(optimizer.state[p][key], value, check_dtype=False)


def test_a_count_that_float32_does_not_hold_is_counted_on():
    optimizer, params = trained("AdamW")
    saved = optimizer.state_dict()
    saved["state"][1]["step"] = torch.tensor(2**24 + 1)
    optimizer.load_state_dict(saved)
    optimizer.step()
    assert optimizer.state[params[1]]["step"].item() == 2**24 + 2


def test_loading_leaves_nothing_for_a_skipped_step_to_convert():
    """A skipped step must not convert states, since it changes nothing."""
    optimizer, params = trained("AdamW")
    saved = optimizer.state_dict()
    for index, how in ((0, "an int64 count"), (1, "a count as a number"), (2, "expanded")):
        SAID_OTHERWISE[how](saved["state"][index])
    saved["state"][2]["step"] = saved["state"][2]["step"].double()
    optimizer.load_state_dict(saved)
    before = everything(optimizer)
    params[0].grad = torch.full_like(params[0], float("nan"))
    assert optimizer.unscale_and_step(grads_scaled_by=1.0).skipped
    assert everything(optimizer) == before


# --- parameters -----------------------------------------------------------------------------------


@every_backend
@pytest.mark.parametrize("shape, strides", [((2, 3), (2, 1)), ((2, 2, 2), (3, 2, 1))])
def test_a_parameter_that_overlaps_itself_is_refused(backend, shape, strides):
    memory = torch.arange(8.0)
    param = Parameter(memory.as_strided(shape, strides))
    optimizer = ampopt.AdamW([("weight", param)])
    param.grad = torch.ones(shape)
    with pytest.raises(RuntimeError, match="weight overlaps itself: several of its elements"):
        optimizer.step()
    assert memory.tolist() == list(range(8))
    assert not optimizer.state


# --- among ranks ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("wrong", ["placed otherwise", "of another size", "not spread"])
def test_a_state_that_is_spread_otherwise_is_refused(wrong):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))

    def spread(tensor: Tensor, *placements: Any) -> Any:
        return distribute_tensor(tensor, mesh, placements)

    param = Parameter(spread(torch.ones(6, 2), Shard(0)))
    optimizer = ampopt.AdamW([("weight", param)])
    param.grad = spread(torch.ones(6, 2), Shard(0))
    optimizer.step()
    stepped = dtensor.local(param).detach().clone()
    state = optimizer.state[param]
    state["exp_avg"] = {
        "placed otherwise": lambda: spread(torch.ones(6, 2), Replicate()),
        "of another size": lambda: spread(torch.ones(5, 2), Shard(0)),
        "not spread": lambda: torch.ones(6, 2),
    }[wrong]()
    with pytest.raises((RuntimeError, ValueError), match="exp_avg of weight"):
        optimizer.step()
    assert state["step"] == 1
    assert torch.equal(stepped, dtensor.local(param))
