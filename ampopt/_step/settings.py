"""What a plan takes of the param groups: flags and options, which stay, and numbers, which move."""

from itertools import chain
from typing import Any

from torch import Tensor

from ampopt._step.hyperparameters import forms_of
from ampopt._step.param_rounding import PARAM_ROUNDING
from ampopt._step.ranks import REPLICATED
from ampopt._step.variants import Variants
from ampopt_kernels.cpu.objects import Contents
from ampopt_kernels.rule import Rule

__all__ = ["Settings"]

_OPTIONS = ("master_weights", PARAM_ROUNDING, REPLICATED)
"""Of param groups, besides those of their rule."""

Hyper = list[list[Any]]


class Settings:
    """The entries of the param groups that a plan was made for.

    Attributes:
        hyper: the hyperparameters of each variant, as ``rule.hyper_values`` gives them.
    """

    def __init__(self, rule: Rule, variants: Variants, groups: list[dict[str, Any]]) -> None:
        """Take them down.

        Args:
            rule: of the plan.
            variants: of ``groups``.
            groups: of the optimizer.
        """
        self._rule, self._variants = rule, variants
        self._members = [group["params"] for group in groups]
        self._take_up(groups, variants.hyper(groups))
        self._others = self._told_of(groups, self.hyper)

    def renew(self, groups: list[dict[str, Any]]) -> bool:
        """Take up the hyperparameters of this step; whether nothing else has changed."""
        if groups is self._groups and self._entries is not None and self._entries.unchanged():
            return True
        if len(groups) != len(self._members):
            return False
        if any(g["params"] is not known for g, known in zip(groups, self._members, strict=True)):
            return False
        hyper = self._variants.hyper(groups)
        if self._told_of(groups, hyper) != self._others:
            return False
        self._take_up(groups, hyper)
        return True

    def _told_of(self, groups: list[dict[str, Any]], hyper: Hyper) -> tuple[Any, ...]:
        """What makes another plan necessary: flags, options, what is no longer a number."""
        options = [list(map(group.get, _OPTIONS)) for group in groups]
        return self._variants.flags(groups), options, forms_of(hyper)

    def _take_up(self, groups: list[dict[str, Any]], hyper: Hyper) -> None:
        self.hyper, self._groups, self._entries = hyper, groups, None
        # A list or a tensor may stay and be another inside, and what ``Rule.entries`` reads may be
        # anything.
        values = [group.get(name) for group in groups for name in self._rule.hyper]
        may_differ = any(isinstance(value, (list, Tensor)) for value in chain(values, *hyper))
        if self._rule.entries is None and not may_differ:
            self._entries = Contents([groups, *groups])
