"""Restores parameters and optimizer state bitwise: after a failed step, and after loading."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ampopt._step.tensor_subclasses import copy_of, inner_names, memory_of
from ampopt._step.torch_private import pytree

__all__ = ["Snapshot", "loaded_uncast"]


class Snapshot:
    """A copy of parameters, optimizer state and param-group entries.

    Tensors are restored in place, so that other references to them have the old values, too; state
    that was created since is dropped. State may be nested containers of tensors.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, shared_keys: frozenset[str] = frozenset()
    ):
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
            params[:] = [param.restore() for param in leaves]
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


@contextmanager
def loaded_uncast(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Context manager: ``load_state_dict`` copies state tensors, and keeps their saved dtypes.

    Torch casts state tensors to the parameter's dtype; this undoes the cast. It also shares tensors
    that need no cast with the state dict, so that two optimizers would write to one state.

    This runs after the user's load-state-dict pre-hooks and before the user's post-hooks.
    """
    state_dicts: list[dict[str, Any]] = []

    def remember(_: Any, state_dict: dict[str, Any]) -> None:
        state_dicts.append(state_dict)

    def uncast(_: Any) -> None:
        (saved_dict,) = state_dicts
        keys = chain.from_iterable(group["params"] for group in saved_dict["param_groups"])
        params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        for key, param in zip(keys, params, strict=True):
            if key in saved_dict["state"]:
                optimizer.state[param] = _uncast(optimizer.state[param], saved_dict["state"][key])

    handles = (
        optimizer.register_load_state_dict_pre_hook(remember),
        optimizer.register_load_state_dict_post_hook(uncast, prepend=True),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _uncast(value: Any, saved_value: Any) -> Any:
    """``value`` with the saved dtypes, except where the optimizer's class has restructured it."""
    if isinstance(value, dict) and isinstance(saved_value, dict):
        for key in value.keys() & saved_value.keys():
            value[key] = _uncast(value[key], saved_value[key])
        return value
    if pytree.tree_structure(value) != pytree.tree_structure(saved_value):
        return value
    return pytree.tree_map(_uncast_copy, value, saved_value)


def _uncast_copy(value: Any, saved_value: Any) -> Any:
    """A state tensor as it was saved: torch casts some to the dtype of the parameter."""
    if not (isinstance(value, Tensor) and isinstance(saved_value, Tensor)):
        return value  # torch makes tensors of the numbers in older state dicts: they stay tensors
    if inner_names(saved_value):  # its `to` may change the dtype alone, and share its inner tensors
        return copy_of(saved_value.to(value.device))
    if value.dtype != saved_value.dtype:
        return saved_value.to(value.device, copy=True)
    return value.clone() if value is saved_value else value
