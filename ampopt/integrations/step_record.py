"""What became of an optimizer's steps, gathered on the device, for whoever logs it."""

from typing import Any

import torch
from torch import Tensor

__all__ = ["StepRecord"]


class StepRecord:
    """Counts the steps of an optimizer and those that were skipped, and waits for none of them.

    It learns of each attempt by a step hook, whoever makes it: the optimizer's own control points,
    or a scaler. Of an optimizer that a scaler skips on the host, as torch's skips most of torch's,
    it hears nothing where a step is skipped.

    Where the optimizer is watched by then (see :class:`ampopt.Watch`), the numbers are those that
    the watch would log, of the last step that is here.

    Example:
        >>> record = StepRecord(optimizer, scaler)
        >>> for batch in batches:
        ...     train_on(batch)
        >>> record.read()
        {'scale': 1024.0, 'skipped': 0.0, 'skips': 6.0, 'steps': 100.0}
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: Any = None) -> None:
        """Begin to count.

        Args:
            optimizer: whose steps are counted; not a wrapper, whose hooks are not called.
            scaler: the ``GradScaler`` that steps it, torch's or ours; ``None`` if none does.
        """
        self._scaler = scaler
        self._steps = 0
        self._skips: Tensor | None = None
        self._last: dict[str, Tensor] = {}
        self._told: dict[str, float] = {}  # by a watch
        self._hooks = [optimizer.register_step_post_hook(self._note)]
        watch = getattr(getattr(optimizer, "_ampopt", None), "watch", None)
        if watch is not None:
            self._hooks.append(watch.log_to(self._learn))

    def numbers(self) -> dict[str, float | Tensor]:
        """What there is to log now. Does not synchronize: tensors are 0-d, on the device.

        Returns:
            ``steps``, all attempts; ``skips``, how many of them were skipped; ``skipped``, 1 if the
            last one was, else 0; ``scale``, the scaler's, for the next loss; ``norm``, the
            optimizer's ``grad_norm``. The last two only where there is one, and what is known of
            attempts only after one. Of a watch also ``skips_in_a_row``; its ``scale`` is that of
            the step, and its ``norm`` is there without clipping, too.
        """
        found: dict[str, float | Tensor] = {"steps": float(self._steps), **self._last}
        if self._skips is not None:
            found["skips"] = self._skips.clone()  # which goes on counting in place
        scale = _scale_of(self._scaler)
        if scale is not None:
            found["scale"] = scale
        return {**found, **self._told}

    def read(self) -> dict[str, float]:
        """:meth:`numbers` as Python numbers, by name in alphabetical order. Synchronizes."""
        return {name: float(number) for name, number in sorted(self.numbers().items())}

    def remove(self) -> None:
        """Stop counting: the hook leaves the optimizer."""
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def _note(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """A step hook: an attempt was made."""
        self._steps += 1
        flag = getattr(optimizer, "found_inf", None)
        skipped = torch.zeros(()) if flag is None else (flag.detach().reshape(()) > 0).float()
        if self._skips is None:
            self._skips = torch.zeros_like(skipped)
        self._skips += skipped.to(self._skips.device)
        self._last = {"skipped": skipped}
        norm = getattr(optimizer, "grad_norm", None)
        if isinstance(norm, Tensor):
            self._last["norm"] = norm

    def _learn(self, told: dict[str, Any]) -> None:
        """What a watch logs of a step."""
        self._told = {name: float(number) for name, number in told.items()}
        self._told["steps"] = self._told.pop("step")


def _scale_of(scaler: Any) -> Tensor | None:
    """The scale on the device; of torch's scaler only once it has scaled something."""
    loss_scale = getattr(scaler, "loss_scale", None)
    if loss_scale is not None:
        return loss_scale.value
    return getattr(scaler, "_scale", None)
