"""Skip any optimizer's step on the device: run it, then put back what it wrote if it must not count.

The step runs under a dispatch mode that copies each parameter and state tensor at its first write;
afterwards a select on the overflow flag keeps the new values or puts the old ones back. That is
exact where the step changes nothing but tensors, by operators that torch's dispatcher sees. Where
it changes anything else (a counter in Python, the entries of its state, a random generator), that
is noticed, the host looks at the flag after all, and the rest is put back too.
"""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["HostState", "Skipper", "Writes"]


class Writes(TorchDispatchMode):
    """Copies each of the given tensors at its first write, through whatever view it comes."""

    def __init__(self, tensors: list[Tensor]) -> None:
        """Watch the storages of ``tensors``."""
        super().__init__()
        strided = (t for t in tensors if t.layout == torch.strided)
        self._watched = {t.untyped_storage()._cdata: t for t in strided}
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Copy what ``func`` is about to write, then run it."""
        kwargs = kwargs or {}
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[position] if position < len(args) else kwargs.get(argument.name)
                for tensor in pytree.tree_leaves(given):
                    if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
                        self._keep(tensor.untyped_storage()._cdata)
        return func(*args, **kwargs)

    def _keep(self, key: int) -> None:
        if key in self._watched and key not in self._copies:
            whole = _whole(self._watched[key])
            self._copies[key] = whole, whole.clone()

    def saw(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` was written."""
        return tensor.untyped_storage()._cdata in self._copies

    def undo(self) -> None:
        """Put everything back, bitwise."""
        for whole, copy in self._copies.values():
            whole.copy_(copy)

    def undo_where(self, skip: Tensor) -> None:
        """Put everything back, bitwise, if ``skip``, a boolean on a device. Does not look at it."""
        for whole, copy in self._copies.values():
            here = skip.to(whole.device, non_blocking=True)
            whole.copy_(torch.where(here, copy, whole))


class HostState:
    """What of an optimizer no select on a device can put back, as it was.

    That is everything but the contents of tensors: which tensors and numbers stand in its state,
    its param groups and its attributes, and the random generators of Python and of torch.

    Attributes:
        tensors: those that stand there.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember."""
        self._optimizer = optimizer
        self._leaves, self._spec = pytree.tree_flatten(_visible(optimizer))
        self.tensors = [leaf for leaf in self._leaves if isinstance(leaf, Tensor)]
        # An assignment to ``tensor.data`` leaves the object and takes the memory away from it.
        self._memory = [(t, t.detach(), _address(t)) for t in self.tensors]
        self._devices = sorted({t.device.index for t in self.tensors if t.device.type == "cuda"})
        self._rng = self._generators()

    def changed(self) -> bool:
        """Whether any of it is different now."""
        return self._rng_changed() or not self._stands(_visible(self._optimizer))

    def only_grew(self) -> bool:
        """Whether all that is different is state that was not there before."""
        now = _visible(self._optimizer)
        known = {id(key): state for key, state in self._before()["state"]}
        now["state"] = [
            (key, {name: value for name, value in state.items() if name in known[id(key)]})
            for key, state in now["state"]
            if id(key) in known
        ]
        return not self._rng_changed() and self._stands(now)

    def restore(self) -> None:
        """Put it back. Tensors that stood there do again, with the contents that they have now."""
        for tensor, alias, address in self._memory:
            if _address(tensor) != address:
                tensor.data = alias
        before, optimizer = self._before(), self._optimizer
        optimizer.state.clear()
        optimizer.state.update(before["state"])
        for group, entries in zip(optimizer.param_groups, before["groups"], strict=True):
            group.clear()
            group.update(entries)
        for name in _attributes(optimizer):
            if name not in before["attributes"]:
                delattr(optimizer, name)
        vars(optimizer).update(before["attributes"])
        random.setstate(self._rng[0])
        torch.set_rng_state(self._rng[1])
        for device, state in zip(self._devices, self._rng[2:], strict=True):
            torch.cuda.set_rng_state(state, device)

    def _before(self) -> dict[str, Any]:
        return pytree.tree_unflatten(self._leaves, self._spec)

    def _stands(self, now: dict[str, Any]) -> bool:
        leaves, spec = pytree.tree_flatten(now)
        return (
            spec == self._spec
            and all(map(_equal, leaves, self._leaves))
            and all(_address(tensor) == address for tensor, _, address in self._memory)
        )

    def _generators(self) -> list[Any]:
        states = (torch.cuda.get_rng_state(device) for device in self._devices)
        return [random.getstate(), torch.get_rng_state(), *states]

    def _rng_changed(self) -> bool:
        python, *torchs = self._generators()
        return python != self._rng[0] or not all(map(torch.equal, torchs, self._rng[1:]))


class Skipper:
    """Decides for one optimizer how its overflowed steps are skipped, and takes or skips them.

    The first finite step is taken on probation: the host looks, and what the step changed is
    compared with what the dispatch mode saw of it. If that was all, later steps are transactions.
    If the step keeps state on the host, or writes past the dispatcher as custom kernels may, the
    host looks at the flag before each step.
    """

    def __init__(self, transacts: bool | None = None) -> None:
        """Begin.

        Args:
            transacts: ``True`` for transactions from the first step on, ``False`` for never,
                ``None`` for probation.
        """
        self._transacts = transacts

    def step(self, optimizer: torch.optim.Optimizer, step: Callable[[], Any], skip: Tensor) -> bool:
        """Take ``step()``, unless ``skip`` is more than 0.

        Args:
            optimizer: whose parameters and state the step changes.
            step: to take.
            skip: one element, on the parameters' device.

        Returns:
            Whether ``step()`` was called. It was not if the host has looked at ``skip`` first.
        """
        if self._transacts:
            self._transact(optimizer, step, skip > 0)
            return True
        if bool(skip > 0):
            return False
        if self._transacts is None:
            self._probe(optimizer, step)
        else:
            step()
        return True

    def _transact(
        self, optimizer: torch.optim.Optimizer, step: Callable[[], Any], skip: Tensor
    ) -> None:
        host = HostState(optimizer)
        writes = Writes(host.tensors)
        failure = None
        try:
            with writes:
                step()
        except Exception as error:  # perhaps of the very gradients for which it is to be skipped
            failure = error
        if failure is None and not host.changed():
            writes.undo_where(skip)
            return
        if failure is None:
            self._transacts = None if host.only_grew() else False
        if bool(skip):
            host.restore()
            writes.undo()
        elif failure is not None:
            raise failure

    def _probe(self, optimizer: torch.optim.Optimizer, step: Callable[[], Any]) -> None:
        host = HostState(optimizer)
        before = [(t, _whole(t).clone()) for t in host.tensors if t.layout == torch.strided]
        writes = Writes(host.tensors)
        with writes:
            step()
        if not host.changed():
            unseen = [(t, old) for t, old in before if not writes.saw(t)]
            self._transacts = all(torch.equal(_whole(t), old) for t, old in unseen)
        elif not host.only_grew():
            self._transacts = False


_NOT_STATE = frozenset(
    {"state", "param_groups", "grad_norm", "_opt_called", "_pending", "_skipper", "_stepped_with"}
)
"""Attributes that are remembered otherwise, or that belong to the attempt and not to the step."""


def _attributes(optimizer: torch.optim.Optimizer) -> list[str]:
    return [name for name in vars(optimizer) if name not in _NOT_STATE]


def _visible(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "state": list(optimizer.state.items()),
        "groups": [dict(group) for group in optimizer.param_groups],
        "attributes": {name: vars(optimizer)[name] for name in _attributes(optimizer)},
    }


def _address(tensor: Tensor) -> int | None:
    return tensor.data_ptr() if tensor.layout == torch.strided else None


def _equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, Tensor) or isinstance(b, Tensor) or type(a) is not type(b):
        return False
    try:
        return bool(a == b)
    except Exception:  # objects that cannot be compared count as changed
        return False


def _whole(tensor: Tensor) -> Tensor:
    """All bytes of the storage of ``tensor``."""
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(tensor.untyped_storage())  # type: ignore[arg-type]
