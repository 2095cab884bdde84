"""Train a small network in float32 and in float16, and compare.

The data are the handwritten digits that come with scikit-learn, 1797 images of 8 by 8. The same
network sees the same batches twice: in float32, and under autocast in float16 with a loss scale
that starts far too high. So the first steps overflow and are skipped. Each skip halves the scale,
and training continues as if the skipped steps had not occurred; after some good steps in a row the
scale grows, until it is too high again. The float16 run must reach the float32 accuracy within
one percentage point, or the script says so and fails.

The line that does it is ``optimizer.unscale_and_step(grads_scaled_by=scale)``. It does not wait
for the device, and neither does the loop: values to be shown are kept in tensors and read every few
steps.

With ``--state-bits 8``, the float16 run keeps the states of AdamW in 8 bits, and no update of a
weight may be above 10 times the learning rate.

    python examples/train_digits.py
    python examples/train_digits.py --state-bits 8
    python examples/train_digits.py --device cuda --output digits.png
"""

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MultipleLocator
from sklearn import datasets
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from tqdm import tqdm

import ampopt

BATCH_SIZE = 64
READ_EVERY = 20
"""Steps between two reads of losses and flags from the device."""

TOLERANCE = 0.01
"""How far below float32 the accuracy of float16 may be."""

LONGEST = 10.0
"""The largest update of a weight that is allowed, in units of the learning rate."""


@dataclass
class Digits:
    """The images, of shape (n, 1, 8, 8) from 0 to 1, and which digit each shows."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


@dataclass
class Run:
    """The results of one training run; the lists have one entry per step."""

    name: str
    losses: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)  # what each loss was multiplied by
    skipped: list[bool] = field(default_factory=list)
    final_scale: float | None = None
    accuracy: float = 0.0
    largest: float = 0.0  # of the updates of all weights, in units of the learning rate
    seconds: float = 0.0

    def note(self, unread: list[Tensor]) -> None:
        """Read loss, scale and flag of each step in ``unread``, and empty it. Synchronizes."""
        for loss, scale, found_inf in torch.stack(unread).tolist():
            self.losses.append(loss)
            self.scales.append(scale)
            self.skipped.append(found_inf > 0)
        unread.clear()


def load_digits(device: torch.device | str = "cpu") -> Digits:
    """Load the digits: three quarters to train on, and always the same quarter to test."""
    images, labels = datasets.load_digits(return_X_y=True)
    images = images.reshape(-1, 1, 8, 8) / 16
    arrays = train_test_split(images, labels, test_size=0.25, stratify=labels, random_state=0)
    train_x, test_x, train_y, test_y = (torch.as_tensor(array, device=device) for array in arrays)
    return Digits(train_x.float(), train_y, test_x.float(), test_y)


def make_model() -> nn.Module:
    """A convolutional network of 18,346 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 64), nn.ReLU(),
        nn.Linear(64, 10),
    )  # fmt: skip


def batches(labels: Tensor, epochs: int, seed: int) -> list[Tensor]:
    """Return the image indices of each step, in a new order for each epoch, given by ``seed``."""
    generator = torch.Generator().manual_seed(seed)
    n = len(labels)
    orders = [torch.randperm(n, generator=generator).to(labels.device) for _ in range(epochs)]
    return [batch for order in orders for batch in order[: n - n % BATCH_SIZE].split(BATCH_SIZE)]


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the fraction of ``images`` that ``model`` classifies correctly, in float32."""
    with torch.no_grad():
        return (model(images).argmax(dim=1) == labels).float().mean().item()


def train(
    name: str, digits: Digits, *, half: bool, epochs: int, seed: int, state_bits: int = 32
) -> Run:
    """Train a new network in float32, or in float16 if ``half``."""
    device = digits.train_images.device
    torch.manual_seed(seed)
    model = make_model().to(device)
    steps = batches(digits.train_labels, epochs, seed)
    optimizer = ampopt.AdamW(model.parameters(), lr=1e-2, state_bits=state_bits)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=len(steps))
    scale = None
    if half:
        # 2**16 and 2000 are usual; these make a short run show what happens in a long one.
        scale = ampopt.DynamicLossScale(init_scale=2.0**30, growth_interval=40, device=device)

    run, unread = Run(name), []
    unscaled, largest = torch.ones((), device=device), torch.zeros((), device=device)
    started = time.perf_counter()
    with tqdm(steps, desc=name, unit="step") as progress:
        for step, batch in enumerate(progress, 1):
            with torch.autocast(device.type, torch.float16, enabled=half):
                outputs = model(digits.train_images[batch])
                loss = nn.functional.cross_entropy(outputs, digits.train_labels[batch])
            used, before = scale, [p.detach().clone() for p in model.parameters()]
            optimizer.zero_grad()
            ampopt.scale_outputs(loss, scale).backward()
            _, found_inf, scale = optimizer.unscale_and_step(grads_scaled_by=scale)
            moved = [
                (p - old).abs().max() for p, old in zip(model.parameters(), before, strict=True)
            ]
            largest = torch.maximum(largest, torch.stack(moved).max() / schedule.get_last_lr()[0])
            schedule.step()

            factor = unscaled if used is None else used.value
            unread.append(torch.stack([loss.detach(), factor, found_inf]))
            if step % READ_EVERY == 0 or step == len(steps):
                run.note(unread)
                shown = {"loss": f"{run.losses[-1]:.4f}"}
                if half:
                    shown["scale"] = f"2^{math.log2(run.scales[-1]):g}"
                    shown["skipped"] = str(sum(run.skipped))
                progress.set_postfix(shown)

    run.final_scale = None if scale is None else scale.item()
    run.largest = largest.item()
    run.accuracy = accuracy(model, digits.test_images, digits.test_labels)
    run.seconds = time.perf_counter() - started
    return run


def table(runs: Sequence[Run]) -> str:
    """Return a table of the runs, as text."""
    row = "{:<10}{:>15}{:>8}{:>9}{:>13}{:>9}".format
    lines = [row("", "test accuracy", "steps", "skipped", "final scale", "time")]
    for run in runs:
        scale = "-" if run.final_scale is None else f"2^{math.log2(run.final_scale):g}"
        seconds, share = f"{run.seconds:.1f} s", f"{run.accuracy:.2%}"
        lines.append(row(run.name, share, len(run.losses), sum(run.skipped), scale, seconds))
    return "\n".join(lines)


def draw(full: Run, half: Run, path: Path) -> None:
    """Draw both losses above, the scale below, and a mark at each skipped step."""
    # Okabe and Ito's colours, which colour-blind readers can tell apart.
    orange, blue, vermilion, grey = "#E69F00", "#0072B2", "#D55E00", "#666666"
    skips = [step for step, skipped in enumerate(half.skipped, 1) if skipped]
    figure = Figure(figsize=(9, 6), layout="constrained")
    losses, scales = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))

    for run, color, width in ((full, orange, 4.0), (half, blue, 1.2)):
        label = f"{run.name}, test accuracy {run.accuracy:.1%}"
        steps = range(1, 1 + len(run.losses))
        losses.plot(steps, run.losses, color=color, linewidth=width, label=label)
    losses.set_yscale("log")
    losses.set_ylabel("training loss of the batch")
    losses.set_title("Handwritten digits: the same batches in float32 and float16", loc="left")

    steps = range(1, 1 + len(half.scales))
    exponents = [math.log2(scale) for scale in half.scales]
    scales.step(steps, exponents, where="post", color=blue, linewidth=1.6, label="loss scale")
    scales.plot(
        skips,
        [exponents[step - 1] for step in skips],
        linestyle="none",
        marker="x",
        markersize=7,
        markeredgewidth=1.8,
        color=vermilion,
        label=f"overflow: step skipped, scale halved ({len(skips)} times)",
    )
    scales.yaxis.set_major_locator(MultipleLocator(2))
    scales.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"$2^{{{y:.0f}}}$"))
    scales.set_ylabel("loss scale of float16")
    scales.set_xlabel("step")

    for axes in (losses, scales):
        for step in skips:
            axes.axvline(step, color=vermilion, linewidth=0.7, alpha=0.35, zorder=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color=grey, alpha=0.2, linewidth=0.6)
        axes.margins(x=0.01)
        axes.legend(framealpha=0.9, edgecolor="none", loc="upper right")
    figure.savefig(path, dpi=110)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(
        description="Train on handwritten digits in float32 and in float16, and compare.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--epochs", type=int, default=20, help="times that each run sees the data")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the batches")
    parser.add_argument("--device", default="cpu", help="where to train, such as cpu or cuda")
    parser.add_argument(
        "--output", type=Path, default=Path("train_digits.png"), help="where the picture goes"
    )
    parser.add_argument(
        "--state-bits", type=int, choices=(32, 16, 8), default=32, help="of AdamW in float16"
    )
    options = parser.parse_args(arguments)
    try:
        torch.empty(0, device=options.device)
    except (RuntimeError, AssertionError) as error:  # torch raises either
        parser.error(f"--device {options.device}: {error}")
    if options.epochs < 1:
        parser.error(f"--epochs must be 1 or more, got {options.epochs}")
    if not options.output.parent.is_dir():
        parser.error(f"--output: there is no folder {options.output.parent}")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Run both, print the table, draw the picture, and check the accuracy."""
    options = parse(arguments)
    # More threads would only wait for each other: the layers are small. And one thread gives the
    # same numbers whatever the number of cores.
    torch.set_num_threads(1)
    digits = load_digits(options.device)
    settings = {"epochs": options.epochs, "seed": options.seed}
    full = train("float32", digits, half=False, **settings)
    half = train("float16", digits, half=True, state_bits=options.state_bits, **settings)
    draw(full, half, options.output)

    print(table([full, half]))
    print(f"picture: {options.output}")
    if options.state_bits != 32:
        print(f"largest update with states in {options.state_bits} bits: {half.largest:.2f} lr")
        if not half.largest <= LONGEST:
            raise SystemExit(f"an update was above {LONGEST:g} times the learning rate")
    behind = full.accuracy - half.accuracy
    if behind > TOLERANCE:
        raise SystemExit(
            f"float16 is {behind * 100:.2f} percentage points behind float32, more than the "
            f"{TOLERANCE * 100:g} allowed"
        )
    print(f"float16 reached float32's accuracy within {TOLERANCE * 100:g} point")


if __name__ == "__main__":
    main()
