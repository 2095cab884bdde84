"""What users attach to the steps of an optimizer: a ``Watch``, and ``skip_when`` conditions."""

import numbers
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ampopt._step import ranks
from ampopt._step.descriptors import RefersToOptimizer
from ampopt_kernels.step_data import Decision, Request

__all__ = ["Observers", "as_loss"]


class Observers(RefersToOptimizer):
    """The watch and the skip conditions of one optimizer, and the loss that they read.

    Attributes:
        watch: the :class:`ampopt.Watch` that records statistics of the gradients, or ``None``.
        causes: further conditions that skip a step, each an :class:`ampopt.skip_when`.
        loss: the loss that the caller passed to the running control point; else ``None``.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Start without any. ``optimizer`` is stored as a weak reference."""
        super().__init__(optimizer)
        self.watch: Any = None
        self.causes: tuple[Any, ...] = ()
        self.loss: Tensor | None = None

    def extend(self, request: Request) -> Request:
        """Add to ``request`` what :attr:`watch` and :attr:`causes` need and do not have yet."""
        earlier = request.earlier_decision
        if self.watch is not None and not (earlier is not None and earlier.measured):
            request = replace(request, measure=True)
        if self.causes and request.check:
            new_causes = (cause for cause in self.causes if cause not in request.causes)
            request = replace(request, causes=(*request.causes, *new_causes))
            if any(cause.needs_loss for cause in self.causes):
                request = replace(request, loss=self._loss_for_causes())
        return request

    def _loss_for_causes(self) -> Tensor | None:
        """The loss of the step; ``None`` if other ranks supply theirs.

        Raises:
            RuntimeError: no process group is known, and this rank has no loss; or there are several
                ranks, and nothing says which of them train the same model.
        """
        if self.optimizer._ampopt.agreement() is None:
            if self.loss is None:
                raise RuntimeError(
                    "skip_when(loss=...) needs the loss of the step: call "
                    "optimizer.unscale_and_step(grads_scaled_by=scale, loss=loss), or use "
                    "ampopt.TrainStep. A step of several optimizers has no loss=, and skip_when "
                    "can limit only its norm"
                )
            if ranks.are_several():
                raise RuntimeError(
                    "skip_when(loss=...) tests the mean loss of all ranks that train one model, "
                    "but the optimizer does not know these ranks: give it process_group="
                    "torch.distributed.group.WORLD, and, under DistributedDataParallel, "
                    "replicated=True in its param groups. If each rank trains a model of its own, "
                    "give it a process_group that has this rank alone"
                )
        return self.loss

    @contextmanager
    def with_loss(self, loss: Any) -> Iterator[None]:
        """Context manager: :attr:`loss` is ``loss`` meanwhile; see :func:`as_loss`."""
        self.loss = as_loss(loss)
        try:
            yield
        finally:
            self.loss = None

    def discard(self, decision: Decision | None) -> None:
        """Tell :attr:`watch` that no step uses these gradients, since their closure runs again."""
        if self.watch is not None:
            self.watch._note_discarded(decision)


def as_loss(loss: Any, refusal: str = "loss must be a number or a tensor of one element") -> Tensor:
    """``loss`` as a tensor.

    Args:
        loss: a number, or a tensor of one element.
        refusal: the beginning of the message of the error.

    Raises:
        TypeError: ``loss`` is neither.
    """
    if isinstance(loss, numbers.Real):
        return torch.tensor(float(loss), device="cpu")
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        is_tensor = isinstance(loss, Tensor)
        got = f"a tensor of shape {tuple(loss.shape)}" if is_tensor else type(loss).__name__
        raise TypeError(f"{refusal}, got {got}")
    return loss
