"""Counts of an optimizer's steps and skips, kept on the device, to be logged."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ampopt._warnings import warn_user

__all__ = ["StepRecord"]


class StepRecord:
    """Counts the steps of an optimizer and how many were skipped, without synchronizing.

    A step post-hook counts the attempts, whether the optimizer's own methods or a scaler make
    them. If a scaler skips on the host, as torch's does for most of torch's optimizers, the hook
    does not run, and the skipped step is not counted.

    If the optimizer already has an :class:`ampopt.Watch`, all numbers but the counts are those that
    the watch would log, for the last step whose statistics have arrived on the host.

    Example:
        >>> record = StepRecord(optimizer, scaler)
        >>> for batch in batches:
        ...     train_on(batch)
        >>> record.read()
        {'scale': 1024.0, 'skipped': 0.0, 'skips': 6.0, 'steps': 100.0}
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: Any = None) -> None:
        """Start counting.

        Args:
            optimizer: the optimizer, not a wrapper around it, whose hooks would not be called.
            scaler: the ``GradScaler`` that steps the optimizer, torch's or ampopt's; ``None`` if
                there is none.
        """
        self._scaler = scaler
        self._steps = 0
        self._last: dict[str, Tensor] = {}
        self._watch_numbers: dict[str, float] = {}
        self._hooks = [optimizer.register_step_post_hook(self._note)]
        ours = getattr(optimizer, "_ampopt", None)
        self._watch = None if ours is None else ours.observers.watch
        if self._watch is not None:
            self._hooks.append(self._watch.log_to(self._store))

    def numbers(self) -> dict[str, float | Tensor]:
        """The numbers to log now. Does not synchronize: tensors are 0-d, on the device.

        Returns:
            ``steps``, the number of attempts; ``skips``, how many of them were skipped;
            ``skipped``, 1 if the last attempt was skipped, else 0; ``scale``, the scaler's scale
            for the next loss; ``norm``, the optimizer's ``grad_norm``. ``scale`` and ``norm`` are
            missing if there is none, and ``skips``, ``skipped`` and ``norm`` before the first
            attempt. With a watch there is also ``skips_in_a_row``; ``scale`` is then that of the
            step, and ``norm`` is present without clipping, too.
        """
        numbers: dict[str, float | Tensor] = {"steps": float(self._steps), **self._last}
        scale = _scale_of(self._scaler)
        if scale is not None:
            numbers["scale"] = scale
        return {**numbers, **self._watch_numbers}

    def read(self) -> dict[str, float]:
        """Return :meth:`numbers` as Python numbers, sorted by name. Synchronizes."""
        return {name: float(number) for name, number in sorted(self.numbers().items())}

    def state_dict(self) -> dict[str, Any]:
        """The counts, and the statistics of the watch, if there is one. Synchronizes."""
        skips = self._last.get("skips")
        return {
            "steps": self._steps,
            "skips": None if skips is None else skips.item(),
            "watch": None if self._watch is None else self._watch.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue the counts of a saved record, and the statistics of its watch.

        Warns, and loads the counts alone, if the saved watch was over other parameters.

        Args:
            state_dict: what :meth:`state_dict` returned.
        """
        self._steps, skips = state_dict["steps"], state_dict["skips"]
        self._last = {} if skips is None else {"skips": torch.tensor(float(skips))}
        if self._watch is not None and state_dict["watch"] is not None:
            try:
                self._watch.load_state_dict(state_dict["watch"])
            except ValueError as error:
                warn_user(f"the watch starts from zero: {error}", RuntimeWarning)

    def remove(self) -> None:
        """Stop counting, and remove the hook from the optimizer."""
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def _note(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Count one attempt; a step post-hook."""
        ours = getattr(optimizer, "_ampopt", None)
        if ours is not None and ours.is_stepping:
            return
        self._steps += 1
        flag = getattr(optimizer, "found_inf", None)
        skips = self._last.get("skips", torch.zeros(()))
        # Torch's scaler sets the number 0 if nothing has a gradient.
        is_known = isinstance(flag, Tensor)
        skipped = (flag.detach().reshape(()) > 0).float() if is_known else torch.zeros_like(skips)
        # At first, and after loading, the counts are on the CPU.
        self._last = {"skips": skips.to(skipped.device) + skipped, "skipped": skipped}
        norm = getattr(optimizer, "grad_norm", None)
        if isinstance(norm, Tensor):
            self._last["norm"] = norm

    def _store(self, numbers: dict[str, Any]) -> None:
        """Store the numbers that a watch logs for a step, without its counts: it may be newer."""
        others = numbers.keys() - {"step", "skips"}
        self._watch_numbers = {name: float(numbers[name]) for name in others}


def _scale_of(scaler: Any) -> Tensor | None:
    """The scale on the device; ``None`` until torch's scaler has scaled something."""
    loss_scale = getattr(scaler, "loss_scale", None)
    if loss_scale is not None:
        return loss_scale.value
    return getattr(scaler, "_scale", None)
