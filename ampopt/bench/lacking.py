"""Counterparts, from pytorch_optimizer, of ampopt's optimizers that torch lacks."""

import importlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["LACKING", "enter"]


class _Peer(NamedTuple):
    """A class of pytorch_optimizer, and the arguments that make both do the same work.

    Attributes:
        name: name of the class.
        ours: arguments of ampopt's class, besides the defaults.
        theirs: arguments of pytorch_optimizer's class, besides the defaults.
    """

    name: str
    ours: dict[str, Any]
    theirs: dict[str, Any]


_LR: dict[str, Any] = {"lr": 1e-3}
LACKING: dict[str, _Peer] = {
    "Adan": _Peer("Adan", _LR, _LR),
    "LAMB": _Peer(
        "Lamb",
        {**_LR, "bias_correction": False},
        {**_LR, "weight_decay": 0.01, "weight_decouple": False, "adam_debias": True},
    ),
    "Lion": _Peer("Lion", _LR, _LR),
    "NovoGrad": _Peer("NovoGrad", _LR, _LR),
    "ScheduleFreeAdamW": _Peer("ScheduleFreeAdamW", _LR, _LR),
}


def enter(name: str, optimizer: str, params: Sequence[Tensor]) -> torch.optim.Optimizer:
    """Make the contender ``name``, ``"for-loop"`` or ``"foreach"``, with ``optimizer``.

    Raises:
        NotImplementedError: ``name`` is ``"fused"``; pytorch_optimizer has no fused optimizers.
        ImportError: pytorch_optimizer is not installed.
    """
    if name == "fused":
        raise NotImplementedError(f"torch has no {optimizer}, and pytorch_optimizer none fused")
    peer = LACKING[optimizer]
    module: Any = importlib.import_module("pytorch_optimizer")
    made = getattr(module, peer.name)(list(params), foreach=name == "foreach", **peer.theirs)
    if optimizer == "LAMB":
        made.clamp = math.inf  # by default it clamps weight norms to 10, ampopt's does not
    return made
