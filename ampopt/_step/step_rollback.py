"""Skips any optimizer's step on the device: runs it, and rolls it back after an overflow.

The step runs under a dispatch mode that copies each parameter and state tensor at its first write;
afterwards a select on the overflow flag keeps the new values or restores the old ones. That is
exact where the step changes nothing but the contents of tensors, by operators that pass through
torch's dispatcher. Where it changes anything else (a counter in Python, the entries of its state, a
random generator), the change is detected; then the host reads the flag, which synchronizes, and
restores that too.
"""

import logging
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from ampopt._step.python_state import PythonState
from ampopt._step.tensor_subclasses import memory_of
from ampopt._step.torch_private import (
    TorchDispatchMode,
    is_operator,
    pytree,
    storage_key,
    written_by,
)
from ampopt.backend import backend_for
from ampopt_kernels.devices import to_device
from ampopt_kernels.step_data import Decision

__all__ = ["Mode", "SKIP_BY", "SkipPolicy", "CopyOnWriteMode", "skip_policy_of"]

Mode = Literal["host", "probation", "transaction"]

SKIP_BY = ("auto", "host", "transaction", "step")
"""The values of :attr:`ampopt.Optimizer.skip_by`."""

_IN_HOST_MEMORY = "tensors in the host's memory"
_GROWTHS = 32
"""The number of steps that may add state: parameters can get their first gradients one by one."""

_log = logging.getLogger(__name__)


class CopyOnWriteMode(TorchDispatchMode):
    """Copies each of the given tensors before the first write to its storage, through any view."""

    supports_higher_order_operators = True

    def __init__(self, tensors: list[Tensor], *, bypasses_dispatcher: bool = False) -> None:
        """Watch the storages of ``tensors``; with ``bypasses_dispatcher``, copy all of them now.

        Args:
            tensors: the tensors that the step may write to.
            bypasses_dispatcher: whether the step writes to tensors without torch's dispatcher, as
                custom kernels may.
        """
        super().__init__()
        self._tensors = {storage_key(t): t for t in tensors}
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        if bypasses_dispatcher:
            self._keep_all()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Copy what ``func`` is about to write, then run it."""
        kwargs = kwargs or {}
        if is_operator(func):
            for tensor in pytree.tree_leaves(list(written_by(func, args, kwargs))):
                if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
                    for part in memory_of(tensor):
                        self._keep(storage_key(part))
        else:  # a higher-order operator has no schema that names the arguments it writes
            self._keep_all()
        return func(*args, **kwargs)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let functions that ``torch.compile`` has compiled run; torch refuses them otherwise.

        What they write is not recorded. A probe detects that by comparing tensors; a transaction
        runs these functions uncompiled.
        """
        return True

    def _keep_all(self) -> None:
        """Copy the storage of every watched tensor that has no copy yet."""
        for key in self._tensors:
            self._keep(key)

    def _keep(self, key: int) -> None:
        """Copy the storage ``key``, unless it is not watched or has a copy."""
        if key in self._tensors and key not in self._copies:
            whole = _whole(self._tensors[key])
            self._copies[key] = whole, whole.clone()

    def saw(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` may have been written."""
        return storage_key(tensor) in self._copies

    def undo(self) -> None:
        """Restore all written tensors, bitwise."""
        for whole, copy in self._copies.values():
            whole.copy_(copy)

    def undo_where(self, skip: Tensor) -> None:
        """Restore all written tensors, bitwise, where ``skip`` is true. Does not synchronize.

        Args:
            skip: a 0-d bool tensor on any device.
        """
        skips = {skip.device: skip}
        for whole, copy in self._copies.values():
            if whole.device not in skips:
                skips[whole.device] = to_device(skip, whole.device)
            torch.where(skips[whole.device], copy, whole, out=whole)

    def on_host(self, skip: Tensor) -> bool:
        """Whether a CPU tensor was written while ``skip`` is on an accelerator.

        Torch's optimizers keep step counts on the CPU for parameters on an accelerator.
        """
        return skip.device.type != "cpu" and any(
            whole.device.type == "cpu" for whole, _ in self._copies.values()
        )


class SkipPolicy:
    """Decides how one optimizer's overflowed steps are skipped, and runs or skips them.

    There are three modes:

    * ``"host"``: read the flag first, which synchronizes, and call ``step()`` only if it is 0.
    * ``"transaction"``: call ``step()`` and roll it back on the device.
    * ``"probation"``: read the flag first, and compare what a finite step changed with the writes
      that the dispatch mode recorded. If they agree, later steps are transactions. If the step
      changes Python state, or writes without torch's dispatcher as custom kernels may, the mode
      becomes ``"host"``.

    Attributes:
        mode: how the next step is skipped.
        reason: why the mode became ``"host"``; ``None`` if it was so from the start, or is not.
        on_accelerator: the policy of an accelerator, if this one reads the flag only because that
            is free here; :func:`ampopt.profile` tries it. Else ``None``.
    """

    def __init__(
        self, mode: Mode, *, mode_is_fixed: bool = False, bypasses_dispatcher: bool = False
    ) -> None:
        """Store how to skip the first step.

        Args:
            mode: the mode of the first step.
            mode_is_fixed: whether the mode never changes: the user chose it, or reading the flag is
                free. A transaction that cannot be rolled back on the device still reads the flag.
            bypasses_dispatcher: whether the step is known to write tensors without torch's
                dispatcher. Then all of them are copied before it.
        """
        self.mode: Mode = mode
        self.reason: str | None = None
        self.on_accelerator: SkipPolicy | None = None
        self._mode_is_fixed, self._bypasses_dispatcher = mode_is_fixed, bypasses_dispatcher
        self._growths = 0

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
        host = None if self.mode == "host" else PythonState(optimizer)
        if host is not None and host.hidden_object is not None and not self._mode_is_fixed:
            self._read_flag_first(
                optimizer, f"has state that cannot be inspected: {host.hidden_object}"
            )
            host = None
        if host is not None and self.mode == "transaction":
            return True, self._transact(optimizer, step, decision.skip > 0, host)
        if decision.coefficients_on_host.skip > 0:
            return False, None
        if host is not None:
            return True, self._probe(optimizer, step, decision.skip, host)
        return True, step()

    def _transact(
        self,
        optimizer: torch.optim.Optimizer,
        step: Callable[[], Any],
        skip: Tensor,
        host: PythonState,
    ) -> Any:
        """Step, and undo every write where ``skip`` is true.

        Synchronizes only if the step raises, or changes something that is not a tensor.
        """
        writes = CopyOnWriteMode(host.tensors, bypasses_dispatcher=self._bypasses_dispatcher)
        result, failure = None, None
        try:
            with writes, torch.compiler.set_stance("force_eager"):  # to record every write
                result = step()
        except Exception as error:  # perhaps because of the non-finite gradients
            failure = error
        changed_object = _changed_object(host, writes, skip)
        if failure is None and changed_object is None:
            writes.undo_where(skip)
            return result
        if failure is None and changed_object is not None and not self._mode_is_fixed:
            self._choose_mode(optimizer, host, changed_object)
        if bool(skip):
            host.restore()
            writes.undo()
        elif failure is not None:
            raise failure
        return result

    def _probe(
        self,
        optimizer: torch.optim.Optimizer,
        step: Callable[[], Any],
        skip: Tensor,
        host: PythonState,
    ) -> Any:
        """Take a step that is not skipped, and choose the mode by what it has written."""
        before = [(t, _whole(t).clone()) for t in host.tensors]
        writes = CopyOnWriteMode(host.tensors, bypasses_dispatcher=self._bypasses_dispatcher)
        with writes:
            result = step()
        changed_object = _changed_object(host, writes, skip)
        if changed_object is not None:
            self._choose_mode(optimizer, host, changed_object)
        elif all(torch.equal(_whole(t), old) for t, old in before if not writes.saw(t)):
            self.mode = "transaction"
        else:
            self._read_flag_first(optimizer, "writes tensors without torch's dispatcher")
        return result

    def _choose_mode(
        self, optimizer: torch.optim.Optimizer, host: PythonState, changed_object: str
    ) -> None:
        """Choose the mode of later steps, after a step changed more than tensors."""
        if changed_object != _IN_HOST_MEMORY and host.only_grew() and self._growths < _GROWTHS:
            self.mode = "probation"  # the step has created state
            self._growths += 1
        else:
            self._read_flag_first(optimizer, f"changes {changed_object}")

    def _read_flag_first(self, optimizer: torch.optim.Optimizer, reason: str) -> None:
        """Choose the mode ``"host"``, and log the reason once."""
        self.mode, self.reason = "host", reason
        _log.info(
            "%s.step %s: before every step, the CPU waits to read the overflow flag",
            type(optimizer).__name__,
            reason,
        )


def skip_policy_of(
    skip_by: str,
    device: torch.device,
    *,
    transacts: bool = False,
    bypasses_dispatcher: bool = False,
) -> SkipPolicy:
    """How to skip a step that does not read the flag itself.

    Args:
        skip_by: the value of :attr:`ampopt.Optimizer.skip_by`.
        device: the device of the decision.
        transacts: whether the step is known to work as a transaction.
        bypasses_dispatcher: see :class:`SkipPolicy`.

    Raises:
        ValueError: ``skip_by`` is not one of :data:`SKIP_BY`.
    """
    if skip_by not in SKIP_BY:
        raise ValueError(
            f"skip_by must be 'auto', 'host', 'transaction' or 'step', got {skip_by!r}"
        )
    if skip_by in ("host", "transaction"):
        return SkipPolicy(skip_by, mode_is_fixed=True, bypasses_dispatcher=bypasses_dispatcher)  # type: ignore[arg-type]
    on_accelerator = SkipPolicy(
        "transaction" if transacts else "probation", bypasses_dispatcher=bypasses_dispatcher
    )
    if not backend_for(device).host_sees:
        return on_accelerator
    policy = SkipPolicy("host", mode_is_fixed=True)
    policy.on_accelerator = on_accelerator
    return policy


def _changed_object(host: PythonState, writes: CopyOnWriteMode, skip: Tensor) -> str | None:
    """The name of what a step has changed and no select on the device restores, if anything."""
    return host.changed_object() or (_IN_HOST_MEMORY if writes.on_host(skip) else None)


def _whole(tensor: Tensor) -> Tensor:
    """All bytes of the storage of ``tensor``, as a 1-d tensor of the widest integer that fits."""
    storage = tensor.untyped_storage()
    for dtype in (torch.int64, torch.int32, torch.int16):
        if (storage.nbytes() | storage.data_ptr()) % dtype.itemsize == 0:
            break
    else:
        dtype = torch.uint8
    whole = torch.empty(0, dtype=dtype, device=tensor.device)
    return whole.set_(storage)  # type: ignore[arg-type]
