"""What a plan takes of the param groups: flags and options, which stay, and numbers, which move."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ampopt._step.masters import needs_master
from ampopt._step.ranks import REPLICATED
from ampopt.options import PARAM_ROUNDING
from ampopt_kernels.native.objects import IdentityGuard
from ampopt_kernels.rule import Kind, Rule

__all__ = ["Settings", "Variants", "check_numbers", "forms_of", "kind_of"]


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


def check_numbers(name: str, value: Any, like: Any) -> None:
    """Refuse what is no number, or not as many as ``like`` has. Reads no tensor.

    Args:
        name: what messages call the value.
        value: a number, or a tensor of one element; or a tuple of these, if ``like`` is one.
        like: a value that is right.

    Raises:
        TypeError: it is something else, such as a string.
        ValueError: there are more or fewer, or a tensor has not one element.
    """
    several = isinstance(like, (tuple, list))
    given = value if isinstance(value, (tuple, list)) else (value,)
    wrong = None
    if (given is value) != several or not all(map(_is_number, given)):
        wrong = TypeError
    elif several and len(given) != len(like) or any(map(_is_long, given)):
        wrong = ValueError
    if wrong is not None:
        allowed = "a number or a tensor of one element"
        if several:
            allowed = f"a tuple of {len(like)}, each {allowed}"
        raise wrong(f"{name} must be {allowed}, got {value!r}")


def forms_of(hyper: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """What :func:`check_numbers` depends on, of the hyperparameters of each group, laid flat."""
    return [
        [(x.shape, x.dtype) if isinstance(x, Tensor) else type(x) for x in values]
        for values in hyper
    ]


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value.is_complex()
    return hasattr(value, "__float__") and not getattr(value, "shape", ())  # as NumPy's have


def _is_long(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() != 1
