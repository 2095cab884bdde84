"""States with a dtype of their own, copies of the parameter, and float64 scalar states."""

import copy
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import ampopt
from ampopt_kernels import Rule, State, jit, tl
from ampopt_kernels.codecs import SIGNED
from ampopt_kernels.language import HAS_TRITON
from ampopt_kernels.native.build import cpp_compiler

BACKENDS = ["eager", *["compiled"] * bool(cpp_compiler()), *["triton"] * HAS_TRITON]


@jit
def _scalars(s, h, flags):
    HALVED: tl.constexpr = flags[0]
    (total,) = s
    lr, decay, halved = h
    if HALVED:
        lr = lr * 0.5
    total = total + lr
    return (total,), (lr, decay, total)


@jit
def _update(p, g, state, h, flags):
    start, average, low = state
    lr, decay, total = h
    average = average + decay * (g - average)
    low = low + g * 0.00390625
    return p - lr * average + lr * decay * (start - p), (start, average, low + total * 0.0)


@jit
def _resized(p, g, state, h, flags):
    return p - h[0] * g * state[0], state


class Anchored(ampopt.ElementwiseOptimizer):
    """Pulls parameters back to their initial values."""

    rule = Rule(
        update=_update,
        scalars=_scalars,
        hyper=("lr", "decay", "halved"),
        flags=("halved",),
        state=(
            State("start", init="param"),
            State("average", dtype=torch.float32),
            State("low", dtype=torch.bfloat16),
        ),
        scalar_state=(State("total", dtype=torch.float64),),
    )

    def __init__(self, params: Any, lr: Any = 0.1, halved: float = 0, **options: Any) -> None:
        super().__init__(params, {"lr": lr, "decay": 0.25, "halved": halved}, **options)


def params_of(dtype: torch.dtype) -> list[Parameter]:
    values = torch.arange(1, 10, dtype=torch.float64).div(3).to(dtype)
    return [Parameter(values.clone()), Parameter(values[:4].view(2, 2) * 2)]


def make(params: list[Parameter], **options: Any) -> Anchored:
    groups = [{"params": params[:1]}, {"params": params[1:], "halved": 1}]
    return Anchored(groups, **options)


def stepped(optimizer: Any, steps: int, *, overflow: float = 0.0) -> None:
    for i in range(steps):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.full_like(p, (i - 1.5) * 4.0 + overflow)
        optimizer.unscale_and_step(grads_scaled_by=4.0)


CASES = [
    (torch.float32, {}),
    (torch.float64, {}),
    (torch.bfloat16, {}),
    (torch.complex64, {}),
    (torch.float16, {"master_weights": True}),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("dtype", "options"), CASES, ids=str)
def test_states_are_kept_as_they_are_declared(backend, dtype, options):
    """For parameters of every dtype, on every backend. The values are those of the definition."""
    ampopt.set_backend(backend)
    params = params_of(dtype)
    optimizer = make(params, **options)
    before = [p.detach().clone() for p in params]
    stepped(optimizer, 3)
    of_param = torch.float32 if options else dtype
    total, lr = torch.zeros((), dtype=torch.float64), [0.1, 0.05]
    for p, start, rate in zip(params, before, lr, strict=True):
        state = optimizer.state[p]
        dtypes = {name: value.dtype for name, value in state.items() if name != "master_param"}
        complex_ = torch.complex64 if dtype.is_complex else None
        assert dtypes == {
            "start": of_param,
            "average": complex_ or torch.float32,
            "low": complex_ or torch.bfloat16,
            "total": torch.float64,
        }
        assert torch.equal(state["start"], start.to(of_param))
        total = torch.zeros((), dtype=torch.float64)
        expected = start.to(torch.complex128 if complex_ else torch.float64)
        average = 0.0
        for i in range(3):
            total += rate
            average += 0.25 * (i - 1.5 - average)
            expected = expected - rate * average + rate * 0.25 * (start - expected)
        assert torch.equal(state["total"], total)
        assert torch.allclose(state["average"], torch.full_like(state["average"], average))
        exact = state.get("master_param", p.detach())
        torch.testing.assert_close(
            exact.to(expected.dtype),
            expected,
            rtol=max(torch.finfo(of_param).eps * 4, 1e-7),
            atol=0,
        )


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_skip_leaves_states_at_their_initial_values(backend):
    """Also in the very first step, when states are copies of the parameter."""
    ampopt.set_backend(backend)
    params = params_of(torch.bfloat16)
    optimizer = make(params)
    stepped(optimizer, 1, overflow=float("inf"))
    for p in params:
        state = optimizer.state[p]
        assert torch.equal(state["start"], p)
        assert state["total"] == 0 and not state["average"].any() and not state["low"].any()
    stepped(optimizer, 2)
    before = copy.deepcopy(optimizer.state_dict())["state"]
    stepped(optimizer, 1, overflow=float("inf"))
    after = optimizer.state_dict()["state"]
    assert all(torch.equal(before[k][n], after[k][n]) for k in before for n in before[k])


def test_saving_and_loading_changes_nothing():
    """Also if the checkpoint has states of another dtype, up to rounding."""
    ampopt.set_backend("eager")
    params = params_of(torch.bfloat16)
    optimizer = make(params)
    stepped(optimizer, 2)
    twins = [Parameter(p.detach().clone()) for p in params]
    twin = make(twins)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["average"] = saved["state"][0]["average"].double()
    saved["state"][0]["total"] = float(saved["state"][0]["total"])
    twin.load_state_dict(saved)
    stepped(optimizer, 2)
    stepped(twin, 2)
    for p, q in zip(params, twins, strict=True):
        assert torch.equal(p, q)
        for name, value in optimizer.state[p].items():
            assert value.dtype == twin.state[q][name].dtype
            assert torch.equal(value, twin.state[q][name])


@jit
def _counted(s, h):
    return (s[0] + 1.0, s[1] + 1.0), h


@jit
def _descend(p, g, state, h, flags):
    return p - h[0] * g, ()


def test_a_scalar_state_that_is_made_later_has_the_dtype_it_would_have_had_at_first():
    class Counting(Anchored):
        rule = Rule(
            update=_descend,
            scalars=_counted,
            hyper=("lr",),
            flags=("halved",),
            scalar_state=(State("all", dtype=torch.float64), State("some", when="halved")),
        )

    p = Parameter(torch.ones(2))
    optimizer = Counting([p])
    stepped(optimizer, 1)
    optimizer.param_groups[0]["halved"] = 1
    stepped(optimizer, 1)
    assert optimizer.state[p]["all"].dtype == torch.float64
    assert optimizer.state[p]["some"].dtype == torch.float32


@pytest.mark.parametrize(
    "full", [{"full": True}, {"shape": "rows"}, {"dtype": torch.float32}, {"init": "param"}]
)
def test_a_codec_of_a_state_in_full_precision_is_refused(full):
    with pytest.raises(ValueError, match="has a codec, but .* never kept in few bits: remove one"):
        State("s", codec=SIGNED, **full)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"shape": "row"}, "cannot have the shape 'row': choose 'rows' or 'columns'"),
        ({"shape": "rows", "init": "param"}, "init='param', a copy of the parameter, does not fit"),
    ],
)
def test_wrong_shapes_are_refused(shape, message):
    with pytest.raises(ValueError, match=message):
        State("s", **shape)


def test_wrong_declarations_are_refused():
    with pytest.raises(ValueError, match="torch.int32.*choose torch.float16"):
        State("s", dtype=torch.int32)
    with pytest.raises(TypeError, match="init=None, which must be a number, the name of"):
        State("s", init=None)  # type: ignore[arg-type]
    for scalar in (State("s", init="param"), State("s", dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="is a scalar"):
            Rule(update=_update, hyper=("lr",), scalar_state=(scalar,))

    @jit
    def four(s, h, flags, more):
        return s, h

    with pytest.raises(TypeError, match="it takes 4 arguments"):
        Rule(update=_update, hyper=("lr",), scalars=four)


@pytest.mark.parametrize(
    ("value", "error"), [(None, TypeError), ("x", TypeError), (torch.ones(2), ValueError)]
)
def test_an_entry_that_cannot_begin_a_state_is_refused(value, error):
    class Late(Anchored):
        rule = Rule(update=_resized, hyper=("lr",), state=(State("size", init="start"),))

    p = Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    optimizer = Late([{"params": [p], "start": value}])
    with pytest.raises(error, match="start of the param group.*State 'size', must be "):
        optimizer.step()
    assert p.tolist() == [1.0, 1.0]


def test_a_number_of_results_that_depends_on_flags_is_refused():
    @jit
    def more(s, h, flags):
        if flags[0]:
            h = h + h
        return s, h

    @jit
    def update(p, g, state, h, flags):
        return p - h[0] * g, ()

    class Uneven(ampopt.ElementwiseOptimizer):
        rule = Rule(update=update, hyper=("lr",), flags=("twice",), scalars=more)

    p = Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    optimizer = Uneven([p], {"lr": 0.5, "twice": True})
    with pytest.raises(ValueError, match="returned 2 numbers under .*the same number whatever"):
        optimizer.step()
    assert p.tolist() == [1.0, 1.0]
