"""For Lightning's ``Trainer``: a precision plugin, and a callback that logs skips and the scale."""

# pyright: reportMissingImports=false

from collections.abc import Callable, Iterator
from typing import Any

import torch

try:
    from lightning.fabric.utilities.exceptions import MisconfigurationException
    from lightning.pytorch import Callback
    from lightning.pytorch.plugins import precision as plugins
except ImportError as error:
    raise ImportError(
        "ampopt.integrations.lightning needs Lightning: python -m pip install lightning"
    ) from error

from ampopt._argument_checks import check_bool
from ampopt.grad_scaler.scaler import GradScaler
from ampopt.integrations.step_record import StepRecord
from ampopt.loss_scale.static import StaticLossScale
from ampopt.optimizer import Optimizer

__all__ = ["MixedPrecision", "StepMonitor"]


class MixedPrecision(plugins.MixedPrecision):
    """Lightning's ``MixedPrecision`` plugin for optimizers that skip overflows themselves.

    Lightning's own plugin also trains ampopt's optimizers, but refuses to clip their gradients.
    This plugin unscales first, so that clipping and ``on_before_optimizer_step`` get unscaled
    gradients::

        trainer = Trainer(plugins=[MixedPrecision("16-mixed", "cuda")], gradient_clip_val=1.0)

    Differs from Lightning: bfloat16 has a scaler too, with a scale of 1.0, so that overflowed steps
    are skipped; with ``master_weights=True`` the gradients of the master weights are clipped; and a
    batch that overflows can be run again.

    Attributes:
        grad_norm: norm of the unscaled gradients before the last clipping by norm, a 0-d tensor on
            the device; ``None`` before the first.
    """

    def __init__(
        self,
        precision: Any = "16-mixed",
        device: str = "cuda",
        scaler: Any = None,
        *,
        replay: bool = False,
    ) -> None:
        """Make the plugin.

        Args:
            precision: ``"16-mixed"`` or ``"bf16-mixed"``.
            device: type of the device to train on.
            scaler: an :class:`ampopt.GradScaler` or torch's. ``None`` makes one of ampopt's: with
                the default schedule, or for bfloat16 with ``StaticLossScale(1.0)``.
            replay: whether to run a batch again with a smaller scale while its gradients overflow,
                so that no batch is lost. This also trains LBFGS, which Lightning refuses. Needs a
                scaler and optimizers of ampopt. Clips by norm only. Hooks before the step are not
                called, because the gradients are unscaled only within the step. A non-finite loss
                raises :class:`ampopt.NonFiniteGradientError`.
        """
        if scaler is None:
            fixed = StaticLossScale(1.0) if precision == "bf16-mixed" else None
            scaler = GradScaler(device, loss_scale=fixed)
        if check_bool("replay", replay) and not isinstance(scaler, GradScaler):
            raise MisconfigurationException(
                f"replay=True needs an ampopt.GradScaler, got {type(scaler).__name__}"
            )
        # Lightning's constructor refuses a scaler for bfloat16, so it is set afterwards.
        super().__init__(precision, device, None if precision == "bf16-mixed" else scaler)
        self.scaler: Any = scaler
        self.replay = replay
        self.grad_norm: torch.Tensor | None = None

    def optimizer_step(
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run the closure, unscale, clip, and step or skip. Synchronizes only to replay."""
        if self.replay and model.automatic_optimization:
            result = self.scaler.step(optimizer, closure, **_clipping(model.trainer), **kwargs)
        else:
            loss = closure()
            if loss is None and model.automatic_optimization:
                return None  # training_step returned None: Lightning's way to skip a batch
            self.scaler.unscale_(optimizer)
            self._after_closure(model, optimizer)  # clips
            result = self.scaler.step(optimizer, **kwargs)
        self.scaler.update()
        return result

    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        """Clip the unscaled gradients, by value or by norm."""
        plugins.Precision.clip_gradients(self, *args, **kwargs)

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """Clip as Lightning does, and record the norm in :attr:`grad_norm`."""
        parameters = self.main_params(optimizer)
        self.grad_norm = torch.nn.utils.clip_grad_norm_(parameters, clip_val)

    def main_params(self, optimizer: Any) -> Iterator[Any]:
        """The tensors whose gradients are unscaled: master weights where they exist."""
        if isinstance(optimizer, Optimizer):
            return optimizer.master_params()
        return super().main_params(optimizer)


class StepMonitor(Callback):
    """Callback that logs loss scale, skipped steps and gradient norm by the module's ``log_dict``.

    The names are ``ampopt/scale``, ``ampopt/skipped``, ``ampopt/skips``, ``ampopt/steps`` and, if
    gradients are clipped by norm, ``ampopt/norm``; see
    :meth:`ampopt.integrations.StepRecord.numbers`. With several optimizers they are
    ``ampopt/0/scale`` and so on. The values stay on the device until the logger writes them. If
    ``configure_optimizers`` made an :class:`ampopt.Watch` for an optimizer, the watch's numbers are
    logged for it. Checkpoints hold the counts, and the statistics of the watch on rank 0; a run
    that is resumed continues them.
    """

    def __init__(self) -> None:
        """Start without records; ``on_fit_start`` makes one for each optimizer."""
        self._records: list[StepRecord] = []
        self._loaded_states: list[dict[str, Any]] = []
        self._final_state: dict[str, Any] = {"records": []}

    def state_dict(self) -> dict[str, Any]:
        """The counts of each optimizer, for a checkpoint. Synchronizes."""
        if not self._records:
            return self._final_state
        return {"records": [record.state_dict() for record in self._records]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Have ``on_fit_start`` continue these counts."""
        self._loaded_states = state_dict["records"]

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Start counting the steps of the trainer's optimizers."""
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self._records = [StepRecord(optimizer, scaler) for optimizer in trainer.optimizers]
        for record, state in zip(self._records, self._loaded_states, strict=False):
            record.load_state_dict(state)
        self._loaded_states = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        """Log the current numbers."""
        several = len(self._records) > 1
        for i, record in enumerate(self._records):
            numbers = record.numbers()
            norm = getattr(trainer.precision_plugin, "grad_norm", None)
            if norm is not None and not several:
                numbers.setdefault("norm", norm)
            prefix = f"ampopt/{i}/" if several else "ampopt/"
            pl_module.log_dict({prefix + name: number for name, number in numbers.items()})

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Stop counting. A checkpoint that is saved afterwards has the counts, too."""
        self._final_state = self.state_dict()
        for record in self._records:
            record.remove()
        self._records = []


def _clipping(trainer: Any) -> dict[str, float]:
    """The trainer's clipping settings as keyword arguments of ``scaler.step``."""
    if not trainer.gradient_clip_val:
        return {}
    if trainer.gradient_clip_algorithm not in (None, "norm"):
        raise MisconfigurationException(
            f"replay=True clips by norm, not by {trainer.gradient_clip_algorithm.value!r}: choose "
            "gradient_clip_algorithm='norm' or replay=False"
        )
    return {"max_norm": float(trainer.gradient_clip_val)}
