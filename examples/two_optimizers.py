"""Two optimizers, one loss scale: a small GAN on handwritten digits, in float16.

A generator draws the digit that it is given; a critic, given the digit too, distinguishes drawings
from real images. Each has its own optimizer. Both losses are multiplied by the same scale. Each
optimizer returns a next scale, and ``ampopt.next_scale`` takes the smaller one, so that the scale
is lowered if either overflows. One of them may skip its step while the other does not.

At the end, a classifier trained on real digits reads the drawings, and the script prints in how
many of them it finds the requested digit.

    python examples/two_optimizers.py
"""

import argparse
import math

import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from tqdm import tqdm
from train_digits import batches, load_digits

import ampopt

NOISE = 16
SHADES = " .:-=+*#%@"


def draw(generator: nn.Module, labels: Tensor) -> Tensor:
    """Draw one new image for each of ``labels``: 64 pixels from 0 to 1."""
    digits = nn.functional.one_hot(labels, 10)
    return generator(torch.cat([torch.randn(len(labels), NOISE), digits], dim=1))


def classify(critic: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Return the critic's logit for each image, above 0 if it classifies the image as real."""
    return critic(torch.cat([images, nn.functional.one_hot(labels, 10)], dim=1))


def loss_against(outputs: Tensor, target: float) -> Tensor:
    """Return the loss of the critic's logits for the target 1.0 (real) or 0.0 (drawn)."""
    targets = torch.full_like(outputs, target)
    return nn.functional.binary_cross_entropy_with_logits(outputs, targets)


def train(images: Tensor, labels: Tensor, epochs: int) -> nn.Module:
    """Train both networks, print skips and scale, and return the generator."""
    generator = nn.Sequential(
        nn.Linear(NOISE + 10, 128), nn.ReLU(), nn.Linear(128, 64), nn.Sigmoid()
    )
    critic = nn.Sequential(
        nn.Linear(64 + 10, 128), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(128, 1)
    )
    of_generator = ampopt.AdamW(generator.parameters(), lr=3e-3, betas=(0.0, 0.99))
    of_critic = ampopt.AdamW(critic.parameters(), lr=3e-3, betas=(0.0, 0.99))
    scale = ampopt.DynamicLossScale(init_scale=2.0**24, growth_interval=100)
    skips = torch.zeros(2)

    for batch in tqdm(batches(labels, epochs, seed=0), unit="step"):
        requested = labels[batch]
        with torch.autocast("cpu", torch.float16):
            drawn = draw(generator, requested)
            on_real = loss_against(classify(critic, images[batch], requested), 0.9)
            on_drawn = loss_against(classify(critic, drawn.detach(), requested), 0.0)
        of_critic.zero_grad()
        ampopt.scale_outputs(on_real + on_drawn, scale).backward()
        _, critic_inf, critic_scale = of_critic.unscale_and_step(grads_scaled_by=scale)

        with torch.autocast("cpu", torch.float16):
            fooled = loss_against(classify(critic, drawn, requested), 1.0)
        of_generator.zero_grad()
        ampopt.scale_outputs(fooled, scale).backward()
        _, generator_inf, generator_scale = of_generator.unscale_and_step(grads_scaled_by=scale)

        scale = ampopt.next_scale(critic_scale, generator_scale)
        skips += torch.stack([critic_inf, generator_inf])

    critic_skips, generator_skips = skips.int().tolist()
    print(
        f"steps skipped: {critic_skips} by the critic, {generator_skips} by the generator; "
        f"the scale went from 2^24 to 2^{math.log2(scale.item()):g}"
    )
    return generator


def as_text(images: Tensor) -> str:
    """Show images of 64 pixels side by side, as text."""
    shades = (images * (len(SHADES) - 1)).round().int().view(-1, 8, 8).tolist()
    rows = zip(*shades, strict=True)
    lines = ("  ".join("".join(SHADES[s] for s in part) for part in row) for row in rows)
    return "\n".join(lines)


def main() -> None:
    """Train both networks, print a drawing of each digit, and classify a thousand drawings."""
    parser = argparse.ArgumentParser(description="A GAN on digits in float16, with one loss scale.")
    parser.add_argument("--epochs", type=int, default=30, help="default: 30")
    epochs = parser.parse_args().epochs
    torch.set_num_threads(1)  # the layers are small
    torch.manual_seed(0)
    digits = load_digits()
    images, labels = digits.train_images.flatten(1), digits.train_labels
    generator = train(images, labels, epochs)

    requested = torch.arange(10).repeat(100)
    with torch.no_grad():
        drawn = draw(generator, requested)
    print(as_text(drawn[:10]))
    reader = LogisticRegression(max_iter=1000).fit(images.numpy(), labels.numpy())
    real = reader.score(digits.test_images.flatten(1).numpy(), digits.test_labels.numpy())
    right = reader.score(drawn.numpy(), requested.numpy())
    print(f"a classifier trained on real digits is right about {real:.1%} of real test digits,")
    print(f"and finds the requested digit in {right:.1%} of 1000 drawings")


if __name__ == "__main__":
    main()
