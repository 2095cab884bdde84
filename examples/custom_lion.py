"""An optimizer of your own: Lion, in about fifteen lines.

An optimizer is a rule, which is the update of one element, and a class that names the rule's
settings. The rule is written in Triton's language. On a GPU, a step is three kernels for all
parameters of one dtype; on a CPU, the same lines run as compiled C++, or as torch operations. Loss
scaling, skipped steps, clipping, closures and checkpoints need no further code.

Lion (https://arxiv.org/abs/2302.06675) moves every element by the learning rate, up or down,
following the sign of a weighted mean of gradient and momentum.

The script trains a small network on handwritten digits with Lion, in float16 under autocast and in
float32, and prints both accuracies. Under ``TRITON_INTERPRET=1``, which runs Triton kernels on a
CPU, it also runs the same steps on two backends and prints how far the results differ.

    python examples/custom_lion.py
    TRITON_INTERPRET=1 python examples/custom_lion.py
"""

import argparse

import torch
from torch import nn
from train_digits import Digits, accuracy, batches, load_digits

import ampopt
from ampopt_kernels import Rule, State, jit, sign
from ampopt_kernels.language import INTERPRETED


@jit
def lion_update(p, g, state, h, flags):
    """Return the new parameter and states, given parameter, gradient, states and settings."""
    lr, beta1, beta2, weight_decay = h
    momentum = state[0]
    mean = beta1 * momentum + (1 - beta1) * g
    p = p - lr * (sign(mean) + weight_decay * p)
    return p, (beta2 * momentum + (1 - beta2) * g,)


class Lion(ampopt.ElementwiseOptimizer):
    """Chen et al., Symbolic Discovery of Optimization Algorithms (2302.06675), algorithm 2."""

    rule = Rule(
        update=lion_update, hyper=("lr", "betas", "weight_decay"), state=(State("exp_avg"),)
    )

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0, **options):
        """Store the settings as defaults; options are those of every rule, as master_weights."""
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, defaults, **options)


def train(digits: Digits, *, half: bool, steps: int) -> tuple[nn.Module, int]:
    """Train a new network; return it and the number of skipped steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = Lion(model.parameters(), lr=1e-3, weight_decay=1.0)
    scale = ampopt.DynamicLossScale(init_scale=2.0**24, growth_interval=40) if half else None
    skipped = torch.zeros(())
    for batch in batches(digits.train_labels, epochs=1 + steps // 20, seed=0)[:steps]:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=half):
            outputs = model(digits.train_images[batch])
            loss = nn.functional.cross_entropy(outputs, digits.train_labels[batch])
        ampopt.scale_outputs(loss, scale).backward()
        _, found_inf, scale = optimizer.unscale_and_step(grads_scaled_by=scale)
        skipped += found_inf
    return model, int(skipped)


def main() -> None:
    """Train in both precisions, then compare backends."""
    parser = argparse.ArgumentParser(description="Train on digits with an optimizer of your own.")
    parser.add_argument("--steps", type=int, default=420, help="steps of each run (default: 420)")
    steps = parser.parse_args().steps
    torch.set_num_threads(1)  # the layers are small
    digits = load_digits()
    for half in (False, True):
        model, skipped = train(digits, half=half, steps=steps)
        share = accuracy(model, digits.test_images, digits.test_labels)
        name = "float16" if half else "float32"
        print(f"Lion in {name}: test accuracy {share:.2%}, {skipped} of {steps} steps skipped")

    if not INTERPRETED:
        print("set TRITON_INTERPRET=1 to run the rule as a Triton kernel too")
        return
    results = []
    for backend in ("eager", "triton"):
        ampopt.set_backend(backend)
        model, _ = train(digits, half=True, steps=12)
        results.append(nn.utils.parameters_to_vector(model.parameters()))
    difference = (results[0] - results[1]).abs().max().item()
    print(f"largest difference between the eager and triton backends: {difference:.1g}")


if __name__ == "__main__":
    main()
