"""For the ``Trainer`` of transformers: a scaler, a gate for its scheduler, and a callback."""

# pyright: reportMissingImports=false

from typing import Any

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError(
        "ampopt.integrations.transformers needs transformers and Accelerate: "
        "python -m pip install transformers accelerate"
    ) from error

from ampopt.integrations.accelerate import unwrapped, use_scaler
from ampopt.integrations.step_record import StepRecord
from ampopt.scheduler_gate import LRSchedulerGate, lr_scheduler_gate

__all__ = ["StepMonitor", "prepare"]


def prepare(trainer: Any, scaler: Any = None) -> Any:
    """Have a ``Trainer`` scale by ``scaler``, count steps that happened, and log skips.

    Before ``train()``, for any subclass of ``Trainer``::

        trainer = Trainer(model, args, optimizer_cls_and_kwargs=(ampopt.AdamW, {"lr": 1e-4}))
        scaler = prepare(trainer)
        trainer.train()

    The scheduler, the trainer's own or one that it was given, advances only for steps that
    happened; see :func:`ampopt.lr_scheduler_gate`. What :class:`StepMonitor` logs, every reporter
    sees.

    Args:
        trainer: a ``Trainer`` that has not begun to train.
        scaler: see :func:`ampopt.integrations.accelerate.use_scaler`; with ``bf16=True``, ``None``
            is for a scale of 1.0, which skips overflows.

    Returns:
        The scaler: ``scaler.skipped`` says whether a step was skipped.

    Raises:
        RuntimeError: it has begun.
    """
    scaler = use_scaler(trainer.accelerator, scaler)
    create_scheduler = trainer.create_scheduler

    def create_gated(*args: Any, **kwargs: Any) -> Any:
        scheduler = create_scheduler(*args, **kwargs)
        if not isinstance(scheduler, LRSchedulerGate):
            scheduler = trainer.lr_scheduler = lr_scheduler_gate(scheduler)
        return scheduler

    trainer.create_scheduler = create_gated
    # First, so that what it adds to a log is there for all others.
    trainer.callback_handler.callbacks.insert(0, StepMonitor())
    return scaler


class StepMonitor(TrainerCallback):  # pyright: ignore[reportGeneralTypeIssues]
    """Adds the loss scale, skips, and the norm of gradients to what the ``Trainer`` logs.

    Under ``ampopt/scale``, ``ampopt/skipped``, ``ampopt/skips`` and ``ampopt/steps``, and what an
    :class:`ampopt.Watch` over the optimizer would log besides; see
    :meth:`ampopt.integrations.StepRecord.numbers`. ``grad_norm`` is logged by the ``Trainer``
    itself. :func:`prepare` puts it before all other callbacks; among ``callbacks=`` of a
    ``Trainer``, those that report to TensorBoard and the like come before it and see nothing of it.
    Synchronizes at each log, as the ``Trainer`` does.
    """

    def __init__(self) -> None:
        """Begin with nothing."""
        self._record: StepRecord | None = None

    def on_train_begin(self, *args: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """Begin to count."""
        if optimizer is not None:
            scaler = getattr(optimizer, "scaler", None)
            self._record = StepRecord(unwrapped(optimizer), scaler)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add what is known by now to the log."""
        if self._record is None or logs is None:
            return
        numbers = {f"ampopt/{name}": number for name, number in self._record.read().items()}
        logs.update(numbers)
        state.log_history[-1].update(numbers)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Stop counting."""
        if self._record is not None:
            self._record.remove()
            self._record = None
