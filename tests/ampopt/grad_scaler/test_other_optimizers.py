"""``ampopt.GradScaler`` with optimizers and wrappers of other packages, and nested outputs."""

import functools
from collections import namedtuple
from typing import Any

import pytest
import torch
from support.optimizers import OWN, Plain
from support.training_loops import INF, give, made, scaler_at
from torch.nn import Parameter

import ampopt
from ampopt import GradScaler
from ampopt.testing.bits import everything

each_kind = pytest.mark.parametrize(
    "cls", [ampopt.AdamW, ampopt.Muon, *OWN, torch.optim.AdamW, torch.optim.Adagrad]
)

Pair = namedtuple("Pair", ("a", "b"))


def test_structures_of_outputs_are_scaled():
    scaler = scaler_at(4.0, GradScaler)
    one = torch.ones(())
    assert scaler.scale([one, (one, one)]) == [4.0, (4.0, 4.0)]
    assert scaler.scale(Pair(one, one)) == Pair(4.0, 4.0)
    assert scaler.scale({"x": one}) == {"x": 4.0}
    assert list(scaler.scale(iter([one, one]))) == [4.0, 4.0]
    assert scaler.scale(one.to("meta")).is_meta
    for wrong in (1.0, "loss", [one, None]):
        with pytest.raises(TypeError, match="only floating-point tensors can be scaled"):
            scaler.scale(wrong)
    with pytest.raises(TypeError, match="only floating-point tensors can be scaled"):
        GradScaler("cpu").scale(1.0)


def test_t9_a_half_precision_loss_does_not_overflow_by_being_scaled():
    scaler = GradScaler("cpu")
    for shape in ((), (1,)):
        scaled = scaler.scale(torch.full(shape, 1.5, dtype=torch.float16))
        assert scaled.dtype == torch.float32
        assert scaled == 1.5 * 2**16


class Wrapper:
    """A wrapper like those of frameworks: it has the param groups and the step of an optimizer."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups

    def step(self, *args: Any, **kwargs: Any) -> Any:
        return self.optimizer.step(*args, **kwargs)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


@each_kind
@pytest.mark.parametrize("wrapped_first", [False, True])
def test_t6_a_wrapper_stands_for_its_optimizer(cls, wrapped_first):
    optimizer, params = made(cls)
    pair = [optimizer, Wrapper(optimizer)]
    first, second = reversed(pair) if wrapped_first else pair
    scaler = scaler_at(4.0, GradScaler)
    torch.manual_seed(0)
    give(optimizer, 1.0, 4.0)
    scaler.unscale_(first)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(second)
    scaler.step(second)
    torch.manual_seed(0)
    clean, clean_params = made(cls)
    give(clean, 1.0)
    clean.step()
    torch.testing.assert_close(params, clean_params)


@each_kind
def test_an_optimizer_with_new_param_groups_is_still_the_same(cls):
    """As after ``load_state_dict``, which replaces their list."""
    optimizer, params = made(cls)
    scaler = scaler_at(4.0, GradScaler)
    give(optimizer, 1.0, 4.0)
    scaler.unscale_(optimizer)
    optimizer.param_groups = list(optimizer.param_groups)
    scaler.step(optimizer)
    assert all((p.grad == 1.0).all() for p in params)
    assert not scaler.was_skipped(optimizer)


class WarmedUp(Wrapper):
    """Changes the learning rate in its step, and forwards missing attributes to the optimizer."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        self.param_groups[0]["lr"] *= 2
        return super().step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


@pytest.mark.parametrize("unscale_first", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        ampopt.AdamW,
        ampopt.Muon,
        *OWN,
        torch.optim.AdamW,
        functools.partial(torch.optim.AdamW, fused=True),
    ],
)
def test_the_step_of_a_wrapper_runs_and_is_skipped(make, unscale_first):
    optimizer, (twin, _) = made(make, lr=0.125)[0], made(make, lr=0.125)
    wrapper, clean = WarmedUp(optimizer), WarmedUp(twin)
    scaler = scaler_at(4.0, GradScaler)
    for number in (INF, 1.0, 0.5):
        torch.manual_seed(0)  # HostCounted draws
        before = everything(optimizer)
        give(optimizer, number, 4.0)
        if unscale_first:
            scaler.unscale_(wrapper)
        scaler.step(wrapper)
        assert (everything(optimizer) == before) is (number == INF)
        assert scaler.was_skipped(wrapper) is (number == INF)
        scaler.update(4.0)
        if number != INF:
            give(clean, number)
            torch.manual_seed(0)
            clean.step()
    assert everything(optimizer) == everything(twin)
    assert optimizer.param_groups[0]["lr"] == 0.5
    with pytest.raises(RuntimeError, match="WarmedUp cannot run a closure again"):
        scaler.step(wrapper, lambda: torch.zeros(()))


@pytest.mark.parametrize("unscale_first", [False, True])
def test_a_wrapper_may_have_control_points_of_its_own(unscale_first):
    class Forwarding(Wrapper):
        def unscale(self, *args: Any, **kwargs: Any) -> Any:
            return self.optimizer.unscale(*args, **kwargs)

        def unscale_and_step(self, *args: Any, **kwargs: Any) -> Any:
            return self.optimizer.unscale_and_step(*args, **kwargs)

        def step_after_unscale(self, *args: Any, **kwargs: Any) -> Any:
            return self.optimizer.step_after_unscale(*args, **kwargs)

    optimizer, (param, _) = made(ampopt.SGD, lr=1.0)
    wrapper, scaler = Forwarding(optimizer), scaler_at(4.0, GradScaler)
    before = param.detach().clone()
    for number in (INF, 1.0):
        give(optimizer, number, scaler.get_scale())
        if unscale_first:
            scaler.unscale_(wrapper)
        scaler.step(wrapper)
        assert scaler.was_skipped(wrapper) is (number == INF)
        scaler.update()
    assert torch.equal(before - param, torch.ones_like(param))


def test_the_master_weights_of_the_optimizer_in_a_wrapper_are_used():
    param = Parameter(torch.ones(2, dtype=torch.float16))
    param.grad = torch.full_like(param, 4.0)
    wrapper = WarmedUp(ampopt.SGD([param], lr=0.25, master_weights=True))
    scaler_at(4.0, GradScaler).step(wrapper)
    assert (param == 0.5).all()


def test_t6_a_parameter_of_two_optimizers_is_not_unscaled_twice():
    params = [Parameter(torch.ones(2)), Parameter(torch.ones(2))]
    for cls in (torch.optim.SGD, Plain):
        first, second = cls(params, lr=0.1), cls(params[:1], lr=0.1)
        scaler = scaler_at(4.0, GradScaler)
        give(first, 1.0, 4.0)
        scaler.unscale_(first)
        with pytest.raises(RuntimeError, match="group 0, parameter 0 of.*belongs to another"):
            scaler.unscale_(second)
        scaler.step(first)


def test_t6_a_step_that_was_refused_has_unscaled_nothing():
    first, params = made(torch.optim.SGD)
    second, scaler = torch.optim.SGD(params[:1], lr=1.0), scaler_at(4.0, GradScaler)
    before = params[0].detach().clone()
    give(first, 1.0, 4.0)
    with pytest.raises(RuntimeError, match="closure"):
        scaler.step(first, lambda: 0.0)
    scaler.step(second)
    assert torch.equal(params[0], before - 1.0)


def test_t6_a_parameter_is_not_unscaled_again_after_a_fused_step():
    """A fused step of torch unscales in place, too."""
    first, params = made(torch.optim.SGD, fused=True)
    second = torch.optim.SGD(params[:1])
    scaler = scaler_at(4.0, GradScaler)
    give(first, 1.0, 4.0)
    scaler.step(first)
    assert (params[0].grad == 1.0).all()
    with pytest.raises(RuntimeError, match="group 0, parameter 0 of.*belongs to another"):
        scaler.step(second)


@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, GradScaler])
@pytest.mark.parametrize("unscale_first", [False, True])
def test_t6_a_step_that_raised_is_not_unscaled_twice(scaler_class, unscale_first):
    class Raising(torch.optim.SGD):
        raises = True

        def step(self, closure: Any = None) -> Any:
            if self.raises:
                raise RuntimeError("out of memory")
            return super().step(closure)

    optimizer, params = made(Raising, lr=1.0)
    scaler = scaler_at(4.0, scaler_class)
    give(optimizer, 1.0, 4.0)
    if unscale_first:
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="out of memory"):
        scaler.step(optimizer)
    optimizer.raises = False
    before = [p.detach().clone() for p in params]
    scaler.step(optimizer)
    torch.testing.assert_close(list(params), [p - 1 for p in before])


@pytest.mark.parametrize("unscale_first", [False, True])
def test_an_optimizer_that_takes_a_flag_gets_1_or_0(unscale_first):
    """Torch's fused optimizers compare the flag with 1 (trap T2); others may compare it with 0."""

    class Own(torch.optim.SGD):
        _step_supports_amp_scaling = True
        seen: list[Any] = []

        def step(self, closure: Any = None) -> Any:
            scale = getattr(self, "grad_scale", None)
            self.seen.append((scale and float(scale), float(vars(self)["found_inf"])))

    optimizer, _ = made(Own)
    scaler = scaler_at(4.0, GradScaler)
    for number in (INF, 1.0):
        give(optimizer, number)
        if unscale_first:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update(4.0)
    carried = None if unscale_first else 4.0
    assert Own.seen == [(carried, 1.0), (carried, 0.0)]
    assert not {"grad_scale", "found_inf"} & vars(optimizer).keys()


@pytest.mark.parametrize("reads_flag", [False, True])
def test_a_step_without_gradients_is_not_called(reads_flag):
    class Counting(torch.optim.SGD):
        _step_supports_amp_scaling = reads_flag
        calls = 0

        def step(self, closure: Any = None) -> Any:
            self.calls += 1

    optimizer, _ = made(Counting)
    scaler = scaler_at(4.0, GradScaler)
    scaler.step(optimizer)
    assert optimizer.calls == 0 and not scaler.skipped


@pytest.mark.parametrize("unscale_first", [False, True])
def test_a_grad_scale_that_the_user_sets_is_for_one_step_as_under_torchs(unscale_first):
    traces = []
    for scaler_class in (torch.amp.GradScaler, GradScaler):
        param = torch.nn.Parameter(torch.ones(2))
        optimizer: Any = torch.optim.SGD([param], lr=0.5, momentum=0.5, fused=True)
        scaler, trace = scaler_at(4.0, scaler_class), []
        for step, number in enumerate((8.0, 8.0, INF, 8.0)):
            if step != 1:
                optimizer.grad_scale = torch.tensor(2.0)
            param.grad = torch.tensor([1.0, number])
            if unscale_first:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            trace += [*param.tolist(), scaler.get_scale()]
        traces.append(trace)
    assert traces[0] == traces[1]


def test_a_grad_scale_that_would_be_ignored_is_refused():
    optimizer, (param, _) = made(ampopt.SGD)
    scaler = scaler_at(4.0, GradScaler)
    give(optimizer, 4.0)
    before = param.detach().clone()
    optimizer.grad_scale = torch.tensor(2.0)
    with pytest.raises(RuntimeError, match="grad_scale of this SGD is set.*multiply the loss"):
        scaler.step(optimizer)
    assert torch.equal(param, before)
    del optimizer.grad_scale
    scaler.step(optimizer)
    assert not torch.equal(param, before)


def test_an_argument_of_that_name_is_of_an_optimizer_that_does_not_skip_by_itself():
    class Own(torch.optim.SGD):
        def step(self, closure: Any = None, *, grad_scaler: Any = None) -> Any:
            return grad_scaler

    optimizer, _ = made(Own)
    give(optimizer, 1.0)
    assert scaler_at(4.0, GradScaler).step(optimizer) is None


def test_an_optimizer_whose_step_takes_the_scaler_gets_it():
    class Old(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure: Any = None, *, grad_scaler: Any = None) -> Any:
            found = grad_scaler._check_inf_per_device(self)
            return [float(flag) for flag in found.values()]

    optimizer, params = made(Old)
    scaler = scaler_at(4.0, GradScaler)
    with pytest.warns(FutureWarning, match="stop passing itself"):
        assert scaler.step(optimizer) == []
    scaler.update()
    give(optimizer, INF)
    with pytest.warns(FutureWarning, match="stop passing itself"):
        assert scaler.step(optimizer) == [1.0]
    assert scaler.skipped
    with pytest.raises(RuntimeError, match="belongs to another"):  # it has unscaled by itself
        scaler.step(torch.optim.SGD(params[:1]))
    scaler.update()
    assert scaler.get_scale() == 2.0


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_gradients_that_are_pairs_of_float16_are_not_unscaled_in_place():
    p = Parameter(torch.ones(2, dtype=torch.complex64).to(torch.complex32))
    p.grad = torch.full((2,), 1e-5 + 1e-5j).to(torch.complex32)
    with pytest.raises(ValueError, match="FP16"):
        scaler_at(2.0**10, GradScaler).unscale_(torch.optim.SGD([p], lr=0.5))


def test_float16_parameters():
    for cls in (torch.optim.SGD, ampopt.SGD, Plain):
        p = Parameter(torch.ones(2, dtype=torch.float16))
        optimizer = cls([p], lr=0.5)
        p.grad = torch.full_like(p, 4.0)
        scaler = scaler_at(4.0, GradScaler)
        with pytest.raises((ValueError, RuntimeError), match="float16|FP16"):
            scaler.unscale_(optimizer)
        if cls is ampopt.SGD:
            scaler.step(optimizer)
            assert (p == 0.5).all()
    p = Parameter(torch.ones(2, dtype=torch.float16))
    optimizer = ampopt.SGD([p], lr=0.5, master_weights=True)
    p.grad = torch.full_like(p, 4.0)
    scaler = scaler_at(4.0, GradScaler)
    scaler.unscale_(optimizer)
    assert all((master.grad == 1.0).all() for master in optimizer.master_params())
    scaler.step(optimizer)
    assert (p == 0.5).all()
