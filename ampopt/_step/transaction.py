"""Skip any optimizer's step on the device: run it, and put back what it wrote if it must not count.

The step runs under a dispatch mode that copies each parameter and state tensor at its first write;
afterwards a select on the overflow flag keeps the new values or puts the old ones back. That is
exact where the step changes nothing but the contents of tensors, by operators that torch's
dispatcher sees. Where it changes anything else (a counter in Python, the entries of its state, a
random generator), that is noticed, the host looks at the flag after all, and the rest is put back
too.
"""

import logging
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from ampopt._step.host_state import HostState
from ampopt._step.sharding import dtensor
from ampopt._step.torch_private import (
    TorchDispatchMode,
    is_operator,
    pytree,
    storage_key,
    written_by,
)
from ampopt.backend import host_may_look
from ampopt_kernels.decision import Decision
from ampopt_kernels.devices import to_device

__all__ = ["Mode", "SKIP_BY", "SkipPolicy", "CopyOnWriteMode", "skip_policy_of"]

Mode = Literal["host", "probation", "transaction"]

SKIP_BY = ("auto", "host", "transaction", "step")
"""What :attr:`ampopt.Optimizer.skip_by` may be."""

_IN_HOST_MEMORY = "tensors in the host's memory"
_GROWTHS = 32
"""Steps that may each add state, as where parameters get their first gradients one by one."""

_log = logging.getLogger(__name__)


class CopyOnWriteMode(TorchDispatchMode):
    """Copies each of the given tensors at its first write, through whatever view it comes."""

    supports_higher_order_operators = True

    def __init__(self, tensors: list[Tensor], *, unseen: bool = False) -> None:
        """Watch the storages of ``tensors``; copy them now if they may be written to unseen."""
        super().__init__()
        self._watched = {storage_key(t): t for t in tensors}
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        if unseen:
            self._keep_all()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Copy what ``func`` is about to write, then run it."""
        kwargs = kwargs or {}
        if is_operator(func):
            for tensor in pytree.tree_leaves(list(written_by(func, args, kwargs))):
                if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
                    self._keep(storage_key(dtensor.local(tensor)))
        else:  # a higher-order operator does not say what it writes
            self._keep_all()
        return func(*args, **kwargs)

    def _keep_all(self) -> None:
        for key in self._watched:
            self._keep(key)

    def _keep(self, key: int) -> None:
        if key in self._watched and key not in self._copies:
            whole = _whole(self._watched[key])
            self._copies[key] = whole, whole.clone()

    def saw(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` may have been written."""
        return storage_key(tensor) in self._copies

    def undo(self) -> None:
        """Put everything back, bitwise."""
        for whole, copy in self._copies.values():
            whole.copy_(copy)

    def undo_where(self, skip: Tensor) -> None:
        """Put everything back, bitwise, if ``skip``, a boolean on a device. Does not look at it."""
        here = {skip.device: skip}
        for whole, copy in self._copies.values():
            if whole.device not in here:
                here[whole.device] = to_device(skip, whole.device)
            torch.where(here[whole.device], copy, whole, out=whole)

    def on_host(self, skip: Tensor) -> bool:
        """Whether some of what was written is in the host's memory, and ``skip`` is not.

        Torch's optimizers keep step counts there for parameters on an accelerator.
        """
        return skip.device.type != "cpu" and any(
            whole.device.type == "cpu" for whole, _ in self._copies.values()
        )


class SkipPolicy:
    """Decides for one optimizer how its overflowed steps are skipped, and takes or skips them.

    In the mode ``"probation"`` the host looks at the flag, and what a finite step changed is
    compared with what the dispatch mode saw of it. If that was all, later steps are transactions.
    If the step keeps state on the host, or writes past the dispatcher as custom kernels may, the
    host looks before each step.

    Attributes:
        mode: how the next step is skipped.
        reason: why the host looks before each step, if that was found out; else ``None``.
    """

    def __init__(self, mode: Mode, *, settled: bool = False, unseen: bool = False) -> None:
        """Begin.

        Args:
            mode: to begin with.
            settled: that is how it stays. Transactions then still notice what they cannot undo on
                the device, and have the host look.
            unseen: the step is known to write where torch's dispatcher is not told.
        """
        self.mode: Mode = mode
        self.reason: str | None = None
        self._settled, self._unseen = settled, unseen
        self._growths = 0

    def step(
        self, optimizer: torch.optim.Optimizer, step: Callable[[], Any], decision: Decision
    ) -> tuple[bool, Any]:
        """Take ``step()``, unless ``decision`` is to skip it.

        Args:
            optimizer: whose parameters and state the step changes.
            step: to take.
            decision: on the parameters' device.

        Returns:
            Whether ``step()`` was called, which it was not if the host has looked first; and what
            it returned.
        """
        host = None if self.mode == "host" else HostState(optimizer)
        if host is not None and host.hidden is not None and not self._settled:
            self._look_from_now_on(optimizer, f"cannot see what changes in {host.hidden}")
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
        host: HostState,
    ) -> Any:
        writes = CopyOnWriteMode(host.tensors, unseen=self._unseen)
        returned, failure = None, None
        try:
            with writes:
                returned = step()
        except Exception as error:  # perhaps of the very gradients for which it is to be skipped
            failure = error
        changed = host.changed() or (_IN_HOST_MEMORY if writes.on_host(skip) else None)
        if failure is None and changed is None:
            writes.undo_where(skip)
            return returned
        if failure is None and changed is not None and not self._settled:
            self._judge(optimizer, host, changed)
        if bool(skip):
            host.restore()
            writes.undo()
        elif failure is not None:
            raise failure
        return returned

    def _probe(
        self,
        optimizer: torch.optim.Optimizer,
        step: Callable[[], Any],
        skip: Tensor,
        host: HostState,
    ) -> Any:
        before = [(t, _whole(t).clone()) for t in host.tensors]
        writes = CopyOnWriteMode(host.tensors, unseen=self._unseen)
        with writes:
            returned = step()
        changed = host.changed() or (_IN_HOST_MEMORY if writes.on_host(skip) else None)
        if changed is not None:
            self._judge(optimizer, host, changed)
        elif all(torch.equal(_whole(t), old) for t, old in before if not writes.saw(t)):
            self.mode = "transaction"
        else:
            self._look_from_now_on(optimizer, "writes tensors where torch's dispatcher is not told")
        return returned

    def _judge(self, optimizer: torch.optim.Optimizer, host: HostState, changed: str) -> None:
        """What a step that changed more than tensors means for later ones."""
        if changed != _IN_HOST_MEMORY and host.only_grew() and self._growths < _GROWTHS:
            self.mode = "probation"  # as where state is made
            self._growths += 1
        else:
            self._look_from_now_on(optimizer, f"changes {changed}")

    def _look_from_now_on(self, optimizer: torch.optim.Optimizer, reason: str) -> None:
        self.mode, self.reason = "host", reason
        _log.info(
            "%s.step %s: the host waits for the overflow flag before each step",
            type(optimizer).__name__,
            reason,
        )


def skip_policy_of(
    skip_by: str, device: torch.device, *, transacts: bool = False, unseen: bool = False
) -> SkipPolicy:
    """How to skip a step that cannot be told to; see :attr:`ampopt.Optimizer.skip_by`.

    Args:
        skip_by: what that says.
        device: where decisions are made.
        transacts: whether the step is known to allow transactions.
        unseen: see :class:`SkipPolicy`.
    """
    if skip_by not in SKIP_BY:
        raise ValueError(
            f"skip_by must be 'auto', 'host', 'transaction' or 'step', got {skip_by!r}"
        )
    if skip_by in ("host", "transaction"):
        return SkipPolicy(skip_by, settled=True, unseen=unseen)  # type: ignore[arg-type]
    if host_may_look(device):
        return SkipPolicy("host", settled=True)
    return SkipPolicy("transaction" if transacts else "probation", unseen=unseen)


def _whole(tensor: Tensor) -> Tensor:
    """All bytes of the storage of ``tensor``, in as few elements as they make."""
    storage = tensor.untyped_storage()
    for dtype in (torch.int64, torch.int32, torch.int16):
        if (storage.nbytes() | storage.data_ptr()) % dtype.itemsize == 0:
            break
    else:
        dtype = torch.uint8
    whole = torch.empty(0, dtype=dtype, device=tensor.device)
    return whole.set_(storage)  # type: ignore[arg-type]
