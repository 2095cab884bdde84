"""Sums over parameters, as ``Rule.reduce`` asks for them: those of all devices, and all ranks."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ampopt_kernels.devices import to_device
from ampopt_kernels.tensors import widest

if TYPE_CHECKING:
    from ampopt_kernels.work import Work

__all__ = ["AgreeOnSums", "Sums", "over_all"]


class Sums(NamedTuple):
    """What was summed up, in ``widest``; see ``tensors``.

    Of a skipped step they may be anything.

    Attributes:
        each: shape (rows, terms): over each parameter.
        totals: shape (terms,): over all of them.
    """

    each: Tensor
    totals: Tensor


AgreeOnSums = Callable[[Sequence["Work"], Sums], Sums]
"""Makes of what was summed up here, over the rows of the works in their order, the sums over whole
parameters and over those of all ranks, on the device where they are."""


def over_all(
    works: Sequence["Work"], sums: Sequence[Tensor], agree: AgreeOnSums | None
) -> list[Sums]:
    """The sums for each work, of what is on all devices, and on all ranks.

    Args:
        works: one for each device.
        sums: of the rows of each: shape (rows, terms).
        agree: of the ranks, if there are several.
    """
    home = sums[0].device
    each = torch.cat([to_device(s, home, widest(home)) for s in sums]) if len(sums) > 1 else sums[0]
    in_norm = each
    if not all(row.in_norm for work in works for row in work.rows):
        counts = [float(row.in_norm) for work in works for row in work.rows]
        mask = works[0].uploads.get("counted rows", counts, torch.float32, home)
        in_norm = torch.where(mask[:, None] > 0, each, 0.0)
    found = Sums(each, in_norm.sum(0))
    if agree is not None:
        found = agree(works, found)
    if len(works) == 1:
        return [found]
    parts = found.each.split([len(work.rows) for work in works])
    return [
        Sums(*(to_device(x, work.device, widest(work.device)) for x in (part, found.totals)))
        for work, part in zip(works, parts, strict=True)
    ]
