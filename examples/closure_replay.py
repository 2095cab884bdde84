"""LBFGS in float16: evaluations that overflow, even in the line search, are run again.

LBFGS evaluates its closure many times in one step, and its line search compares the losses and
gradients it gets. If an overflow skipped the step, the search would go on with infinite gradients.
So a closure takes the loss scale as its argument. If the gradients overflow, the optimizer runs the
same closure again with the next smaller scale, until they are finite.

Here LBFGS fits logistic regression to the handwritten digits, once in float32 and once under
autocast in float16 with a scale that starts too high. The very first evaluation overflows, as one
would expect. A later one does too: the line search tries a step that is too long, where gradients
are larger than any before. Both runs end with nearly the same loss.

    python examples/closure_replay.py
"""

import math

import torch
from torch import nn
from train_digits import Digits, accuracy, load_digits

import ampopt

STEPS = 5


def evaluations(attempts: list[tuple[float, float]]) -> list[tuple[float, list[float]]]:
    """Group the attempts ``(scale, loss)`` of one step into evaluations ``(loss, scales)``.

    Within a step the scale only falls, and only between an attempt and its replay.
    """
    grouped: list[tuple[float, list[float]]] = []
    previous = None
    for scale, loss in attempts:
        if previous is not None and scale < previous:
            grouped[-1][1].append(scale)
        else:
            grouped.append((loss, [scale]))
        previous = scale
    return grouped


def fit(digits: Digits, *, half: bool) -> tuple[float, float]:
    """Fit the regression; return the final loss and the test accuracy, both in float32."""
    images, labels = digits.train_images.flatten(1), digits.train_labels
    model = nn.Linear(64, 10)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = ampopt.LBFGS(model.parameters(), max_iter=8, line_search_fn="strong_wolfe")
    scale = ampopt.DynamicLossScale(init_scale=2.0**24, growth_interval=1) if half else None
    attempts: list[tuple[float, float]] = []

    def closure(scale):
        """Run forward and backward pass with the scaled loss; return the unscaled loss."""
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=half):
            loss = nn.functional.cross_entropy(model(images), labels)
        loss = loss + 1e-4 * model.weight.square().sum()
        ampopt.scale_outputs(loss, scale).backward()
        if half:
            attempts.append((scale.item(), loss.item()))
        return loss

    for step in range(1, STEPS + 1):
        attempts.clear()
        _, _, scale = optimizer.unscale_and_step(closure, grads_scaled_by=scale)
        for number, (loss, scales) in enumerate(evaluations(attempts), 1):
            tried = " ".join(f"2^{math.log2(s):g}" for s in scales)
            replays = f"   {len(scales) - 1} overflowed" if len(scales) > 1 else ""
            print(f"step {step}, evaluation {number:2}: loss {loss:.4f}, scale {tried}{replays}")

    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(images), labels)
    return loss.item(), accuracy(model, digits.test_images.flatten(1), digits.test_labels)


def main() -> None:
    """Fit both and compare."""
    torch.set_num_threads(1)  # the matrices are small
    digits = load_digits()
    loss16, accuracy16 = fit(digits, half=True)
    loss32, accuracy32 = fit(digits, half=False)
    print()
    print(f"float16: training loss {loss16:.4f}, test accuracy {accuracy16:.2%}")
    print(f"float32: training loss {loss32:.4f}, test accuracy {accuracy32:.2%}")


if __name__ == "__main__":
    main()
