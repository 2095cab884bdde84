"""Adds up the terms of ``Rule.reduce`` over all shards and devices, and passes the sums on."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ampopt_kernels.devices import to_device
from ampopt_kernels.step_tensors import Work
from ampopt_kernels.tensors import widest

__all__ = ["AgreeOnSums", "Sums", "over_all"]


class Sums(NamedTuple):
    """Sums of the terms of ``Rule.reduce``; undefined in a skipped step.

    ``widest`` is float64, or float32 on devices without float64; see ``tensors``.

    Attributes:
        each: sums over each parameter: ``widest``, shape (rows, terms).
        totals: sums over all parameters: ``widest``, shape (terms,).
    """

    each: Tensor
    totals: Tensor


AgreeOnSums = Callable[[Sequence[Work], Sums], Sums]
"""All-reduces the sums of this rank, over the rows of all works in their order. Returns the sums
over whole parameters, and totals over the parameters of all ranks, on the same device."""


def over_all(
    works: Sequence[Work], sums: Sequence[Tensor], agree: AgreeOnSums | None
) -> list[Sums]:
    """The sums over all devices and ranks, for each work on its device.

    Args:
        works: as for :func:`~ampopt_kernels.step.run`.
        sums: for each work, the sums over its rows: ``widest``, shape (rows, terms).
        agree: all-reduces over ranks; ``None`` for one rank.
    """
    device = sums[0].device
    each = sums[0]
    if len(sums) > 1:
        each = torch.cat([to_device(s, device, widest(device)) for s in sums])
    in_norm = each
    if not all(row.in_norm for work in works for row in work.rows):
        # Replicated parameters count once in the totals.
        counts = [float(row.in_norm) for work in works for row in work.rows]
        mask = works[0].uploads.get("counted rows", counts, torch.float32, device)
        in_norm = torch.where(mask[:, None] > 0, each, 0.0)
    over_ranks = Sums(each, in_norm.sum(0))
    if agree is not None:
        over_ranks = agree(works, over_ranks)
    if len(works) == 1:
        return [over_ranks]
    parts = over_ranks.each.split([len(work.rows) for work in works])
    return [
        Sums(*(to_device(x, work.device, widest(work.device)) for x in (part, over_ranks.totals)))
        for work, part in zip(works, parts, strict=True)
    ]
