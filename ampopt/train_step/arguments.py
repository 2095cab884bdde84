"""The arguments of :class:`ampopt.TrainStep`: what they stand for, and what is refused."""

import numbers
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ampopt._step.torch_private import pytree
from ampopt.loss_scale.arguments import check_bool, check_count, instead_of
from ampopt.loss_scale.base import LossScale
from ampopt.loss_scale.static import StaticLossScale
from ampopt.optimizer import Optimizer
from ampopt.precision.levels import Precision

__all__ = [
    "NOT_GIVEN",
    "as_scale",
    "check_divisible",
    "check_loss",
    "check_masters",
    "check_overflow",
    "of_autocast",
    "outputs",
    "parts",
]


NOT_GIVEN: Any = object()


def of_autocast(dtype: Any) -> Precision:
    """The level that ``autocast=`` alone stands for."""
    if dtype not in (torch.float16, torch.bfloat16, None, NOT_GIVEN):
        raise ValueError(f"autocast must be torch.float16, torch.bfloat16 or None, got {dtype!r}")
    dtype = torch.float16 if dtype is NOT_GIVEN else dtype
    return Precision(compute_dtype=dtype or torch.float32)


def check_overflow(then: Any, max_replays: Any, preserve_rng: bool, cuda_graph: bool) -> None:
    """Refuse what does not go together of the arguments that say what an overflow does."""
    if then not in ("skip", "replay", "next_batch"):
        raise ValueError(f"on_overflow must be 'skip', 'replay' or 'next_batch', got {then!r}")
    if max_replays is not None:
        check_count("max_replays", max_replays, least=0)
        if then == "skip":
            raise ValueError(
                "max_replays does not go with on_overflow='skip': leave one of them out"
            )
    if check_bool("preserve_rng", preserve_rng) and then != "replay":
        raise ValueError("preserve_rng is for replays: give on_overflow='replay' too")
    if check_bool("cuda_graph", cuda_graph) and then != "skip":
        raise ValueError(
            f"on_overflow={then!r} does not go with cuda_graph=True: the host has to look at each "
            "step; leave one of them out"
        )


def check_masters(precision: Any, optimizer: Optimizer) -> None:
    """Refuse an optimizer made without the masters that ``precision`` asks for."""
    if not isinstance(precision, Precision):
        raise TypeError(f"precision must be an ampopt.Precision, got {type(precision).__name__}")
    if precision.master_weights and not all(
        group.get("master_weights") for group in optimizer.param_groups
    ):
        raise ValueError(
            f"precision asks for master weights, and {type(optimizer).__name__} was made without: "
            "give it **precision.optimizer_options"
        )


def as_scale(scale: Any) -> LossScale | None:
    """The scale that a caller gave."""
    if scale is NOT_GIVEN:
        raise TypeError("TrainStep needs a loss scale, None for none of it, or precision=")
    if scale is None or isinstance(scale, LossScale):
        return scale
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        raise TypeError(
            "scale must be a LossScale, such as ampopt.DynamicLossScale(), a positive number or "
            f"None, got {type(scale).__name__}{instead_of(scale)}"
        )
    return StaticLossScale(float(scale))


def check_loss(loss: Any) -> None:
    """Refuse what is no loss."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise TypeError(f"loss_fn must return a tensor of one element, got {got}")


def parts(batch: Any, n: int) -> Iterator[Any]:
    """The batch in ``n`` parts: its tensors along their first dimension, the rest in each."""
    if n == 1:
        yield batch
        return
    leaves, structure = pytree.tree_flatten(batch)
    split = [x.split(len(x) // n) if _has_rows(x) else [x] * n for x in leaves]
    for part in zip(*split, strict=True):
        yield pytree.tree_unflatten(part, structure)


def check_divisible(batch: Any, n: int) -> None:
    """Refuse a batch that has no ``n`` parts of equal size.

    Raises:
        ValueError: it does not.
    """
    for leaf in pytree.tree_leaves(batch) if n > 1 else ():
        if _has_rows(leaf) and (len(leaf) % n or not len(leaf)):
            raise ValueError(
                f"a batch of {len(leaf)} cannot be divided into micro_batches={n} of equal "
                "size: choose a batch size that it divides, and drop_last=True in the loader"
            )


def outputs(model: Callable[..., Any], inputs: Any) -> Any:
    """What the model makes of a tensor, or of a tuple or mapping of arguments."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > 0
