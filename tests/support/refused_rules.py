"""Update rules that the first step refuses."""

from typing import Any

import pytest
import torch
from torch.nn import Parameter

import ampopt
from ampopt.testing.bits import bits, everything
from ampopt_kernels import Rule

__all__ = ["assert_refused", "optimizer_of"]


def optimizer_of(rule: Rule) -> type[ampopt.ElementwiseOptimizer]:
    """Make an optimizer class for ``rule``, with defaults that the rule may name."""

    class Author(ampopt.ElementwiseOptimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.5, "decay": 0.25, "extra": False})

    Author.rule = rule
    return Author


def assert_refused(rule: Rule, *message: str) -> None:
    """Check that each kind of first step raises ``ValueError`` and changes nothing.

    The message is the same each time that the rule is tried.
    """
    messages = set()
    for step in (
        lambda optimizer: optimizer.step(),
        lambda optimizer: optimizer.unscale_and_step(grads_scaled_by=2.0),
        lambda optimizer: optimizer.step(lambda: torch.ones(())),
    ):
        param = Parameter(torch.ones(3))
        param.grad = torch.ones(3)
        optimizer = optimizer_of(rule)([param])
        before = everything(optimizer), bits(param.grad)
        with pytest.raises(ValueError) as raised:
            step(optimizer)
        messages.add(str(raised.value))
        for part in ("Author's rule", *message):
            assert part in str(raised.value)
        assert (everything(optimizer), bits(param.grad)) == before
    assert len(messages) == 1
