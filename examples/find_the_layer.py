"""Find the layer that overflows: ``ampopt.Watch`` names it, without synchronizing.

    python examples/find_the_layer.py [--steps 120] [--output find_the_layer.png]

A small network is trained in float16 under a loss scale that is raised every ten steps. The
activations of one layer are 300 times as large as those of the others, so that its gradients are
the first to overflow, now and then. ``ampopt.Watch`` counts overflows per parameter on the device.
The script prints the watch's report and table, and draws its picture. Then it trains again with
that layer in float32, and prints that the layer no longer overflows.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import ampopt


class Block(nn.Module):
    """A residual layer with its input multiplied, and its weights divided, by ``loudness``."""

    def __init__(self, width: int, loudness: float = 1.0) -> None:
        """Store ``loudness``, and make the linear layer."""
        super().__init__()
        self.loudness = loudness
        self.layer = nn.Linear(width, width)
        with torch.no_grad():
            self.layer.weight.div_(loudness)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of ``x``."""
        return x + torch.tanh(self.layer(x * self.loudness))


class Network(nn.Module):
    """Four blocks; the third has a loudness of 300."""

    def __init__(self, width: int = 16) -> None:
        """Make the blocks and a linear head."""
        super().__init__()
        self.blocks = nn.ModuleList([Block(width, 300.0 if i == 2 else 1.0) for i in range(4)])
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return one number for each row of ``x``."""
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(steps: int, in_float32: str | None = None) -> ampopt.Watch:
    """Train with a watch; the module named ``in_float32``, if any, computes in float32."""
    torch.manual_seed(0)
    model = Network()
    if in_float32 is not None:
        ampopt.run_in(model.get_submodule(in_float32), torch.float32)
    optimizer = ampopt.AdamW(model.named_parameters(), lr=1e-4)
    watch = ampopt.Watch(optimizer)
    scale = ampopt.DynamicLossScale(init_scale=2.0**10, growth_interval=10)
    step = ampopt.TrainStep(model, nn.MSELoss(), optimizer, scale, max_norm=1.0)
    for _ in range(steps):
        inputs = torch.randn(32, 16)
        step(inputs, inputs.sum(dim=1, keepdim=True))
    return watch


def main(arguments: Sequence[str] | None = None) -> None:
    """Find the layer, then train again with that layer in float32."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--output", type=Path, default=Path("find_the_layer.png"))
    options = parser.parse_args(arguments)

    watch = train(options.steps)
    print(watch.report())
    print()
    print(watch)
    watch.plot(options.output)
    print(f"picture: {options.output}")

    parameters = watch.read()["parameters"]
    worst = max(parameters, key=lambda name: parameters[name]["overflows"])
    layer = worst.rpartition(".")[0]
    again = train(options.steps, in_float32=layer).read()["parameters"][worst]
    print(
        f"{worst} overflowed {parameters[worst]['overflows']} times; with {layer} in float32, "
        f"{again['overflows']} times"
    )


if __name__ == "__main__":
    main()
