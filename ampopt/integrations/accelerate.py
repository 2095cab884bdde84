"""For Accelerate: a scaler for an ``Accelerator``, and a gate for the schedulers it prepares."""

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
    """Have ``accelerator`` scale, unscale and skip by ``scaler``, before it prepares optimizers.

    ::

        accelerator = Accelerator(mixed_precision="fp16")
        scaler = use_scaler(accelerator)
        model, optimizer, gate, loader = accelerator.prepare(model, optimizer, gate, loader)

    ``accelerator.clip_grad_norm_`` then unscales in every precision, where by itself it clips
    gradients that are still scaled unless ``mixed_precision`` is ``"fp16"``. With
    ``master_weights=True`` clip ``optimizer.master_params()``, of the optimizer as it was before
    ``prepare``. ``save_state`` and ``load_state`` save and load the scaler.

    Ask ``scaler.skipped`` whether a step was skipped: ``accelerator.optimizer_step_was_skipped`` is
    about optimizers that the host skips, and says no of those that skip by themselves.

    Args:
        accelerator: an ``Accelerator`` that has prepared no optimizer yet.
        scaler: :class:`ampopt.GradScaler`; ``None`` for one with its default schedule where
            ``mixed_precision`` is ``"fp16"``, else with ``StaticLossScale(1.0)``, which scales
            nothing and skips overflows.

    Returns:
        The scaler.

    Raises:
        RuntimeError: an optimizer was prepared already, without the scaler.
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
    """:func:`ampopt.lr_scheduler_gate` for a scheduler that Accelerate is to prepare.

    With several processes Accelerate calls a scheduler's ``step`` once for each of them after each
    step of the optimizer, unless it splits batches: the gate lets all of these calls through, or
    none.

    Args:
        scheduler: any of torch's, or of your own.
        delay: see :func:`ampopt.lr_scheduler_gate`.
    """
    return _GateOfProcesses(scheduler, delay=delay)


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside what ``prepare`` returned."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


class _GateOfProcesses(LRSchedulerGate):
    """Accelerate calls it only after an attempt, so that a call without one repeats the last."""

    _last = False

    def _advances(self, attempts: Any) -> bool:
        if attempts:
            self._last = super()._advances(attempts)
        return self._last
