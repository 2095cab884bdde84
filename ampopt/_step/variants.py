"""Param groups as a rule sees them: divided, where it tells kinds of parameters apart."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ampopt._step.masters import needs_master
from ampopt_kernels.rule import Kind, Rule

__all__ = ["Variants", "kind_of"]


def kind_of(group: dict[str, Any], param: Tensor) -> Kind:
    """What ``Rule.entries`` is told of ``param``."""
    return param.ndim, torch.float32 if needs_master(group, param) else param.dtype


class Variants:
    """The groups, each once for every kind of its parameters that a step works on.

    They are the groups themselves for a rule without ``entries``.
    """

    def __init__(
        self, rule: Rule, groups: Sequence[dict[str, Any]], present: Sequence[tuple[int, Tensor]]
    ) -> None:
        """Begin.

        Args:
            rule: whose.
            groups: of the optimizer.
            present: ``(group, parameter)`` of all that a step works on.
        """
        self._rule = rule
        self.of = [group for group, _ in present]
        self._kinds: list[tuple[int, Kind | None]] = [(i, None) for i in range(len(groups))]
        if rule.entries is not None:
            kinds = [(group, kind_of(groups[group], param)) for group, param in present]
            self._kinds = list(dict.fromkeys(kinds))
            places = {kind: place for place, kind in enumerate(self._kinds)}
            self.of = [places[kind] for kind in kinds]

    def seen(self, groups: Sequence[dict[str, Any]]) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """The group of each, and the entries that the rule sees."""
        for group, kind in self._kinds:
            yield group, groups[group] if kind is None else self._rule.seen(groups[group], kind)

    def flags(self, groups: Sequence[dict[str, Any]]) -> list[tuple[bool, ...]]:
        """The flags of each."""
        flags = self._rule.flag_values
        return [flags(groups[group], kind) for group, kind in self._kinds]

    def hyper(self, groups: Sequence[dict[str, Any]]) -> list[list[float | Tensor]]:
        """The hyperparameters of each."""
        hyper = self._rule.hyper_values
        return [hyper(groups[group], kind) for group, kind in self._kinds]
