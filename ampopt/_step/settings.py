"""The entries of param groups that a plan depends on.

Flags and options must not change while a plan is reused; hyperparameters may change every step.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ampopt._step.masters import needs_master
from ampopt._step.ranks import REPLICATED
from ampopt.options import PARAM_ROUNDING, STATE_BITS
from ampopt_kernels.native.objects import IdentityGuard
from ampopt_kernels.rule import Kind, Rule

__all__ = ["Settings", "Variants", "check_numbers", "forms_of", "kind_of"]


def kind_of(group: dict[str, Any], param: Tensor) -> Kind:
    """``(ndim, dtype)`` of ``param``, which ``Rule.entries`` takes; float32 if it has a master."""
    return param.ndim, torch.float32 if needs_master(group, param) else param.dtype


class Variants:
    """The param groups, split by the kinds ``(ndim, dtype)`` of their parameters.

    A rule with ``entries`` may have other flags and hyperparameters for each kind. For a rule
    without, the variants are the param groups.

    Attributes:
        of: for each parameter of ``present``, the index of its variant.
    """

    def __init__(
        self, rule: Rule, groups: Sequence[dict[str, Any]], present: Sequence[tuple[int, Tensor]]
    ) -> None:
        """Find the variants.

        Args:
            rule: the update rule.
            groups: the param groups of the optimizer.
            present: ``(group index, parameter)`` for each parameter to step.
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
        """For each variant, the index of its group, and the entries that the rule reads."""
        for group, kind in self._kinds:
            yield group, groups[group] if kind is None else self._rule.seen(groups[group], kind)

    def flags(self, groups: Sequence[dict[str, Any]]) -> list[tuple[bool, ...]]:
        """The flags of the rule for each variant."""
        flags = self._rule.flag_values
        return [flags(groups[group], kind) for group, kind in self._kinds]

    def hyper(self, groups: Sequence[dict[str, Any]]) -> list[list[float | Tensor]]:
        """The hyperparameters of each variant."""
        hyper = self._rule.hyper_values
        return [hyper(groups[group], kind) for group, kind in self._kinds]


_OPTIONS = ("master_weights", PARAM_ROUNDING, STATE_BITS, REPLICATED)
"""Entries of param groups, besides those of the rule, on which a plan depends."""

Hyper = list[list[Any]]


class Settings:
    """The flags, options and hyperparameters that a plan was made with.

    Attributes:
        hyper: the hyperparameters of each variant, as ``rule.hyper_values`` returns them.
    """

    def __init__(self, rule: Rule, variants: Variants, groups: list[dict[str, Any]]) -> None:
        """Store the present entries.

        Args:
            rule: the rule of the plan.
            variants: the variants of ``groups``.
            groups: the param groups of the optimizer.
        """
        self._rule, self._variants = rule, variants
        self._members = [group["params"] for group in groups]
        self.hyper = variants.hyper(groups)
        self._fixed = self._fixed_values(groups, self.hyper)
        self._groups, self._entries = groups, None
        # A tensor may change in place, and ``Rule.entries`` may read any entry of the group.
        of_numbers = not any(isinstance(value, Tensor) for value in chain(*self.hyper))
        self._by_identity = of_numbers and rule.entries is None

    def revalidate(self, groups: list[dict[str, Any]]) -> bool:
        """Update :attr:`hyper` for this step.

        Returns:
            Whether the plan is still valid: only hyperparameters have changed.
        """
        if self._entries is not None and groups is self._groups and self._entries.unchanged():
            return True
        if len(groups) != len(self._members):
            return False
        for group, members in zip(groups, self._members, strict=True):
            if group["params"] is not members:
                return False
        hyper = self._variants.hyper(groups)
        if self._fixed_values(groups, hyper) != self._fixed:
            return False
        # A guard would not pay if a scheduler changes numbers at every step.
        stays = self._by_identity and hyper == self.hyper and not self._has_lists(groups)
        self._entries = IdentityGuard([groups, *groups]) if stays else None
        self._groups, self.hyper = groups, hyper
        return True

    def reason(self, groups: list[dict[str, Any]]) -> str | None:
        """Why :meth:`revalidate` has returned ``False``; ``None`` if it has not."""
        if len(groups) != len(self._members):
            return "a param group was added or removed"
        for index, (group, members) in enumerate(zip(groups, self._members, strict=True)):
            if group["params"] is not members:
                return f"the list of parameters of group {index} was replaced"
        flags, options, forms = self._fixed_values(groups, self._variants.hyper(groups))
        known = self._fixed
        if flags != known[0]:
            return f"a flag of the rule was changed, one of {', '.join(self._rule.flags)}"
        if options != known[1]:
            return f"an option of a group was changed, one of {', '.join(_OPTIONS)}"
        return None if forms == known[2] else "a hyperparameter has another type"

    def _fixed_values(self, groups: list[dict[str, Any]], hyper: Hyper) -> tuple[Any, ...]:
        """What requires a new plan when it changes: flags, options, types of hyperparameters."""
        options = [list(map(group.get, _OPTIONS)) for group in groups]
        return self._variants.flags(groups), options, forms_of(hyper)

    def _has_lists(self, groups: list[dict[str, Any]]) -> bool:
        """Whether a hyperparameter is a list, whose elements may change in place."""
        names = self._rule.hyper
        return any(isinstance(group.get(name), list) for group in groups for name in names)


def check_numbers(name: str, value: Any, like: Any) -> None:
    """Raise unless ``value`` is a number, or a tuple of as many numbers as ``like`` has.

    Reads no tensor, and so does not synchronize.

    Args:
        name: the name of the value for messages.
        value: a number, a tensor of one element, or a tuple of these if ``like`` is one.
        like: a valid value.

    Raises:
        TypeError: ``value`` has another type, such as a string.
        ValueError: ``value`` has another length than ``like``, or a tensor has not one element.
    """
    several = isinstance(like, (tuple, list))
    elements = value if isinstance(value, (tuple, list)) else (value,)
    wrong = None
    if (elements is value) != several or not all(map(_is_number, elements)):
        wrong = TypeError
    elif several and len(elements) != len(like) or any(map(_is_long, elements)):
        wrong = ValueError
    if wrong is not None:
        allowed = "a number or a tensor of one element"
        if several:
            allowed = f"a tuple of {len(like)}, each {allowed}"
        raise wrong(f"{name} must be {allowed}, got {value!r}")


def forms_of(hyper: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """The type of each hyperparameter, or shape and dtype of a tensor: what fixes a plan."""
    return [
        [(x.shape, x.dtype) if isinstance(x, Tensor) else type(x) for x in values]
        for values in hyper
    ]


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value.is_complex()
    return hasattr(value, "__float__") and not getattr(value, "shape", ())  # so NumPy scalars pass


def _is_long(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() != 1
