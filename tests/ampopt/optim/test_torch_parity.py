"""Every optimizer of torch gives torch's results, with every option that torch tests."""

import copy
import functools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.torch_options import (
    ELEMENTWISE,
    INHERITED,
    OPTION_SETS,
    RICH,
    ULPS,
    Distance,
    OptionSet,
    assert_train_alike,
    give,
    gradients,
    initial,
    named,
    params_of,
    spoiled,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import ampopt
from ampopt.testing.bits import bits, state_of

BY_RULE = [s for s in OPTION_SETS if s.name in ELEMENTWISE]

each_optimizer = pytest.mark.parametrize("options", RICH, ids=str)
each_rule = pytest.mark.parametrize("options", [s for s in RICH if s.name in ELEMENTWISE], ids=str)

# Compiling takes a second for each rule, its flags and dtypes, once for all tests: about a hundred.
pytestmark = pytest.mark.parametrize("backend", ["eager", "triton", "compiled"], indirect=True)


def steps_for(options: OptionSet, backend: str) -> range:
    """As many steps as reach every branch of the formula; fewer if steps are slow."""
    if options.name == "Muon":
        return range(3)  # products of bfloat16 matrices take the CPU milliseconds
    # RAdam begins to rectify at the sixth.
    return range(7 if backend != "triton" or options.name == "RAdam" else 3)


# --- results -------------------------------------------------------------------------------------


# All options of rules in float32, and in float64 those with most state; others in float64 are drawn
# below. Where the step is torch's own, options are passed on: test_drop_in.py and test_lbfgs.py.
@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        *((s, torch.float32) for s in [*BY_RULE, *(s for s in RICH if s.name in INHERITED)]),
        *((s, torch.float64) for s in RICH),
    ],
    ids=str,
)
def test_every_option_set_gives_the_results_of_torchs_for_loop(options, dtype, backend):
    ours = options.ours(initial(options, dtype))
    torchs = options.torchs(initial(options, dtype))
    assert_train_alike(ours, torchs, gradients(options, dtype), steps_for(options, backend))


@pytest.mark.parametrize("options", [s for s in RICH if s.complex], ids=str)
def test_complex_parameters_are_pairs_of_reals(options, backend):
    dtype = torch.complex64
    ours = options.ours(initial(options, dtype))
    torchs = options.torchs(initial(options, dtype))
    assert_train_alike(ours, torchs, gradients(options, dtype), steps_for(options, backend))


@pytest.mark.parametrize("name", ["Adam", "AdamW", "Adamax", "NAdam", "RAdam"])
def test_an_average_without_memory_is_the_gradient_to_the_bit(name, backend):
    options = named(name)
    ours, torchs = (
        make([torch.ones(4)], betas=(0.0, 0.9)) for make in (options.ours, options.torchs)
    )
    for scale in (1e6, 1e-6):
        for optimizer in (ours, torchs):
            give(optimizer, [torch.tensor([0.1, -0.7, 1.3, 0.0])], scale)
            optimizer.step()
        (p,), (q,) = ours.param_groups[0]["params"], torchs.param_groups[0]["params"]
        assert bits(ours.state[p]["exp_avg"]) == bits(torchs.state[q]["exp_avg"]) == bits(p.grad)


def test_adagrads_accumulator_is_initialized_in_both_parts_of_a_complex_state(backend):
    late = torch.ones(2, dtype=torch.complex64)
    ours = ampopt.Adagrad([torch.ones(2)], initial_accumulator_value=0.5)
    ours.add_param_group({"params": [late]})
    # Both at once: torch 2.11 makes no accumulator for a group that is added later.
    groups = [{"params": [torch.ones(2)]}, {"params": [late.clone()]}]
    torchs = torch.optim.Adagrad(groups, initial_accumulator_value=0.5)
    grads = [torch.ones(2), torch.ones(2, dtype=torch.complex64)]
    assert_train_alike(ours, torchs, lambda: grads, range(2))


@each_optimizer
def test_each_group_has_its_own_options(options, backend):
    plain = named(options.name)
    half = len(initial(options)) // 2

    def groups() -> list[dict[str, Any]]:
        params = initial(options)
        return [
            {"params": params[:half], **options.options},
            {"params": params[half:], "lr": 0.03125},
        ]

    ours, torchs = plain.ours(groups()), plain.torchs(groups())
    assert_train_alike(ours, torchs, gradients(options), steps_for(options, backend))


@each_optimizer
def test_a_learning_rate_on_the_device_may_change_at_every_step(options, backend):
    lrs = [torch.tensor(0.5), torch.tensor(0.5)]
    ours = options.ours(initial(options), lr=lrs[0])
    torchs = options.torchs(initial(options), lr=lrs[1])
    source = gradients(options)
    apart = Distance(torchs)
    for _ in steps_for(options, backend):
        grads = source()
        give(ours, grads)
        give(torchs, grads)
        ours.step()
        torchs.step()
        assert max(apart.of_optimizers(ours, torchs).values()) <= ULPS
        for lr in lrs:
            lr.mul_(0.5)
    assert lrs[0] == lrs[1]


@each_rule
def test_nan_and_infinity_spread_as_they_do_in_torch(options, backend):
    ours, torchs = options.ours(initial(options)), options.torchs(initial(options))
    source = gradients(options)
    for grads in (source(), spoiled(source()), [g * float("nan") for g in source()], source()):
        give(ours, grads)
        give(torchs, grads)
        with np.errstate(all="ignore"):  # the interpreter is written in numpy
            ours.step()
        torchs.step()
    for p, q in zip(ours.param_groups[0]["params"], torchs.param_groups[0]["params"], strict=True):
        torch.testing.assert_close(p, q, equal_nan=True)
        for name, value in torchs.state[q].items():
            if isinstance(value, Tensor):
                mine = ours.state[p][name].to(value.dtype)
                torch.testing.assert_close(mine, value, equal_nan=True, msg=f"{name}: {{}}".format)


@pytest.mark.parametrize(
    "options", [s for s in RICH if "differentiable" in s.implementations], ids=str
)
def test_differentiable_steps_can_be_differentiated_through(options, backend):
    def meta_gradient(optimizer_of: Any) -> tuple[Tensor, list[Tensor]]:
        weight = torch.tensor(1.5, requires_grad=True)
        params = [weight * p for p in initial(options)]
        optimizer = optimizer_of(params, differentiable=True)
        give(optimizer, gradients(options)())
        optimizer.step()
        params = optimizer.param_groups[0]["params"]
        torch.stack([p.sum() for p in params]).sum().backward()
        assert weight.grad is not None
        return weight.grad, [p.detach() for p in params]

    assert bits(meta_gradient(options.ours)) == bits(meta_gradient(options.torchs))


# --- scaling and skipping ------------------------------------------------------------------------


@each_optimizer
def test_a_learning_rate_that_changes_after_a_skipped_first_step_is_the_first_one(options, backend):
    fresh = options.ours(initial(options), lr=2.0**-5)
    stumbling = options.ours(initial(options), lr=2.0**-6)
    source = gradients(options)
    give(stumbling, spoiled(source()))
    assert stumbling.unscale_and_step(grads_scaled_by=1.0).skipped
    stumbling.param_groups[0]["lr"] = 2.0**-5
    for _ in range(2):
        grads = source()
        for optimizer in (fresh, stumbling):
            give(optimizer, grads)
            optimizer.step()
    assert bits(stumbling.param_groups[0]["params"]) == bits(fresh.param_groups[0]["params"])
    assert state_of(stumbling) == state_of(fresh)


# --- by inheritance ------------------------------------------------------------------------------


class NoReadBack(TorchDispatchMode):
    """Raises if a value is read from a tensor, which would make the host wait for a device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "a value was read back"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", INHERITED)
def test_no_step_by_inheritance_reads_a_value_back(name, backend):
    options = named(name)
    optimizer = options.ours(initial(options))
    source = gradients(options)
    for _ in range(2):
        give(optimizer, source())
        with NoReadBack():
            optimizer.step()


@pytest.mark.parametrize("name", INHERITED)
def test_every_control_point_works_by_inheritance(name, backend):
    options, dtype = named(name), torch.float32
    plain, joined, split, closed, closed_split = (options.ours(initial(options)) for _ in range(5))
    source = gradients(options)
    for _ in range(2):
        grads = source()
        give(plain, grads)
        plain.step()

        give(joined, grads, 64.0)
        _, found_inf, _ = joined.unscale_and_step(grads_scaled_by=64.0)
        assert (found_inf.shape, found_inf.dtype, float(found_inf)) == ((), dtype, 0.0)

        give(split, grads, 64.0)
        assert not split.unscale(64.0).found_inf
        assert not split.step_after_unscale().skipped

        def closure(optimizer: Any, grads: list[Tensor], scale: Any) -> Tensor:
            overflows = float(scale) > 64.0
            give(optimizer, spoiled(grads) if overflows else grads, float(scale))
            return torch.zeros(())

        loss, _, scale = closed.unscale_and_step(functools.partial(closure, closed, grads), 128.0)
        assert float(loss) == 0.0
        assert float(scale) == 64.0

        def unscaling(optimizer: Any, grads: list[Tensor], scale: Any) -> Any:
            loss = closure(optimizer, grads, scale)
            return loss, *optimizer.unscale(scale)

        closed_split.step_after_unscale(functools.partial(unscaling, closed_split, grads), 128.0)
    for optimizer in (joined, split, closed, closed_split):
        assert bits(optimizer.param_groups[0]["params"]) == bits(plain.param_groups[0]["params"])
        assert state_of(optimizer) == state_of(plain)


@pytest.mark.parametrize("name", INHERITED)
def test_float16_gradients_are_refused_by_inheritance(name, backend):
    options = named(name)
    optimizer = options.ours(initial(options, torch.float16))
    give(optimizer, gradients(options, torch.float16)())
    before = bits(optimizer.param_groups[0]["params"])
    with pytest.raises(RuntimeError, match="float16.*underflow"):
        optimizer.unscale_and_step(grads_scaled_by=1024.0)
    assert bits(optimizer.param_groups[0]["params"]) == before
    assert not any(state_of(optimizer))


@pytest.mark.parametrize("name", [*INHERITED, *ELEMENTWISE])
def test_wrong_gradients_are_refused_before_anything_changes(name, backend):
    options = named(name)
    optimizer = options.ours(initial(options))
    grads = gradients(options)()
    if name == "SparseAdam":
        grads[-1] = grads[-1].to_dense()
    else:
        if getattr(optimizer, "sparse_gradients", False):
            pytest.skip("takes sparse gradients too")
        grads[0] = grads[0].to_sparse()
    give(optimizer, grads)
    before = bits(optimizer.param_groups[0]["params"]), state_of(optimizer)
    with pytest.raises(RuntimeError, match=f"{name} does not support (sparse|dense) gradients"):
        optimizer.step()
    if name != "Muon":  # the step is torch's own, and makes the state of what came before
        assert (bits(optimizer.param_groups[0]["params"]), state_of(optimizer)) == before


@pytest.mark.parametrize("name", ["SGD", "Adagrad"])
def test_sparse_gradients_give_the_results_of_torch(name, backend):
    options = named(name)
    like = named("SparseAdam")
    ours, torchs = options.ours(initial(like)), options.torchs(initial(like))
    source = gradients(like)
    apart = Distance(torchs)
    for bad in (True, False, True, False):
        grads = source()
        give(ours, spoiled(grads) if bad else grads, 8.0)
        before = bits(ours.param_groups[0]["params"])
        assert ours.unscale_and_step(grads_scaled_by=8.0).skipped == bad
        if bad:
            assert bits(ours.param_groups[0]["params"]) == before
            continue
        give(torchs, grads)
        torchs.step()
        # torch's SGD adds an element that comes twice one after the other.
        assert max(apart.of_optimizers(ours, torchs).values()) <= ULPS


def test_a_checkpoint_of_torchs_own_step_adds_no_state(backend):
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer, loaded = (ampopt.SGD(params, momentum=0.5, dampening=0.5) for _ in range(2))
    for bad in (True, False, True):
        grads = [torch.full((2,), torch.inf if bad else 1.0) for _ in params]
        params[0].grad, params[1].grad = grads[0].to_sparse(), grads[1]
        optimizer.unscale_and_step(grads_scaled_by=2.0)
    loaded.load_state_dict(optimizer.state_dict())
    assert state_of(loaded) == state_of(optimizer)


def test_torchs_own_step_after_a_skip_is_the_first_step(backend):
    weights = []
    for cls in (ampopt.SGD, torch.optim.SGD):
        params = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
        optimizer: Any = cls(params, lr=1.0, momentum=0.5, dampening=0.5)
        if cls is ampopt.SGD:
            params[1].grad = torch.full((2,), torch.inf)
            optimizer.unscale_and_step(grads_scaled_by=1.0)
        for step in range(3):
            grads = [torch.full((2,), 1.0 + step) for _ in params]
            params[0].grad, params[1].grad = grads[0].to_sparse() if step < 2 else None, grads[1]
            optimizer.step()
        weights.append([param.tolist() for param in params])
    assert weights[0] == weights[1]


def test_the_buffer_of_muon_has_the_strides_of_the_first_gradient_in_every_kind_of_step(backend):
    def stepped(cls: Any, step: str, **arguments: Any) -> tuple[Any, ...]:
        param = torch.nn.Parameter(torch.ones(3, 2, dtype=torch.float64).t())
        param.grad = torch.full((2, 3), -0.0, dtype=torch.float64)
        optimizer = cls([param], momentum=0.0)
        getattr(optimizer, step)(**arguments)
        buffer = optimizer.state[param]["momentum_buffer"]
        return buffer.stride(), bits(buffer), bits(param)

    expected = stepped(torch.optim.Muon, "step")
    assert stepped(ampopt.Muon, "step") == expected
    assert stepped(ampopt.Muon, "unscale_and_step", grads_scaled_by=2.0) == expected


def test_the_step_count_of_sparse_adam_is_saved_as_torch_saves_it(backend):
    options = named("SparseAdam")
    ours, torchs = options.ours(initial(options)), options.torchs(initial(options))
    assert_train_alike(ours, torchs, gradients(options), range(3))
    saved = ours.state_dict()["state"][0]
    assert type(saved["step"]) is int
    assert saved["step"] == torchs.state_dict()["state"][0]["step"] == 3
    assert ours.state[ours.param_groups[0]["params"][0]]["step"].dtype == torch.float32


# --- anything goes -------------------------------------------------------------------------------

# Centered variance of gradients that repeat is rounding noise under a square root; what it then
# divides has no result to compare. Rprop compares signs of products that may round to 0, as torch.
DRAWN = [s for s in BY_RULE if not s.options.get("centered")]


@given(
    st.sampled_from(DRAWN),
    st.sampled_from([torch.float32, torch.float64]),
    st.lists(
        st.lists(
            st.floats(2.0**-20, 2.0**20, width=32).flatmap(lambda x: st.sampled_from([x, -x, 0.0])),
            min_size=3,
            max_size=3,
        ),
        min_size=1,
        max_size=6,
    ),
)
def test_drawn_gradients_give_the_results_of_torch(backend, options, dtype, rows):
    if backend == "triton":
        rows = rows[:2]
    ours = options.ours([torch.tensor([1.0, -2.0, 0.5], dtype=dtype)])
    torchs = options.torchs([torch.tensor([1.0, -2.0, 0.5], dtype=dtype)])
    drawn = iter(rows)
    source = lambda: [torch.tensor(next(drawn), dtype=dtype)]  # noqa: E731
    assert_train_alike(ours, torchs, source, range(len(rows)), ulps=64.0)


@pytest.fixture
def float64_by_default():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@each_rule
def test_scalar_states_are_float64_where_that_is_the_default(options, backend, float64_by_default):
    """float64 is torch's default dtype here. Results are as precise as torch's."""
    ours, torchs = (
        make(initial(options, torch.float64)) for make in (options.ours, options.torchs)
    )
    source = gradients(options, torch.float64)
    for _ in range(5):
        grads = source()
        for optimizer in (ours, torchs):
            give(optimizer, grads)
            optimizer.step()
    for p, q in zip(params_of(ours), params_of(torchs), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-13, atol=1e-14)
        for name, value in torchs.state[q].items():
            assert ours.state[p][name].dtype == value.dtype == torch.float64
            torch.testing.assert_close(ours.state[p][name], value, rtol=1e-13, atol=1e-14)


@each_rule
def test_a_skip_after_a_checkpoint_of_torchs_changes_no_dtype(options, backend):
    """With two dtypes: torch's NAdam casts ``mu_product`` to the dtype of its parameter."""
    if options.name == "Adafactor":
        pytest.skip("has no state that torch casts")
    dtypes = (torch.float64, torch.float32)

    def made(make: Any) -> Any:
        return make([p for dtype in dtypes for p in initial(options, dtype)])

    torchs = made(options.torchs)
    for p in params_of(torchs):
        p.grad = torch.ones_like(p)
    torchs.step()
    torchs.load_state_dict(copy.deepcopy(torchs.state_dict()))  # which casts
    ours = made(options.ours)
    ours.load_state_dict(torchs.state_dict())
    before = state_of(ours)
    for p in params_of(ours):
        p.grad = torch.full_like(p, float("nan"))
    assert ours.unscale_and_step(grads_scaled_by=1.0).skipped
    assert state_of(ours) == before


def test_scalar_states_of_two_precisions_keep_them(backend):
    """Torch's NAdam saves such states: it casts ``mu_product``, and does not cast ``step``."""
    ours, torchs = (
        cls(initial(named("NAdam"), torch.float64), lr=0.1)
        for cls in (ampopt.NAdam, torch.optim.NAdam)
    )
    source = gradients(named("NAdam"), torch.float64)
    for taken in range(3):
        grads = source()
        for optimizer in (ours, torchs):
            give(optimizer, grads)
            optimizer.step()
            if not taken:
                for state in optimizer.state.values():
                    state["mu_product"] = state["mu_product"].double()
    for p, q in zip(params_of(ours), params_of(torchs), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-13, atol=1e-14)
        assert ours.state[p]["step"].dtype == torch.float32
        assert ours.state[p]["mu_product"].dtype == torch.float64
