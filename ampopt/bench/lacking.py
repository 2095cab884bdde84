"""Optimizers that torch lacks, as pytorch_optimizer has them: whom else to run beside ours."""

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["LACKING", "enter"]


class _Peer(NamedTuple):
    """The same work there.

    Attributes:
        name: of the class.
        ours: arguments of ours besides the defaults.
        theirs: of theirs.
    """

    name: str
    ours: dict[str, Any]
    theirs: dict[str, Any]


_LR: dict[str, Any] = {"lr": 1e-3}
LACKING: dict[str, _Peer] = {
    "Adan": _Peer("Adan", _LR, _LR),
    # There, a step clips by itself unless told not to, and corrects a bias in another place: as
    # much work, to a result a little off.
    "LAMB": _Peer("Lamb", _LR, {**_LR, "weight_decay": 0.01, "max_grad_norm": 0.0}),
    "Lion": _Peer("Lion", _LR, _LR),
    "NovoGrad": _Peer("NovoGrad", _LR, _LR),
    "ScheduleFreeAdamW": _Peer("ScheduleFreeAdamW", _LR, _LR),
}


def enter(name: str, optimizer: str, params: Sequence[Tensor]) -> torch.optim.Optimizer:
    """The contender ``name``, ``"for-loop"`` or ``"foreach"``, with ``optimizer``.

    Raises:
        NotImplementedError: there is none.
        ImportError: pytorch_optimizer is not installed.
    """
    if name == "fused":
        raise NotImplementedError(f"torch has no {optimizer}, and pytorch_optimizer none fused")
    peer = LACKING[optimizer]
    module: Any = importlib.import_module("pytorch_optimizer")
    return getattr(module, peer.name)(list(params), foreach=name == "foreach", **peer.theirs)
