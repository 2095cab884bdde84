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


@pytest.mark.parametrize(
    "mistake",
    [float16_parameters, unscaled_twice, without_gradients, first_step_skipped, with_a_closure],
)
def test_torch_says_what_the_page_has_as_a_heading(mistake):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.zeros(()))
    with pytest.raises((AssertionError, RuntimeError, UserWarning, ValueError)) as error:
        mistake(scaler)
    assert any(heading in str(error.value) for heading in HEADINGS)
