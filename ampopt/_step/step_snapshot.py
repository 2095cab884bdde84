"""Restores parameters and optimizer state bitwise after a failed step."""

from typing import Any

import torch
from torch import Tensor

from ampopt._step.tensor_subclasses import copy_of, memory_of
from ampopt._step.torch_private import pytree

__all__ = ["Snapshot"]


class Snapshot:
    """A copy of parameters, optimizer state and param-group entries.

    Tensors are restored in place, so that other references to them have the old values, too; state
    that was created since is dropped. State may be nested containers of tensors.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, shared_keys: frozenset[str]) -> None:
        """Copy everything that ``step`` may change.

        Args:
            optimizer: the optimizer.
            shared_keys: keys of the state whose tensors ``step`` replaces but never writes to. They
                are kept without a copy.
        """
        self._optimizer = optimizer
        self._params = [
            (group["params"], [_SavedLeaf(p) for p in group["params"]])
            for group in optimizer.param_groups
        ]
        self._groups = [
            {k: _save(v) for k, v in group.items() if k != "params"}
            for group in optimizer.param_groups
        ]
        self._state = [
            (key, _save_state(state, shared_keys)) for key, state in optimizer.state.items()
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore everything, bitwise."""
        groups = self._optimizer.param_groups
        for group, entries, (params, leaves) in zip(
            groups, self._groups, self._params, strict=True
        ):
            group.clear()
            restored = [param.restore() for param in leaves]
            if isinstance(params, list):  # a user may have set a tuple
                params[:] = restored
            group.update(params=params, **_restore(entries))
        self._optimizer.state.clear()
        for key, state in self._state:
            self._optimizer.state[key] = _restore(state)


class _SavedLeaf:
    """One leaf: a tensor with a copy of its values, or any other object."""

    def __init__(self, value: Any, *, share: bool = False) -> None:
        """Store ``value``, and a copy of it if it is a tensor, unless ``share``."""
        self._value = value
        is_copied = isinstance(value, Tensor) and not share
        self._copy = copy_of(value) if is_copied else None

    def restore(self) -> Any:
        """Return the object; a tensor gets its old values back."""
        if self._copy is not None:
            for tensor, copy in zip(memory_of(self._value), memory_of(self._copy), strict=True):
                tensor.copy_(copy)
        return self._value


def _save(tree: Any, *, share: bool = False) -> Any:
    """Copy ``tree``, with a :class:`_SavedLeaf` in place of each leaf."""
    return pytree.tree_map(lambda leaf: _SavedLeaf(leaf, share=share), tree)


def _save_state(state: Any, shared_keys: frozenset[str]) -> Any:
    """The state of one parameter, saved: the tensors of ``shared_keys`` without a copy."""
    if not isinstance(state, dict):  # some optimizers store numbers in ``state``, by name
        return _save(state)
    return {k: _save(v, share=k in shared_keys) for k, v in state.items()}


def _restore(tree: Any) -> Any:
    """Restore each :class:`_SavedLeaf` of ``tree``, and return the tree of objects."""
    return pytree.tree_map(_SavedLeaf.restore, tree)
