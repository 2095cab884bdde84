"""AdamW with the 8-bit states of other packages, to compare its steps with ampopt's."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ampopt.environment import version_of

__all__ = ["FlashOptimStates", "peers"]


def peers(lr: float) -> dict[str, Callable[[Sequence[Tensor]], Any]]:
    """Functions that make AdamW of parameters, without weight decay, by the name of the package.

    The packages are torchao and bitsandbytes, if they are installed, and FlashOptim, whose states
    are transcribed here because its package runs on a GPU only.

    Args:
        lr: the learning rate.
    """
    options = {"lr": lr, "weight_decay": 0.0}
    makers: dict[str, Callable[[Sequence[Tensor]], Any]] = {
        "FlashOptim 0.1.4, transcribed": lambda params: FlashOptimStates(params, lr)
    }
    if version := version_of("torchao"):
        makers[f"torchao {version}"] = lambda params: _Uncompiled(
            importlib.import_module("torchao.optim").AdamW8bit(params, **options)
        )
    if version := version_of("bitsandbytes"):
        makers[f"bitsandbytes {version}"] = lambda params: importlib.import_module(
            "bitsandbytes.optim"
        ).AdamW8bit(params, **options)
    return makers


class _Uncompiled:
    """An optimizer of torchao whose step, normally compiled, runs uncompiled."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Wrap ``optimizer``."""
        self._optimizer = optimizer

    def step(self) -> None:
        """Step, with compiled functions run eagerly."""
        with torch.compiler.set_stance("force_eager"):
            self._optimizer.step()


class FlashOptimStates:
    """AdamW in float32 whose states are kept as flashoptim 0.1.4 keeps them.

    Transcribed from ``_triton_quantize_kernel`` and ``_triton_dequantize_kernel`` of that package,
    to the same bits. Groups of 32 elements share a float16 scale, codes are rounded to nearest, and
    the first moment is encoded by softsign, the second by its square root.
    """

    betas, eps = (0.9, 0.999), 1e-8

    def __init__(self, params: Sequence[Tensor], lr: float) -> None:
        """Make the optimizer of parameters whose sizes are multiples of 32."""
        self._params, self._lr, self._step = list(params), lr, 0
        self._states = [(torch.zeros_like(p), torch.zeros_like(p)) for p in self._params]

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters from their gradients, and round the states as they are stored."""
        self._step += 1
        (beta1, beta2), states = self.betas, []
        for param, (exp_avg, exp_avg_sq) in zip(self._params, self._states, strict=True):
            grad = param.grad
            assert grad is not None
            exp_avg = beta1 * exp_avg + (1 - beta1) * grad
            exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad * grad
            denominator = (exp_avg_sq / (1 - beta2**self._step)).sqrt() + self.eps
            param -= self._lr * (exp_avg / (1 - beta1**self._step)) / denominator
            states.append((self.first_moment(exp_avg), self.second_moment(exp_avg_sq)))
        self._states = states

    @staticmethod
    def first_moment(x: Tensor) -> Tensor:
        """``x`` after it was stored and read as the first moment."""
        groups, scales = _groups(x)
        x = groups / scales
        code = torch.floor(2 * x / (1 + x.abs()) * 127 + 0.5) / 127
        return (code / (2 - code.abs()) * scales.half().float()).view(-1)

    @staticmethod
    def second_moment(x: Tensor) -> Tensor:
        """``x`` after it was stored and read as the second moment."""
        groups, scales = _groups(x.sqrt())
        code = torch.floor(groups / scales * 255 + 0.5) / 255
        return (code * scales.half().float()).square().view(-1)


def _groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` as groups of 32 elements, and the largest magnitude of each, at least 1e-12."""
    groups = x.view(-1, 32)
    return groups, groups.abs().amax(1, keepdim=True).clamp(min=1e-12)
