"""How the optimizer of an example is made: with its options, and with states of fewer bits."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

import ampopt

__all__ = ["Make", "maker", "maker_of_reference", "storing"]

Make = Callable[[Any], Any]
"""Function from parameters or param groups to the optimizer."""


def maker(contract: Any, options: Mapping[str, Any], *, state_bits: int = 32) -> Make:
    """Return a function that makes the optimizer of ``contract``.

    The function raises ``TypeError`` if what ``contract.make`` returns is no optimizer of ampopt.

    Args:
        contract: the contract.
        options: the keyword arguments of its ``make``.
        state_bits: how many bits states have, if the optimizer is made from a rule.
    """
    make = _making(contract.make, options, ampopt.Optimizer, "an ampopt.Optimizer")
    return storing(make, state_bits=state_bits)


def maker_of_reference(contract: Any, options: Mapping[str, Any]) -> Make:
    """Return a function that makes the trusted optimizer of ``contract``; see :func:`maker`."""
    kind = torch.optim.Optimizer
    return _making(contract.reference, options, kind, "a torch.optim.Optimizer")


def _making(make: Any, options: Mapping[str, Any], kind: type[Any], must_be: str) -> Make:
    """``make`` with ``options``, whose result is checked to be a ``kind``."""

    def make_checked(params: Any) -> Any:
        # Tests write to a learning rate that is a tensor, so each optimizer gets its own.
        own = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        optimizer = make(params, **own)
        if not isinstance(optimizer, kind):
            raise TypeError(
                f"{make.__name__} must return {must_be}, got {type(optimizer).__name__}: derive "
                f"the class from {must_be.split()[1]}"
            )
        return optimizer

    return make_checked


def storing(make: Make, **options: Any) -> Make:
    """``make``, with ``options`` of every param group, if the optimizer is made from a rule.

    Args:
        make: function from parameters or param groups to the optimizer.
        options: options of param groups, such as ``state_bits``. A number of 32 bits, which is the
            default, is left out.
    """
    entries = {name: value for name, value in options.items() if value != 32}

    def make_storing(params: Any) -> Any:
        optimizer = make(params)
        if not (entries and isinstance(optimizer, ampopt.ElementwiseOptimizer)):
            return optimizer
        groups = params if isinstance(params[0], dict) else [{"params": params}]
        return make([{**entries, **group} for group in groups])

    return make_storing
