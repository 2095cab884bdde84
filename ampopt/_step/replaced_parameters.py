"""A warning for an optimizer that was made before its model was sharded, and so steps nothing.

``fully_shard`` and ``parallelize_module`` put other parameters into a model. The old ones, which
the optimizer has, get no gradients ever.
"""

import gc
import sys
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ampopt._step.dtensor import is_spread

__all__ = ["warn_of_replaced"]

_ASKED: Any = WeakIdKeyDictionary()
"""The first parameter of each optimizer that was looked at, which takes a while."""


def warn_of_replaced(param_groups: Iterable[dict[str, Any]]) -> None:
    """Warn, once, if all parameters, which have no gradients, were taken out of a sharded model."""
    params = [param for group in param_groups for param in group["params"]]
    if "torch.distributed.tensor" not in sys.modules or not params or params[0] in _ASKED:
        return
    _ASKED[params[0]] = True
    if any(map(is_spread, params)):
        return
    modules = [m for m in gc.get_objects() if isinstance(m, torch.nn.Module)]
    in_use = [param for module in modules for param in module.parameters(recurse=False)]
    if any(map(is_spread, in_use)) and not {*map(id, params)} & {*map(id, in_use)}:
        warnings.warn(
            "the parameters of this optimizer have no gradients and belong to no module, while "
            "those of a module are DTensors. If the optimizer was made before fully_shard or "
            "parallelize_module, which put other parameters into a model, no step will ever move "
            "anything: make it after them, of model.parameters()",
            UserWarning,
            stacklevel=2,
        )
