"""The nouns of one step: what there is to do, what was asked, what was found and decided.

A step is three passes, each one launch on an accelerator: *detect* reads the gradients once,
*control* decides from what was found and advances the per-parameter scalars, *update* applies the
rule or returns at once. :func:`run` is their order; a :class:`Backend` carries them out. A rule
that sums something up over parameters has a further pass before update, *reduce*.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ampopt_kernels.devices import to_device
from ampopt_kernels.found import NOBODY, Found, FoundByRanks, Owner
from ampopt_kernels.ledger import ChunkRange, Ledger, RecordedStep, note
from ampopt_kernels.marginals import AgreeOnLines, LineSums, Marginals
from ampopt_kernels.places import Places
from ampopt_kernels.policy import PolicyConstants
from ampopt_kernels.rule import Rule
from ampopt_kernels.stochastic import take_keys
from ampopt_kernels.sums import AgreeOnSums, Sums, over_all
from ampopt_kernels.tensors import arithmetic, widest
from ampopt_kernels.uploads import Uploads

__all__ = ["Backend", "Decision", "Coefficients", "Partials", "Request", "Row", "Work", "run"]


@dataclass(slots=True)
class Row:
    """One parameter's tensors, all real, dense and laid out alike, but for the gradient.

    That is another one at every step, laid out alike too, and among :attr:`Work.grads`. ``state``
    follows ``rule.state_for(flags)``; ``scalars`` follows ``rule.scalar_state``, with
    ``None`` where the flags leave one out. A row that is only to be read has no ``param``. Where
    ``param`` is a float32 master, ``copy`` is the low-precision parameter that gets it rounded.
    Where several ranks hold a parameter alike, it is ``in_norm`` towards the norm on one of them.
    A bfloat16 parameter that is rounded stochastically has ``keys``, of which each step takes one,
    0-d int64; see ``stochastic``. The chances of its elements, and random numbers of a rule, follow
    from their ``places`` in the whole parameter; where there are neither, ``places`` say nothing.
    Beside states of rows and columns, its ``marginals``, all tensors are contiguous.
    """

    grad_dtype: torch.dtype
    param: Tensor | None = None
    state: tuple[Tensor, ...] = ()
    copy: Tensor | None = None
    scalars: tuple[Tensor | None, ...] = ()
    flags: tuple[bool, ...] = ()
    group: int = 0
    in_norm: bool = True
    owner: Owner = NOBODY
    keys: Tensor | None = None
    places: Places = Places()
    marginals: Marginals | None = None

    @property
    def written(self) -> tuple[Tensor, ...]:
        """Parameter, states and copy: what ``update`` writes, in its order."""
        return tuple(t for t in (self.param, *self.state, self.copy) if t is not None)

    def factors(self, start: int, end: int) -> tuple[Tensor, ...]:
        """What a rule reads of rows and columns for the elements from ``start`` to ``end``."""
        return () if self.marginals is None else self.marginals.at(start, end)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Of the gradient and of what is written."""
        return (self.grad_dtype, *(t.dtype for t in self.written))

    @property
    def kind(self) -> tuple[Any, ...]:
        """What one launch must have in common: all that is compiled for a row."""
        jumps = len(self.places.jumps)
        return self.dtypes, self.flags, self.copy is not None, self.keys is not None, jumps

    @property
    def compute_dtype(self) -> torch.dtype:
        """The arithmetic dtype: float64 for float64 gradients or parameters, else float32."""
        given = (self.grad_dtype,) if self.param is None else (self.grad_dtype, self.param.dtype)
        return arithmetic(*given)


@dataclass
class Work:
    """The rows of one device.

    Attributes:
        rows: in any order; a row may have no elements.
        grads: of the rows in their order, in this step; none between steps.
        hyper: the hyperparameters of each group, as ``rule.hyper_values`` gives them.
        rule: ``None`` where gradients are only read.
        uploads: what the device already holds of the tables, kept from step to step.
        table: the backend's own form of the rows, once it has made one. It outlasts the
            gradients of one step.
        grads_version: changes whenever there are other gradients.
    """

    device: torch.device
    rows: list[Row]
    grads: list[Tensor] = field(default_factory=list)
    rule: Rule | None = None
    hyper: Sequence[Sequence[float | Tensor]] = ()
    uploads: Uploads = field(default_factory=Uploads)
    table: Any = None
    grads_version: int = field(default=0, init=False)

    @functools.cached_property
    def owners(self) -> list[Owner]:
        """Whose each row is."""
        return [row.owner for row in self.rows]

    @functools.cached_property
    def keys(self) -> list[Tensor]:
        """Of the rows that are rounded stochastically."""
        return [row.keys for row in self.rows if row.keys is not None]

    @functools.cached_property
    def compute_dtypes(self) -> list[torch.dtype]:
        """The arithmetic dtype of each row."""
        return [row.compute_dtype for row in self.rows]

    def take(self, grads: list[Tensor], hyper: Sequence[Sequence[float | Tensor]]) -> None:
        """Work on these from now on, each gradient laid out as the one in its place before."""
        self.grads, self.hyper = grads, hyper
        self.grads_version += 1

    @property
    def factors(self) -> Iterator[Tensor]:
        """What kernels read of rows and columns, made for these rows alone."""
        return (f for row in self.rows if row.marginals is not None for f in row.marginals.factors)

    @functools.cached_property
    def scalar_dtypes(self) -> tuple[torch.dtype, ...]:
        """What each of the scalar states is kept in, in every row that has it."""
        n = 0 if self.rule is None else len(self.rule.scalar_state)
        columns = ((s for row in self.rows for s in row.scalars[i : i + 1]) for i in range(n))
        return tuple(
            next((s.dtype for s in column if s is not None), torch.float32) for column in columns
        )

    @property
    def float64(self) -> bool:
        """Whether all of the arithmetic is float64. None is not."""
        return bool(self.rows) and all(row.compute_dtype == torch.float64 for row in self.rows)


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
        factors: :class:`Coefficients`, of a backend whose host sees them; else a tensor of the same
            three on the device: ``widest``, shape (3,).
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
    factors: Coefficients | Tensor
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
        """:attr:`factors` as a tensor."""
        if isinstance(self.factors, Tensor):
            return self.factors
        device = self.found_inf.device
        return torch.tensor(self.factors, dtype=widest(device), device=device)

    @property
    def coefficients_on_host(self) -> Coefficients:
        """:attr:`factors` as numbers, for which the host waits if they are on a device."""
        if isinstance(self.factors, Tensor):
            return Coefficients(*self.factors.tolist())
        return self.factors

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
    backends = []
    for work in works:
        backends.append(backend_for(work.device))
        if request.apply:
            backends[-1].prepare(work, decides=work is works[0])
    first, *others = works
    asked, partials = _on(first.device, request), None
    if request.needs_agreement or request.write or request.measure or request.accumulate:
        found = []
        for backend, work in zip(backends, works, strict=True):
            detect = backend.accumulate if request.accumulate else backend.detect
            found.append(detect(work, asked if work is first else _on(work.device, request)))
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
            factors = to_device(decision.coefficients_on_device, work.device, widest(work.device))
            decisions.append(Decision(found_inf=decision.found_inf, factors=factors))
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
        work.uploads.keep_while_captured(work.device, work.factors)
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
