"""How steps round bfloat16 parameters that have no master: to the nearest, or stochastically."""

from typing import Any

import torch
from torch import Tensor

from ampopt._step.masters import needs_master
from ampopt._step.state_checks import KEYS
from ampopt_kernels.stochastic import STREAM

__all__ = ["PARAM_ROUNDING", "check_rounding", "is_stochastic", "keys_of"]

PARAM_ROUNDING = "param_rounding"
"""The option of a param group."""


def check_rounding(given: Any) -> None:
    """Refuse what is no way to round.

    Raises:
        ValueError: it is not.
    """
    if given not in ("nearest", "stochastic"):
        raise ValueError(f"param_rounding must be 'nearest' or 'stochastic', got {given!r}")


def is_stochastic(group: dict[str, Any]) -> bool:
    """Whether bfloat16 parameters of ``group`` are rounded stochastically, if without masters."""
    return group.get(PARAM_ROUNDING, "nearest") == "stochastic"


def keys_of(optimizer: Any, group: dict[str, Any], param: Tensor, place: int) -> Tensor | None:
    """The keys of ``param``, made where they are missing; ``None`` if it is rounded as usual.

    Each parameter has keys of its own, by its ``place`` among all.
    """
    of_bfloat16 = param.dtype == torch.bfloat16 and not needs_master(group, param)
    if not (of_bfloat16 and is_stochastic(group)):
        return None
    state = optimizer.state[param]
    kept = state.get(KEYS, STREAM * place)
    if not (
        isinstance(kept, Tensor)
        and (kept.dtype, kept.device, kept.ndim) == (torch.int64, param.device, 0)
    ):
        state[KEYS] = torch.full((), int(kept), dtype=torch.int64, device=param.device)
    return state[KEYS]
