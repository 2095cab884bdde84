"""For the ``Trainer`` of transformers: a scaler, a gate for its scheduler, and a callback."""

# pyright: reportMissingImports=false

import json
from typing import Any

import torch

try:
    from transformers import TrainerCallback
    from transformers.trainer_callback import ExportableState
except ImportError as error:
    raise ImportError(
        "ampopt.integrations.transformers needs transformers and Accelerate: "
        "python -m pip install transformers accelerate"
    ) from error

from ampopt.grad_scaler.scaler import GradScaler
from ampopt.integrations.accelerate import unwrapped, use_scaler
from ampopt.integrations.step_record import StepRecord
from ampopt.scheduler_gate import LRSchedulerGate, lr_scheduler_gate

__all__ = ["StepMonitor", "prepare"]


def prepare(trainer: Any, scaler: Any = None) -> Any:
    """Make a ``Trainer`` scale with ``scaler``, gate its scheduler, and log skipped steps.

    Call it before ``train()``, with any subclass of ``Trainer``, such as those of trl::

        trainer = Trainer(model, args, optimizer_cls_and_kwargs=(ampopt.AdamW, {"lr": 1e-4}))
        scaler = prepare(trainer)
        trainer.train()

    The scheduler, whether the trainer makes it or you passed it, advances only after steps that
    were applied; see :func:`ampopt.lr_scheduler_gate`. Every reporter gets the numbers of
    :class:`StepMonitor`. If the optimizer keeps master weights of float16 or bfloat16 parameters,
    ``max_grad_norm`` clips the gradients of the master weights, and the logged ``grad_norm`` is the
    norm of those gradients.

    Args:
        trainer: a ``Trainer`` that has not started to train.
        scaler: an :class:`ampopt.GradScaler`. ``None`` makes one: with the default schedule if
            ``fp16=True`` or if the model has float16 parameters, else with a scale of 1.0, which
            scales nothing and skips overflows.

    Returns:
        The scaler. ``scaler.skipped`` says whether the last step was skipped.

    Raises:
        RuntimeError: the trainer has already prepared an optimizer.
    """
    if scaler is None and any(p.dtype == torch.float16 for p in trainer.model.parameters()):
        scaler = GradScaler(trainer.accelerator.device.type)
    scaler = use_scaler(trainer.accelerator, scaler)
    create_scheduler = trainer.create_scheduler

    def create_gated(*args: Any, **kwargs: Any) -> Any:
        scheduler = create_scheduler(*args, **kwargs)
        if not isinstance(scheduler, LRSchedulerGate):
            scheduler = trainer.lr_scheduler = lr_scheduler_gate(scheduler)
        return scheduler

    trainer.create_scheduler = create_gated
    # If this is true, the Trainer clips by a method of its own, for parameters on several device
    # meshes, which does not unscale. Accelerate's method does, and clips these, too.
    trainer._mixed_mesh_grads = False
    # First in the list, so that the callbacks after it get the numbers that it adds to a log.
    trainer.callback_handler.callbacks.insert(0, StepMonitor())
    return scaler


class StepMonitor(TrainerCallback, ExportableState):  # pyright: ignore[reportGeneralTypeIssues]
    """Callback that adds loss scale, skipped steps and gradient norm to what the ``Trainer`` logs.

    The names are ``ampopt/scale``, ``ampopt/skipped``, ``ampopt/skips`` and ``ampopt/steps``, and
    for an optimizer with an :class:`ampopt.Watch` also the watch's numbers; see
    :meth:`ampopt.integrations.StepRecord.numbers`. The ``Trainer`` logs ``grad_norm`` itself.
    :func:`prepare` puts this callback before all others. Do not pass it in ``callbacks=`` of a
    ``Trainer``: it would run after the callbacks that report to TensorBoard and the like, which
    would miss its numbers. Synchronizes at each log, as the ``Trainer`` does.

    The ``Trainer`` saves the counts, and the statistics of the watch on rank 0, in its checkpoints.
    A run that is resumed continues them.

    Attributes:
        saved: what the ``Trainer`` saved of this callback, as JSON; ``None`` before it did.
    """

    def __init__(self) -> None:
        """Start without a record; ``on_train_begin`` makes it."""
        self.saved: str | None = None
        self._record: StepRecord | None = None

    def state(self) -> dict[str, Any]:
        """The state that the ``Trainer`` saves. Synchronizes."""
        if self._record is not None:
            self.saved = json.dumps(self._record.state_dict())  # compact, in an indented file
        return {"args": {}, "attributes": {"saved": self.saved}}

    def on_train_begin(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Start counting the steps of the optimizer, or continue the counts of a checkpoint."""
        if optimizer is not None:
            scaler = getattr(optimizer, "scaler", None)
            self._record = StepRecord(unwrapped(optimizer), scaler)
            # A checkpoint from before this callback has no entry, which the Trainer needs to save.
            entry = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
            entry = entry[0] if isinstance(entry, list) else entry
            record_json = entry["attributes"]["saved"]
            if record_json is not None:
                self._record.load_state_dict(json.loads(record_json))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add the current numbers to the log."""
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
