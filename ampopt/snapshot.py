"""A copy of parameters and optimizer state, to put back when a step gives up half way."""

from typing import Any

import torch
from torch import Tensor

__all__ = ["Snapshot"]


class Snapshot:
    """Everything that ``step`` may change, as it was.

    Tensors are restored in place, so that whoever holds them sees the old values again; state
    that was created since is dropped. Costs a copy of parameters and state.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, shared: frozenset[str] = frozenset()):
        """Copy.

        Args:
            optimizer: whose parameters, state and param-group entries are copied.
            shared: keys of the state whose tensors ``step`` replaces and never writes, so that
                holding on to them is enough.
        """
        self._optimizer = optimizer
        self._groups = [dict(group) for group in optimizer.param_groups]
        params = [p for group in optimizer.param_groups for p in group["params"]]
        self._params = [(p, p.detach().clone()) for p in params]
        self._state = [
            (key, {k: _kept(v, share=k in shared) for k, v in state.items()})
            for key, state in optimizer.state.items()
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back, bitwise."""
        for param, value in self._params:
            param.copy_(value)
        for group, entries in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.clear()
            group.update(entries)
        self._optimizer.state.clear()
        for key, state in self._state:
            self._optimizer.state[key] = {k: _restored(v) for k, v in state.items()}


def _kept(value: Any, *, share: bool) -> Any:
    if isinstance(value, Tensor):
        return (value, None if share else value.detach().clone())
    if isinstance(value, list):
        return [_kept(item, share=share) for item in value]
    return (value, None)


def _restored(kept: Any) -> Any:
    if isinstance(kept, list):
        return [_restored(item) for item in kept]
    value, copy = kept
    return value if copy is None else value.copy_(copy)
