"""A learning-rate scheduler that advances for steps that happened, and waits for none of them."""

from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

__all__ = ["DELAY", "LRSchedulerGate", "lr_scheduler_gate"]

DELAY = 8
"""Calls after which a gate learns, on an accelerator, whether a step happened."""

_STATE = "lr_scheduler_gate"
"""The key of a gate's own state among the scheduler's."""


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
    torch's or ours, or a plain ``step()``. Any optimizer will do, and one may have several gates.

    **Delay.** On the CPU it is exact at once. On an accelerator the host would have to wait for
    the device to learn whether a step was skipped. So the gate takes it that it was not, and
    learns the truth ``delay`` calls later, from a copy that was made meanwhile; if the step was
    skipped, that call does not advance the scheduler. Until then, that is for ``delay`` steps after
    a skip, learning rates are those of one step further on in the schedule. When this happens
    depends on nothing but ``delay``, so a run can be repeated. The host then runs ahead of the
    device by no more than ``delay`` steps.

    Args:
        scheduler: any of torch's, or of your own.
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
        self._unknown: deque[_Outcome] = deque()
        self._ahead = 0
        while isinstance(inner := vars(optimizer).get("optimizer"), torch.optim.Optimizer):
            optimizer = inner  # a wrapper's, as Accelerate's: hooks are called of the one inside
        self._hook = optimizer.register_step_post_hook(self._note)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the scheduler if a step happened since the last call.

        Does not wait for the steps just attempted, unless ``delay`` is 0.

        Args:
            args: what the scheduler's ``step`` takes, as ``ReduceLROnPlateau`` takes a metric.
            kwargs: likewise.
        """
        attempts, self._attempts = self._attempts, []
        if self._advances(attempts):
            self.scheduler.step(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's own, and what the gate has yet to make up for. Synchronizes.

        A checkpoint can be loaded with or without a gate.
        """
        state = self.scheduler.state_dict()
        if not (self._unknown or self._ahead):
            return state
        unknown = [outcome.skipped() for outcome in self._unknown]
        return {**state, _STATE: {"unknown": unknown, "ahead": self._ahead}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of the gate, or of the scheduler alone.

        Raises:
            TypeError: ``state_dict`` is no dict.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"state_dict must be a dict, got {type(state_dict).__name__}")
        own = state_dict.get(_STATE, {"unknown": [], "ahead": 0})
        self.scheduler.load_state_dict({k: v for k, v in state_dict.items() if k != _STATE})
        self._attempts = []
        self._ahead = own["ahead"]
        self._unknown = deque(_Outcome(skip, None, False) for skip in own["unknown"])

    def get_last_lr(self) -> list[float | Tensor]:
        """The learning rates in use; after a skip, see the delay of :func:`lr_scheduler_gate`."""
        return self.scheduler.get_last_lr()

    def get_lr(self) -> list[float | Tensor]:
        """See the scheduler's."""
        return self.scheduler.get_lr()

    def detach(self) -> LRScheduler:
        """Take the gate away: its hook leaves the optimizer.

        Returns:
            The scheduler.
        """
        self._hook.remove()
        return self.scheduler

    def __getattr__(self, name: str) -> Any:
        """What a gate has not, its scheduler has."""
        if name == "scheduler":  # not there yet, as while it is being unpickled
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def _advances(self, attempts: list[Tensor | None]) -> bool:
        """Whether the scheduler is to advance now, after these attempts since the last call."""
        if not attempts:
            return False
        self._unknown.append(_outcome(attempts))
        delay = self._delay
        if delay is None:
            delay = DELAY if any(outcome.is_late for outcome in self._unknown) else 0
        while len(self._unknown) > delay:
            self._ahead += self._unknown.popleft().skipped()
        if self._ahead:
            self._ahead -= 1
            return False
        return True

    def _note(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """A step hook: remember the flag of this attempt."""
        # An optimizer of torch's has it while a scaler steps it and it skips by itself.
        flag = getattr(optimizer, "found_inf", None)
        self._attempts.append(flag if isinstance(flag, Tensor) else None)


class _Outcome(NamedTuple):
    """Whether any step happened between two calls of a gate.

    Attributes:
        skip: more than 0 if none did; in the host's memory after ``arrived``.
        arrived: an event of the device, if there is one.
        is_late: whether asking would have the host wait for a device.
    """

    skip: Tensor | bool
    arrived: Any
    is_late: bool

    def skipped(self) -> bool:
        """Wait until the device has said so."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return bool(self.skip > 0)


def _outcome(attempts: list[Tensor | None]) -> _Outcome:
    """Of attempts with these flags; ``None`` for one that was certainly not skipped."""
    flags = [flag for flag in attempts if flag is not None]
    if len(flags) < len(attempts):
        return _Outcome(False, None, False)
    flag = torch.stack([flag.reshape(()).to(flags[0]) for flag in flags]).amin()
    if flag.device.type == "cpu":
        return _Outcome(flag, None, False)
    module = torch.get_device_module(flag.device)
    if not (hasattr(module, "Event") and hasattr(module, "current_stream")):
        return _Outcome(flag, None, True)
    host = torch.empty((), dtype=flag.dtype, device="cpu", pin_memory=True)
    host.copy_(flag, non_blocking=True)
    event = module.Event()
    event.record(module.current_stream(flag.device))
    return _Outcome(host, event, True)
