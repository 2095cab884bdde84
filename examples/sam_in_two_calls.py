"""Sharpness-aware minimization (SAM) without a closure, under a loss scale.

Some training loops compute SAM by two backward passes of their own: move the weights along the
gradient, run the second backward pass, move the weights back, and step. Here both gradients are
unscaled. If the first overflows, the weights do not move; if the second overflows, the step is
skipped. Only the lines marked ``new`` change, and nothing waits for the device. ``sam.py`` has SAM
with a closure.

    python examples/sam_in_two_calls.py
"""

import math
from collections.abc import Callable

import torch

import ampopt

DISTANCE = 0.05


def sam_step(
    optimizer: ampopt.Optimizer,
    params: list[torch.nn.Parameter],
    backward: Callable[[ampopt.DynamicLossScale], object],
    scale: ampopt.DynamicLossScale,  # new
) -> ampopt.DynamicLossScale:
    """Step with the gradients at the worst point within ``DISTANCE``; return the next scale."""
    backward(scale)
    found_inf, _ = optimizer.unscale(grads_scaled_by=scale)  # new
    weights = [p.detach().clone() for p in params]
    grads = [p.grad for p in params if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads)
    for p, grad in zip(params, grads, strict=True):
        p.data += torch.where(found_inf > 0, 0.0, grad * DISTANCE / norm)  # new: torch.where
    backward(scale)
    _, next_scale = optimizer.unscale(grads_scaled_by=scale)  # new
    for p, weight in zip(params, weights, strict=True):
        p.data.copy_(weight)
    optimizer.step()
    return next_scale  # new


def main() -> None:
    """Train a linear model, from a scale that is too high, and print loss and scale."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 10)
    images, labels = torch.rand(256, 64), torch.randint(10, (256,))
    optimizer = ampopt.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scale = ampopt.DynamicLossScale(init_scale=2.0**24)  # new
    losses = []

    def backward(scale: ampopt.DynamicLossScale) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
        ampopt.scale_outputs(loss, scale).backward()  # new: scale_outputs
        losses.append(loss.detach())

    for _ in range(30):
        scale = sam_step(optimizer, list(model.parameters()), backward, scale)
    print(f"loss from {losses[0]:.2f} to {losses[-2]:.2f}, scale 2^{math.log2(scale.item()):g}")


if __name__ == "__main__":
    main()
