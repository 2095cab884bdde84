"""Train a transformer at five opt levels, and compare loss, speed and memory.

The text is English, and ships with Python: what ``help`` says on its topics, 466 KB in Python 3.11,
read byte by byte. The same network is trained at five levels, from the same weights, on the same
batches, and all of it again from other seeds:

    O0        float32
    O1        float32 weights, autocast to float16 by lists of operators, a dynamic loss scale
    O2        float16 weights, float32 master weights, a dynamic loss scale
    O3        float16 weights and state, so that small second moments of Adam underflow to zero
    bfloat16  float32 weights, autocast to bfloat16, a loss scale of 1

The loss is measured on held-out text. The mean of O1, O2 and bfloat16 over the seeds may exceed
that of float32 by no more than the spread of the float32 runs (largest minus smallest); otherwise
the script prints which one does, and fails. An opt level is one object,
``ampopt.Precision.like("O2")``, which is passed to ``ampopt.TrainStep``: nothing else differs
between the runs of a seed. With ``--state-bits 8``, O1, O2 and bfloat16 keep the states of AdamW in
8 bits, and, with ``--master-bits 24``, O2 its master weights in 24; then the table also has the
largest update of an element in each run, in units of the learning rate, which must not exceed 10.

    python examples/train_text.py
    python examples/train_text.py --state-bits 8 --master-bits 24
    python examples/train_text.py --device cuda --size gpt2-small --output levels.png
"""

import argparse
import itertools
import math
import statistics
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

import ampopt
from ampopt import Precision

READ_EVERY = 20
"""Steps between two reads of losses and flags from the device."""
HELD_OUT = 0.1
"""The fraction of the text that is not trained on."""
LONGEST = 10.0
"""The largest update of an element that is allowed, in units of the learning rate."""

LEVELS: dict[str, Precision] = {
    "O0": Precision.like("O0"),
    "O1": Precision.like("O1"),
    "O2": Precision.like("O2"),
    "O3": Precision.like("O3"),
    "bfloat16": Precision(compute_dtype=torch.bfloat16, scaling=1.0),
}


@dataclass(frozen=True)
class Size:
    """The size of a network, and the settings of its training."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int
    steps: int
    lr: float


SIZES = {
    "tiny": Size(layers=1, width=32, heads=2, context=32, batch=8, steps=40, lr=4e-3),
    "small": Size(layers=2, width=96, heads=4, context=64, batch=16, steps=200, lr=4e-3),
    "gpt2-small": Size(layers=12, width=768, heads=12, context=1024, batch=8, steps=600, lr=6e-4),
}


class Block(nn.Module):
    """A transformer block: causal attention, then an MLP, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        """Make the layers."""
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of ``x``: (batch, position, width)."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.queries_keys_values(self.before_attention(x)).chunk(3, dim=-1)
        )
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attended(attention.transpose(1, 2).flatten(2))
        return x + self.mlp(self.before_mlp(x))


class Transformer(nn.Module):
    """A language model of bytes."""

    def __init__(self, size: Size) -> None:
        """Make the layers."""
        super().__init__()
        self.bytes = nn.Embedding(256, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size.width, size.heads) for _ in range(size.layers)))
        self.norm, self.next = nn.LayerNorm(size.width), nn.Linear(size.width, 256)
        for embedding in (self.bytes, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, (batch, position, 256), for bytes ``x``, (batch, position)."""
        places = torch.arange(x.shape[1], device=x.device)
        return self.next(self.norm(self.blocks(self.bytes(x) + self.positions(places))))


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy over all positions."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass
class Text:
    """Bytes to train on, and held-out bytes to measure the loss on; both 1-d int64."""

    train: Tensor
    held_out: Tensor

    @staticmethod
    def load(device: str) -> "Text":
        """Load the help that ships with Python; the same topics are always held out."""
        text = "\n".join(topics[name] for name in sorted(topics)).encode()
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device, torch.long)
        n = round(len(data) * (1 - HELD_OUT))
        return Text(data[:n], data[n:])

    def batches(self, size: Size, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield random windows of the text, and the same windows shifted by one byte."""
        generator = torch.Generator().manual_seed(seed)
        window = torch.arange(size.context + 1, device=self.train.device)
        while True:
            starts = torch.randint(
                len(self.train) - len(window), (size.batch, 1), generator=generator
            )
            windows = self.train[starts.to(window.device) + window]
            yield windows[:, :-1], windows[:, 1:]

    def held_out_windows(self, size: Size) -> tuple[Tensor, Tensor]:
        """Return 32 windows at equal distances in the held-out text."""
        window = torch.arange(size.context + 1, device=self.held_out.device)
        last = len(self.held_out) - len(window)
        starts = torch.linspace(0, last, 32, device=window.device).long()[:, None]
        windows = self.held_out[starts + window]
        return windows[:, :-1], windows[:, 1:]


@dataclass
class Run:
    """The results of one training run; the lists have one entry per step."""

    name: str
    losses: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    held_out: float = math.nan
    steps_per_second: float = 0.0
    megabytes: float = 0.0
    largest: float | None = None  # of all updates, in units of the learning rate

    def note(self, unread: list[Tensor]) -> None:
        """Read loss and flag of each step in ``unread``, and empty the list. Synchronizes."""
        for loss, found_inf in torch.stack(unread).tolist():
            self.losses.append(loss)
            self.skipped.append(found_inf > 0)
        unread.clear()


def with_bits(state_bits: int, master_bits: int) -> dict[str, Precision]:
    """Return the opt levels; O1, O2 and bfloat16 with states and master weights in few bits."""
    changed = {name: replace(LEVELS[name], state_bits=state_bits) for name in ("O1", "bfloat16")}
    changed["O2"] = replace(LEVELS["O2"], state_bits=state_bits, master_bits=master_bits)
    return {**LEVELS, **changed}


def train(
    name: str, text: Text, size: Size, seed: int, precision: Precision, measures: bool = False
) -> Run:
    """Train a new network at the opt level ``name``; ``measures`` says whether to note updates."""
    device = text.train.device
    torch.manual_seed(seed)
    model = precision.prepare(Transformer(size).to(device))
    optimizer = ampopt.AdamW(
        model.parameters(), lr=size.lr, betas=(0.9, 0.95), **precision.optimizer_options
    )
    warm_up = max(size.steps // 10, 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda at: min((at + 1) / warm_up, 0.55 + 0.45 * math.cos(math.pi * at / size.steps)),
    )
    step = ampopt.TrainStep(
        model, cross_entropy, optimizer, precision=precision, max_norm=1.0,
        cuda_graph=device.type == "cuda",
    )  # fmt: skip

    run, unread = Run(f"{name}, seed {seed}"), []
    largest = torch.zeros((), device=device)
    batches = text.batches(size, seed)
    measured = size.steps // 4  # the steps before fill caches, compile and capture
    started = 0.0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with tqdm(itertools.islice(batches, size.steps), run.name, size.steps, unit="step") as progress:
        for at, (inputs, targets) in enumerate(progress, 1):
            before = weights(optimizer) if measures else []
            loss, found_inf, _ = step(inputs, targets)
            if measures:
                largest = torch.maximum(largest, largest_update(before, optimizer))
            schedule.step()
            unread.append(torch.stack([loss, found_inf]))
            if at % READ_EVERY == 0 or at in (measured, size.steps):
                run.note(unread)
                progress.set_postfix(loss=f"{run.losses[-1]:.3f}", skipped=sum(run.skipped))
            if at == measured:
                started = time.perf_counter()
    run.steps_per_second = (size.steps - measured) / (time.perf_counter() - started)
    run.largest = largest.item() if measures else None
    run.megabytes = memory(model, optimizer, precision, next(batches)) / 1e6
    inputs, targets = text.held_out_windows(size)
    with torch.no_grad(), precision.autocast(device.type):
        run.held_out = cross_entropy(model(inputs), targets).item()
    return run


def weights(optimizer: Any) -> list[Tensor]:
    """Return copies of all weights, in float32 where they have master weights."""
    return [master.detach().clone() for _, master in optimizer.params_and_masters()]


def largest_update(before: list[Tensor], optimizer: Any) -> Tensor:
    """Return the largest change of a weight since ``before``, in units of the learning rate."""
    pairs = zip(weights(optimizer), before, strict=True)
    largest = torch.stack([(new - old).abs().max().float() for new, old in pairs]).max()
    return largest / optimizer.param_groups[0]["lr"]


def memory(model: nn.Module, optimizer: Any, precision: Precision, batch: Any) -> int:
    """Return the peak memory of a step in bytes: measured on a GPU, estimated on a CPU.

    The estimate adds up parameters, gradients, optimizer state and saved activations.
    """
    inputs, targets = batch
    if inputs.is_cuda:
        return torch.cuda.max_memory_allocated(inputs.device)
    kept: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    params = list(model.parameters())
    with (
        torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor),
        precision.autocast(inputs.device.type),
    ):
        loss = cross_entropy(model(inputs), targets)  # its graph keeps the activations alive
    state = [x for s in optimizer.state.values() for x in s.values() if torch.is_tensor(x)]
    counted = [*params, *(p.grad for p in params if p.grad is not None), *state]
    mine = {p.untyped_storage().data_ptr() for p in params}
    del loss
    return sum(x.numel() * x.element_size() for x in counted) + sum(
        n for place, n in kept.items() if place not in mine
    )


def table(runs: Sequence[Run]) -> str:
    """Return a table of the runs, as text."""
    row = "{:<18}{:>15}{:>14}{:>13}{:>10}{:>17}".format
    measured = any(run.largest is not None for run in runs)
    last = "largest update" if measured else ""
    lines = [row("", "held-out loss", "steps/second", "peak memory", "skipped", last)]
    for run in runs:
        loss, speed = f"{run.held_out:.4f}", f"{run.steps_per_second:.2f}"
        size, skipped = f"{run.megabytes:.1f} MB", sum(run.skipped)
        largest = "" if run.largest is None else f"{run.largest:.2f} lr"
        lines.append(row(run.name, loss, speed, size, skipped, largest))
    return "\n".join(map(str.rstrip, lines))


def draw(runs: Mapping[str, Sequence[Run]], path: Path) -> None:
    """Draw losses on the left, with other seeds in pale lines; bars of speed and memory."""
    # Okabe and Ito's colours, which colour-blind readers can tell apart.
    colors = dict(zip(LEVELS, ["#000000", "#56B4E9", "#E69F00", "#D55E00", "#009E73"], strict=True))
    figure = Figure(figsize=(11, 5.5), layout="constrained")
    losses, speed, size = figure.subplot_mosaic([["loss", "speed"], ["loss", "memory"]],
                                                width_ratios=(2, 1)).values()  # fmt: skip
    for (name, (first, *others)), width in zip(
        runs.items(), (6.0, 4.0, 2.6, 1.4, 1.4), strict=True
    ):
        label = f"{name}: {mean_loss(runs[name]):.3f} on held-out text"
        losses.plot(smooth(first.losses), color=colors[name], linewidth=width, label=label)
        for run in others:
            losses.plot(smooth(run.losses), color=colors[name], linewidth=1.0, alpha=0.3)
    firsts = {name: first for name, (first, *_) in runs.items()}
    seen = smooth(firsts["O0"].losses)
    losses.set_ylim(0.95 * min(seen), 1.05 * max(seen))  # O3 leaves this range
    losses.set_ylabel("training loss, mean of ten steps")
    losses.set_xlabel("step")
    losses.set_title("A transformer on Python's help texts, at each opt level", loc="left")
    losses.legend(frameon=False)
    for axes, values, title in (
        (speed, [run.steps_per_second for run in firsts.values()], "steps per second"),
        (size, [run.megabytes for run in firsts.values()], "peak memory, MB"),
    ):
        bars = axes.barh([*firsts], values, color=[colors[name] for name in firsts])
        axes.bar_label(bars, [f"{value:.3g}" for value in values], padding=3)
        axes.set_title(title, loc="left", fontsize="medium")
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.set_xticks([])
    for axes in (losses, speed, size):
        axes.spines[["top", "right"]].set_visible(False)
    losses.grid(axis="y", color="#666666", alpha=0.2, linewidth=0.6)
    figure.savefig(path, dpi=110)


def mean_loss(runs: Sequence[Run]) -> float:
    """Return the mean of the held-out losses of ``runs``."""
    return statistics.fmean(run.held_out for run in runs)


def smooth(losses: Sequence[float]) -> list[float]:
    """Return the mean of each loss and the nine before it."""
    return [statistics.fmean(losses[max(at - 9, 0) : at + 1]) for at in range(len(losses))]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(
        description="Train a transformer at five opt levels, and compare.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--size", choices=SIZES, default="small", help="of the network")
    parser.add_argument("--steps", type=int, help="of each run; by default, those of the size")
    parser.add_argument("--seeds", type=int, default=3, help="of each level")
    parser.add_argument("--device", default="cpu", help="where to train, such as cpu or cuda")
    parser.add_argument(
        "--state-bits", type=int, choices=(32, 16, 8), default=32, help="of O1, O2 and bfloat16"
    )
    parser.add_argument(
        "--master-bits", type=int, choices=(32, 24), default=32, help="of the master weights of O2"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("train_text.png"), help="where the picture goes"
    )
    options = parser.parse_args(arguments)
    try:
        torch.empty(0, device=options.device)
    except (RuntimeError, AssertionError) as error:  # torch raises either
        parser.error(f"--device {options.device}: {error}")
    for name in ("steps", "seeds"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            parser.error(f"--{name} must be 1 or more, got {getattr(options, name)}")
    if not options.output.parent.is_dir():
        parser.error(f"--output: there is no folder {options.output.parent}")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Train at every opt level, print the table, draw the picture, and check the losses."""
    options = parse(arguments)
    # O3 is here to show what this warning means.
    warnings.filterwarnings("ignore", "AdamW keeps .* in float16")
    size: Any = SIZES[options.size]
    if options.steps is not None:
        size = Size(**{**vars(size), "steps": options.steps})
    text = Text.load(options.device)
    levels = with_bits(options.state_bits, options.master_bits)
    measures = levels != LEVELS
    runs = {
        name: [train(name, text, size, seed, level, measures) for seed in range(options.seeds)]
        for name, level in levels.items()
    }
    draw(runs, options.output)

    print(table([run for level in runs.values() for run in level]))
    print(f"picture: {options.output}")
    seeds = [run.held_out for run in runs["O0"]]
    spread, mean = max(seeds) - min(seeds), mean_loss(runs["O0"])
    print(f"float32 over {len(seeds)} seeds: mean loss {mean:.4f}, spread {spread:.4f}")
    above = {name: mean_loss(level) - mean for name, level in runs.items() if name != "O0"}
    for name, by in above.items():
        print(f"{name}: mean loss {by:+.4f} from float32's")
    del above["O3"]  # small second moments are 0 in float16
    if options.seeds > 1:
        failed = {name: by for name, by in above.items() if not by <= spread}
        if failed:
            raise SystemExit(
                "further above the float32 mean than the spread over seeds: "
                + ", ".join(f"{name} by {by:.4f}" for name, by in failed.items())
            )
        print(f"{', '.join(above)}: above that mean by no more than the spread")
    if measures:
        longest = max(run.largest or 0.0 for name in above for run in runs[name])
        if not longest <= LONGEST:
            raise SystemExit(f"an update was {longest:.2f} times the learning rate")
        print(f"{', '.join(above)}: no update above {LONGEST:g} times the learning rate")


if __name__ == "__main__":
    main()
