"""What a plan takes of the param groups: flags and options, which stay, and numbers, which move."""

from itertools import chain
from typing import Any

from torch import Tensor

from ampopt._step.hyperparameters import forms_of
from ampopt._step.param_rounding import PARAM_ROUNDING
from ampopt._step.ranks import REPLICATED
from ampopt._step.variants import Variants
from ampopt_kernels.cpu.objects import IdentityGuard
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
        self.hyper = variants.hyper(groups)
        self._others = self._told_of(groups, self.hyper)
        self._groups, self._entries = groups, None
        # A tensor may be another number inside, and what ``Rule.entries`` reads may be anything.
        of_numbers = not any(isinstance(value, Tensor) for value in chain(*self.hyper))
        self._by_identity = of_numbers and rule.entries is None

    def revalidate(self, groups: list[dict[str, Any]]) -> bool:
        """Take up the hyperparameters of this step; whether nothing else has changed."""
        if self._entries is not None and groups is self._groups and self._entries.unchanged():
            return True
        if len(groups) != len(self._members):
            return False
        for group, members in zip(groups, self._members, strict=True):
            if group["params"] is not members:
                return False
        hyper = self._variants.hyper(groups)
        if self._told_of(groups, hyper) != self._others:
            return False
        # Not for numbers that move at each step, as those of a scheduler do.
        stays = self._by_identity and hyper == self.hyper and not self._has_lists(groups)
        self._entries = IdentityGuard([groups, *groups]) if stays else None
        self._groups, self.hyper = groups, hyper
        return True

    def _told_of(self, groups: list[dict[str, Any]], hyper: Hyper) -> tuple[Any, ...]:
        """What makes another plan necessary: flags, options, what is no longer a number."""
        options = [list(map(group.get, _OPTIONS)) for group in groups]
        return self._variants.flags(groups), options, forms_of(hyper)

    def _has_lists(self, groups: list[dict[str, Any]]) -> bool:
        """Whether a list of hyperparameters may stay and hold other numbers."""
        names = self._rule.hyper
        return any(isinstance(group.get(name), list) for group in groups for name in names)
