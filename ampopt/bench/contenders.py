"""The contenders: torch's implementations under its own scaler, ampopt's, and installed others."""

import importlib
import importlib.util
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import ampopt
from ampopt.bench.workloads import SCALE

__all__ = [
    "AMPOPT",
    "FLOAT32",
    "SMALL",
    "TORCH",
    "Contender",
    "by_control_point",
    "enter",
    "names",
    "optimizers",
    "others",
    "under_scaler",
]

AMPOPT = "ampopt"
FLOAT32 = "float32"
"""The column of ampopt with float32 parameters and gradients, in rows of master weights."""
SMALL: dict[str, dict[str, int]] = {"ampopt:16": {"state_bits": 16}, "ampopt:8": {"state_bits": 8}}
"""ampopt with states in fewer bits, by the name of the column: the options."""
_MASTER_BITS = {"ampopt:8": 24}
"""The bits of master weights, if there are any and they are not 32, by the name of the column."""
TORCH = ("for-loop", "foreach", "fused")
_OTHERS = ("apex", "optimi")
_OTHERS_WITH_MASTERS = ("deepspeed",)

_ASKED_FOR = ("Adafactor", "Muon")
"""Optimizers of torch that do not work element by element; measured only if named."""
_MAX_NORM = 1.0
_NEVER = 1 << 30
"""Growth interval that no run reaches: a scale that grew in one run only would change its work."""
_LR: dict[str, Any] = {"lr": 1e-3}
_PEERS: dict[str, dict[str, Any]] = {
    "Adan": _LR,
    "LAMB": {**_LR, "weight_decay": 0.01, "weight_decouple": False, "adam_debias": True},
    "Lion": _LR,
    "NovoGrad": _LR,
    "ScheduleFreeAdamW": _LR,
}
"""ampopt's optimizers that torch lacks: the arguments of their counterparts in pytorch_optimizer,
besides the defaults, with which both do the same work."""
_SETTINGS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9},  # without momentum, SGD is little more than a copy
    **dict.fromkeys(_PEERS, _LR),
    "LAMB": {**_LR, "bias_correction": False},
}
"""Arguments of other contenders that differ from the defaults."""


@dataclass(frozen=True)
class Contender:
    """One implementation, ready to step.

    Attributes:
        name: name of the column.
        optimizer: the optimizer, over the parameters passed to :func:`enter`.
        step: function that unscales, checks for overflow, steps, and updates the scale.
        clipped_step: the same, with clipping by global norm.
    """

    name: str
    optimizer: torch.optim.Optimizer
    step: Callable[[], Any]
    clipped_step: Callable[[], Any]


def optimizers() -> list[str]:
    """Names of the optimizers with an elementwise rule here and a counterpart in torch.

    Those of :func:`others` are not among them.
    """
    return [
        name
        for name in ampopt.optim.__all__
        if hasattr(torch.optim, name) and hasattr(getattr(ampopt, name), "rule")
        if name not in _ASKED_FOR
    ]


def others() -> list[str]:
    """Names of the optimizers that are measured only if named.

    torch has no fused version of them, or none at all; then pytorch_optimizer's take torch's
    columns.
    """
    return [*_PEERS, *(name for name in _ASKED_FOR if hasattr(torch.optim, name))]


def names(device: torch.device, masters: bool = False) -> tuple[str, ...]:
    """Names of the columns: torch's, ampopt's, and further installed packages.

    Args:
        device: the device of the parameters. Some packages are for GPUs.
        masters: whether there are master weights. DeepSpeed's are on the CPU.
    """
    ours = (AMPOPT, *SMALL, *((FLOAT32,) if masters else ()))
    others = _OTHERS_WITH_MASTERS if masters else ()
    if device.type == "cuda":
        others = () if masters else _OTHERS
    return (*TORCH, *ours, *(name for name in others if importlib.util.find_spec(name)))


def enter(name: str, optimizer: str, params: Sequence[Tensor], masters: bool = False) -> Contender:
    """Make the contender ``name`` with ``optimizer`` over ``params``.

    Args:
        name: one of :func:`names`.
        optimizer: the name of the optimizer.
        params: the parameters; of ``FLOAT32``, float32.
        masters: whether to step float32 master weights of parameters in half precision. Others than
            ampopt step float32 copies: gradients are cast before the step, parameters after it.

    Raises:
        NotImplementedError: the contender has no such optimizer, or it refuses the parameters.
    """
    if name == FLOAT32:
        return replace(enter(AMPOPT, optimizer, params), name=FLOAT32)
    ours = name == AMPOPT or name in SMALL
    if masters and not ours:
        return _on_copies(params, lambda copies: enter(name, optimizer, copies))
    settings = _SETTINGS.get(optimizer, {})
    if ours:
        kind = getattr(ampopt, optimizer)
        if name in SMALL and not hasattr(kind, "rule"):
            raise NotImplementedError(f"{optimizer} has no rule, and so no small states")
        settings = {**settings, **SMALL.get(name, {})}
        if masters:
            bits = _MASTER_BITS.get(name, 32)
            settings |= {"master_weights": True, "master_bits": bits}
        return by_control_point(name, kind(params, **settings))
    if name in (*_OTHERS, *_OTHERS_WITH_MASTERS):
        if (make := _of_package(name).get(optimizer)) is None:
            raise NotImplementedError(f"{optimizer} of {name} is not measured")
        instance = make(params, **settings)
    elif optimizer in _PEERS:
        instance = _peer(name, optimizer, params)
    else:
        instance = _torchs(name, optimizer, params, settings)
    return under_scaler(name, instance, params)


def _torchs(
    name: str, optimizer: str, params: Sequence[Tensor], settings: dict[str, Any]
) -> torch.optim.Optimizer:
    """Torch's optimizer of that name, in the implementation ``name`` of :data:`TORCH`.

    Raises:
        NotImplementedError: torch has none, or it refuses the parameters.
    """
    kind = getattr(torch.optim, optimizer)
    flags = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
    flag = flags[name]
    if not flag.keys() <= inspect.signature(kind).parameters.keys():
        if name != "for-loop":
            raise NotImplementedError(f"torch has no {name} {optimizer}")
        flag = {}  # the class has one implementation, and no flags
    try:
        return kind(params, **settings, **flag)
    except (RuntimeError, ValueError) as error:
        raise NotImplementedError(f"torch's {name} {optimizer}: {error}") from error


def _peer(name: str, optimizer: str, params: Sequence[Tensor]) -> torch.optim.Optimizer:
    """Make the counterpart of ``optimizer`` from pytorch_optimizer.

    Args:
        name: ``"for-loop"`` or ``"foreach"``.
        optimizer: the name of the optimizer.
        params: the parameters.

    Raises:
        NotImplementedError: ``name`` is ``"fused"``; pytorch_optimizer has no fused optimizers.
        ImportError: pytorch_optimizer is not installed.
    """
    if name == "fused":
        raise NotImplementedError(f"torch has no {optimizer}, and pytorch_optimizer none fused")
    module: Any = importlib.import_module("pytorch_optimizer")
    kind = getattr(module, "Lamb" if optimizer == "LAMB" else optimizer)
    instance = kind(list(params), foreach=name == "foreach", **_PEERS[optimizer])
    if optimizer == "LAMB":
        instance.clamp = math.inf  # by default it clamps weight norms to 10, ampopt's does not
    return instance


def by_control_point(name: str, optimizer: Any) -> Contender:
    """The contender that steps by ampopt's ``unscale_and_step``."""
    scale = ampopt.DynamicLossScale(init_scale=SCALE, growth_interval=_NEVER)

    def step(max_norm: float | None = None) -> None:
        nonlocal scale
        result = optimizer.unscale_and_step(grads_scaled_by=scale, max_norm=max_norm)
        scale = result.scale

    return Contender(name, optimizer, step, lambda: step(_MAX_NORM))


def under_scaler(
    name: str,
    optimizer: torch.optim.Optimizer,
    params: Sequence[Tensor],
    kind: Any = torch.amp.GradScaler,  # pyright: ignore[reportPrivateImportUsage]
) -> Contender:
    """The contender that steps under a scaler of the class ``kind``."""
    scaler = kind(params[0].device.type, init_scale=SCALE, growth_interval=_NEVER)
    # torch's scaler creates its tensors when it first scales a loss.
    scaler.scale(torch.zeros((), device=params[0].device))

    def step() -> None:
        scaler.step(optimizer)
        scaler.update()

    def clipped_step() -> None:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(params, _MAX_NORM)
        step()

    return Contender(name, optimizer, step, clipped_step)


def _on_copies(
    params: Sequence[Tensor], enter_copies: Callable[[Sequence[Tensor]], Contender]
) -> Contender:
    """The contender ``enter_copies`` on float32 copies, with casts before and after its step."""
    copies = [p.detach().float().requires_grad_() for p in params]
    grads = [torch.empty_like(copy) for copy in copies]
    copy_all: Any = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
    inner = enter_copies(copies)

    def around(step: Callable[[], Any]) -> Callable[[], None]:
        def cast() -> None:
            with torch.no_grad():
                copy_all(grads, [p.grad for p in params])
                for copy, grad in zip(copies, grads, strict=True):
                    copy.grad = grad
                step()
                copy_all(list(params), copies)

        return cast

    return Contender(inner.name, inner.optimizer, around(inner.step), around(inner.clipped_step))


def _of_package(name: str) -> dict[str, Callable[..., torch.optim.Optimizer]]:
    """What makes the optimizers of the package ``name``, another than torch, by their names."""
    if name == "apex":
        module: Any = importlib.import_module("apex.optimizers")
        return {
            "Adam": partial(module.FusedAdam, adam_w_mode=False),
            "AdamW": partial(module.FusedAdam, weight_decay=1e-2),
            "SGD": partial(module.FusedSGD, **_LR),
            "Adagrad": module.FusedAdagrad,
        }
    if name == "deepspeed":  # its Adam for the CPU
        module = importlib.import_module("deepspeed.ops.adam")
        return {
            "Adam": partial(module.DeepSpeedCPUAdam, **_LR, adamw_mode=False, weight_decay=0.0),
            "AdamW": partial(module.DeepSpeedCPUAdam, **_LR, adamw_mode=True, weight_decay=1e-2),
        }
    classes = vars(importlib.import_module("optimi")).items()  # which has Triton kernels
    return {key: partial(cls, **_LR, triton=True) for key, cls in classes if isinstance(cls, type)}
