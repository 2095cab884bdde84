"""The contract of every built-in optimizer, with what each of them claims."""

from typing import Any

import torch

import ampopt
from ampopt.testing import OptimizerContract, strategies

__all__ = ["BUILT_IN", "Small", "contract_of"]

BUILT_IN: tuple[type[Any], ...] = tuple(
    cls
    for name in ampopt.__all__
    if isinstance(cls := getattr(ampopt, name), type)
    and issubclass(cls, torch.optim.Optimizer)
    and hasattr(torch.optim, name)
    and cls is not ampopt.Optimizer
)
"""The optimizers that torch has too."""

_BY_RULE: dict[str, Any] = {
    "half_precision": (torch.bfloat16, torch.float16),
    "complex_parameters": True,
    "sync_free": True,
}
_ORDINARY: dict[str, Any] = {"half_precision": (torch.bfloat16,)}
_OF_EACH: dict[str, dict[str, Any]] = {
    # A step goes by the learning rate that the last one computed.
    "ASGD": {"zero_lr_is_still": False},
    "Adafactor": {"layout_changes_no_bit": False},
    # torch's LBFGS takes views of its gradients, and the largest of their elements.
    "LBFGS": {
        "any_layout": False,
        "shapes": strategies.shapes(min_side=1),
        "plain_steps": False,
        "half_precision": (),
        "several_groups": False,
        "independent_parameters": False,
    },
    # torch's Muon divides by the number of rows, and by norms.
    "Muon": {
        "shapes": strategies.shapes(min_dims=2, max_dims=2, min_side=1),
        "layout_changes_no_bit": False,
    },
    # The learning rate is where step sizes begin.
    "Rprop": {"zero_lr_is_still": False},
    "SparseAdam": {
        "dense_gradients": False,
        "sparse_gradients": True,
        "layout_changes_no_bit": False,
        "shapes": strategies.shapes(min_dims=1, max_dims=2),
    },
}


class Small:
    """Short histories of small parameters, for what is slow."""

    shapes = strategies.shapes(max_elements=4, max_dims=2)

    @classmethod
    def histories(cls, **changed: Any) -> Any:
        """As the contract's."""
        return super().histories(**{"max_params": 2, "max_steps": 2, **changed})  # type: ignore


def contract_of(
    cls: type[Any], suffix: str = "", bases: tuple[type[Any], ...] = (), **claims: Any
) -> type[OptimizerContract]:
    """The contract of a built-in optimizer, with any of its hyperparameters."""

    def make(self: Any, params: Any, **options: Any) -> Any:
        return cls(params, **options)

    if claims.get("sparse_gradients"):  # with which torch takes no weight decay
        claims["options"] = strategies.hyperparameters(cls).map(lambda o: {**o, "weight_decay": 0})
    by_rule = issubclass(cls, ampopt.ElementwiseOptimizer)
    attributes = {
        "make": make,
        "options": strategies.hyperparameters(cls),
        **(_BY_RULE if by_rule else _ORDINARY),
        **_OF_EACH.get(cls.__name__, {}),
        **claims,
    }
    return type(f"Test{cls.__name__}{suffix}", (*bases, OptimizerContract), attributes)
