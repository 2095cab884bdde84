"""A learning-rate scheduler that does not advance for skipped steps, without synchronizing."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from ampopt._argument_checks import check_count
from ampopt_kernels.devices import copied_together

__all__ = ["DELAY", "LRSchedulerGate", "lr_scheduler_gate"]

DELAY = 8
"""How many calls later a gate reads, on an accelerator, whether a step was skipped."""

_STATE = "lr_scheduler_gate"
"""The key of the gate's entries in the state dict of its scheduler."""


def lr_scheduler_gate(scheduler: LRScheduler, *, delay: int | None = None) -> "LRSchedulerGate":
    """Make ``scheduler`` advance only for optimizer steps that were not skipped.

    Use the gate in the place of the scheduler, after each call that steps or skips, with the
    arguments that the scheduler takes::

        gate = lr_scheduler_gate(CosineAnnealingLR(optimizer, T_max=10_000))
        for batch in batches:
            optimizer.zero_grad()
            scale_outputs(loss_of(batch), scale).backward()
            _, _, scale = optimizer.unscale_and_step(grads_scaled_by=scale)
            gate.step()

    ``gate.step()`` advances the scheduler if at least one step since its last call was applied; it
    may also be called once an epoch. Without any step since then it does nothing. A step hook
    records every step, whoever makes it: a control point, a ``GradScaler`` of torch or of ampopt,
    or a plain ``step()``. The optimizer may be of any class, and have several gates.

    **Delay.** On the CPU the gate knows at once whether a step was skipped. On an accelerator the
    host would have to wait for the device to know. So the gate assumes that the step was not
    skipped, and reads the flag ``delay`` calls later, from a copy that was made meanwhile. If the
    step was skipped, that call does not advance the scheduler. Until then, for ``delay`` steps
    after a skip, the learning rate is one step ahead in the schedule. This delay is always the
    same, so a run can be repeated. The host then runs at most ``delay`` steps ahead of the device.

    Args:
        scheduler: a scheduler of torch, or of your own.
        delay: how many calls later the gate reads whether a step was skipped; 0 to wait for the
            device, ``None`` for 0 on the CPU and 8 elsewhere.

    Returns:
        The gate: an ``LRScheduler`` with the attributes of ``scheduler``.

    Raises:
        TypeError: ``scheduler`` is not a scheduler of a torch optimizer, or ``delay`` not an
            ``int``.
        ValueError: ``delay`` is negative.
    """
    return LRSchedulerGate(scheduler, delay=delay)


class LRSchedulerGate(LRScheduler):
    """A scheduler that calls another one, except for skipped steps; see :func:`lr_scheduler_gate`.

    Attributes:
        scheduler: the scheduler that the gate advances.
    """

    _own = frozenset({"scheduler", "_delay", "_attempts", "_outcomes", "_ahead", "_hook"})
    """Names of the gate's attributes; all others are the scheduler's."""

    def __init__(self, scheduler: LRScheduler, *, delay: int | None = None) -> None:
        """Put a gate before ``scheduler``; see :func:`lr_scheduler_gate`."""
        # Without super().__init__(): `scheduler` has the attributes that it would set; see
        # __getattr__.
        optimizer = getattr(scheduler, "optimizer", None)
        if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(
            scheduler, LRSchedulerGate
        ):
            raise TypeError(
                "scheduler must be a learning-rate scheduler of a torch optimizer, got "
                f"{type(scheduler).__name__}"
            )
        self.scheduler = scheduler
        self._delay = None if delay is None else check_count("delay", delay, least=0)
        self._attempts: list[Tensor | None] = []
        self._outcomes: deque[_AllSkipped] = deque()
        self._ahead = 0
        self._attach()

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the scheduler if a step since the last call was not skipped.

        Does not wait for the last steps on the device, unless ``delay`` is 0.

        Args:
            args: positional arguments of the scheduler's ``step``, such as the metric of
                ``ReduceLROnPlateau``.
            kwargs: keyword arguments of the scheduler's ``step``.
        """
        attempts, self._attempts = self._attempts, []
        if self._advances(attempts):
            self.scheduler.step(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's state, and by how many skipped steps it is ahead. Synchronizes.

        A checkpoint can be loaded with or without a gate.
        """
        state = self.scheduler.state_dict()
        if not (self._outcomes or self._ahead):
            return state
        return {**state, _STATE: {"unknown": self._skips(), "ahead": self._ahead}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of the gate, or of the scheduler alone.

        Raises:
            TypeError: ``state_dict`` is not a dict.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"state_dict must be a dict, got {type(state_dict).__name__}")
        own = state_dict.get(_STATE, {"unknown": [], "ahead": 0})
        self.scheduler.load_state_dict({k: v for k, v in state_dict.items() if k != _STATE})
        self._attempts = []
        self._ahead = own["ahead"]
        self._outcomes = deque(map(_AllSkipped, own["unknown"]))

    def get_last_lr(self) -> list[float | Tensor]:
        """The learning rates in use; after a skip, see the delay of :func:`lr_scheduler_gate`."""
        return self.scheduler.get_last_lr()

    def get_lr(self) -> list[float | Tensor]:
        """The learning rates that the scheduler computes; see ``LRScheduler.get_lr``."""
        return self.scheduler.get_lr()

    def detach(self) -> LRScheduler:
        """Remove the gate's hook from the optimizer, to use the scheduler without the gate.

        Returns:
            The scheduler.
        """
        self._hook.remove()
        return self.scheduler

    def __getstate__(self) -> dict[str, Any]:
        """The state to copy or pickle, without the hook, as optimizers do. Synchronizes."""
        attempts, outcomes = [*self._attempts], deque(map(_AllSkipped, self._skips()))
        return {**vars(self), "_attempts": attempts, "_outcomes": outcomes, "_hook": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Support copying and pickling."""
        vars(self).update(state)
        self._attach()

    def __getattr__(self, name: str) -> Any:
        """An attribute of the scheduler, if the gate has none of that name."""
        if name == "scheduler":  # not set yet: its lookup would come here again, without end
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the gate, or, if the gate has none of that name, of the scheduler."""
        if name in self._own:
            super().__setattr__(name, value)
        else:
            setattr(self.scheduler, name, value)

    def _attach(self) -> None:
        """Register the step hook that records every step."""
        optimizer: Any = self.scheduler.optimizer
        while isinstance(inner := vars(optimizer).get("optimizer"), torch.optim.Optimizer):
            optimizer = inner  # of a wrapper, such as Accelerate's, the hooks are not called
        self._hook = optimizer.register_step_post_hook(self._note)

    def _skips(self) -> list[bool]:
        """Whether the steps of each call that is not decided yet were skipped. Synchronizes."""
        return [outcome.skipped() for outcome in self._outcomes]

    def _advances(self, attempts: list[Tensor | None]) -> bool:
        """Whether to advance the scheduler now; ``attempts`` are the flags since the last call."""
        if not attempts:
            return False
        self._outcomes.append(_outcome(attempts))
        delay = self._delay
        if delay is None:
            delay = DELAY if any(outcome.is_late for outcome in self._outcomes) else 0
        while len(self._outcomes) > delay:
            self._ahead += self._outcomes.popleft().skipped()
        if self._ahead:
            self._ahead -= 1
            return False
        return True

    def _note(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """A step hook: append the flag of this step to the attempts."""
        # A fused optimizer of torch has this attribute while a scaler steps it.
        flag = getattr(optimizer, "found_inf", None)
        self._attempts.append(flag if isinstance(flag, Tensor) else None)


class _AllSkipped(NamedTuple):
    """Whether all steps between two calls of a gate were skipped.

    Attributes:
        skip: more than 0 if all were skipped; valid after ``events``.
        events: the events after which the copy to the host is complete.
        is_late: whether reading ``skip`` may make the host wait for a device.
    """

    skip: Any
    events: Sequence[Any] = ()
    is_late: bool = False

    def skipped(self) -> bool:
        """Whether all steps were skipped. Waits for the copy to the host."""
        for event in self.events:
            event.synchronize()
        return bool(self.skip > 0)


def _outcome(attempts: list[Tensor | None]) -> _AllSkipped:
    """The outcome of steps with these flags; a flag is ``None`` if the step was surely applied."""
    flags = [flag for flag in attempts if flag is not None]
    if len(flags) < len(attempts):
        return _AllSkipped(False)
    flag = torch.stack([flag.reshape(()).to(flags[0]) for flag in flags]).amin()
    (skip,), events = copied_together([flag])
    return _AllSkipped(skip, events, not flag.is_cpu)
