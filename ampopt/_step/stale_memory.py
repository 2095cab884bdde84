"""Drops what optimizers keep of tensors that were replaced, in full garbage collections.

An optimizer keeps the tensors of its last step, to compare them with those of the next one. A
program that offloads states or parameters between steps, as reinforcement learning does, replaces
these tensors to get their memory back. It calls ``gc.collect()`` then, before
``torch.cuda.empty_cache()``. The next step would be too late.
"""

import gc
import weakref
from typing import Any, Protocol

from ampopt_kernels.native import objects

__all__ = ["drop_in_collections"]

_OLDEST = 2
"""The generation of a full collection."""


class _Keeper(Protocol):
    """An object that keeps tensors from step to step."""

    def drop_stale(self) -> None:
        """Drop them if one of them was replaced."""


_keepers: "weakref.WeakSet[_Keeper]" = weakref.WeakSet()


def drop_in_collections(keeper: _Keeper) -> None:
    """Call ``keeper.drop_stale`` in each full garbage collection, as long as ``keeper`` lives."""
    _keepers.add(keeper)


def _drop_stale(phase: str, info: dict[str, Any]) -> None:
    """Called by Python when a collection starts and when it is over."""
    # Without the loops, to read tensors may call functions of a user's own.
    if phase == "start" and info["generation"] == _OLDEST and objects.loops.loaded is not None:
        for keeper in list(_keepers):
            keeper.drop_stale()


gc.callbacks.append(_drop_stale)
