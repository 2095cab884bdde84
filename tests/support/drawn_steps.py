"""Steps of an optimizer with drawn gradients, and the bits that they lead to."""

from typing import Any

import torch

from ampopt.testing.bits import bits


def stepped(optimizer: Any, steps: int, *, seed: int = 1) -> Any:
    """Take ``steps`` steps of ``optimizer`` with drawn gradients, and return it."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = (torch.randn(p.shape, generator=generator) * 1e-2).to(p.dtype)
        optimizer.step()
    return optimizer


def everything(optimizer: Any) -> tuple[Any, Any]:
    """The bits of all parameters and states."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    states = optimizer.state_dict()["state"]
    return [bits(p) for p in params], {
        (key, name): bits(value) for key, state in states.items() for name, value in state.items()
    }
