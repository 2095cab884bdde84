"""Train a policy by reinforcement learning in float16 and in bfloat16, and compare the mismatch.

In reinforcement learning of language models, an engine generates tokens, and a trainer computes
the gradients. Both evaluate the same weights, but by different code, which rounds differently. So
the probability of a token is not the same in both, and the gradient is not that of the policy that
generated the tokens. Here the policy is a small transformer that learns to count: each token
should be the previous one plus one. The trainer evaluates whole sequences; the engine adds up
each matrix product from two parts, as an engine on two tensor-parallel ranks does.

The script prints and plots the mean difference of the two log-probabilities over all generated
tokens, and the reward, for both dtypes and several seeds. float16 has three more bits than
bfloat16, so its mismatch is about eight times smaller. Which dtype learns faster depends on the
seed: a policy as small as this one is not harmed by the mismatch. float16 needs a loss scale, and
the optimizer skips the steps that overflow:
``optimizer.unscale_and_step(grads_scaled_by=scale)``. In both dtypes the optimizer keeps float32
master weights.

    python examples/float16_rl.py
    python examples/float16_rl.py --seeds 10 --output rl.png
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

import ampopt

TOKENS = 16
LENGTH = 12
"""Tokens of a sequence; the first is the prompt."""

WIDTH, HEADS, LAYERS = 64, 4, 2
BATCH = 64
"""Sequences of one step."""

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass
class Run:
    """The results of one training run; the lists have one entry per step."""

    name: str
    rewards: list[float] = field(default_factory=list)  # the fraction of tokens that count on
    mismatches: list[float] = field(default_factory=list)  # of log-probabilities, mean difference
    skipped: int = 0

    def learned(self) -> int | None:
        """The first step in which 99 % of the tokens counted on; ``None`` if there was none."""
        return next((step for step, reward in enumerate(self.rewards) if reward >= 0.99), None)


class Block(nn.Module):
    """One layer of the transformer: attention and a network of two layers, each with a norm."""

    def __init__(self) -> None:
        """Make the layer, in float32."""
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.into = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, parts: int) -> Tensor:
        """Return the output for ``x``, of shape (batch, length, width); ``parts`` as in Policy."""
        heads = product(self.norms[0](x), self.into, parts).unflatten(-1, (3, HEADS, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        wide = query.float(), key.float(), value.float()
        seen = F.scaled_dot_product_attention(*wide, is_causal=True)
        x = x + product(seen.to(x.dtype).transpose(1, 2).flatten(2), self.out, parts)
        return x + product(F.gelu(product(self.norms[1](x), self.up, parts)), self.down, parts)


class Policy(nn.Module):
    """A causal transformer over ``TOKENS`` tokens."""

    def __init__(self) -> None:
        """Make the model, in float32."""
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, sequences: Tensor, parts: int = 1) -> Tensor:
        """The log-probabilities of all next tokens, of shape (batch, length, tokens).

        Args:
            sequences: tokens, of shape (batch, length).
            parts: how many partial sums each matrix product is added up from: 1 for the trainer.
        """
        x = self.tokens(sequences) + self.positions.weight[: sequences.shape[1]]
        for block in self.blocks:
            x = block(x, parts)
        return product(x, self.head, parts).float().log_softmax(-1)


def product(x: Tensor, layer: nn.Linear, parts: int) -> Tensor:
    """``layer(x)``, added up from ``parts`` sums, each computed in float32 and rounded.

    The matrix units of a GPU do the same. Many CPUs have no fast float16 products of their own.
    """
    pairs = zip(x.chunk(parts, -1), layer.weight.chunk(parts, -1), strict=True)
    first, *others = (F.linear(i.float(), w.float()).to(x.dtype) for i, w in pairs)
    return sum(others, first) + layer.bias


@torch.no_grad()
def generate(policy: Policy, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sequences that the engine samples, and the log-probabilities of their tokens in the engine.

    Returns:
        Tokens of shape (``BATCH``, ``LENGTH``), and log-probabilities of all but the first.
    """
    sequences = torch.randint(TOKENS, (BATCH, 1), generator=generator)
    chosen = []
    for _ in range(LENGTH - 1):
        log_probs = policy(sequences, parts=2)[:, -1]
        token = torch.multinomial(log_probs.exp(), 1, generator=generator)
        chosen.append(log_probs.gather(-1, token))
        sequences = torch.cat([sequences, token], dim=1)
    return sequences, torch.cat(chosen, dim=1)


def train(name: str, *, steps: int, seed: int) -> Run:
    """Train a new policy in the dtype ``name``."""
    torch.manual_seed(seed)
    policy = ampopt.cast(Policy(), DTYPES[name])
    optimizer = ampopt.AdamW(policy.parameters(), lr=2e-3, master_weights=True)
    half = name == "float16"
    scale = ampopt.DynamicLossScale() if half else ampopt.StaticLossScale(1.0)
    generator = torch.Generator().manual_seed(seed)

    run, unread = Run(name), []
    for _ in tqdm(range(steps), desc=f"{name}, seed {seed}", unit="step"):
        sequences, sampled = generate(policy, generator)
        rewards = (sequences[:, 1:] == (sequences[:, :-1] + 1) % TOKENS).float()
        advantages = rewards - rewards.mean()
        log_probs = policy(sequences[:, :-1]).gather(-1, sequences[:, 1:, None]).squeeze(-1)
        loss = -(log_probs * advantages).mean()
        optimizer.zero_grad()
        ampopt.scale_outputs(loss, scale).backward()
        _, found_inf, scale = optimizer.unscale_and_step(grads_scaled_by=scale, max_norm=1.0)
        mismatch = (log_probs.detach() - sampled).abs().mean()
        unread.append(torch.stack([rewards.mean(), mismatch, found_inf]))
    run.rewards, run.mismatches, flags = map(list, zip(*torch.stack(unread).tolist(), strict=True))
    run.skipped = sum(flag > 0 for flag in flags)
    return run


def plot(runs: Sequence[Run], path: Path) -> None:
    """Draw rewards and mismatches of all runs, each as a line in the colour of its dtype."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    # Okabe and Ito's colours, which colour-blind readers can tell apart.
    for name, color in zip(DTYPES, ("#0072B2", "#E69F00"), strict=True):
        for number, run in enumerate(run for run in runs if run.name == name):
            look = {"color": color, "label": "" if number else name, "linewidth": 1}
            left.plot(run.rewards, **look)
            right.semilogy(run.mismatches, **look)
    left.set(title="reward: tokens that count on", xlabel="step", ylim=(0, 1))
    right.set(title="mismatch of log-probabilities", xlabel="step")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=100)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the script with these command-line arguments."""
    parser = argparse.ArgumentParser(
        description="Train a policy in float16 and in bfloat16, and compare the mismatch."
    )
    parser.add_argument("--steps", type=int, default=100, help="steps of each run (default: 100)")
    parser.add_argument("--seeds", type=int, default=4, help="runs in each dtype (default: 4)")
    parser.add_argument("--output", type=Path, default=Path("float16_rl.png"), help="the picture")
    options = parser.parse_args(arguments)
    for option in ("steps", "seeds"):
        if getattr(options, option) < 1:
            parser.error(f"--{option} must be 1 or more, got {getattr(options, option)}")
    if not options.output.parent.is_dir():
        parser.error(f"--output: {options.output.parent} is not a folder")

    torch.set_num_threads(1)  # the products are small: more threads would wait for each other
    runs = [
        train(name, steps=options.steps, seed=seed)
        for seed in range(options.seeds)
        for name in DTYPES
    ]
    print(f"{'':10}{'reward':>8}{'mismatch':>12}{'skipped':>9}  99 % of the reward at step")
    for name in DTYPES:
        of_dtype = [run for run in runs if run.name == name]
        reward = sum(run.rewards[-1] for run in of_dtype) / options.seeds
        mismatch = sum(sum(run.mismatches) for run in of_dtype) / options.steps / options.seeds
        skipped = sum(run.skipped for run in of_dtype)
        learned = ", ".join("-" if (at := run.learned()) is None else str(at) for run in of_dtype)
        print(f"{name:10}{reward:8.1%}{mismatch:12.2e}{skipped:9}  {learned}")
    plot(runs, options.output)
    print(f"picture: {options.output}")
    ratios = [
        sum(other.mismatches) / sum(half.mismatches)
        for half, other in zip(runs[::2], runs[1::2], strict=True)
    ]
    least, most = min(ratios), max(ratios)
    print(f"by seed, the mismatch of bfloat16 is {least:.1f} to {most:.1f} times that of float16")


if __name__ == "__main__":
    main()
