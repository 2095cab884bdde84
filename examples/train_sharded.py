"""A small transformer in float16 under FSDP2, on two ranks that skip the same steps.

It learns to predict the help texts of CPython, letter by letter. Weights are sharded over the ranks
and gathered in float16, gradients are summed in float32, and the loss scale starts too high. In one
step, the script makes a gradient of one rank infinite: both ranks skip that step, and their loss
scales stay equal.

Then one process takes the same steps. Two more runs, on one process and on four, resume from the
checkpoint that the two ranks saved half way. A table and a picture compare the losses of the four
runs, which must agree within 2 percent: "difference" is the largest relative difference of a loss
from that of the run on two ranks, and "ranks equal" is whether all ranks had the same losses, skips
and scales.

    python examples/train_sharded.py
"""

import argparse
import json
import multiprocessing
import sys
import tempfile
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch._dynamo  # as FSDP2 does at its first use: once here, not on every rank
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from tqdm import tqdm

import ampopt

BATCH, LENGTH, WIDTH = 16, 48, 48
TEXT = torch.tensor(list("\n".join(topics.values()).encode("ascii", "replace")))
LETTERS = 128


class Writer(nn.Module):
    """Predicts the next letter from those before it."""

    def __init__(self) -> None:
        """Make the layers, with the same weights on every rank and in every run."""
        torch.manual_seed(0)
        super().__init__()
        self.letters = nn.Embedding(LETTERS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, LETTERS)

    def forward(self, text: Tensor) -> Tensor:
        """Return float32 logits of the letter that follows each letter of ``text``."""
        later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        hidden = self.letters(text) + self.places(torch.arange(LENGTH))
        for block in self.blocks:
            hidden = block(hidden, src_mask=later)
        return self.head(hidden).float()


def sharded() -> Writer:
    """Make the model, sharded over all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    precision: Any = MixedPrecisionPolicy(torch.float16, torch.float32)
    model = Writer()
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh, mp_policy=precision)
    return model


def batch_of(number: int) -> tuple[Tensor, Tensor]:
    """Return this rank's part of a batch: letters, and the letters that follow them."""
    draw = torch.Generator().manual_seed(number)
    begin = torch.randint(len(TEXT) - LENGTH, (BATCH,), generator=draw)
    begin = begin.chunk(dist.get_world_size())[dist.get_rank()]
    text = torch.stack([TEXT[i : i + LENGTH + 1] for i in begin.tolist()])
    return text[:, :-1], text[:, 1:]


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, scale: Any) -> dict[str, Any]:
    """Return the contents of a checkpoint."""
    weights, states = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": states, "scale": scale.state_dict()}


def train(begin: int, end: int, spoiled: int, checkpoint: str) -> list[dict[str, Any]]:
    """Take the steps from ``begin`` to ``end``; return a record of each attempt.

    A batch is used again after its step was skipped, so that every run trains on the same batches.
    """
    model = sharded()
    optimizer = ampopt.AdamW(model.parameters(), lr=3e-3)
    scale: Any = ampopt.DynamicLossScale(init_scale=2.0**24, growth_interval=50)
    if begin:
        state = state_of(model, optimizer, scale)
        state_dict_loader.load(state, checkpoint_id=checkpoint)
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(model, optimizer, **parts)
        scale.load_state_dict(state["scale"])
    attempts: list[dict[str, Any]] = []
    shown = tqdm(total=end - begin, unit="step", disable=dist.get_rank() != 0)
    taken = begin
    while taken < end:
        text, following = batch_of(taken)
        optimizer.zero_grad()
        logits = model(text).flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, following.flatten())
        ampopt.scale_outputs(loss, scale).backward()
        if taken == spoiled:
            spoiled = -1  # once
            if dist.get_rank() == dist.get_world_size() - 1:
                grad: Any = model.head.weight.grad
                grad.to_local().view(-1)[-1] = float("inf")  # in the shard of this rank alone
        _, found_inf, scale = optimizer.unscale_and_step(grads_scaled_by=scale, max_norm=1.0)
        skipped = bool(found_inf)
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        attempts.append(
            {"step": taken, "loss": mean.item(), "skipped": skipped, "scale": scale.item()}
        )
        taken += not skipped
        shown.update(not skipped)
        shown.set_postfix(loss=f"{mean.item():.3f}", scale=f"{scale.item():g}")
        if taken == end // 2 and not skipped and not begin and dist.get_world_size() == 2:
            state_dict_saver.save(state_of(model, optimizer, scale), checkpoint_id=checkpoint)
    return attempts


def run(begin: int, steps: int, folder: str, **meeting: Any) -> None:
    """Train in a process group of all ranks; every rank writes its attempts to a file."""
    dist.init_process_group("gloo", **meeting)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    attempts = train(begin, steps, steps // 4, f"{folder}/checkpoint")
    Path(folder, f"{begin}-{ranks}-{rank}.json").write_text(json.dumps(attempts))
    dist.barrier()
    dist.destroy_process_group()


def run_on(ranks: int, begin: int, steps: int, folder: str) -> None:
    """Train on ``ranks`` new processes, forked from this one, which has done the imports."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as place:
        meeting = {"init_method": f"file://{place}/met", "world_size": ranks}
        processes = [
            context.Process(
                target=run, args=(begin, steps, folder), kwargs={**meeting, "rank": rank}
            )
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    if any(process.exitcode for process in processes):
        sys.exit(f"the run on {ranks} from step {begin} failed")


def compare(steps: int, folder: str, picture: Path) -> list[str]:
    """Print and draw the results of the runs; return what differs between them, as sentences."""
    half, differences = steps // 2, []
    runs = {(0, 2): "2 ranks", (0, 1): "1 process"}
    runs |= {(half, 1): "resumed on 1", (half, 4): "resumed on 4"}
    losses: dict[tuple[int, int], dict[int, float]] = {}
    head = f"{'':14}{'steps':>6}{'skipped':>9}{'ranks equal':>13}{'last loss':>11}"
    print(f"{head}{'difference':>12}")
    for key, name in runs.items():
        begin, ranks = key
        files = [Path(folder, f"{begin}-{ranks}-{rank}.json") for rank in range(ranks)]
        first, *others = (json.loads(file.read_text()) for file in files)
        losses[key] = {a["step"]: a["loss"] for a in first if not a["skipped"]}
        reference = losses[0, 2]
        difference = max(abs(loss / reference[step] - 1) for step, loss in losses[key].items())
        equal = all(other == first for other in others)
        skipped = sum(a["skipped"] for a in first)
        last = losses[key][steps - 1]
        if not equal:
            differences.append(f"{name}: its ranks have different losses, skips or scales")
        if not difference < 0.02:
            differences.append(f"{name}: a loss differs by {difference:.2%} from that on 2 ranks")
        print(
            f"{name:14}{steps - begin:6}{skipped:9}{'yes' if equal else 'no':>13}"
            f"{last:11.4f}{difference:12.2%}"
        )
    _draw({runs[key]: curve for key, curve in losses.items()}, picture)
    print(f"picture: {picture}")
    return differences


def _draw(curves: dict[str, dict[int, float]], picture: Path) -> None:
    """Draw the losses of all runs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    widths = iter((9, 6, 3.5, 1))  # thin lines are drawn on wide ones, so that all can be seen
    for name, curve in curves.items():
        axes.plot(list(curve), list(curve.values()), label=name, linewidth=next(widths))
    axes.set(xlabel="steps taken", ylabel="loss", title="float16 under FSDP2: the same losses")
    axes.legend()
    figure.savefig(picture, dpi=100)


def main() -> int:
    """Train on two ranks, then on others, and compare."""
    explained, *_ = (__doc__ or "").split("\n\n")
    parser = argparse.ArgumentParser(description=explained)
    parser.add_argument("--steps", type=int, default=60, help="to take (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("train_sharded.png"), help="picture")
    options = parser.parse_args()
    if options.steps < 4 or options.steps % 2:
        parser.error(f"argument --steps: must be even, 4 or more, got {options.steps}")
    with tempfile.TemporaryDirectory() as folder:
        for begin, ranks in ((0, 2), (0, 1), (options.steps // 2, 1), (options.steps // 2, 4)):
            run_on(ranks, begin, options.steps, folder)
        differences = compare(options.steps, folder, options.output)
    if differences:
        print("\n".join(differences), file=sys.stderr)
        return 1
    print("all runs have the same losses, and the ranks of each skipped the same steps")
    return 0


if __name__ == "__main__":
    sys.exit(main())
