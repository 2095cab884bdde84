"""For Accelerate: a scaler for an ``Accelerator``, and a gate for its learning rate schedulers."""

# pyright: reportMissingImports=false

from typing import Any

try:
    from accelerate.optimizer import AcceleratedOptimizer
except ImportError as error:
    raise ImportError(
        "ampopt.integrations.accelerate needs Accelerate: python -m pip install accelerate"
    ) from error

from torch.optim.lr_scheduler import LRScheduler

from ampopt.grad_scaler.scaler import GradScaler
from ampopt.loss_scale.static import StaticLossScale
from ampopt.scheduler_gate import LRSchedulerGate

__all__ = ["lr_scheduler_gate", "unwrapped", "use_scaler"]


def use_scaler(accelerator: Any, scaler: Any = None) -> Any:
    """Make ``accelerator`` scale, unscale and skip with ``scaler``. Call it before ``prepare``.

    ::

        accelerator = Accelerator(mixed_precision="fp16")
        scaler = use_scaler(accelerator)
        model, optimizer, gate, loader = accelerator.prepare(model, optimizer, gate, loader)

    ``accelerator.clip_grad_norm_`` then unscales gradients in every precision. Without this call it
    unscales only if ``mixed_precision`` is ``"fp16"``. With ``master_weights=True``, clip
    ``optimizer.master_params()`` of the optimizer from before ``prepare``. ``save_state`` and
    ``load_state`` include the scaler.

    To find out whether a step was skipped, read ``scaler.skipped``.
    ``accelerator.optimizer_step_was_skipped`` covers only optimizers whose step the host skips, and
    is False for those that skip on the device.

    Args:
        accelerator: an ``Accelerator`` that has not prepared an optimizer yet.
        scaler: an :class:`ampopt.GradScaler`. ``None`` makes one: with the default schedule if
            ``mixed_precision`` is ``"fp16"``, else with ``StaticLossScale(1.0)``, which scales
            nothing and skips overflows.

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
        chosen = accelerator._optimizers if optimizer is None else optimizer
        for each in chosen if isinstance(chosen, (list, tuple)) else [chosen]:
            scaler.unscale_(unwrapped(each))

    accelerator.scaler = scaler
    accelerator.unscale_gradients = unscale_gradients
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


class _GateOfProcesses(LRSchedulerGate):
    """A gate that repeats its last decision for calls without a new step attempt.

    Accelerate calls the scheduler only after an attempt, so such calls belong to the last attempt.
    """

    _last = False

    def _advances(self, attempts: Any) -> bool:
        if attempts:
            self._last = super()._advances(attempts)
        return self._last
