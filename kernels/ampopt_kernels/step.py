"""The passes of one step, and their order.

A step is three passes, each one launch on an accelerator: *detect* reads the gradients once,
*control* decides from what was found and advances the per-parameter scalars, *update* applies the
rule or returns at once. :func:`run` is their order; a :class:`Backend` carries them out. A rule
that sums something up over parameters has a further pass before update, *reduce*.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from ampopt_kernels.decision import Decision, Partials, Request
from ampopt_kernels.devices import to_device
from ampopt_kernels.found import Found
from ampopt_kernels.ledger import ChunkRange, Ledger, RecordedStep, note
from ampopt_kernels.marginals import LineSums
from ampopt_kernels.stochastic import take_keys
from ampopt_kernels.sums import over_all
from ampopt_kernels.tensors import widest
from ampopt_kernels.uploads import Uploads
from ampopt_kernels.work import Work

__all__ = ["Backend", "run"]


class Backend(ABC):
    """How the three passes are carried out; see ``eager``, ``multi_tensor`` and others."""

    name: ClassVar[str]
    host_sees: ClassVar[bool] = False
    """Whether the host reads this backend's tensors at no cost, so that it need not avoid it."""

    def prepare(self, work: Work, *, decides: bool) -> None:  # noqa: B027  # most need nothing
        """Do for :meth:`reduce` and :meth:`update` what may fail, before anything is changed.

        Args:
            work: to be stepped.
            decides: whether :meth:`control` decides with this work. Otherwise the decision comes
                from another device.
        """

    def prepare_gradients(self, work: Work, request: Request, *, decides: bool) -> None:  # noqa: B027
        """Do what may fail for :meth:`accumulate`, or :meth:`detect` that writes.

        It is called for the work of every device before gradients or sums of any are changed.

        Args:
            work: the rows and gradients of one device.
            request: has ``accumulate`` or ``write``, and no ``apply``.
            decides: whether :meth:`control` makes the decision with this work.
        """

    @abstractmethod
    def detect(self, work: Work, request: Request) -> Partials:
        """Read every gradient once; store it unscaled if ``request.write``."""

    @abstractmethod
    def accumulate(self, work: Work, request: Request) -> Partials:
        """Add every gradient, unscaled, to the sum that its row has in place of a parameter.

        Judges as :meth:`detect` does, and the sum too. The flag of a row says that nothing is in
        its sum yet, which then is only written. With ``request.found_inf`` more than 0, all sums
        stay as they are, and are 0 where nothing was in them.
        """

    @abstractmethod
    def control(self, work: Work, request: Request, partials: Partials | None) -> Decision:
        """Decide from what was found. May advance the scalars of ``work`` if ``request.apply``."""

    @abstractmethod
    def line_sums(self, work: Work, decision: Decision) -> LineSums:
        """Sum up terms over rows and columns, of what is here of parameters.

        Of those that are spread over ranks, at least; and nothing of a step that the host sees to
        be skipped.
        """

    @abstractmethod
    def reduce(self, work: Work, decision: Decision) -> Tensor:
        """Sum up the terms of the rule over each row, without a change to any.

        Returns:
            ``widest``, shape (rows, terms). The same bits each time.
        """

    @abstractmethod
    def update(self, work: Work, decision: Decision) -> None:
        """Apply the rule to every row, or leave every bit as it was.

        Advances the scalars first, unless ``decision.h`` says that control did.
        """

    def note(
        self,
        ledger: Ledger,
        attempt: RecordedStep,
        found: Found | None,
        parts: Sequence[ChunkRange],
        uploads: Uploads,
        *,
        notes_step: bool,
    ) -> None:
        """Add a step to a ledger; see :func:`ampopt_kernels.ledger.note`."""
        note(ledger, attempt, found, parts, uploads, notes_step=notes_step)


def run(
    backend_for: Callable[[torch.device], Backend], works: Sequence[Work], request: Request
) -> Decision:
    """One step over the work of each device, under one decision.

    The decision is made on the first device from what all of them found, so that all of them
    skip, clip and rescale alike. Does not synchronize, unless the host is one of several devices.

    Args:
        backend_for: gives the backend for a device.
        works: one for each device.
        request: what is asked of all of them.
    """
    first, *others = works
    reads = request.needs_agreement or request.write or request.measure or request.accumulate
    requests = [_on(work.device, request) for work in (works if reads else works[:1])]
    backends = [backend_for(work.device) for work in works]
    if request.apply:
        for backend, work in zip(backends, works, strict=True):
            backend.prepare(work, decides=work is first)
    if request.write or request.accumulate:
        for backend, work, its_own in zip(backends, works, requests, strict=True):
            backend.prepare_gradients(work, its_own, decides=work is first)
    asked, partials = requests[0], None
    if reads:
        found = []
        for backend, work, its_own in zip(backends, works, requests, strict=True):
            detect = backend.accumulate if request.accumulate else backend.detect
            found.append(detect(work, its_own))
        partials = found[0] if not others else _joined(found, first.device)
        if request.agree is not None:
            agreed = request.agree(partials, asked.found_inf, first.device)
            partials = replace(agreed, found=(*partials.found, *agreed.found))
            if request.check:  # else nothing is judged but the norm, and the flag is known to all
                asked = replace(asked, found_inf=None)
    decision = backends[0].control(first, asked, partials)
    if request.apply:
        decisions = [decision]
        for work in others:
            device = work.device
            coefficients = to_device(decision.coefficients_on_device, device, widest(device))
            decisions.append(Decision(found_inf=decision.found_inf, coefficients=coefficients))
        steps = list(zip(backends, works, decisions, strict=True))
        if first.rule is not None and first.rule.reduces:
            if request.agree_on_lines is not None:
                found = [backend.line_sums(work, its_own) for backend, work, its_own in steps]
                lines = request.agree_on_lines(works, found)
                steps = [
                    (*step[:2], replace(step[2], lines=own))
                    for step, own in zip(steps, lines, strict=True)
                ]
            sums = [backend.reduce(work, its_own) for backend, work, its_own in steps]
            known = over_all(works, sums, request.agree_on_sums)
            steps = [
                (*step[:2], replace(step[2], sums=s)) for step, s in zip(steps, known, strict=True)
            ]
        for backend, work, its_own in steps:
            if work.keys:
                take_keys(work.keys, its_own.skip)
            backend.update(work, its_own)
    for work in works:
        work.uploads.keep_while_captured(work.device, work.row_column_factors)
    return decision


def _on(device: torch.device, request: Request) -> Request:
    """``request`` with the scale and the flag from elsewhere where a kernel can read them."""
    scale, flag = request.scale, request.found_inf
    if (scale is None or scale.device == device) and (flag is None or flag.device == device):
        return request
    there = [None if x is None else to_device(x, device) for x in (scale, flag)]
    return replace(request, scale=there[0], found_inf=there[1])


def _joined(parts: list[Partials], device: torch.device) -> Partials:
    squares = None
    if all(p.squares is not None for p in parts):
        wide = widest(device)
        squares = torch.cat(
            [to_device(p.squares, device, wide) for p in parts if p.squares is not None]
        )
    found = tuple(one for p in parts for one in p.found)
    return Partials(torch.cat([p.flags_on(device) for p in parts]), squares, found)
