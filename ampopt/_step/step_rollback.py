"""Skips any optimizer's step on the device: runs it, and rolls it back after an overflow.

All tensors that can be reached from the optimizer are copied before the step; afterwards an update
under the overflow flag keeps the new values or copies the old ones back. That is exact where the
step changes nothing but the contents of tensors. Where it changes anything else (a counter in
Python, the entries of its state, a random generator), the change is detected; then the host reads
the flag, which synchronizes, and restores that too.
"""

import logging
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from ampopt._step.python_state import PythonState
from ampopt._step.stale_memory import drop_in_collections
from ampopt._step.storage_copies import StorageCopies
from ampopt.backend import backend_for
from ampopt_kernels.devices import captures
from ampopt_kernels.step_data import Decision

__all__ = ["LARGE", "Mode", "SKIP_BY", "SkipPolicy", "skip_policy_of"]

Mode = Literal["host", "transaction"]

SKIP_BY = ("auto", "host", "transaction", "step")
"""The values of :attr:`ampopt.Optimizer.skip_by`."""

LARGE = 1 << 29
"""Bytes of tensors beyond which ``"auto"`` reads the flag: on a GPU, to copy more takes about as
long as the GPU waits for the CPU, or longer (see "A hand-written step" in ``kernels/RESULTS.md``).
"""
_TOO_LARGE = f"has more than {LARGE >> 20} MiB of tensors, and copies of them would take long"
_ON_CPU = "tensors in the host's memory"
_GROWTHS = 32
"""The number of steps that may add state: parameters can get their first gradients one by one."""

_log = logging.getLogger(__name__)


class SkipPolicy:
    """Decides how one optimizer's overflowed steps are skipped, and runs or skips them.

    There are two modes:

    * ``"host"``: read the flag first, which synchronizes, and call ``step()`` only if it is 0.
    * ``"transaction"``: call ``step()`` and roll it back on the device. It reads the flag after a
      step that changes Python state.

    ``"auto"`` begins with transactions, and turns to the host for good where the step changes
    Python state, unless it only adds state, as the first step does; also if the copies are large,
    or there is no memory for them.

    Attributes:
        skip_by: ``"host"``, ``"transaction"`` or ``"auto"``.
        reason: why ``"auto"`` has turned to the host; ``None`` if it has not.
        has_read_flag: whether the host has read the flag of the last step.
        most_copied: the bytes of tensors beyond which ``"auto"`` turns to the host.
        on_accelerator: the policy of an accelerator, if this one reads the flag only because that
            is free here; :func:`ampopt.profile` tries it. Else ``None``.
    """

    def __init__(self, skip_by: str, *, most_copied: float = LARGE) -> None:
        """Store how to skip steps; see the class."""
        self.skip_by = skip_by
        self.reason: str | None = None
        self.has_read_flag = False
        self.on_accelerator: SkipPolicy | None = None
        self.most_copied = most_copied
        self._growths = 0
        # Of the last step, as both take long to make anew.
        self._kept: tuple[PythonState, StorageCopies] | None = None
        drop_in_collections(self)

    @property
    def mode(self) -> Mode:
        """How the next step is skipped."""
        return "host" if self.skip_by == "host" or self.reason is not None else "transaction"

    def step(
        self, optimizer: torch.optim.Optimizer, step: Callable[[], Any], decision: Decision
    ) -> tuple[bool, Any]:
        """Run ``step()``, unless ``decision`` says to skip it.

        Args:
            optimizer: the optimizer to step.
            step: the step to run.
            decision: the decision, on the parameters' device.

        Returns:
            Whether ``step()`` was called, and what it returned. A step that was rolled back was
            called; a step that was skipped on the host was not.
        """
        self.has_read_flag = False
        # Into a CUDA graph, where no flag can be read.
        captured = captures(decision.found_inf.device)
        if self.mode == "transaction" or (self.reason == _TOO_LARGE and captured):
            state, copies = self._fitting(optimizer)
            reason = self._obstacle(state, copies, captured) if self.skip_by == "auto" else None
            if reason is None:
                outcome = self._transact(optimizer, step, decision.skip > 0, state, copies)
                if outcome is not None:
                    return outcome
                reason = "leaves no memory for copies of all tensors"
            self._read_flag_first(optimizer, reason)
        self.has_read_flag = True
        if decision.coefficients_on_host.skip > 0:
            return False, None
        return True, step()

    def drop_stale(self) -> None:
        """Drop the snapshot if an object in it was replaced, so that its memory is free."""
        if self._kept is not None and not self._kept[0].is_current():
            self._kept = None

    def _fitting(self, optimizer: torch.optim.Optimizer) -> tuple[PythonState, StorageCopies]:
        """A snapshot and its copies: those of the last step, if only numbers have changed."""
        if self._kept is None or not self._kept[0].retake():
            state = PythonState(optimizer)
            self._kept = state, StorageCopies(state.tensors)
        return self._kept

    def _obstacle(self, state: PythonState, copies: StorageCopies, captured: bool) -> str | None:
        """Why the flag has to be read before the step; ``None`` if the step can be rolled back."""
        if state.hidden_object is not None:
            return f"has state that cannot be inspected: {state.hidden_object}"
        return _TOO_LARGE if copies.nbytes > self.most_copied and not captured else None

    def _transact(
        self,
        optimizer: torch.optim.Optimizer,
        step: Callable[[], Any],
        skip: Tensor,
        state: PythonState,
        copies: StorageCopies,
    ) -> tuple[bool, Any] | None:
        """Step, and undo every write where ``skip`` is true, or if there is too little memory.

        Synchronizes only if the step raises, or changes something that is not a tensor.

        Returns:
            As :meth:`step`; ``None`` if there was no memory for the copies, or beside them for the
            step. Then nothing has changed, and the step may run without copies.
        """
        result, failure = None, None
        no_memory: Any = torch.OutOfMemoryError if self.skip_by == "auto" else ()
        try:
            try:
                copies.make()
            except no_memory:
                return None
            try:
                result = step()
            except Exception as error:  # perhaps because of the non-finite gradients
                failure = error
            changed_object = state.changed_object()
            if changed_object is None and skip.device.type != "cpu" and copies.differ_on_cpu():
                changed_object = _ON_CPU
            if failure is None and changed_object is None:
                copies.restore_where(skip)
                return True, result
            self.has_read_flag, skipped = True, bool(skip)
            if failure is None and self.skip_by == "auto":
                if changed_object != _ON_CPU and state.only_grew() and self._growths < _GROWTHS:
                    self._growths += not skipped  # the step has created state
                else:
                    self._read_flag_first(optimizer, f"changes {changed_object}")
            if skipped or isinstance(failure, torch.OutOfMemoryError):
                state.restore()
                copies.restore()
            if failure is not None and not skipped:
                if isinstance(failure, no_memory):
                    return None
                raise failure
            return True, result
        finally:
            copies.drop()
            failure = None  # its traceback refers to the memory of the step

    def _read_flag_first(self, optimizer: torch.optim.Optimizer, reason: str) -> None:
        """Turn to the host, and log the reason once."""
        self.reason, self._kept = reason, None
        _log.info(
            "%s.step %s: before every step, the CPU waits to read the overflow flag",
            type(optimizer).__name__,
            reason,
        )


def skip_policy_of(skip_by: str, device: torch.device, *, most_copied: float = LARGE) -> SkipPolicy:
    """How to skip a step that does not read the flag itself.

    Args:
        skip_by: the value of :attr:`ampopt.Optimizer.skip_by`.
        device: the device of the decision.
        most_copied: see :class:`SkipPolicy`; for ``"auto"``.

    Raises:
        ValueError: ``skip_by`` is not one of :data:`SKIP_BY`.
    """
    if skip_by not in SKIP_BY:
        raise ValueError(
            f"skip_by must be 'auto', 'host', 'transaction' or 'step', got {skip_by!r}"
        )
    policy = SkipPolicy(skip_by, most_copied=most_copied)
    if skip_by == "auto" and backend_for(device).host_sees:
        on_cpu = SkipPolicy("host")
        on_cpu.on_accelerator = policy
        return on_cpu
    return policy
