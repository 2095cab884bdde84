"""An optimizer with a Triton kernel of your own, which reads the overflow flag and skips.

The optimizer here divides each row of the momentum by the root of its mean square. A rule can do
that, too (with ``averages``); here it stands for any kernel that you have written. If ``step()``
consisted of torch operations, ampopt could skip it (see ``ampopt.Optimizer.skip_by``), but it
cannot undo what your kernel has written. So the kernel itself has to skip, in one of two ways:

1. ``RowNormalized`` sets ``skip_by = "step"``. ampopt unscales the gradients and tests them for inf
   and NaN, and the step finds the flag in ``self.found_inf``: one pointer, and one line of the
   kernel.
2. ``Controlled`` also overrides ``unscale_and_step`` and ``step_after_unscale``: a second kernel
   tests the gradients, and the first one unscales them as it reads them, so that unscaled gradients
   are never written to memory.

Neither synchronizes. Both train a small network on handwritten digits in float16, with a scale that
starts too high. Both must end with the same weights, and reach the accuracy of a float32 run;
otherwise the script prints what differs, and fails.

    python examples/own_kernel.py                       # on a GPU
    TRITON_INTERPRET=1 python examples/own_kernel.py    # without: Triton's interpreter runs it
"""

import argparse
import os
import sys
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from train_digits import Digits, accuracy, batches, load_digits

import ampopt

ROWS = 32
"""Rows that one program of ``step_kernel`` works on."""


@triton.jit
def step_kernel(
    param, grad, momentum, found_inf, scale, lr, beta, rows, columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """``momentum = beta momentum + grad / scale; param -= lr momentum / rms(row of momentum)``."""
    if tl.load(found_inf) > 0:
        return
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    at, mask = row.to(tl.int64) * columns + column, (row < rows) & (column < columns)
    g = tl.load(grad + at, mask=mask, other=0.0) * (1.0 / tl.load(scale))
    m = beta * tl.load(momentum + at, mask=mask, other=0.0) + g
    mean_square = tl.sum(m * m, axis=1, keep_dims=True) / columns
    p = tl.load(param + at, mask=mask, other=0.0) - lr * m * tl.rsqrt(mean_square + 1e-12)
    tl.store(momentum + at, m, mask=mask)
    tl.store(param + at, p, mask=mask)


@triton.jit
def found_inf_kernel(grad, scale, found_inf, n, BLOCK: tl.constexpr):
    """Set ``found_inf`` to 1 if an element of ``grad / scale`` is not finite."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(grad + at, mask=at < n, other=0.0) * (1.0 / tl.load(scale))
    # Several programs may store here, but all of them store the same number.
    tl.store(found_inf, 1.0, mask=tl.max((~(tl.abs(g) < float("inf"))).to(tl.int32), axis=0) == 1)


class RowNormalized(ampopt.Optimizer):
    """Momentum with normalized rows, for contiguous float32 parameters. A vector is one row.

    Attributes:
        scale: the loss scale that the gradients are still multiplied by; ``None`` if they are
            unscaled.
    """

    skip_by = "step"
    scale: Tensor | None = None

    def __init__(self, params: Any, lr: float = 0.01, beta: float = 0.9) -> None:
        """Store the settings as defaults; a param group may override them."""
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Step, or do nothing if ``self.found_inf`` is more than 0. Does not synchronize."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._launch(p, p.grad, group["lr"], group["beta"])
        return loss

    def _launch(self, p: Tensor, grad: Tensor, lr: float, beta: float) -> None:
        """Launch the kernel for one parameter, whose momentum is made if it is missing."""
        state = self.state[p]
        if not state:  # zeros, which a skipped first step leaves as they are
            state["momentum"] = torch.zeros_like(p)
        # A plain step() has no flag and is not skipped.
        found_inf = p.new_zeros(()) if self.found_inf is None else self.found_inf
        scale = p.new_ones(()) if self.scale is None else self.scale
        columns = p.shape[-1] if p.ndim > 1 else p.numel()
        rows = p.numel() // columns
        launch: Any = step_kernel[(triton.cdiv(rows, ROWS),)]
        launch(
            p, grad.contiguous(), state["momentum"], found_inf, scale, lr, beta, rows, columns,
            ROWS=ROWS, COLUMNS=triton.next_power_of_2(columns),
        )  # fmt: skip


class Controlled(RowNormalized):
    """The same without a separate pass to unscale. Accepts a ``LossScale``, and no closure."""

    @torch.no_grad()
    def unscale_and_step(self, closure: Any = None, grads_scaled_by: Any = None) -> Any:  # type: ignore[override]
        """Test the scaled gradients, then step, unscaling them on the way; all on the device."""
        assert closure is None and isinstance(grads_scaled_by, ampopt.LossScale)
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        found_inf, scale = torch.zeros((), device=params[0].device), grads_scaled_by.value
        for p in params:
            grad, n = p.grad.contiguous(), p.numel()
            launch: Any = found_inf_kernel[(triton.cdiv(n, 1024),)]
            launch(grad, scale, found_inf, n, BLOCK=1024)
        self.found_inf, self.scale = found_inf, scale
        try:
            self.step()
        finally:
            del self.found_inf, self.scale
        return ampopt.StepResult(None, found_inf, grads_scaled_by.next(found_inf))

    def step_after_unscale(self) -> Any:  # type: ignore[override]
        """Step with the gradients that ``unscale`` has unscaled; ``self.found_inf`` is its flag."""
        pending = self.pending
        assert pending is not None, "call unscale(grads_scaled_by=scale) first"
        self.step()
        return ampopt.StepResult(None, *pending)


def train(
    cls: type[RowNormalized], digits: Digits, *, half: bool, steps: int
) -> tuple[nn.Sequential, int]:
    """Train a new network; return it and the number of skipped steps."""
    torch.manual_seed(0)
    device = digits.train_images.device
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).to(device)
    optimizer = cls(model.parameters())
    scale: Any = ampopt.DynamicLossScale(init_scale=2.0**24, growth_interval=30) if half else None
    skipped = torch.zeros((), device=device)
    for batch in batches(digits.train_labels, epochs=1 + steps // 20, seed=0)[:steps]:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.float16, enabled=half):
            outputs = model(digits.train_images[batch])
            loss = nn.functional.cross_entropy(outputs, digits.train_labels[batch])
        ampopt.scale_outputs(loss, scale).backward()
        _, found_inf, scale = optimizer.unscale_and_step(grads_scaled_by=scale)
        skipped += found_inf
    return model, int(skipped)


def main() -> None:
    """Train in float32 once and in float16 in both ways, and compare."""
    parser = argparse.ArgumentParser(description="Train with a Triton kernel of one's own.")
    parser.add_argument("--steps", type=int, default=100, help="steps of each run (default: 100)")
    steps = parser.parse_args().steps
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not interpreted and not torch.cuda.is_available():
        sys.exit("no GPU: run it with TRITON_INTERPRET=1, in Triton's interpreter")
    torch.set_num_threads(1)  # the layers are small
    digits = load_digits("cpu" if interpreted else "cuda")
    runs = (
        ("float32, plain step()", RowNormalized, False),
        ("float16, RowNormalized", RowNormalized, True),
        ("float16, Controlled", Controlled, True),
    )
    shares, weights = [], []
    for name, cls, half in runs:
        model, skipped = train(cls, digits, half=half, steps=steps)
        shares.append(accuracy(model, digits.test_images, digits.test_labels))
        weights.append(nn.utils.parameters_to_vector(model.parameters()))
        print(f"{name:<25} test accuracy {shares[-1]:.2%}, {skipped} of {steps} steps skipped")
    if not torch.equal(weights[1], weights[2]):
        sys.exit("the two float16 runs ended with different weights")
    if min(shares[1:]) < shares[0] - 0.02:
        sys.exit("float16 fell more than 2 percentage points behind float32")
    print("both float16 runs ended with bitwise equal weights, and reached float32's accuracy")


if __name__ == "__main__":
    main()
