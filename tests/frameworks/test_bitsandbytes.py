"""bitsandbytes' optimizers with states in 8 bits, under ``extend``, on the CPU."""

# The extra may not be installed.
# pyright: reportMissingImports=false

from typing import Any

import pytest
import torch
from support.requirements import needs

import ampopt
from ampopt.testing.bits import bits

bitsandbytes = needs("bitsandbytes")


def parameters() -> list[Any]:
    return [torch.nn.Parameter(torch.linspace(-1.0, 1.0, 8192).reshape(64, 128))]


def stepped(optimizer: Any, seed: int, bad: bool = False) -> Any:
    (param,) = optimizer.param_groups[0]["params"]
    param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(seed))
    if bad:
        param.grad[0, 0] = float("inf")
    if isinstance(optimizer, ampopt.Optimizer):
        return optimizer.unscale_and_step(grads_scaled_by=1.0).skipped
    return optimizer.step()


def seen(optimizer: Any) -> Any:
    (param,) = optimizer.param_groups[0]["params"]
    state = optimizer.state[param]
    return bits([param, *(v for v in state.values() if isinstance(v, torch.Tensor))])


@pytest.mark.parametrize("name", ["AdamW8bit", "Lion8bit"])
def test_skips_are_exact_and_finite_steps_are_theirs(name, tmp_path):
    cls = getattr(bitsandbytes.optim, name)
    optimizer, reference = ampopt.extend(cls)(parameters()), cls(parameters())
    for seed, bad in enumerate((False, True, False, True, False)):
        before = seen(optimizer)
        assert stepped(optimizer, seed, bad) is bad
        assert (seen(optimizer) == before) is bad
        if not bad:
            stepped(reference, seed)
    assert seen(optimizer) == seen(reference)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    resumed = ampopt.extend(cls)(parameters())
    resumed.load_state_dict(torch.load(tmp_path / "optimizer.pt"))
    with torch.no_grad():
        resumed.param_groups[0]["params"][0].copy_(optimizer.param_groups[0]["params"][0])
    stepped(resumed, 9)
    stepped(reference, 9)
    assert seen(resumed) == seen(reference)
