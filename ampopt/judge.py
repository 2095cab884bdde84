"""Judge, and unscale, the gradients of optimizers of any class, of one or several at once."""

from dataclasses import replace
from typing import Any

import torch

from ampopt import gradients
from ampopt.backend import backend_for
from ampopt_kernels.uploads import Uploads
from ampopt_kernels.work import Decision, Request, Row, Work, run

__all__ = ["device_of", "judge"]


@torch.no_grad()
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
    if not present:
        return None
    staged = gradients.Staged()
    by_device: dict[torch.device, list[Row]] = {}
    for row in gradients.rows(present, staged, written=write):
        by_device.setdefault(row.grad.device, []).append(row)
    uploads = {} if uploads is None else uploads
    works = [
        Work(device, rows, uploads=uploads.setdefault(device, Uploads()))
        for device, rows in by_device.items()
    ]
    agreed = gradients.agreed_upon(request, present)
    decision = run(backend_for, works, replace(agreed, write=write, apply=False))
    staged.store()
    return decision


def device_of(param_groups: list[dict[str, Any]]) -> torch.device | None:
    """Where the decisions about these parameters are made; ``None`` if there are none."""
    first = None
    for group in param_groups:
        for param in group["params"]:
            if param.grad is not None:
                return param.device
            first = param if first is None else first
    return None if first is None else first.device
