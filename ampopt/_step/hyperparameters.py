"""The flags and hyperparameters that a rule reads from param groups, and their types."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampopt.options import GROUP_OPTIONS, needs_master
from ampopt_kernels.rule import ParamKind, Rule

__all__ = [
    "Hyper",
    "Variant",
    "Variants",
    "check_like",
    "check_numbers",
    "forms_of",
    "kind_of",
]

Hyper = list[list[Any]]
"""The hyperparameters of each variant, as ``Rule.hyper_values`` returns them."""


def kind_of(group: dict[str, Any], param: Tensor) -> ParamKind:
    """``(ndim, dtype)`` of ``param``, which ``Rule.entries`` takes; float32 if it has a master."""
    return param.ndim, torch.float32 if needs_master(group, param) else param.dtype


class Variant(NamedTuple):
    """What the parameters of one group and kind ``(ndim, dtype)`` have in common.

    Attributes:
        place: the index among the variants of a plan.
        flags: the flags of the rule.
        states: the names of the elementwise states.
        state_keys: the names of all states.
        forms: name, dtype and shape of each state; ``None`` for those of the parameter.
        scalar_keys: for each scalar state of the rule its name; ``None`` if the flags omit it.
        is_plain: whether the states are elementwise or scalar, and have all their digits: no option
            of :data:`ampopt.options.GROUP_OPTIONS` is set.
    """

    place: int
    flags: tuple[bool, ...]
    states: tuple[str, ...]
    state_keys: tuple[str, ...]
    forms: tuple[tuple[str, torch.dtype | None, torch.Size | None], ...]
    scalar_keys: tuple[str | None, ...]
    is_plain: bool


class Variants:
    """The param groups, split by the kinds ``(ndim, dtype)`` of their parameters.

    A rule with ``entries`` may have other flags and hyperparameters for each kind. For a rule
    without, each group is one variant. Groups without parameters to step have none.
    """

    def __init__(self, rule: Rule) -> None:
        """Start without variants; ``rule`` is the update rule."""
        self._rule = rule
        self._variants: dict[tuple[int, ParamKind | None], Variant] = {}

    def add(
        self, groups: Sequence[dict[str, Any]], params: Iterable[tuple[int, Tensor]]
    ) -> list[Variant]:
        """Add the variants of further parameters.

        Args:
            groups: the param groups of the optimizer.
            params: ``(group index, parameter)`` for each parameter to step.

        Returns:
            The variant of each parameter.
        """
        by_kind, variants, found = self._rule.entries is not None, self._variants, []
        for index, param in params:
            key = index, kind_of(groups[index], param) if by_kind else None
            if (variant := variants.get(key)) is None:
                variants[key] = variant = self._new(groups[index], key[1])
            found.append(variant)
        return found

    def _new(self, group: dict[str, Any], kind: ParamKind | None) -> Variant:
        """The variant of the parameters of ``kind`` in ``group``."""
        rule = self._rule
        flags = rule.flag_values(group, kind)
        every, scalars = rule.all_state_for(flags), rule.scalar_state_for(flags)
        has_options = any(option.is_set(group) for option in GROUP_OPTIONS.values())
        return Variant(
            place=len(self._variants),
            flags=flags,
            states=tuple(part.name for part in rule.state_for(flags)),
            state_keys=tuple(part.name for part in every),
            forms=tuple(
                (part.name, part.dtype or torch.float32, torch.Size())
                if part in scalars
                else (part.name, part.dtype, None)
                for part in every
            ),
            scalar_keys=tuple(p.name if p in scalars else None for p in rule.scalar_state),
            is_plain=not (has_options or rule.averages_for(flags)),
        )

    def entries(self, groups: Sequence[dict[str, Any]]) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """For each variant, the index of its group, and the entries that the rule reads."""
        for group, kind in self._variants:
            entries = groups[group]
            yield group, entries if kind is None else self._rule.entries_for(entries, kind)

    def flags(self, groups: Sequence[dict[str, Any]]) -> list[tuple[bool, ...]]:
        """The flags of the rule for each variant."""
        flags = self._rule.flag_values
        return [flags(groups[group], kind) for group, kind in self._variants]

    def hyper(self, groups: Sequence[dict[str, Any]]) -> list[list[float | Tensor]]:
        """The hyperparameters of each variant."""
        hyper = self._rule.hyper_values
        return [hyper(groups[group], kind) for group, kind in self._variants]


def check_numbers(name: str, value: Any, like: Any, *, or_none: bool = False) -> None:
    """Raise unless ``value`` is a number, or a tuple of as many numbers as ``like`` has.

    Reads no tensor, and so does not synchronize.

    Args:
        name: the name of the value for messages.
        value: a number, a tensor of one element, or a tuple of these if ``like`` is one.
        like: a valid value.
        or_none: whether elements of a tuple may be ``None``.

    Raises:
        TypeError: ``value`` has another type, such as a string.
        ValueError: ``value`` has another length than ``like``, or a tensor has not one element.
    """
    several = isinstance(like, (tuple, list))
    if not several and _is_long(value):
        raise ValueError(f"Tensor {name} must be 1-element, got {value!r}")  # torch's words
    elements = value if isinstance(value, (tuple, list)) else (value,)
    wrong = None
    numbers = [x for x in elements if not (or_none and x is None)]
    if (elements is value) != several or not all(map(_is_number, numbers)):
        wrong = TypeError
    elif several and len(elements) != len(like) or any(map(_is_long, elements)):
        wrong = ValueError
    if wrong is not None:
        allowed_values = "a number or a tensor of one element"
        if several:
            allowed_values = f"a tuple of {len(like)}, each {allowed_values}"
        raise wrong(f"{name} must be {allowed_values}, got {value!r}")


def check_like(name: str, value: Any, like: Any) -> None:
    """Raise unless ``value`` is what the valid hyperparameter ``like`` is: a flag or numbers.

    Whatever else ``like`` is, such as ``None`` or a string, says nothing of other values. If a
    tuple has ``None`` among its numbers, so may others.

    Args:
        name: the name of the hyperparameter for messages.
        value: the value to check. Reads a tensor on the CPU only.
        like: a valid value, such as the default.

    Raises:
        TypeError: ``value`` has another type; for a flag, it is neither a bool nor 0 or 1.
        ValueError: ``value`` is NaN, or a tuple of another length.
    """
    if isinstance(like, bool):
        if isinstance(value, (str, Tensor)) or not any(value is x or value == x for x in (0, 1)):
            raise TypeError(f"{name} must be True or False, got {value!r}")
        return
    several = isinstance(like, (tuple, list))
    numbers = [x for x in like if x is not None] if several else [like]
    if not all(map(_is_number, numbers)):
        return
    check_numbers(name, value, like, or_none=several and len(numbers) < len(like))
    for x in value if several else (value,):
        if not (x is None or isinstance(x, Tensor) and x.device.type != "cpu") and math.isnan(x):
            raise ValueError(f"{name} is nan in {value!r}: pass a number")


def forms_of(hyper: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """The type of each hyperparameter, or shape and dtype of a tensor: what fixes a plan."""
    return [
        [(x.shape, x.dtype) if isinstance(x, Tensor) else type(x) for x in values]
        for values in hyper
    ]


def _is_number(value: Any) -> bool:
    """Whether ``value`` is a real number, or a tensor of real numbers."""
    if isinstance(value, Tensor):
        return not value.is_complex()
    return hasattr(value, "__float__") and not getattr(value, "shape", ())  # so NumPy scalars pass


def _is_long(value: Any) -> bool:
    """Whether ``value`` is a tensor that has not exactly one element."""
    return isinstance(value, Tensor) and value.numel() != 1
