"""Sharpness-aware minimization (SAM) in float16, under a loss scale.

SAM (https://arxiv.org/abs/2010.01412) looks for weights around which the loss is flat. Each step
takes two gradients: one at the weights, and one at the worst place within a small distance, in the
direction of the first; the update uses the second. Under a scaler that is hard to do: both
gradients have to be unscaled, each may overflow, and if the second overflows, the weights have
already been moved.

Here SAM is a hand-written ``step(closure)`` that asks for two evaluations and knows nothing of
scaling. The gradients that it gets are unscaled and finite: an evaluation whose gradients overflow
is run again with a smaller scale, the second one too, at the weights that SAM has moved. If no
scale helps, the weights are restored.

The script trains a small network on handwritten digits. A third of the training labels are wrong.
It shows that SAM gives the same accuracy in float16 as in float32, and how often an evaluation had
to be run again. It also trains by plain SGD in float32, which is no fair comparison: after 25
epochs SGD has begun to memorize the wrong labels, and falls behind; with ``--epochs 10`` it is
ahead.

    python examples/sam.py
"""

import argparse
import sys
from typing import Any

import torch
from torch import Tensor, nn
from train_digits import Digits, accuracy, batches, load_digits

import ampopt

WRONG_LABELS = 1 / 3


class SAM(ampopt.SGD):
    """SGD with the gradient at the worst point within ``rho`` of the weights."""

    def __init__(self, params: Any, lr: float, *, rho: float = 0.05, **options: Any) -> None:
        """Store ``rho``, a distance in the 2-norm of all weights; the rest is SGD's."""
        super().__init__(params, lr, **options)
        self.rho = rho

    def step(self, closure: Any) -> Tensor:  # type: ignore[override]
        """Evaluate twice, step once; return the loss at the weights."""
        loss = closure()
        with torch.no_grad():
            params = [p for group in self.param_groups for p in group["params"]]
            params = [p for p in params if p.grad is not None]
            grads = [p.grad for p in params]
            factor = self.rho / (nn.utils.get_total_norm(grads) + 1e-12)
            weights = [p.clone() for p in params]
            for p, grad in zip(params, grads, strict=True):
                p.add_(grad * factor)
        closure()
        with torch.no_grad():
            for p, weight in zip(params, weights, strict=True):
                p.copy_(weight)
        super().step()
        return loss


def mislabelled(digits: Digits) -> Digits:
    """The same digits, with a share of the training labels replaced by others."""
    generator = torch.Generator().manual_seed(0)
    labels = digits.train_labels
    wrong = torch.rand(labels.shape, generator=generator) < WRONG_LABELS
    others = (labels + torch.randint(1, 10, labels.shape, generator=generator)) % 10
    return Digits(
        digits.train_images, torch.where(wrong, others, labels),
        digits.test_images, digits.test_labels,
    )  # fmt: skip


def train(optimizer_of: Any, digits: Digits, *, half: bool, epochs: int) -> tuple[float, str]:
    """Train a new network; return its test accuracy and what happened, as text."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = optimizer_of(model.parameters())
    scale: Any = ampopt.DynamicLossScale(init_scale=2.0**24, growth_interval=50) if half else None
    evaluations = 0
    steps = batches(digits.train_labels, epochs=epochs, seed=0)
    for batch in steps:

        def closure(scale: Any, batch: Tensor = batch) -> Tensor:
            nonlocal evaluations
            evaluations += 1
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16, enabled=half):
                outputs = model(digits.train_images[batch])
                loss = nn.functional.cross_entropy(outputs, digits.train_labels[batch])
            ampopt.scale_outputs(loss, scale).backward()
            return loss

        _, _, scale = optimizer.unscale_and_step(closure, grads_scaled_by=scale)
    share = accuracy(model, digits.test_images, digits.test_labels)
    again = evaluations - len(steps) * (2 if isinstance(optimizer, SAM) else 1)
    return share, f"test accuracy {share:.2%}, {len(steps)} steps, {again} evaluations run again"


def main() -> None:
    """Train SGD, and SAM in both precisions, and compare."""
    parser = argparse.ArgumentParser(description="Train on digits with SAM under a loss scale.")
    parser.add_argument("--epochs", type=int, default=25, help="of each run (default: 25)")
    epochs = parser.parse_args().epochs
    torch.set_num_threads(1)  # the layers are small
    digits = mislabelled(load_digits())

    def sgd(params: Any) -> SAM | ampopt.SGD:
        return ampopt.SGD(params, lr=0.1, momentum=0.9)

    def sam(params: Any) -> SAM | ampopt.SGD:
        return SAM(params, lr=0.1, momentum=0.9, rho=0.5)

    shares = []
    for name, optimizer_of, half in (
        ("SGD in float32", sgd, False),
        ("SAM in float32", sam, False),
        ("SAM in float16", sam, True),
    ):
        share, text = train(optimizer_of, digits, half=half, epochs=epochs)
        print(f"{name}: {text}")
        shares.append(share)
    if shares[2] < shares[1] - 0.02:
        sys.exit("SAM in float16 fell more than 2 percentage points behind float32")
    print("SAM in float16 reached float32's accuracy within 2 points")


if __name__ == "__main__":
    main()
