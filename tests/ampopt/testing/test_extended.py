"""Extended and patched optimizers keep the contract, and on kernels a rule as users write it.

On eager, the contract of that rule is with those of other correct optimizers.
"""

from typing import Any

import pytorch_optimizer
import torch
from support.authored_optimizers import contract_of
from support.contracts import INTERPRETED, OF_ONE_RULE, OF_RULES, OTHERS, Small
from support.optimizers import Signed
from support.strategies import fewer

import ampopt


def patched(params: Any) -> Any:
    """Torch's NAdam, patched in place."""
    return ampopt.patch_optimizer(torch.optim.NAdam(params, lr=0.125))


PATCHED: Any = patched
OF_SIGNED = {**OF_RULES, "continuous": False}  # it goes by signs
CONTRACTS: dict[str, Any] = {
    # It counts the steps of a group on the host, and, as any torch optimizer with attributes of
    # its own, is no optimizer once it is copied.
    "AdaBelief": contract_of(
        ampopt.extend(pytorch_optimizer.AdaBelief),
        {"independent_parameters": False, "deepcopies": False, "settings": fewer(0.1)},
    ),
    # It keeps all in tensors, so that on a device its steps are undone there; one count for all.
    "MADGRAD": contract_of(
        ampopt.extend(pytorch_optimizer.MADGRAD),
        {"independent_parameters": False, "deepcopies": False, "settings": fewer(0.1)},
    ),
    "PatchedNAdam": contract_of(PATCHED, {"settings": fewer(0.1)}),
}
FEW = {"triton": INTERPRETED, "compiled": fewer(0.25)}
for _backend in ("triton", "compiled"):
    _claims = {**OF_SIGNED, **OTHERS, **OF_ONE_RULE, "backend": _backend, "on_device": (False,)}
    CONTRACTS[f"SignedOn{_backend.title()}"] = contract_of(
        Signed, {**_claims, "settings": FEW[_backend]}, (Small,)
    )
for _name, _contract in CONTRACTS.items():
    _contract.__name__ = _contract.__qualname__ = f"Test{_name}"
    _contract.__module__ = __name__
    globals()[_contract.__name__] = _contract
