"""Compares settings that must be equal on all ranks: classes, options, gradients of copies.

The settings are numbers in the row of each rank (see ``rank_messages``). A rank describes its own
options in words only after the numbers have differed.
"""

import operator
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ampopt._argument_checks import check_bool
from ampopt._step.sharding.dtensor import is_dtensor
from ampopt._step.torch_private import is_flattened_by_fsdp1, pytree
from ampopt.options import DEFAULTS
from ampopt_kernels.devices import to_device

__all__ = [
    "REPLICATED",
    "UNKNOWN",
    "LeftOut",
    "RankSettings",
    "digest",
    "is_initialized",
    "replicated_of",
]

REPLICATED = "replicated"
"""The key of a param group that says which ranks have a copy of its parameters: ``True`` for all,
or a list of global ranks."""


def replicated_of(group: dict[str, Any]) -> bool | list[int]:
    """``replicated`` of a param group. A copy of a list, in order: a list may change in place.

    Raises:
        TypeError: the value is neither ``True``, nor ``False``, nor a list of ranks.
        ValueError: the value is a list of ranks without this one.
    """
    value = group.get(REPLICATED, False)
    if not isinstance(value, (list, tuple)):
        return check_bool("replicated of a param group", value)
    if not all(type(rank) is int for rank in value):
        raise TypeError(f"replicated of a param group must be a list of ranks, got {value!r}")
    if is_initialized() and (here := torch.distributed.get_rank()) not in value:
        raise ValueError(
            f"replicated of a param group must contain this rank, {here}, got {value!r}: name the "
            "ranks that hold the same elements as this one"
        )
    return sorted(set(value))


def is_initialized() -> bool:
    """Whether ``torch.distributed`` has a default process group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


_DIGESTS = 2**24 - 3
"""Digests are less than this prime, so that they are exact in float32 and depend on all bits."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their size in bytes."""


def digest(value: object) -> int:
    """A checksum of ``repr(value)``."""
    return zlib.crc32(repr(value).encode()) % _DIGESTS


UNKNOWN = -1
"""What :meth:`RankSettings.left_out` returns if this rank cannot tell."""


@dataclass
class LeftOut:
    """Counts the calls that one rank has left out for one optimizer since the last all-reduce.

    All-reduces match in order, so after a call that one rank has left out, its next call meets the
    call before on the other ranks. Nothing but this count tells.

    Attributes:
        count: how often ``zero_grad`` has cleared gradients with neither an all-reduce nor a step
            before it.
        is_known: whether there were gradients in all of these calls of ``zero_grad``. Without, this
            rank has left out a call, of a batch for which it has no gradients, or has not.
        is_decided: whether there was an all-reduce, or a step, since the last ``zero_grad``. A
            plain step uses gradients without an all-reduce, on all ranks alike.
    """

    count: int = 0
    is_known: bool = True
    is_decided: bool = False

    def note_zero_grad(self, params: Iterable[Tensor]) -> None:
        """Note that ``zero_grad`` is about to clear the gradients of ``params``."""
        if not self.is_decided:
            if any(param.grad is not None for param in params):
                self.count += 1
            else:
                self.is_known = False
        self.is_decided = False

    def note_all_reduce(self) -> None:
        """Note that there is an all-reduce now."""
        self.count, self.is_known, self.is_decided = 0, True, True


class SharedOptions:
    """The options of param groups whose parameters other ranks have too, as shards or copies."""

    def __init__(
        self,
        groups: Iterable[tuple[dict[str, Any], Iterable[str]]],
        copies: Sequence[Tensor],
        described: object = (),
    ) -> None:
        """Note where the options are.

        Args:
            groups: the param groups, each with the names of the options of its optimizer. Other
                entries of a group, such as those of schedulers, may differ.
            copies: the parameters of which other ranks have copies.
            described: what has to be alike besides the options; its ``repr`` is compared.
        """
        self._places = [(group, key) for group, keys in groups for key in keys]
        self._copies, self._described = copies, described
        self._values: list[Any] = []
        self._tensors: list[Tensor] = []
        self._digest = 0

    def numbers(self, device: torch.device) -> tuple[int | Tensor, int]:
        """Digests of the options, and of which copies have gradients; 0 without any.

        Does not synchronize.

        Args:
            device: where the first number is, if it is a tensor.
        """
        total: Any = self._without_tensors()
        for number, tensor in enumerate(self._tensors, 1):
            bits = tensor.detach().view(_INTEGERS[tensor.element_size()]).sum() % _DIGESTS
            bits = bits.item() if bits.device.type == "cpu" else to_device(bits, device)
            total = (total + number * bits) % _DIGESTS
        have_gradients = bytes(param.grad is not None for param in self._copies)
        return total, zlib.crc32(have_gradients) % _DIGESTS

    def _without_tensors(self) -> int:
        """A digest of the options, without the values of tensors."""
        values = self._values_now()
        for value in tuple(values):
            if type(value) is list:  # it may be changed in place, and stays the same object
                values += value
        if len(values) != len(self._values) or any(map(operator.is_not, values, self._values)):
            leaves = pytree.tree_leaves(self._values_now())
            self._tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            self._digest = digest((self._described, *self._texts()))
            self._values = values
        return self._digest

    def as_texts(self) -> list[str]:
        """The options of this rank, for a message. Does not synchronize."""
        return self._texts(lambda leaf: f"tensor({leaf.tolist()})" if leaf.is_cpu else "tensor")

    def _values_now(self) -> list[Any]:
        """The value of each option."""
        return [group.get(key, DEFAULTS.get(key)) for group, key in self._places]

    def _texts(self, of_tensor: Callable[[Tensor], str] = lambda _: "tensor") -> list[str]:
        """Each option as text."""

        def shown(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return of_tensor(leaf)
            # Of other objects than numbers the type: their repr may differ between processes.
            return leaf if isinstance(leaf, _PLAIN) else type(leaf).__name__

        keys = (key for _, key in self._places)
        values = (pytree.tree_map(shown, value) for value in self._values_now())
        return [f"{key}={value!r}" for key, value in zip(keys, values, strict=True)]


class RankSettings:
    """What has to be alike on all ranks, or on some.

    Attributes:
        classes: a digest of the names of the classes and rules of the optimizers.
        params: a digest of shapes, dtypes and placements of the parameters that all ranks have, as
            shards or copies.
        shared: the options that all ranks have to set alike.
        held: the options that the ranks of a list have to set alike, each with the weight of this
            rank: the weights of the ranks of a list add up to 0, so that equal numbers do too.
    """

    def __init__(self, optimizers: Sequence[Any], *, is_named: bool, names_ranks: bool) -> None:
        """Note where the settings are.

        Under a process group that the user named, plain tensors and ``DTensor``s may be of parts of
        the model that only this rank has: a stage, or experts. So their options may differ.

        Args:
            optimizers: the optimizers that step together.
            is_named: whether the user named the process group.
            names_ranks: see :class:`ampopt._step.rank_agreement.Agreement`.
        """
        # Not the optimizers, which hold this object.
        ours = [getattr(optimizer, "_ampopt", None) for optimizer in optimizers]
        self._left_out: list[LeftOut] = [strategy.left_out for strategy in ours if strategy]
        self._observers: list[Any] = [strategy.observers for strategy in ours if strategy]
        self.classes = digest([_names(optimizer) for optimizer in optimizers])
        self.held: list[tuple[int, SharedOptions]] = []
        shared, layouts, copies, here = [], [], [], torch.distributed.get_rank()
        for optimizer in optimizers:
            keys = {**getattr(optimizer, "defaults", {}), **DEFAULTS}
            for group in optimizer.param_groups:
                ranks, params = replicated_of(group), group["params"]
                are_on_all = ranks is True or not (ranks or names_ranks)
                if are_on_all:
                    layouts += map(_layout, params)
                if isinstance(ranks, list):
                    weight = len(ranks) - 1 if here == ranks[0] else -1
                    described = ranks, list(map(_layout, params))
                    self.held.append((weight, SharedOptions([(group, keys)], params, described)))
                elif are_on_all or (not is_named and any(map(is_flattened_by_fsdp1, params))):
                    shared.append((group, keys))
                    copies += [p for p in params if ranks or _is_copy(p, are_on_all)]
        self.params = digest(layouts)
        self.shared = SharedOptions(shared, copies)

    def left_out(self) -> int:
        """The calls that this rank has left out, or UNKNOWN. Notes that an all-reduce is made."""
        is_known = all(each.is_known for each in self._left_out)
        count = sum(each.count for each in self._left_out) if is_known else UNKNOWN
        for each in self._left_out:
            each.note_all_reduce()
        return count

    def causes(self) -> list[str]:
        """The arguments of every ``skip_when``."""
        return sorted(cause.settings for each in self._observers for cause in each.causes)

    def as_texts(self) -> dict[str, str]:
        """The options and the causes of this rank, for a message. Does not synchronize."""
        every = (self.shared, *(options for _, options in self.held))
        options = dict.fromkeys(text for each in every for text in each.as_texts())
        return {"options": ", ".join(options), "causes": ", ".join(self.causes()) or "none"}


_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype)


def _layout(param: Any) -> tuple[Any, ...]:
    """What is equal on all ranks that have ``param``."""
    return (*param.shape, param.dtype, param.placements if is_dtensor(param) else ())


def _is_copy(param: Any, is_on_all: bool) -> bool:
    """Whether another rank has a copy of ``param``: a plain tensor ``is_on_all``, or on none."""
    if not is_dtensor(param):
        return is_on_all
    sizes = zip(param.placements, param.device_mesh.shape, strict=True)
    return any(placement.is_replicate() and size > 1 for placement, size in sizes)


def _names(optimizer: Any) -> tuple[str, ...]:
    """The name of the class of ``optimizer``, and that of its rule."""
    update: Any = getattr(getattr(optimizer, "rule", None), "update", None)
    names = (getattr(update, name, "") for name in ("__module__", "__qualname__"))
    return type(optimizer).__qualname__, *names
