"""Judge, and unscale, the gradients of optimizers of any class, of one or several at once."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ampopt import gradients
from ampopt.backend import backend_for
from ampopt_kernels.uploads import Uploads
from ampopt_kernels.work import Decision, Request, Row, Work, run

__all__ = ["device_of", "judge", "judge_held", "works_of"]


def judge(
    param_groups: list[dict[str, Any]],
    request: Request,
    *,
    write: bool = False,
    uploads: dict[torch.device, Uploads] | None = None,
) -> Decision | None:
    """Judge all gradients under one decision. Does not synchronize.

    Args:
        param_groups: of one or several optimizers.
        request: what is asked; nothing is stepped.
        write: unscale the gradients in place.
        uploads: what the devices hold of earlier calls.

    Returns:
        The decision; ``None`` if there are no gradients.

    Raises:
        RuntimeError: see :func:`ampopt.gradients.check`; nothing has changed then.
        TypeError: likewise.
    """
    gradients.check(param_groups)
    present = gradients.present(param_groups)
    uploads = {} if uploads is None else uploads
    return judge_held(present, request, write=write, uploads=uploads) if present else None


@torch.no_grad()
def judge_held(
    holders: Sequence[tuple[int, Tensor]],
    request: Request,
    *,
    write: bool,
    uploads: dict[torch.device, Uploads],
) -> Decision:
    """As :func:`judge`, of gradients that were checked: of one tensor at least.

    Args:
        holders: ``(group, tensor)``, each with a ``grad``.
        request: as for :func:`judge`.
        write: likewise.
        uploads: likewise.
    """
    staged = gradients.Staged()
    works = works_of(gradients.rows(holders, staged, written=write), uploads)
    agreed = gradients.agreed_upon(request, holders)
    decision = run(backend_for, works, replace(agreed, write=write, apply=False))
    staged.store()
    return decision


def works_of(
    rows: Sequence[Row], uploads: dict[torch.device, Uploads], **fields: Any
) -> list[Work]:
    """The rows by device, the first parameter's first; ``fields`` are further ones of each."""
    by_device: dict[torch.device, list[Row]] = {}
    for row in rows:
        by_device.setdefault(row.grad.device, []).append(row)
    return [
        Work(device, of_device, uploads=uploads.setdefault(device, Uploads()), **fields)
        for device, of_device in by_device.items()
    ]


def device_of(param_groups: list[dict[str, Any]]) -> torch.device | None:
    """Where the decisions about these parameters are made; ``None`` if there are none."""
    first = None
    for group in param_groups:
        for param in group["params"]:
            if param.grad is not None:
                return param.device
            first = param if first is None else first
    return None if first is None else first.device
