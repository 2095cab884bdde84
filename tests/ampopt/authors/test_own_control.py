"""Optimizers that skip by themselves: in ``step``, by the flag, or in their own control points."""

import contextlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.optimizers import Plain
from support.strategies import fewer
from torch import Tensor
from torch.nn import Parameter

import ampopt
from ampopt.testing.bits import bits, everything
from ampopt.testing.no_sync import assert_no_sync
from ampopt_kernels.language import HAS_TRITON

INF = float("inf")
NAN = float("nan")


class Told(Plain):
    """Applies ``found_inf`` itself in its step, and records it."""

    skip_by = "step"
    flags: list[Any]

    def update(self) -> None:
        self.__dict__.setdefault("flags", []).append(self.found_inf)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state["buffer"] = torch.zeros_like(p)
                    self.one(p, p.grad, state["buffer"], group)

    def one(self, p: Tensor, grad: Tensor, buffer: Tensor, group: dict[str, Any]) -> None:
        new = buffer * group["momentum"] + grad
        if self.found_inf is None:
            buffer.copy_(new)
            p.sub_(group["lr"] * new)
        else:
            skip = self.found_inf > 0
            buffer.copy_(torch.where(skip, buffer, new))
            p.copy_(torch.where(skip, p, p - group["lr"] * new))


class InControl(Told):
    """Overrides ``unscale_and_step`` and ``step_after_unscale``."""

    def unscale_and_step(self, closure: Any = None, grads_scaled_by: Any = None) -> Any:  # type: ignore[override]
        self.unscale(grads_scaled_by=grads_scaled_by)
        return self.step_after_unscale()

    def step_after_unscale(self) -> Any:  # type: ignore[override]
        pending = self.pending
        assert pending is not None
        self.step()
        return ampopt.StepResult("theirs", *pending)


def numbers(*values: float) -> Tensor:
    return torch.tensor(values)


def made(cls: Any) -> tuple[Any, Parameter]:
    param = Parameter(numbers(1.0, -2.0))
    return cls([param]), param


both = pytest.mark.parametrize("cls", [Told, InControl])
splits = pytest.mark.parametrize("split", [False, True])


@pytest.mark.usefixtures("backend")
@both
@splits
@fewer(0.25)
@given(
    history=st.lists(st.tuples(st.integers(-9, 9), st.sampled_from([0.5, -4.0, INF, NAN]))),
    exponent=st.integers(-9, 9),
)
def test_steps_that_skip_by_themselves_equal_ordinary_steps(cls, split, history, exponent):
    (optimizer, param), (plain, plain_param) = made(cls), made(Plain)
    scale = ampopt.DynamicLossScale(init_scale=2.0**exponent, growth_interval=2)
    expected = scale
    for pair in history:
        before = bits(param), optimizer.state.get(param, {}).get("buffer", numbers(0, 0)).tolist()
        param.grad = numbers(*pair) * scale.item()
        plain_param.grad = numbers(*pair) * expected.item()
        if split:
            optimizer.unscale(grads_scaled_by=scale)
            result = optimizer.step_after_unscale()
        else:
            result = optimizer.unscale_and_step(grads_scaled_by=scale)
        expected = plain.unscale_and_step(grads_scaled_by=expected).scale
        scale = result.scale
        assert scale.state_dict() == expected.state_dict()
        assert bits(param) == bits(plain_param)
        if result.skipped:
            assert (bits(param), optimizer.state[param]["buffer"].tolist()) == before
        flag = optimizer.flags[-1]
        assert (flag.dtype, flag.shape, bool(flag > 0)) == (torch.float32, (), result.skipped)
        assert "found_inf" not in vars(optimizer)
        assert result.loss == ("theirs" if cls is InControl else None)


@both
def test_a_plain_step_gets_no_flag(cls):
    optimizer, param = made(cls)
    param.grad = numbers(INF, 1.0)
    optimizer.step()
    assert optimizer.flags == [None]
    assert not param.isfinite().all()


def test_a_plain_step_after_unscale_gets_its_flag():
    optimizer, param = made(Told)
    before = bits(param)
    param.grad = numbers(INF, 1.0)
    optimizer.unscale(grads_scaled_by=1.0)
    optimizer.step()
    assert optimizer.flags == [1.0] and bits(param) == before
    assert optimizer.pending is None


def test_an_author_in_control_has_the_flag_of_a_pending_unscale():
    optimizer, param = made(InControl)
    param.grad = numbers(INF, 1.0)
    found_inf, scale = optimizer.unscale(grads_scaled_by=2.0)
    assert optimizer.found_inf is found_inf
    assert optimizer.pending == (found_inf, scale)
    optimizer.zero_grad()
    assert optimizer.found_inf is None


def test_nothing_is_read_back():
    optimizer, param = made(Told)
    ampopt.set_backend("triton" if HAS_TRITON else "eager")
    for number in (1.0, INF, 2.0):
        param.grad = numbers(number, 1.0)
        before = bits(param)
        with assert_no_sync() if HAS_TRITON and number != 1.0 else contextlib.nullcontext():
            optimizer.unscale_and_step(grads_scaled_by=2.0)
        assert (bits(param) == before) is (number == INF)


@both
@pytest.mark.parametrize("scaler", [torch.amp.GradScaler, ampopt.GradScaler])
@splits
def test_under_a_grad_scaler_the_step_gets_its_flag(cls, scaler, split):
    optimizer, param = made(cls)
    scaler = scaler("cpu", init_scale=8.0)
    plain, plain_param = made(Plain)
    for number in (INF, 1.0, NAN, 2.0):
        scaler.scale(torch.zeros(()))
        before = everything(optimizer)["parameters"]
        param.grad = numbers(number, 1.0) * scaler.get_scale()
        if split:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update(8.0)
        if number in (1.0, 2.0):
            plain_param.grad = numbers(number, 1.0)
            plain.step()
        else:
            assert everything(optimizer)["parameters"] == before
        assert bits(param) == bits(plain_param)
        assert "found_inf" not in vars(optimizer)


def test_the_flag_is_gone_when_a_step_raised():
    class Raises(Told):
        def update(self) -> None:
            raise KeyError("no step")

    optimizer, param = made(Raises)
    param.grad = numbers(1.0, 1.0)
    with pytest.raises(KeyError, match="no step"):
        optimizer.unscale_and_step(grads_scaled_by=1.0)
    assert optimizer.found_inf is None


def test_a_closure_is_replayed_before_a_step_that_skips_by_itself():
    optimizer, param = made(Told)

    def closure(scale: Any) -> Tensor:
        optimizer.zero_grad()
        loss = (param - 3).square().sum()
        ampopt.scale_outputs(loss, scale).backward()
        return loss

    scale = ampopt.DynamicLossScale(init_scale=2.0**126)
    assert optimizer.unscale_and_step(closure, grads_scaled_by=scale).scale.item() < 2.0**126
    assert optimizer.flags == [None]
    assert param.tolist() == pytest.approx([1.4, -1.0])


# --- the kernels of the example ------------------------------------------------------------------


@pytest.fixture(scope="module")
def example():
    if not HAS_TRITON:
        pytest.skip("Triton cannot be imported here")
    path = Path(__file__).parents[3] / "examples" / "own_kernel.py"
    spec = importlib.util.spec_from_file_location("own_kernel", path)
    assert spec is not None and spec.loader is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(path.parent))
        patch.setitem(sys.modules, "own_kernel", importlib.util.module_from_spec(spec))
        spec.loader.exec_module(sys.modules["own_kernel"])
        yield sys.modules["own_kernel"]


@pytest.mark.parametrize("name", ["RowNormalized", "Controlled"])
@splits
@pytest.mark.parametrize("first_bad", [False, True])
def test_the_examples_kernels_skip_and_step(example, name, split, first_bad):
    generator = torch.Generator().manual_seed(0)
    params = [Parameter(torch.randn(shape, generator=generator)) for shape in ((40, 3), (5,), ())]
    wide = [p.detach().double().requires_grad_() for p in params]
    momenta = [torch.zeros_like(p) for p in wide]
    optimizer = getattr(example, name)(params, lr=0.25, beta=0.5)
    scale: Any = ampopt.DynamicLossScale(init_scale=2.0**10)
    for bad in (first_bad, False, True, False):
        grads = [torch.randn(p.shape, generator=generator) for p in params]
        if bad:
            grads[1][-1] = NAN
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad * scale.item()
        before = everything(optimizer)
        if split:
            optimizer.unscale(grads_scaled_by=scale)
            result = optimizer.step_after_unscale()
        else:
            result = optimizer.unscale_and_step(grads_scaled_by=scale)
        scale = result.scale
        assert result.skipped is bad
        if bad:
            assert everything(optimizer)["parameters"] == before["parameters"]
            if before["state"][0] is not None:
                assert everything(optimizer) == before
            continue
        with torch.no_grad():
            for p, m, grad in zip(wide, momenta, grads, strict=True):
                m.mul_(0.5).add_(grad)
                rows = m if m.ndim > 1 else m.view(1, -1)
                p.sub_((0.25 * rows / rows.square().mean(1, keepdim=True).sqrt()).view(p.shape))
        for p, q in zip(params, wide, strict=True):
            torch.testing.assert_close(p.double(), q, rtol=1e-5, atol=1e-5)
