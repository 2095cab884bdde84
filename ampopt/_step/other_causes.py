"""Skips for other causes than overflow, decided between what detect found and the decision."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ampopt.backend import backend_for
from ampopt_kernels.step import Decision, Partials, Request, Work, run
from ampopt_kernels.tensors import widest
from ampopt_kernels.transfers import to_device

__all__ = ["SkipCauses"]


class SkipCauses:
    """Joins further causes to the flag of a step, and keeps them from the loss scale."""

    def __init__(self, request: Request) -> None:
        """Have the causes of ``request``."""
        self._request = request
        self._cause: Tensor | None = None

    def run(self, works: Sequence[Work]) -> Decision:
        """As :func:`ampopt_kernels.step.run`, but that the scale learns nothing of a cause."""
        request = self._request
        measures = any(cause.needs_norm for cause, _ in request.causes)
        max_norm = float("inf") if request.max_norm is None and measures else request.max_norm
        decision = run(backend_for, works, replace(request, agree=self, max_norm=max_norm))
        cause = self._cause
        assert cause is not None
        return replace(decision, cause=cause).with_schedule_where(cause == 0, request)

    def __call__(self, found: Partials, flag: Tensor | None, device: torch.device) -> Partials:
        """What all ranks have found, with a flag for whatever the step is to be skipped for."""
        vote: Any = self._request.agree  # a ranks.Vote
        loss_of_all = None
        if vote is not None:
            found, flag = vote(found, flag, device), None
            loss_of_all = vote.loss
        flags = found.flags_on(device)
        bad = flags.amax() > 0 if flags.numel() else torch.zeros((), device=device) > 0
        if flag is not None:
            bad = bad | (flag.reshape(()) > 0)
        values: dict[str, Tensor] = {}
        if found.squares is not None:
            values["norm"] = found.squares.sum().sqrt()
        total: Any = torch.zeros((), dtype=widest(device), device=device)
        said = []
        for cause, loss in self._request.causes:
            if loss_of_all is not None:
                values["loss"] = loss_of_all
            elif loss is not None:
                values["loss"] = to_device(loss.detach().reshape(()), device, widest(device))
            why, judged = cause.evaluate(values)
            said.append((cause, dict(values), judged))
            total = torch.where(total > 0, total, why)
        self._cause = torch.where(bad, 0.0, total)
        for cause, its_values, judged in said:
            cause.update_from(its_values, judged, self._cause, bad)
        joined, squares = (bad | (self._cause > 0)).to(torch.float32).reshape(1), found.squares
        if squares is not None:  # a flag for each part, of which there may be none
            squares = squares if squares.numel() else squares.new_zeros(1)
            joined = joined.repeat(squares.numel())
        return Partials(joined, squares, found.found)
