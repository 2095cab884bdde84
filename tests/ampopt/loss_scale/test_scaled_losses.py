"""A step without a scale, after a loss was multiplied by one, warns once."""

import inspect
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.optimizers import Plain
from torch import nn

import ampopt

EACH = pytest.mark.parametrize("cls", [ampopt.AdamW, Plain, ampopt.Muon])
SCALES: dict[str, Callable[[], Any]] = {
    "number": lambda: 4.0,
    "tensor": lambda: torch.tensor(4.0),
    "static": lambda: ampopt.StaticLossScale(4.0),
    "dynamic": lambda: ampopt.DynamicLossScale(init_scale=4.0),
}


def model_and(cls: Any) -> tuple[nn.Module, Any]:
    model = nn.Linear(2, 2, bias=False)
    return model, cls(model.parameters())


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(torch.ones(2)).sum()


def warned(call: Callable[[], Any]) -> int:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    texts = [str(warning.message) for warning in caught]
    assert all("scale_outputs" in text and "unscale_and_step(grads" in text for text in texts)
    users = (__file__, inspect.getfile(Plain))  # whose step calls the closure
    assert all(warning.filename in users for warning in caught)
    return len(texts)


STEPS: dict[str, Callable[[Any], Any]] = {
    "step": lambda optimizer: optimizer.step(),
    "unscale_and_step": lambda optimizer: optimizer.unscale_and_step(),
    "clipped": lambda optimizer: optimizer.unscale_and_step(max_norm=1.0),
    "together": lambda optimizer: ampopt.unscale_and_step([optimizer]),
    "clipped together": lambda optimizer: ampopt.unscale_and_step([optimizer], max_norm=1.0),
}


@EACH
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("step", STEPS)
def test_a_step_that_is_told_of_no_scale_warns_once(cls, scale, step):
    model, optimizer = model_and(cls)
    counts = []
    for _ in range(3):
        scaled_loss = ampopt.scale_outputs(loss_of(model), SCALES[scale]())
        optimizer.zero_grad()
        scaled_loss.backward()
        counts.append(warned(lambda: STEPS[step](optimizer)))
    assert counts == [1, 0, 0]


@EACH
@pytest.mark.parametrize("scale", ["static", "dynamic"])
def test_a_product_with_the_scale_counts_as_well(cls, scale):
    model, optimizer = model_and(cls)
    (loss_of(model) * SCALES[scale]()).backward()
    assert warned(optimizer.step) == 1


def test_a_sum_to_which_scaled_gradients_are_added_warns():
    model, optimizer = model_and(ampopt.AdamW)
    for _ in range(2):
        ampopt.scale_outputs(loss_of(model), 4.0).backward()
        if optimizer._ampopt.accumulation.cycle is None:
            optimizer.accumulate(grads_scaled_by=4.0)
    assert warned(optimizer.step) == 1


@pytest.mark.parametrize(
    ("cls", "call"),
    [(ampopt.AdamW, "accumulate"), (Plain, "accumulate"), (ampopt.Sophia, "update_hessian")],
)
def test_sums_and_second_rules_that_are_told_of_no_scale_warn(cls, call):
    model, optimizer = model_and(cls)
    ampopt.scale_outputs(loss_of(model), 4.0).backward()
    assert warned(getattr(optimizer, call)) == 1


@pytest.mark.parametrize("cls", [ampopt.AdamW, Plain, ampopt.LBFGS])
@pytest.mark.parametrize(
    "step",
    [
        lambda optimizer, closure: optimizer.step(closure),
        lambda optimizer, closure: optimizer.unscale_and_step(closure),
        lambda optimizer, closure: optimizer.unscale_and_step(closure, max_norm=1.0),
        lambda optimizer, closure: optimizer.step_after_unscale(
            lambda scale: (closure(), *optimizer.unscale(scale)), current_grad_scale=None
        ),
    ],
    ids=["step", "unscale_and_step", "clipped", "step_after_unscale"],
)
def test_a_closure_that_scales_without_being_given_a_scale_is_seen(cls, step):
    model, optimizer = model_and(cls)

    def closure(scale: Any = None) -> torch.Tensor:
        optimizer.zero_grad()
        ampopt.scale_outputs(loss_of(model), 4.0).backward()
        return loss_of(model)

    assert warned(lambda: step(optimizer, closure)) == 1


# --- no false alarm -------------------------------------------------------------------------------


@EACH
@pytest.mark.parametrize(
    "scale", [None, 1.0, torch.tensor(1.0), ampopt.StaticLossScale(1.0)], ids=str
)
def test_a_scale_of_one_is_none(cls, scale):
    model, optimizer = model_and(cls)
    ampopt.scale_outputs(loss_of(model), scale).backward()
    assert warned(optimizer.step) == 0


def after_unscale(optimizer: Any) -> None:
    optimizer.unscale(grads_scaled_by=4.0)
    optimizer.step()


def after_accumulate(optimizer: Any) -> None:
    optimizer.accumulate(grads_scaled_by=4.0)
    optimizer.step()


@EACH
@pytest.mark.parametrize(
    "step",
    [
        lambda o: o.unscale_and_step(grads_scaled_by=4.0),
        after_unscale,
        after_accumulate,
        lambda o: ampopt.unscale_and_step([o], grads_scaled_by=4.0),
    ],
    ids=["unscale_and_step", "unscale", "accumulate", "together"],
)
def test_a_step_that_is_told_of_the_scale_does_not_warn_nor_do_plain_steps_after_it(cls, step):
    model, optimizer = model_and(cls)
    ampopt.scale_outputs(loss_of(model), 4.0).backward()
    assert warned(lambda: step(optimizer)) == 0
    optimizer.zero_grad()
    loss_of(model).backward()
    assert warned(optimizer.step) == 0


@EACH
def test_gradients_that_zero_grad_discarded_do_not_count(cls):
    model, optimizer = model_and(cls)
    ampopt.scale_outputs(loss_of(model), 4.0).backward()
    optimizer.zero_grad()
    loss_of(model).backward()
    assert warned(optimizer.step) == 0


@EACH
def test_a_loss_without_a_backward_pass_does_not_count(cls):
    model, optimizer = model_and(cls)
    loss_of(model).backward()
    with torch.no_grad():
        ampopt.scale_outputs(loss_of(model), 4.0)
    assert warned(optimizer.step) == 0


@EACH
def test_losses_from_before_an_optimizer_was_made_do_not_count(cls):
    model, _ = model_and(cls)
    ampopt.scale_outputs(loss_of(model), 4.0).backward()
    optimizer = cls(model.parameters())
    assert warned(optimizer.step) == 0


@EACH
@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, ampopt.GradScaler])
@pytest.mark.parametrize("theirs", [False, True])
def test_a_scaler_beside_does_not_count(cls, scaler_class, theirs):
    model, optimizer = model_and(cls)
    scaler = scaler_class("cpu", init_scale=4.0)
    scaled_optimizer = torch.optim.SGD(model.parameters()) if theirs else optimizer
    scaler.scale(loss_of(model)).backward()
    assert warned(lambda: scaler.step(scaled_optimizer)) == 0
    scaler.update()
    assert warned(optimizer.step) == 0


def test_closures_of_control_points_do_not_count():
    model, optimizer = model_and(ampopt.LBFGS)

    def closure(scale: Any) -> torch.Tensor:
        optimizer.zero_grad()
        ampopt.scale_outputs(loss_of(model).square(), scale).backward()
        return loss_of(model).square().detach()

    assert warned(lambda: optimizer.unscale_and_step(closure, 4.0)) == 0
    _, plain = model_and(ampopt.AdamW)
    for p in plain.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    assert warned(plain.step) == 0


def test_losses_of_another_thread_do_not_count():
    model, optimizer = model_and(ampopt.AdamW)
    scales = threading.Thread(
        target=lambda: ampopt.scale_outputs(loss_of(model), 4.0).backward(), daemon=True
    )
    scales.start()
    scales.join()
    assert warned(optimizer.step) == 0


@EACH
def test_a_class_that_unscales_by_a_method_of_its_own_needs_to_tell_no_scale(cls):
    class Unscales(cls):
        def unscale(self, grads_scaled_by: Any = None) -> Any:
            for param in self.param_groups[0]["params"]:
                param.grad.div_(grads_scaled_by)

    for kind, count in ((Unscales, 0), (type("Inherits", (Unscales,), {}), 0), (cls, 1)):
        model, optimizer = model_and(kind)
        ampopt.scale_outputs(loss_of(model), 4.0).backward()
        if kind is not cls:
            optimizer.unscale(4.0)
        assert warned(optimizer.step) == count
