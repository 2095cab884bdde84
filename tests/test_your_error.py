"""The messages in ``examples/guides/your_error.md`` are those that torch gives."""

import pytest
import torch
from support.readme import ROOT, headings

HEADINGS = headings(ROOT / "examples" / "guides" / "your_error.md")


def sgd(gradient: float | None = 1.0, dtype=torch.float32):
    p = torch.nn.Parameter(torch.ones(3, dtype=dtype))
    p.grad = None if gradient is None else torch.full_like(p, gradient)
    return torch.optim.SGD([p], lr=0.1)


def float16_parameters(scaler):
    scaler.unscale_(sgd(dtype=torch.float16))


def unscaled_twice(scaler):
    optimizer = sgd()
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)


def without_gradients(scaler):
    scaler.step(sgd(gradient=None))


def first_step_skipped(scaler):
    optimizer = sgd(gradient=float("inf"))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    scaler.step(optimizer)
    scheduler.step()  # a warning, which is an error in tests


def with_a_closure(scaler):
    scaler.step(sgd(), closure=lambda: torch.zeros(()))


def float32_inputs_of_a_float16_model(_):
    torch.nn.Linear(3, 3).half()(torch.ones(3, 3))


def step_between_forward_and_backward(_):
    optimizer = sgd()
    (parameter,) = optimizer.param_groups[0]["params"]
    loss = parameter.square().sum()
    optimizer.step()
    loss.backward()


def stepped_twice(scaler):
    optimizer = sgd()
    scaler.step(optimizer)
    scaler.step(optimizer)


def resumed_from_a_disabled_scaler(scaler):
    scaler.load_state_dict(torch.amp.GradScaler("cpu", enabled=False).state_dict())


@pytest.mark.parametrize(
    "mistake",
    [
        float16_parameters,
        float32_inputs_of_a_float16_model,
        unscaled_twice,
        stepped_twice,
        step_between_forward_and_backward,
        without_gradients,
        first_step_skipped,
        with_a_closure,
        resumed_from_a_disabled_scaler,
    ],
)
def test_torch_says_what_the_page_has_as_a_heading(mistake):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.zeros(()))
    with pytest.raises((AssertionError, RuntimeError, UserWarning, ValueError)) as error:
        mistake(scaler)
    assert any(heading in str(error.value) for heading in HEADINGS)


def test_torch_does_not_clip_what_is_sharded_in_part(process_group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    parameters = [
        torch.nn.Parameter(torch.ones(3)),
        torch.nn.Parameter(distribute_tensor(torch.ones(3), mesh, [Shard(0)])),
    ]
    for p in parameters:
        p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError) as error:
        torch.nn.utils.clip_grad_norm_(parameters, max_norm=1.0)
    assert any(heading in str(error.value) for heading in HEADINGS)
