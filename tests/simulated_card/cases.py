"""Trainings on the card, compared with torch operations; and faults that must be found."""

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from support.averaging_rules import Damped
from support.langevin import Langevin
from support.optimizers import EVERY_RULE
from torch import Tensor

import ampopt
from simulated_card import STATE
from simulated_card.ptx import Fault

__all__ = ["CASES", "EVERY_CASE", "FAULTS", "Case", "fault_found", "verdict"]

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
WAYS = ("clipped", "split", "plain", "accumulated", "watched")
SIZES = (0, 3, 1024, 9001)  # empty, odd, a whole block, and several chunks
STEPS = 4


@dataclass(frozen=True)
class Case:
    """A training of parameters of all ``SIZES``, a matrix, and two that share memory.

    Attributes:
        optimizer: the class.
        way: one of ``WAYS``.
        dtype: the dtype of the parameters.
        options: keyword arguments of the optimizer.
    """

    optimizer: Any
    way: str = "clipped"
    dtype: torch.dtype = F32
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        """One line."""
        options = "".join(f" {name}={value}" for name, value in self.options)
        return f"{self.optimizer.__name__} {str(self.dtype)[6:]} {self.way}{options}"

    def train(self, backend: str) -> Iterator[list[Tensor]]:
        """After each step on ``backend``: parameters, states, masters, scale and norm."""
        generator = torch.Generator().manual_seed(0)
        ampopt.set_backend(backend)
        values = [torch.randn(n, generator=generator) for n in SIZES]
        values.append(torch.randn(131, 70, generator=generator))
        whole = torch.randn(257, generator=generator)[1:]  # whose address is odd
        params = [torch.nn.Parameter(v.to(self.dtype)) for v in (*values, whole)]
        params.append(torch.nn.Parameter(params[-1].detach()[100:]))  # in the same memory
        optimizer = self.optimizer(params, **dict(self.options))
        scale: Any = ampopt.DynamicLossScale(init_scale=4.0, growth_interval=2)
        others: list[Any] = []
        if self.way == "watched":
            others = [
                ampopt.Watch(optimizer),
                ampopt.skip_when(optimizer, norm=1e9, norm_deviations=6.0, warmup=2),
            ]
        for step in range(STEPS):
            for n in range(2 if self.way == "accumulated" else 1):
                for p in params:
                    p.grad = torch.randn(p.shape, generator=generator).to(p.dtype) * 4
                if step == 1:
                    params[3].grad.view(-1)[-1] = float("inf")  # type: ignore[union-attr]
                if step == 2:
                    params[2].grad = None
                if self.way == "accumulated" and n == 0:
                    optimizer.accumulate(grads_scaled_by=scale)
            if self.way == "split" and self.dtype in (F32, F64):
                optimizer.unscale(grads_scaled_by=scale)
                scale = optimizer.step_after_unscale().scale
            else:
                norm = 1.0 if self.way == "clipped" else None
                scale = optimizer.unscale_and_step(grads_scaled_by=scale, max_norm=norm).scale
            states = [v for p in params for v in optimizer.state.get(p, {}).values()]
            found = [*params, *states, scale.value, optimizer.grad_norm]
            yield [t.detach().clone() for t in found if isinstance(t, Tensor)]
        for other in others:
            if hasattr(other, "remove"):
                other.remove()


def _options(**options: Any) -> tuple[tuple[str, Any], ...]:
    """Keyword arguments as a ``Case`` has them."""
    return tuple(options.items())


_MASTERS = _options(master_weights=True)
CASES = (
    Case(ampopt.AdamW),
    Case(ampopt.SGD, "split", F64, _options(lr=0.1, momentum=0.9)),
    Case(ampopt.LAMB, "watched", BF16),
    Case(ampopt.Adafactor, "clipped", F16, _MASTERS),
    Case(
        ampopt.AdamW,
        "accumulated",
        BF16,
        (*_MASTERS, *_options(state_bits=8, master_bits=24)),
    ),
    Case(ampopt.Lion, "plain", BF16, _options(param_rounding="stochastic", state_bits=16)),
    Case(Damped, "clipped", F32, _options(state_bits=8)),
    Case(Langevin, "plain"),
)
"""Each kind of kernel and of storage, with one rule."""

_STORAGES = (
    *((dtype, ()) for dtype in (F32, F64, F16, BF16)),
    (F16, _MASTERS),
    (BF16, _options(param_rounding="stochastic")),
    (F32, _options(state_bits=8)),
    (BF16, (*_MASTERS, *_options(state_bits=16, master_bits=24))),
)
EVERY_CASE = tuple(
    Case(optimizer, WAYS[place % len(WAYS)], dtype, options)
    for place, (optimizer, (dtype, options)) in enumerate(itertools.product(EVERY_RULE, _STORAGES))
)
"""Every rule in every storage, with each way to step in turn."""


def verdict(case: Case, order: int = 0) -> str:
    """``"equal"``, ``"within rounding"`` (by how much), or what is wrong.

    Args:
        case: the training.
        order: how warps and programs are ordered; see ``Kernel.launch``.
    """
    STATE.order = order
    worst = 0.0
    try:
        for step, (ours, theirs) in enumerate(
            zip(case.train("triton"), list(case.train("eager")), strict=True)
        ):
            for a, b in zip(ours, theirs, strict=True):
                if torch.equal(a, b) or torch.equal(a.isnan(), b.isnan()) and _same_numbers(a, b):
                    continue
                worst = max(worst, _distance(a, b))
            if worst > 1e-5:
                return f"WRONG: differs by {worst:.1e} after step {step + 1}"
    except Fault as fault:
        return f"WRONG: {fault}"
    except ValueError as error:  # the rule does not take this storage
        return f"refused: {error}"
    return f"within rounding, {worst:.1e}" if worst else "equal"


def _same_numbers(a: Tensor, b: Tensor) -> bool:
    """Whether all that is not NaN is equal."""
    return torch.equal(a.nan_to_num(0.0), b.nan_to_num(0.0))


def _distance(a: Tensor, b: Tensor) -> float:
    """The largest difference, in units of the largest number."""
    a, b = a.double(), b.double()
    largest = b[b.isfinite()].abs().max().item() if b.isfinite().any() else 1.0
    difference = (a - b).abs().nan_to_num(float("inf")).max().item()
    return difference / max(largest, 1e-30)


# --- faults ---------------------------------------------------------------------------------------


def _nth(pattern: str, by: str, n: int = 0) -> Callable[[str], str]:
    """A change of PTX: the occurrence number ``n`` of ``pattern``, replaced by ``by``."""

    def change(text: str) -> str:
        found = list(re.finditer(pattern, text))[n : n + 1]
        for one in found:
            text = text[: one.start()] + one.expand(by) + text[one.end() :]
        return text

    return change


_WIDE_STORE = r"st\.global\.v4\.b32\s+\[ ?(%rd\d+)(?: ?\+ ?0)? ?\]"
FAULTS: dict[str, tuple[str, Callable[[str], str]]] = {
    "a barrier is missing": ("detect_kernel", _nth(r"(bar|barrier)\.sync\s+0;", "")),
    "a store 4 bytes further": (
        "detect_kernel",
        _nth(r"st\.global\.b32 \[ (%rd\d+) \+ 0 \]", r"st.global.b32 [ \1 + 4 ]"),
    ),
    "a store that is not aligned": (
        "update_kernel",
        _nth(_WIDE_STORE, r"st.global.v4.b32 [ \1 + 2 ]"),
    ),
    "a wide store 16 bytes further": (
        "update_kernel",
        _nth(_WIDE_STORE, r"st.global.v4.b32 [ \1 + 16 ]"),
    ),
    "loads without a mask": (
        "update_kernel",
        lambda text: re.sub(r"@%p\d+ (ld\.global\.b32)", r"\1", text),
    ),
    "all programs take the first chunk": (
        "update_kernel",
        _nth(r"mov\.u32\s+(%r\d+), %ctaid\.x", r"mov.u32 \1, 0"),
    ),
    "a product for a quotient": ("update_kernel", _nth(r"div\.rn\.f32", "mul.rn.f32")),
    "an overflow that is not skipped": (
        "update_kernel",
        _nth(r"setp\.(gt|leu|le|geu)\.f64", "setp.ltu.f64"),
    ),
    "the smaller for the larger": ("control_kernel", _nth(r"max\.f32", "min.f32")),
    "a shuffle with the lane itself": (
        "detect_kernel",
        lambda text: re.sub(r"(shfl\.sync\.bfly\.b32\s+%r\d+, %r\d+), 16", r"\1, 0", text),
    ),
}
"""What is planted, by what it is: the kernel, and a change of its PTX."""


def fault_found(what: str) -> str:
    """What is seen of the fault ``what``, planted in the first of ``CASES``; empty for nothing."""
    name, change = FAULTS[what]
    planted: list[bool] = []

    def changed(text: str) -> str:
        if f".entry {name}(" not in text:
            return text
        new = change(text)
        planted.append(new != text)
        return new

    STATE.changed = changed
    try:
        seen = verdict(CASES[0])
    finally:
        STATE.changed = lambda text: text
    assert any(planted), f"nothing in {name} to plant it in"
    return seen.removeprefix("WRONG: ") if seen.startswith("WRONG") else ""
