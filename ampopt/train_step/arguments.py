"""Check the arguments of :class:`ampopt.TrainStep`, and divide batches into micro-batches."""

import functools
import numbers
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ampopt._argument_checks import check_bool, check_count
from ampopt._step.torch_private import pytree
from ampopt.loss_scale.arguments import instead_of
from ampopt.loss_scale.base import LossScale
from ampopt.loss_scale.static import StaticLossScale
from ampopt.optimizer import Optimizer
from ampopt.options import MASTER_BITS, MASTER_WEIGHTS, STATE_BITS
from ampopt.precision.levels import Precision
from ampopt_kernels.devices import to_device

__all__ = [
    "NOT_GIVEN",
    "as_scale",
    "check_divisible",
    "check_loss",
    "check_masters",
    "check_overflow",
    "of_autocast",
    "on_device",
    "outputs",
    "parts",
]


NOT_GIVEN: Any = type("not_given", (), {"__repr__": lambda self: "<not given>"})()
"""The default of arguments of which ``None`` is a value; ``help`` shows it by this repr."""


def of_autocast(dtype: Any) -> Precision:
    """The precision policy that the argument ``autocast`` alone stands for."""
    if dtype not in (torch.float16, torch.bfloat16, None, NOT_GIVEN):
        raise ValueError(f"autocast must be torch.float16, torch.bfloat16 or None, got {dtype!r}")
    dtype = torch.float16 if dtype is NOT_GIVEN else dtype
    return Precision(compute_dtype=dtype or torch.float32)


def check_overflow(then: Any, max_replays: Any, preserve_rng: bool, cuda_graph: bool) -> None:
    """Refuse arguments about overflow that do not go together; ``then`` is ``on_overflow``."""
    if then not in ("skip", "replay", "next_batch"):
        raise ValueError(f"on_overflow must be 'skip', 'replay' or 'next_batch', got {then!r}")
    if max_replays is not None:
        check_count("max_replays", max_replays, least=0)
        if then == "skip":
            raise ValueError(
                "max_replays cannot be combined with on_overflow='skip': leave one of them out"
            )
    if check_bool("preserve_rng", preserve_rng) and then != "replay":
        raise ValueError("preserve_rng is for replays: pass on_overflow='replay' too")
    if check_bool("cuda_graph", cuda_graph) and then != "skip":
        raise ValueError(
            f"on_overflow={then!r} cannot be combined with cuda_graph=True: the host has to read "
            "the overflow flag of each step; leave one of them out"
        )


def check_masters(precision: Any, optimizer: Optimizer) -> None:
    """Refuse an optimizer without the master weights or bits that ``precision`` requires."""
    if not isinstance(precision, Precision):
        raise TypeError(f"precision must be an ampopt.Precision, got {type(precision).__name__}")
    name = type(optimizer).__name__
    made_with = f"create it with {name}(params, **precision.optimizer_options)"
    if precision.master_weights and not all(map(MASTER_WEIGHTS.of, optimizer.param_groups)):
        raise ValueError(
            f"precision requires master weights, and {name} was made without: {made_with}"
        )
    for option in (STATE_BITS, MASTER_BITS):
        bits = option.of(vars(precision))
        own = [option.of(group) for group in optimizer.param_groups]
        if bits != option.default and bits not in own:  # some groups may have others
            raise ValueError(
                f"precision requires {option.name}={bits}, and {name} was made with {max(own)}: "
                + made_with
            )


def as_scale(scale: Any) -> LossScale | None:
    """The loss scale that the argument ``scale`` stands for."""
    if scale is NOT_GIVEN:
        raise TypeError(
            "TrainStep needs scale=, a loss scale or None to disable scaling, or precision="
        )
    if scale is None or isinstance(scale, LossScale):
        return scale
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        raise TypeError(
            "scale must be a LossScale, such as ampopt.DynamicLossScale(), a positive number or "
            f"None, got {type(scale).__name__}{instead_of(scale)}"
        )
    return StaticLossScale(float(scale))


def check_loss(loss: Any) -> None:
    """Refuse a loss that is not a tensor of one element."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise TypeError(f"loss_fn must return a tensor of one element, got {what}")


def on_device(device: torch.device, leaf: Any) -> Any:
    """``leaf`` of a batch, if it is a tensor, on ``device``.

    A mapping that is no pytree, such as a ``BatchEncoding`` of transformers, becomes a dict.
    """
    if isinstance(leaf, Tensor):
        return to_device(leaf, device)
    if isinstance(leaf, Mapping):
        return pytree.tree_map(functools.partial(on_device, device), dict(leaf))
    return leaf


def parts(batch: Any, n: int) -> Iterator[Any]:
    """Divide ``batch`` into ``n`` micro-batches: tensors by their first dimension.

    0-d tensors and other objects are part of each.
    """
    if n == 1:
        yield batch
        return
    leaves, structure = pytree.tree_flatten(batch)
    pieces = [x.split(len(x) // n) if _has_rows(x) else [x] * n for x in leaves]
    for part in zip(*pieces, strict=True):
        yield pytree.tree_unflatten(part, structure)


def check_divisible(batch: Any, n: int) -> None:
    """Refuse a batch that cannot be divided into ``n`` micro-batches of equal size.

    Raises:
        ValueError: the first dimension of a tensor is 0, or not a multiple of ``n``.
    """
    for leaf in pytree.tree_leaves(batch) if n > 1 else ():
        if _has_rows(leaf) and (len(leaf) % n or not len(leaf)):
            raise ValueError(
                f"a batch of {len(leaf)} cannot be divided into micro_batches={n} of equal "
                "size: choose a batch size that it divides, and drop_last=True in the loader"
            )


def outputs(model: Callable[..., Any], inputs: Any) -> Any:
    """Call the model with ``inputs``: a tensor, a tuple of arguments, or a mapping of them."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def _has_rows(leaf: Any) -> bool:
    """Whether ``leaf`` is a tensor with a first dimension, along which a batch is divided."""
    return isinstance(leaf, Tensor) and leaf.ndim > 0
