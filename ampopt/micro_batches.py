"""A batch in parts of equal size, and how a part is handed to the model."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from ampopt._step.torch_private import pytree

__all__ = ["check_divisible", "outputs", "parts"]


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
