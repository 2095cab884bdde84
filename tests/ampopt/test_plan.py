"""What a step works on is kept from one step to the next, and never when it should not be."""

import pytest
import torch

import ampopt
from ampopt import alike
from ampopt.alike import Alike


@pytest.fixture(params=["guards", "functions"])
def implementation(request, monkeypatch):
    if request.param == "functions":
        monkeypatch.setattr(alike, "TensorGuards", None)
    elif alike.TensorGuards is None:
        pytest.skip("this torch has no TensorGuards")


def example():
    return [torch.zeros(2, 3), torch.zeros(()), torch.zeros(4, dtype=torch.float64)]


CHANGED = {
    "shape": torch.zeros(3, 2),
    "rank": torch.zeros(6),
    "strides": torch.zeros(3, 2).t(),
    "dtype": torch.zeros(2, 3, dtype=torch.float16),
    "device": torch.zeros(2, 3, device="meta"),
    "layout": torch.zeros(2, 3).to_sparse(),
    "negation": torch._neg_view(torch.zeros(2, 3)),  # pyright: ignore[reportPrivateImportUsage]
}


def test_others_laid_out_the_same_are_alike(implementation):
    known = Alike(example())
    with torch.no_grad():
        others = [torch.ones(100)[7:13].view(2, 3), torch.ones(9)[3], *example()[2:]]
        assert known.to(others)
    assert known.to(others)


@pytest.mark.parametrize("what", CHANGED)
def test_what_a_flat_kernel_would_misread_is_not_alike(implementation, what):
    assert not Alike(example()).to([CHANGED[what], *example()[1:]])


def test_more_or_fewer_are_not_alike(implementation):
    assert not Alike(example()).to(example()[:2])
    assert not Alike(example()[:2]).to(example())
    assert Alike([]).to([])


def test_guards_that_take_other_arguments_are_done_without(monkeypatch):
    def other(*tensors):
        raise AssertionError("not reached: the keywords do not fit")

    monkeypatch.setattr(alike, "TensorGuards", other)
    known = Alike(example())
    assert known.to(example())
    assert not known.to([CHANGED["dtype"], *example()[1:]])


def trained(model, optimizer, scale):
    optimizer.zero_grad()
    model(torch.ones(5, 4)).sum().backward()
    return optimizer.unscale_and_step(grads_scaled_by=scale).scale


def test_a_plan_outlasts_ordinary_steps(implementation):
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    optimizer = ampopt.AdamW(model.parameters())
    scale = trained(model, optimizer, ampopt.DynamicLossScale())
    plan = optimizer._plan
    assert plan is not None
    for _ in range(3):
        scale = trained(model, optimizer, scale)
    optimizer.param_groups[0]["lr"] = 0.5
    trained(model, optimizer, scale)
    assert optimizer._plan is plan


@pytest.mark.parametrize(
    "change",
    [
        lambda model, optimizer: setattr(model.weight, "data", model.weight.data.clone()),
        lambda model, optimizer: optimizer.param_groups[0].update(weight_decay=0.0),
        lambda model, optimizer: optimizer.load_state_dict(optimizer.state_dict()),
        lambda model, optimizer: optimizer.add_param_group({"params": [torch.zeros(2)]}),
        lambda model, optimizer: model.bias.requires_grad_(False),
    ],
)
def test_a_plan_is_made_anew_when_anything_else_changes(implementation, change):
    model = torch.nn.Linear(4, 3)
    optimizer = ampopt.AdamW(model.parameters())
    scale = trained(model, optimizer, ampopt.DynamicLossScale())
    plan = optimizer._plan
    change(model, optimizer)
    trained(model, optimizer, scale)
    assert optimizer._plan is not plan
