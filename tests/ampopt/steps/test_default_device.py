"""A default device set by the caller has no effect on where steps run.

``torch.set_default_device("cuda")`` is common. Here the default is a device without kernels.
"""

from typing import Any

import pytest
import torch
from support.optimizers import Plain
from torch.nn import Parameter

import ampopt
from ampopt.testing.bits import bits, everything

pytestmark = [
    pytest.mark.parametrize("backend", ["eager on a device", "triton"], indirect=True),
    pytest.mark.usefixtures("backend"),
]


def observed(default: str) -> Any:
    param = Parameter(torch.linspace(-1.0, 1.0, 3))
    optimizer = ampopt.SGD([("weight", param)])
    watch = ampopt.Watch(optimizer)
    condition = ampopt.skip_when(optimizer, norm_deviations=2.0)
    model = torch.nn.ParameterList([param])
    with torch.device(default):
        average = ampopt.averaged(model, optimizer)
        for number in (1.0, float("inf"), 2.0):
            param.grad = torch.full_like(param, number)
            optimizer.unscale_and_step(grads_scaled_by=1.0)
            average.update_parameters(model)
        for each in (watch, condition):
            each.load_state_dict(each.state_dict())
    return (
        watch.read(),
        watch.state_dict(),
        condition.state_dict(),
        bits(dict(average.state_dict())),
    )


def trained(cls: Any, default: str) -> Any:
    params = [Parameter(torch.linspace(-1.0, 1.0, n).reshape(n, 1)) for n in (3, 5)]
    numbers = [[torch.full_like(p, x) for p in params] for x in (2.0, float("inf"), 1.0, 0.5)]
    optimizer, again = cls(params), cls(params)  # torch's Adagrad makes tensors wherever it is
    with torch.device(default):
        scale: Any = ampopt.DynamicLossScale(init_scale=2.0)
        for kind in ("dynamic", 2.0):
            for step, gradients in enumerate(numbers):
                for p, grad in zip(params, gradients, strict=True):
                    p.grad = grad.clone()
                given = scale if kind == "dynamic" else kind
                if step % 2:
                    optimizer.unscale(grads_scaled_by=given)
                    scale = optimizer.step_after_unscale().scale
                else:
                    scale = optimizer.unscale_and_step(grads_scaled_by=given, max_norm=1.0).scale
        again.load_state_dict(optimizer.state_dict())
        again.step()
    return everything(again)


@pytest.mark.parametrize("cls", [ampopt.NAdam, ampopt.LAMB, ampopt.Adafactor, ampopt.Muon, Plain])
def test_steps_are_taken_where_the_parameters_are(cls):
    assert trained(cls, "meta") == trained(cls, "cpu")


def test_statistics_are_kept_where_the_parameters_are():
    assert observed("meta") == observed("cpu")
