"""What a step is asked to do, what its passes found, and what was decided from that.

:class:`Request` is the caller's; ``detect`` returns :class:`Partials`; ``control`` returns a
:class:`Decision`, which ``update`` follows.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampopt_kernels.devices import to_device
from ampopt_kernels.found import Found, FoundByRanks
from ampopt_kernels.marginals import AgreeOnLines, LineSums
from ampopt_kernels.policy import PolicyConstants
from ampopt_kernels.sums import AgreeOnSums, Sums
from ampopt_kernels.tensors import widest

__all__ = ["Coefficients", "Decision", "Partials", "Request"]


@dataclass(frozen=True)
class Request:
    """What the caller asks of one step.

    Attributes:
        scale: the factor the gradients carry, a one-element tensor, or ``None`` for 1.
        policy: the schedule, if ``scale`` has a successor.
        counters: int32, shape (2,): the schedule's counters, with ``policy``.
        check: judge the gradients; otherwise ``found_inf`` is what ``found_inf`` says.
        found_inf: a flag from elsewhere, one element, more than 0 for overflow; joined to ours.
        drop: do not apply an overflowed update.
        max_norm: clip the unscaled gradients to this global norm; ``None`` to leave the norm
            alone.
        write: store the unscaled gradients where they came from (detect), so that nothing is left
            for the update to unscale.
        accumulate: add the unscaled gradients to sums, in place of detect; nothing is applied.
        apply: advance the scalars and update the parameters.
        agree: makes of what was found here, and of :attr:`found_inf`, what all ranks have found,
            as one part on the device that it is given.
        agree_on_sums: likewise of what a rule has summed up over parameters.
        agree_on_lines: likewise of what it has summed up over their rows and columns.
        measure: measure the gradients for who watches them; see :class:`Found`.
        earlier_decision: the decision that was made of these gradients before, whose step this is.
        causes: for which to skip besides, each with the loss, if it is to know that.
    """

    scale: Tensor | None = None
    policy: PolicyConstants | None = None
    counters: Tensor | None = None
    check: bool = True
    found_inf: Tensor | None = None
    drop: bool = True
    max_norm: float | None = None
    write: bool = False
    accumulate: bool = False
    apply: bool = True
    agree: "Callable[[Partials, Tensor | None, torch.device], Partials] | None" = None
    agree_on_sums: AgreeOnSums | None = None
    agree_on_lines: AgreeOnLines | None = None
    measure: bool = False
    earlier_decision: "Decision | None" = None
    causes: tuple[tuple[Any, Tensor | None], ...] = ()

    @property
    def needs_agreement(self) -> bool:
        """Whether there is anything to agree on: an overflow, or a norm."""
        return self.check or self.max_norm is not None


@dataclass(frozen=True)
class Partials:
    """What detect found, part by part; a part is a tensor or a piece of one.

    ``widest`` is float64 where the device has it; see ``precision``.

    Attributes:
        flags: float32, shape (parts,): 1 where a part has a non-finite unscaled gradient. Truths,
            of a backend whose host sees them.
        squares: ``widest``, shape (parts,): sums of squares of unscaled gradients, if asked for;
            0 where a row is not counted.
        found: whose they are, for each device; nothing where a host has seen that none overflowed.
            Of several ranks, also which of them found an overflow.
    """

    flags: Tensor | list[bool]
    squares: Tensor | None
    found: tuple[Found | FoundByRanks, ...] = ()

    def flags_on(self, device: torch.device) -> Tensor:
        """:attr:`flags` as a tensor on ``device``."""
        if isinstance(self.flags, list):
            return torch.tensor(self.flags, dtype=torch.float32, device=device)
        return to_device(self.flags, device, torch.float32)


class Coefficients(NamedTuple):
    """What update does with every gradient, as numbers of the host."""

    skip: float
    """More than 0 to leave every bit as it is."""
    inverse: float
    """The reciprocal of the scale that the gradients still carry."""
    clip: float
    """The clip coefficient."""


@dataclass(frozen=True)
class Decision:
    """What control decided; its tensors are all new, and on the device.

    ``widest`` is float64 where the device has it; see ``precision``.

    Attributes:
        found_inf: float32, 0-d; more than 0 for overflow.
        coefficients: :class:`Coefficients`, of a backend whose host sees them; else a tensor of the
            same three on the device: ``widest``, shape (3,).
        norm: 0-d global norm of the unscaled gradients, if asked for.
        scale: the successor of the scale, of its shape and dtype, if it has one.
        counters: int32, shape (2,), with ``scale``.
        h: what ``rule.scalars`` gave for each row, where control has advanced them already; of a
            rule that reduces, what ``rule.before_reduce`` gave.
        found: see :class:`Partials`.
        sums: what the rule has summed up over parameters, once all have it.
        lines: what it has summed up over rows and columns, where ranks have to agree on that.
        scaled_by: the factor that the gradients carried.
        earlier_decision: see :class:`Request`.
        cause: for which it is skipped if not for overflow, as counted in ``ledger``; 0 for none.
    """

    found_inf: Tensor
    coefficients: Coefficients | Tensor
    norm: Tensor | None = None
    scale: Tensor | None = None
    counters: Tensor | None = None
    h: Tensor | None = None
    found: tuple[Found | FoundByRanks, ...] = ()
    sums: Sums | None = None
    lines: LineSums = field(default_factory=dict)
    scaled_by: Tensor | None = None
    earlier_decision: "Decision | None" = None
    cause: Tensor | None = None

    @property
    def overflow(self) -> Tensor:
        """:attr:`found_inf`, but 0 where another cause has made it."""
        found_inf = self.found_inf
        return found_inf if self.cause is None else found_inf * (self.cause == 0)

    def with_schedule_where(self, learns: Tensor, request: Request) -> "Decision":
        """This one, but with the schedule as ``request`` has it unless ``learns``, a 0-d bool."""
        if self.scale is None or self.counters is None:
            return self
        assert request.scale is not None and request.counters is not None
        device = self.scale.device
        return replace(
            self,
            scale=torch.where(learns, self.scale, to_device(request.scale, device)),
            counters=torch.where(learns, self.counters, to_device(request.counters, device)),
        )

    @property
    def overflow_details(self) -> tuple[Found | FoundByRanks, ...]:
        """:attr:`found`, if it was judged, as gradients without a scale are not."""
        return () if self.scaled_by is None else self.found

    @property
    def measured(self) -> bool:
        """Whether the gradients were measured; see :class:`Found`."""
        return any(part.measures is not None for part in self.found)

    @functools.cached_property
    def coefficients_on_device(self) -> Tensor:
        """:attr:`coefficients` as a tensor."""
        if isinstance(self.coefficients, Tensor):
            return self.coefficients
        device = self.found_inf.device
        return torch.tensor(self.coefficients, dtype=widest(device), device=device)

    @property
    def coefficients_on_host(self) -> Coefficients:
        """:attr:`coefficients` as numbers, for which the host waits if they are on a device."""
        if isinstance(self.coefficients, Tensor):
            return Coefficients(*self.coefficients.tolist())
        return self.coefficients

    @property
    def skip(self) -> Tensor:
        """See :class:`Coefficients`; 0-d, on the device."""
        return self.coefficients_on_device[0]

    @property
    def inverse(self) -> Tensor:
        """See :class:`Coefficients`; 0-d, on the device."""
        return self.coefficients_on_device[1]

    @property
    def clip(self) -> Tensor:
        """See :class:`Coefficients`; 0-d, on the device."""
        return self.coefficients_on_device[2]
