"""How the optimizer of an example is made: with its options, and with states of fewer bits."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

import ampopt
from ampopt_kernels import Rule

__all__ = ["Make", "maker", "maker_of_reference", "positive_states", "storing"]

Make = Callable[[Any], Any]
"""Function from parameters or param groups to the optimizer."""


def maker(
    contract: Any, options: Mapping[str, Any], *, state_bits: int = 32, signed: str | None = None
) -> Make:
    """Return a function that makes the optimizer of ``contract``.

    The function raises ``TypeError`` if what ``contract.make`` returns is no optimizer of ampopt.

    Args:
        contract: the contract.
        options: the keyword arguments of its ``make``.
        state_bits: how many bits states have, if the optimizer is made from a rule.
        signed: the name of a state that is taken as declared without ``positive=True``.
    """
    make = _making(contract.make, options, ampopt.Optimizer, "an ampopt.Optimizer")
    if signed is not None:
        make = _keeping_signed(make, signed)
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


def positive_states(make: Make) -> list[str]:
    """The names of the states that the optimizer's rule declares ``positive``, if it has a rule."""
    try:
        optimizer = make([torch.nn.Parameter(torch.ones(1))])
    except Exception:  # it may refuse such a parameter
        return []
    if not isinstance(optimizer, ampopt.ElementwiseOptimizer):
        return []
    return [part.name for part in optimizer.rule.state if part.positive]


def _keeping_signed(make: Make, name: str) -> Make:
    """``make``, with the state ``name`` declared without ``positive=True``."""

    def make_signed(params: Any) -> Any:
        optimizer = make(params)
        optimizer.rule = _with_signed(optimizer.rule, name)
        return optimizer

    return make_signed


@functools.cache  # a rule is compiled once
def _with_signed(rule: Rule, name: str) -> Rule:
    """``rule``, with its state ``name`` declared without ``positive=True``."""
    parts = (replace(part, positive=part.positive and part.name != name) for part in rule.state)
    return replace(rule, state=tuple(parts))
