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


def test_states_are_handed_on_to_ours():
    """By the lines of the guide "Less memory"."""
    params = parameters()
    exact = torch.optim.AdamW(params, lr=0.0)
    theirs = bitsandbytes.optim.AdamW8bit(params, lr=0.0)
    for seed in range(3):
        stepped(exact, seed)
        stepped(theirs, seed)
    ours = ampopt.AdamW(params, state_bits=8)
    state_dict = ours.state_dict()
    for key, state in enumerate(theirs.state.values()):
        state_dict["state"][key] = {"step": torch.tensor(float(state["step"]))}
        for n, name in enumerate(("exp_avg", "exp_avg_sq"), 1):
            value = state[f"state{n}"]
            if value.dtype == torch.uint8:
                value = bitsandbytes.functional.dequantize_blockwise(
                    value, absmax=state[f"absmax{n}"], code=state[f"qmap{n}"], blocksize=256
                )
            state_dict["state"][key][name] = value
    ours.load_state_dict(state_dict)
    assert ours.state[params[0]]["exp_avg"].dtype == torch.int8
    found, wanted = ampopt.full_state_dict(ours)["state"][0], exact.state[params[0]]
    assert found["step"] == wanted["step"]
    for name in ("exp_avg", "exp_avg_sq"):
        assert (found[name] - wanted[name]).norm() <= 0.05 * wanted[name].norm()
