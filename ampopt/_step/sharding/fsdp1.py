"""Finds the parameters that FSDP1 has flattened but not sharded (strategy ``NO_SHARD``)."""

import gc
import sys
from collections.abc import Iterable
from typing import Any

from torch.utils.weak import WeakIdKeyDictionary

from ampopt._step.torch_private import is_flattened_by_fsdp1

__all__ = ["whole_parameters"]

_WHOLE: Any = WeakIdKeyDictionary()
"""Whether each parameter that FSDP1 has flattened is replicated."""


def whole_parameters(params: Iterable[Any]) -> frozenset[int]:
    """The ``id`` of each of ``params`` that FSDP1 has flattened and not sharded.

    A parameter does not know its module, so the first call goes through all objects of the process.
    """
    flattened = [param for param in params if is_flattened_by_fsdp1(param)]
    if not all(param in _WHOLE for param in flattened):
        _note_strategies()
    return frozenset(id(param) for param in flattened if _WHOLE.setdefault(param, False))


def _note_strategies() -> None:
    """Note the sharding strategy of each FSDP1 module for its parameters."""
    fsdp: Any = sys.modules["torch.distributed.fsdp"]
    # By type(m): isinstance reads __class__, which raises for a dead weakref.proxy.
    cls = fsdp.FullyShardedDataParallel
    modules = [m for m in gc.get_objects() if issubclass(type(m), cls)]
    # Outer modules first: an inner FSDP1 module has a strategy of its own.
    for module in sorted(modules, key=lambda module: -len(list(module.modules()))):
        is_whole = module.sharding_strategy == fsdp.ShardingStrategy.NO_SHARD
        for param in module.parameters():
            _WHOLE[param] = is_whole
