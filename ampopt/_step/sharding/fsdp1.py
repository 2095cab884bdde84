"""Parameters of FSDP1 that each rank has whole, as its strategy ``NO_SHARD`` leaves them."""

import gc
import sys
from collections.abc import Iterable
from typing import Any

from torch.utils.weak import WeakIdKeyDictionary

from ampopt._step.torch_private import is_flattened_by_fsdp1

__all__ = ["whole_parameters"]

_WHOLE: Any = WeakIdKeyDictionary()
"""Parameters that FSDP1 has flattened → whether each rank has all of it."""


def whole_parameters(params: Iterable[Any]) -> frozenset[int]:
    """The ``id`` of each of ``params`` that FSDP1 does not divide among ranks.

    A parameter does not know its module, so the first time all objects are gone through.
    """
    flattened = [param for param in params if is_flattened_by_fsdp1(param)]
    if not all(param in _WHOLE for param in flattened):
        _look_at_modules()
    return frozenset(id(param) for param in flattened if _WHOLE.setdefault(param, False))


def _look_at_modules() -> None:
    """Note what each FSDP1 module there is does with its own parameters."""
    fsdp: Any = sys.modules["torch.distributed.fsdp"]
    # By type: isinstance would ask a dead weakref.proxy for its class, which raises.
    cls = fsdp.FullyShardedDataParallel
    modules = [m for m in gc.get_objects() if issubclass(type(m), cls)]
    # A module within another has a strategy of its own, and has fewer parameters.
    for module in sorted(modules, key=lambda module: -len(list(module.modules()))):
        is_whole = module.sharding_strategy == fsdp.ShardingStrategy.NO_SHARD
        for param in module.parameters():
            _WHOLE[param] = is_whole
