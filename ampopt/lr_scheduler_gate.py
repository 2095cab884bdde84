"""A learning-rate scheduler that advances for steps that happened, and waits for none of them."""

import copy
from collections import deque
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

__all__ = ["DELAY", "LRSchedulerGate", "lr_scheduler_gate"]

DELAY = 8
"""Calls after which a gate learns, on an accelerator, whether a step happened."""


def lr_scheduler_gate(scheduler: LRScheduler, *, delay: int | None = None) -> "LRSchedulerGate":
    """Make ``scheduler`` advance only for optimizer steps that happened.

    A skipped step is one that the schedule should not count. Use the gate where the scheduler
    was used, after each attempt at a step, with the arguments that the scheduler takes::

        gate = lr_scheduler_gate(CosineAnnealingLR(optimizer, T_max=10_000))
        for batch in batches:
            optimizer.zero_grad()
            scale_outputs(loss_of(batch), scale).backward()
            _, _, scale = optimizer.unscale_and_step(grads_scaled_by=scale)
            gate.step()

    ``gate.step()`` advances the scheduler if a step happened since the call before: one is enough
    where it is called once an epoch, and without any attempt it does nothing. It knows of every
    attempt by a step hook, whoever makes it: the optimizer's own control points, a GradScaler of
    torch's or ours, or a plain ``step()``. Any optimizer will do.

    **Delay.** On the CPU it is exact at once. On an accelerator the host would have to wait for
    the device to learn whether a step was skipped. So the gate takes it that it was not, and
    learns the truth ``delay`` calls later, from a copy that was made meanwhile; if the step was
    skipped, the scheduler goes back to where it was before and repeats the calls that came after.
    Until then, that is for ``delay`` steps after a skip, learning rates are those of one step
    further on in the schedule. When this happens depends on nothing but ``delay``, so a run can be
    repeated. The host then runs ahead of the device by no more than ``delay`` steps.

    Args:
        scheduler: any of torch's, or of your own with ``state_dict`` and ``load_state_dict``.
        delay: calls after which the gate learns what happened; 0 to wait for it, ``None`` for 0 on
            the CPU and 8 elsewhere.

    Returns:
        The gate: an ``LRScheduler`` with the attributes of ``scheduler``.

    Raises:
        TypeError: ``scheduler`` is not a scheduler of a torch optimizer.
        ValueError: ``delay`` is not a whole number, 0 or more.
    """
    return LRSchedulerGate(scheduler, delay=delay)


class LRSchedulerGate(LRScheduler):
    """What :func:`lr_scheduler_gate` returns.

    Attributes:
        scheduler: behind the gate.
    """

    def __init__(self, scheduler: LRScheduler, *, delay: int | None = None) -> None:
        """Put a gate before ``scheduler``; see :func:`lr_scheduler_gate`."""
        # What LRScheduler.__init__ sets, the scheduler has: see __getattr__.
        optimizer = getattr(scheduler, "optimizer", None)
        if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(scheduler, type(self)):
            raise TypeError(
                "scheduler must be a learning-rate scheduler of a torch optimizer, got "
                f"{type(scheduler).__name__}"
            )
        if delay is not None and (
            isinstance(delay, bool) or not isinstance(delay, int) or delay < 0
        ):
            raise ValueError(f"delay must be a whole number, 0 or more, or None, got {delay!r}")
        self.scheduler = scheduler
        self._delay = delay
        self._attempts: list[Tensor | None] = []
        self._unsettled: deque[_Advance] = deque()
        self._hooks = (
            optimizer.register_step_post_hook(self._note),
            optimizer.register_state_dict_pre_hook(self._settle_for),
        )

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the scheduler if a step happened since the last call.

        Does not wait for the steps just attempted, unless ``delay`` is 0.

        Args:
            args: what the scheduler's ``step`` takes, as ``ReduceLROnPlateau`` takes a metric.
            kwargs: likewise.
        """
        attempts, self._attempts = self._attempts, []
        if not attempts:
            return
        flags = [flag for flag in attempts if flag is not None]
        skip = None if len(flags) < len(attempts) else _least(flags)
        delay = self._delay
        if delay is None:
            delay = 0 if skip is None or skip.device.type == "cpu" else DELAY
        if delay == 0 and not self._unsettled:
            if skip is None or not bool(skip > 0):
                self.scheduler.step(*args, **kwargs)
            return
        self._unsettled.append(_Advance(self.scheduler, skip, args, kwargs))
        while len(self._unsettled) > delay:
            self._settle_oldest()

    def settle(self) -> None:
        """Learn what has happened up to now, and correct the scheduler. Synchronizes."""
        while self._unsettled:
            self._settle_oldest()

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's own, settled. Synchronizes.

        The optimizer's ``state_dict()`` settles it, too, so that the two agree. A checkpoint can be
        loaded with or without a gate.
        """
        self.settle()
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of the scheduler, and forget what was not settled yet."""
        self._attempts = []
        self._unsettled.clear()
        self.scheduler.load_state_dict(state_dict)

    def get_last_lr(self) -> list[float | Tensor]:
        """The learning rates in use; after a skip, see the delay of :func:`lr_scheduler_gate`."""
        return self.scheduler.get_last_lr()

    def get_lr(self) -> list[float | Tensor]:
        """See the scheduler's."""
        return self.scheduler.get_lr()

    def detach(self) -> LRScheduler:
        """Take the gate away, settled: its hooks leave the optimizer. Synchronizes.

        Returns:
            The scheduler.
        """
        self.settle()
        for hook in self._hooks:
            hook.remove()
        return self.scheduler

    def __getattr__(self, name: str) -> Any:
        """What a gate has not, its scheduler has."""
        if name == "scheduler":  # not there yet, as while it is being unpickled
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def _note(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """A step hook: remember the flag of this attempt."""
        # While a scaler steps an optimizer that skips by itself, this is its flag.
        flag = vars(optimizer).get("found_inf")
        if not isinstance(flag, Tensor):
            flag = getattr(optimizer, "_skip_flag", None)
        self._attempts.append(flag)

    def _settle_for(self, optimizer: Any) -> None:
        self.settle()

    def _settle_oldest(self) -> None:
        oldest = self._unsettled.popleft()
        if oldest.skipped():
            oldest.undo()
            for later in self._unsettled:
                later.repeat()


class _Advance:
    """A scheduler's step that may have to be undone."""

    def __init__(self, scheduler: Any, skip: Tensor | None, args: Any, kwargs: Any) -> None:
        self._scheduler, self._args, self._kwargs = scheduler, args, kwargs
        self._skip, self._arrived = _on_its_way(skip)
        self.repeat()

    def repeat(self) -> None:
        """Take the scheduler's step, from where the scheduler is now."""
        groups = self._scheduler.optimizer.param_groups
        self._state = copy.deepcopy(self._scheduler.state_dict())
        before = [dict(group) for group in groups]
        # A learning rate that is a tensor is changed in place.
        self._tensors = [
            (value, value.clone())
            for group in groups
            for value in group.values()
            if isinstance(value, Tensor)
        ]
        self._scheduler.step(*self._args, **self._kwargs)
        self._numbers = [
            (group, {k: v for k, v in old.items() if group.get(k) is not v})
            for group, old in zip(groups, before, strict=True)
        ]

    def undo(self) -> None:
        """Put the scheduler, and what it has set in the param groups, where they were."""
        self._scheduler.load_state_dict(self._state)
        for tensor, value in self._tensors:
            tensor.copy_(value)
        for group, entries in self._numbers:
            group.update(entries)

    def skipped(self) -> bool:
        """Whether the optimizer's step was skipped. Waits until the device has said so."""
        if self._skip is None:
            return False
        if self._arrived is not None:
            self._arrived.synchronize()
        return bool(self._skip > 0)


def _least(flags: list[Tensor]) -> Tensor:
    if len(flags) == 1:
        return flags[0]
    return torch.stack([flag.reshape(()).to(flags[0]) for flag in flags]).amin()


def _on_its_way(flag: Tensor | None) -> tuple[Tensor | None, Any]:
    """A copy of ``flag`` in the host's memory, and the event after which it is there.

    The flag itself, where there is no event to wait for.
    """
    if flag is None or flag.device.type == "cpu":
        return flag, None
    module = getattr(torch, flag.device.type, None)
    if not (hasattr(module, "Event") and hasattr(module, "current_stream")):
        return flag, None
    assert module is not None
    host = torch.empty((), dtype=flag.dtype, pin_memory=True)
    host.copy_(flag.reshape(()), non_blocking=True)
    event = module.Event()
    event.record(module.current_stream(flag.device))
    return host, event
