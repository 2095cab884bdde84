"""The data that passes between the caller and the passes of a step.

The caller makes a :class:`Request`. ``detect`` returns :class:`Partials`, flags and sums of
squares; ``control`` returns a :class:`Decision`, which ``update`` carries out. No object is changed
once it is made. The dataclasses are not frozen, because to make frozen ones takes as long as the
arithmetic of a small step.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampopt_kernels.devices import to_device
from ampopt_kernels.gradient_reports import GradientReport, RankFlags
from ampopt_kernels.next_scale import PolicyConstants
from ampopt_kernels.step_decision import Check
from ampopt_kernels.step_tensors import Work
from ampopt_kernels.sums import AgreeOnSums, Sums
from ampopt_kernels.tensors import widest

__all__ = ["Coefficients", "Decision", "Partials", "Request"]


@dataclass
class Request:
    """Options of one step.

    Attributes:
        scale: the loss scale that gradients are multiplied by: one element, of a floating-point
            dtype; ``None`` for 1.
        unscaled: whether the gradients have been divided by ``scale`` before: sums of
            ``accumulate``. Then ``scale`` is only what ``policy`` continues.
        policy: the schedule that computes the next scale; ``None`` for a scale that stays.
        scheduled_by: see :func:`~ampopt_kernels.step_decision.decide`: one element.
        counters: the schedule's growth count and hysteresis budget: int32, shape (2,). Required
            with ``policy``.
        check: whether to test gradients for inf/NaN. If not, ``found_inf`` alone decides.
        found_inf: an overflow flag from elsewhere, such as torch's scaler: one element, more than
            0 for overflow. Combined with the flags of this step.
        drop: whether an overflow skips the update.
        max_norm: the global norm to clip the unscaled gradients to; ``inf`` to compute the norm and
            clip nothing; ``None`` for no norm.
        write: whether to store the unscaled gradients in place of the scaled ones. Detect does, so
            that ``update`` need not unscale, or ``update``: see :meth:`Backend.unscales_in_update`.
        accumulate: whether detect adds the unscaled gradients to the sums that ``param`` of each
            row is. No update is applied then.
        agree: ``agree(partials, found_inf, device) -> partials``: all-reduces flags and sums of
            squares over ranks, and returns one flag and one sum, on ``device``.
        agree_on_sums: all-reduces the sums that ``Rule.reduce`` asks for.
        agree_on_lines: all-reduces the sums over rows and columns that ``Rule.averages`` asks for:
            sets the ``whole_sums`` of each :class:`~ampopt_kernels.row_column_means.Stack` of the
            works. A collective: every rank that has a shard calls it once.
        measure: whether to measure gradients for :mod:`ampopt.watching`; see
            :class:`GradientReport`.
        earlier_decision: the decision that ``unscale`` made about the same gradients before this
            step, if there is one.
        causes: further skip conditions (:func:`ampopt.skip_when`), evaluated if ``check``. Each has
            a method ``checks(device)``, which returns its
            :class:`~ampopt_kernels.step_decision.Check` objects, and a property ``needs_norm``.
        loss: the loss of the step, if a cause needs it: one element.
    """

    scale: Tensor | None = None
    policy: PolicyConstants | None = None
    counters: Tensor | None = None
    unscaled: bool = False
    scheduled_by: Tensor | None = None
    check: bool = True
    found_inf: Tensor | None = None
    drop: bool = True
    max_norm: float | None = None
    write: bool = False
    accumulate: bool = False
    agree: "Callable[[Partials, Tensor | None, torch.device], Partials] | None" = None
    agree_on_sums: AgreeOnSums | None = None
    agree_on_lines: Callable[[Sequence[Work]], None] | None = None
    measure: bool = False
    earlier_decision: "Decision | None" = None
    causes: tuple[Any, ...] = ()
    loss: Tensor | None = None

    def checks(self, device: torch.device) -> list[Check]:
        """The checks of all causes, with their statistics on ``device``."""
        causes = self.causes if self.check else ()
        return [check for cause in causes for check in cause.checks(device)]

    def with_norm(self) -> "Request":
        """A copy that computes the norm and clips nothing, if ``causes`` or ``measure`` need it.

        With several ranks, ``measure`` needs it, of the gradients of all ranks.
        """
        of_causes = self.check and any(cause.needs_norm for cause in self.causes)
        is_needed = of_causes or (self.measure and self.agree is not None)
        return replace(self, max_norm=float("inf")) if is_needed else self

    @property
    def grad_scale(self) -> Tensor | None:
        """:attr:`scale`, if the gradients are still multiplied by it; else ``None``."""
        return None if self.unscaled else self.scale

    @property
    def needs_agreement(self) -> bool:
        """Whether ranks have something to all-reduce: an overflow flag, or a norm."""
        return self.check or self.max_norm is not None


@dataclass
class Partials:
    """The results of detect, one for each chunk; a chunk is a tensor or a slice of one.

    ``widest`` is float64, or float32 on devices without float64; see ``tensors``.

    Attributes:
        flags: 1 for each chunk that has a non-finite unscaled gradient, else 0: float32, shape
            (chunks,). From a backend that computes on the host a list of bool, empty if no
            gradient overflows and no norm was requested.
        squares: sum of squares of the unscaled gradients of each chunk: ``widest``, shape
            (chunks,); 0 for rows that are not ``in_norm``. ``None`` if no norm was requested.
        reports: for each device, which parameter each chunk belongs to; after an all-reduce, also
            which ranks overflowed. Empty if the host knows that no gradient overflowed.
        loss: the mean of the losses of all ranks, 0-d, after an all-reduce of a step whose causes
            need it; else ``None``.
    """

    flags: Tensor | list[bool]
    squares: Tensor | None
    reports: tuple[GradientReport | RankFlags, ...] = ()
    loss: Tensor | None = None

    def flags_on(self, device: torch.device) -> Tensor:
        """:attr:`flags` as a tensor on ``device``: float32, 1-d."""
        if isinstance(self.flags, Tensor):
            return to_device(self.flags, device, torch.float32)
        return torch.tensor(self.flags, dtype=torch.float32, device=device)


class Coefficients(NamedTuple):
    """The three numbers that update needs, as Python floats."""

    skip: float
    """More than 0 if the step is skipped: no bit of parameters and states changes."""
    inverse: float
    """Reciprocal of the loss scale that the gradients still carry."""
    clip: float
    """Clip coefficient, at most 1."""


@dataclass
class Decision:
    """The result of control. All tensors are new, and on the device of the first work.

    ``widest`` is float64, or float32 on devices without float64; see ``tensors``.

    Attributes:
        found_inf: more than 0 for overflow, or if a skip condition held: float32, 0-d.
        coefficients: :class:`Coefficients` from a backend that computes on the host; else a tensor
            of the same three numbers on the device: ``widest``, shape (3,).
        norm: global norm of the unscaled gradients, 0-d, if requested.
        scale: the next scale, with shape and dtype of ``request.scale``, if there is a policy.
        counters: the next counters, int32, shape (2,), with ``scale``.
        h: on an accelerator, the numbers of each row that control has computed, and so the update
            need not: those that ``rule.scalars`` returned, or for a rule that reduces, those of
            ``rule.before_reduce``: shape (rows, width). The CPU's update does not read it.
        reports: as :attr:`Partials.reports`.
        unscales: whether update stores the gradients unscaled.
        sums: the sums over whole parameters, once all ranks and devices have added theirs, if the
            rule reduces.
        scaled_by: the loss scale that the gradients carried; ``None`` if they carried none.
        earlier_decision: as :attr:`Request.earlier_decision`.
        cause: index in ``watch_statistics.CAUSES``, counted from 1, of the skip condition that
            held; 0, or ``None``, if no condition held.
    """

    found_inf: Tensor
    coefficients: Coefficients | Tensor
    norm: Tensor | None = None
    scale: Tensor | None = None
    counters: Tensor | None = None
    h: Tensor | None = None
    reports: tuple[GradientReport | RankFlags, ...] = ()
    unscales: bool = False
    sums: Sums | None = None
    scaled_by: Tensor | None = None
    earlier_decision: "Decision | None" = None
    cause: Tensor | None = None

    @property
    def overflow(self) -> Tensor:
        """:attr:`found_inf`, but 0 if a skip condition set it: float32, 0-d."""
        found_inf = self.found_inf
        return found_inf if self.cause is None else found_inf * (self.cause == 0)

    def with_schedule_where(self, advances: Tensor, request: Request) -> "Decision":
        """A copy whose scale and counters advance only if ``advances``.

        Args:
            advances: bool, 0-d. Where it is false, the copy has scale and counters of ``request``.
            request: of this step.
        """
        if self.scale is None or self.counters is None:
            return self
        assert request.scale is not None and request.counters is not None
        device = self.scale.device
        return replace(
            self,
            scale=torch.where(advances, self.scale, to_device(request.scale, device)),
            counters=torch.where(advances, self.counters, to_device(request.counters, device)),
        )

    @property
    def overflow_reports(self) -> tuple[GradientReport | RankFlags, ...]:
        """:attr:`reports`; empty without a loss scale, as such gradients are not tested."""
        return () if self.scaled_by is None else self.reports

    @property
    def measured(self) -> bool:
        """Whether :attr:`reports` has measures of the gradients."""
        return any(part.measures is not None for part in self.reports)

    @functools.cached_property
    def coefficients_on_device(self) -> Tensor:
        """:attr:`coefficients` as a tensor on the device: ``widest``, shape (3,)."""
        if isinstance(self.coefficients, Tensor):
            return self.coefficients
        device = self.found_inf.device
        return torch.tensor(self.coefficients, dtype=widest(device), device=device)

    @property
    def coefficients_on_host(self) -> Coefficients:
        """:attr:`coefficients` as numbers. Synchronizes if they are on an accelerator."""
        if isinstance(self.coefficients, Tensor):
            return Coefficients(*self.coefficients.tolist())
        return self.coefficients

    @property
    def skip(self) -> Tensor:
        """More than 0 if the step is skipped: ``widest``, 0-d, on the device."""
        return self.coefficients_on_device[0]

    @property
    def clip(self) -> Tensor:
        """Clip coefficient: ``widest``, 0-d, on the device."""
        return self.coefficients_on_device[2]
