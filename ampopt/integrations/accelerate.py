"""For Accelerate: a scaler for an ``Accelerator``, and a gate for its learning rate schedulers."""

# pyright: reportMissingImports=false

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

try:
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import DistributedType
except ImportError as error:
    raise ImportError(
        "ampopt.integrations.accelerate needs Accelerate: python -m pip install accelerate"
    ) from error

from torch.optim.lr_scheduler import LRScheduler

from ampopt.grad_scaler.scaler import GradScaler
from ampopt.loss_scale.static import StaticLossScale
from ampopt.optimizer import Optimizer
from ampopt.scheduler_gate import LRSchedulerGate

__all__ = ["lr_scheduler_gate", "unwrapped", "use_scaler"]

_BY_NORM = "clip_grad_norm_"
"""The method of an ``Accelerator`` that clips by norm."""


def use_scaler(accelerator: Any, scaler: Any = None) -> Any:
    """Make ``accelerator`` scale, unscale and skip with ``scaler``. Call it before ``prepare``.

    ::

        accelerator = Accelerator(mixed_precision="fp16")
        scaler = use_scaler(accelerator)
        model, optimizer, gate, loader = accelerator.prepare(model, optimizer, gate, loader)

    ``accelerator.clip_grad_norm_`` and ``clip_grad_value_`` then unscale gradients in every
    precision; without this call they unscale only if ``mixed_precision`` is ``"fp16"``. For
    parameters with master weights, they clip the gradients of the master weights, because the step
    uses these, and return their norm. ``save_state`` and ``load_state`` include the scaler.

    To find out whether a step was skipped, read ``scaler.skipped``.
    ``accelerator.optimizer_step_was_skipped`` covers only optimizers whose step the host skips, and
    is False for those that skip on the device.

    Args:
        accelerator: an ``Accelerator`` that has not prepared an optimizer yet.
        scaler: an :class:`ampopt.GradScaler`. ``None`` makes one: with the default schedule if
            ``mixed_precision`` is ``"fp16"``, else with ``StaticLossScale(1.0)``, which scales
            nothing and skips overflows. For float16 parameters in another ``mixed_precision``,
            pass ``ampopt.GradScaler(...)``.

    Returns:
        The scaler.

    Raises:
        RuntimeError: an optimizer was already prepared, without this scaler.
    """
    if accelerator._optimizers:
        raise RuntimeError(
            "use_scaler must be called before accelerator.prepare, which has given "
            f"{type(unwrapped(accelerator._optimizers[0])).__name__} another scaler, or none"
        )
    if scaler is None:
        fixed = None if accelerator.mixed_precision == "fp16" else StaticLossScale(1.0)
        scaler = GradScaler(accelerator.device.type, loss_scale=fixed)

    def unscale_gradients(optimizer: Any = None) -> None:
        optimizers = accelerator._optimizers if optimizer is None else optimizer
        for each in optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]:
            scaler.unscale_(unwrapped(each))

    accelerator.scaler = scaler
    accelerator.unscale_gradients = unscale_gradients
    for name in (_BY_NORM, "clip_grad_value_"):
        setattr(accelerator, name, _of_masters(accelerator, getattr(accelerator, name)))
    return scaler


def lr_scheduler_gate(scheduler: LRScheduler, *, delay: int | None = None) -> LRSchedulerGate:
    """Return :func:`ampopt.lr_scheduler_gate` for a scheduler that Accelerate will prepare.

    With several processes, Accelerate calls ``scheduler.step()`` once per process after each step
    of the optimizer, unless it splits batches. This gate lets all of these calls through, or none.

    Args:
        scheduler: any torch scheduler, or your own.
        delay: see :func:`ampopt.lr_scheduler_gate`.
    """
    return _GateOfProcesses(scheduler, delay=delay)


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer inside the wrapper that ``prepare`` returned."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _masters_of(accelerator: Any) -> dict[Tensor, Tensor]:
    """The master of each parameter that has one."""
    return {
        param: master
        for optimizer in map(unwrapped, accelerator._optimizers)
        if isinstance(optimizer, Optimizer)
        for param, master in optimizer.params_and_masters()
        if master is not param
    }


def _of_masters(accelerator: Any, clip: Callable[..., Any]) -> Callable[..., Any]:
    """``clip``, a method of ``accelerator``, with master weights in place of their parameters."""

    def replaced(parameters: Any) -> Iterator[Tensor]:
        # A generator, which Accelerate runs once it has unscaled: only then do 24-bit masters have
        # tensors with gradients, and `parameters`, if it is master_params(), may be read.
        masters = _masters_of(accelerator)
        for param in [parameters] if isinstance(parameters, Tensor) else parameters:
            yield masters.get(param, param)

    @functools.wraps(clip)
    def clip_masters(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if not _masters_of(accelerator):
            return clip(parameters, *args, **kwargs)
        tensors = replaced(parameters)
        if accelerator.distributed_type != DistributedType.FSDP or clip.__name__ != _BY_NORM:
            return clip(tensors, *args, **kwargs)  # under FSDP it refuses to clip by value
        if not accelerator.is_fsdp2:
            raise RuntimeError(
                "under FSDP1, Accelerate clips the gradients of the parameters, and the step uses "
                "those of their float32 master weights: choose fsdp_version=2, or keep the "
                "parameters in float32, without master_weights"
            )
        # Accelerate's method would unscale twice, as it does with any list but the parameters of a
        # model that it has prepared.
        accelerator.unscale_gradients()
        # What it would call then; from Accelerate 1.15 on, it clips parameters on several meshes.
        torch_clips = torch.nn.utils.clip_grad_norm_
        by_norm = getattr(accelerator, "_clip_grad_norm_dtensor_aware", torch_clips)
        return by_norm(list(tensors), *args, **kwargs)

    return clip_masters


class _GateOfProcesses(LRSchedulerGate):
    """A gate that repeats its last decision for calls without a new step attempt.

    Accelerate calls the scheduler only after an attempt, so such calls belong to the last attempt.
    """

    _own = LRSchedulerGate._own | {"_last"}
    _last = False

    def _advances(self, attempts: Any) -> bool:
        """Whether to advance; without a step since the last call, the last answer again."""
        if attempts:
            self._last = super()._advances(attempts)
        return self._last
