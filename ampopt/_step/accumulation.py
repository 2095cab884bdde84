"""Buffers, in float32 at least, to which ``accumulate`` adds unscaled gradients for a step.

An accumulation cycle begins with the first ``accumulate`` and ends with the step (see
``accumulated_step``) or with ``zero_grad``. The buffers outlive the cycle: a CUDA graph needs them
at the same addresses in every cycle.
"""

import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ampopt._step import gradients, ranks
from ampopt._step.optimizer_reference import RefersToOptimizer
from ampopt._step.overflow import check_and_unscale_held, decided_elsewhere, device_of, works_of
from ampopt._step.rank_messages import Call
from ampopt._step.sharding import dtensor
from ampopt.backend import backend_for
from ampopt_kernels.decision import Decision, Request
from ampopt_kernels.devices import to_device
from ampopt_kernels.found import Found, FoundByRanks
from ampopt_kernels.step import run
from ampopt_kernels.tensors import dense_like, real
from ampopt_kernels.uploads import Uploads
from ampopt_kernels.work import Row, Work

__all__ = ["DROPS", "Accumulation", "ClosedCycle", "AccumulationCycle", "refuse_sparse"]

DROPS = ("window", "micro_batch")
"""What an overflow costs: all that is accumulated, or the part that it is in."""


@dataclass
class AccumulationCycle:
    """What was accumulated since the last step.

    Attributes:
        decision_device: where decisions about it are made.
        drop: one of :data:`DROPS`.
        params: those that have a sum, by their ``id``.
        flag: more than 0 if there was an overflow; ``None`` before there were gradients.
        found: where.
        calls: how many micro-batches there were, where they are rejected one by one.
        kept: how many of them were not.
    """

    decision_device: torch.device
    drop: str
    params: dict[int, gradients.ParamWithGrad] = field(default_factory=dict)
    flag: Tensor | None = None
    found: tuple[Found | FoundByRanks, ...] = ()
    calls: int = 0
    kept: Tensor | None = None

    def add_flag(self, decision: Decision) -> None:
        """Join the flag of a part of it."""
        flag = to_device(decision.found_inf, self.decision_device)
        self.flag = flag if self.flag is None else torch.maximum(self.flag, flag)
        self.found += decision.found

    def count(self, decision: Decision) -> None:
        """Count a micro-batch, which was rejected if it overflowed."""
        kept = to_device(decision.found_inf <= 0, self.decision_device, torch.float32)
        self.kept = kept if self.kept is None else self.kept + kept
        self.calls += 1


class ClosedCycle(NamedTuple):
    """A window that nothing is added to any more.

    Attributes:
        cycle: all that was added up.
        skip: more than 0 if no micro-batch is left, or their sum overflowed; ``None`` where an
            overflow anywhere in the cycle skips the step.
    """

    cycle: AccumulationCycle
    skip: Tensor | None


class _ReplacedGradient(NamedTuple):
    """The gradient of a parameter whose sum stands there for a step."""

    param: Tensor
    grad: Tensor | None
    dtype: torch.dtype | None  # that gradients of it may have


class Accumulation(RefersToOptimizer):
    """The sums of one optimizer.

    Attributes:
        cycle: in which they are filled; ``None`` while nothing is accumulated that no step has
            taken yet.
        taken: whether they stand in the place of the gradients, for a step.
        uploads: what devices hold of earlier calls, by what they were for.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Begin without a window.

        Args:
            optimizer: whose gradients these are, which is not kept alive.
        """
        super().__init__(optimizer)
        self.cycle: AccumulationCycle | None = None
        self.swapped_in = False
        self._hook: Any = None  # while there is a cycle, for a plain step
        self._replaced: list[_ReplacedGradient] = []
        self._sums = WeakIdKeyDictionary()
        self._latest = WeakIdKeyDictionary()  # a weak reference to the gradient added last
        self.uploads: dict[str, dict[torch.device, Uploads]] = defaultdict(dict)

    # --- filling ----------------------------------------------------------------------------------

    @torch.no_grad()
    def add(
        self, request: Request, agreement: ranks.Agreement | None, drop: str
    ) -> Decision | None:
        """Add the gradients, unscaled, to the sums, and clear them. Does not synchronize.

        Args:
            request: what is asked; nothing is stepped.
            agreement: of the ranks that decide together.
            drop: one of :data:`DROPS`, the same in all of a cycle.

        Returns:
            The decision on these gradients; ``None`` if there are none.

        Raises:
            TypeError: one is sparse. Nothing has changed then.
            ValueError: ``drop`` is another than in this cycle before. Likewise.
        """
        refuse_sparse(self.groups)
        decision = self._add(self._open_cycle(drop), request, agreement)
        stay = []
        for _, param in gradients.present(self.groups):
            if self._is_reused(param):
                stay.append(dtensor.local(param.grad))
            else:
                param.grad = None
        if stay:
            torch._foreach_zero_(stay)  # pyright: ignore[reportPrivateImportUsage]
        return decision

    def _open_cycle(self, drop: str) -> AccumulationCycle:
        cycle = self.cycle
        if cycle is None:
            self.restore_gradients()
            cycle = self.cycle = AccumulationCycle(
                device_of(self.groups) or torch.device("cpu"), drop
            )
            self._hook = self.optimizer.register_step_pre_hook(_end_cycle_in_plain_step)
        elif drop != cycle.drop:
            raise ValueError(
                f"accumulate(drop={drop!r}), but an earlier call since the last step had "
                f"drop={cycle.drop!r}: pass the same drop to all calls before a step"
            )
        return cycle

    def _add(
        self, cycle: AccumulationCycle, request: Request, agreement: ranks.Agreement | None
    ) -> Decision | None:
        decision, present = None, gradients.held(self.groups)
        self._check_sums(cycle)
        if cycle.drop == "micro_batch":
            decision = check_and_unscale_held(
                present,
                request,
                agreement,
                cycle.decision_device,
                write=False,
                uploads=self.uploads["check"],
                call=Call.MICRO_BATCH,
            )
            if decision is not None:
                cycle.count(decision)
        if present:
            reject = None if decision is None else decision.found_inf
            # Whoever asked for no judgement may end the cycle with one.
            asked = replace(request, found_inf=reject, check=True, accumulate=True, apply=False)
            added = run(backend_for, self._works_of_sums(cycle, present), asked)
            decision = added if decision is None else decision
        if decision is not None:
            cycle.add_flag(decision)
        return decision

    def _works_of_sums(
        self, cycle: AccumulationCycle, present: Sequence[gradients.ParamWithGrad]
    ) -> list[Work]:
        rows, grads = [], []
        for held in present:
            group, param, owner = held
            values = gradients.values_of(param)
            fresh = id(param) not in cycle.params
            cycle.params[id(param)] = held
            total = real(dtensor.local(self._sum_of(param, fresh)))
            grads.append(dense_like(values, total))
            rows.append(Row(values.dtype, total, flags=(fresh,), group=group, owner=owner))
        return works_of(rows, grads, self.uploads["add"])

    def _sum_of(self, param: Any, fresh: bool) -> Any:
        """Where the gradients of ``param`` are added up.

        If ``fresh``, nothing was added in this window, and what is in it may be anything.
        """
        wide = torch.promote_types(param.dtype, param.grad.dtype)
        wide = torch.promote_types(wide, torch.float32)
        total = self._sums.get(param)
        if total is not None and not fresh:
            total = self._sums[param] = total.to(torch.promote_types(wide, total.dtype))
        elif total is None or total.dtype != wide or not _is_placed_like(total, param):
            total = torch.empty_like(dtensor.local(param.detach()), dtype=wide)
            self._sums[param] = total = dtensor.spread_like(total, param)
        return total

    def _check_sums(self, cycle: AccumulationCycle) -> None:
        """Refuse sums of parameters that were resized or moved in their window.

        Raises:
            RuntimeError: there is one. Nothing has changed then.
        """
        for _, param, owner in cycle.params.values():
            total = self._sums[param]
            if not _is_placed_like(total, param):
                raise RuntimeError(
                    f"accumulate: the sum of the gradients of {owner.name} has shape "
                    f"{tuple(total.shape)} on {total.device}, and the parameter shape "
                    f"{tuple(param.shape)} on {param.device} now: resize or move a parameter only "
                    "after the step that takes the sum, or call zero_grad() to discard it"
                )

    def _is_reused(self, param: Tensor) -> bool:
        """Whether ``param`` has the gradient that it had last time, as a CUDA graph needs it."""
        grad: Any = param.grad
        latest = self._latest.get(param)
        self._latest[param] = weakref.ref(grad)
        return latest is not None and latest() is grad

    # --- taking -----------------------------------------------------------------------------------

    def close(self, request: Request, agreement: ranks.Agreement | None) -> "ClosedCycle":
        """End the window, with what is in ``p.grad`` by now; without a window, that is all of it.

        Args:
            request: of the scale that ``p.grad`` carries; nothing is stepped.
            agreement: of the ranks that decide together.
        """
        cycle = self._open_cycle("window") if self.cycle is None else self.cycle
        if gradients.present(self.groups):
            self._add(cycle, request, agreement)
        else:
            self._check_sums(cycle)
        skip = None if cycle.kept is None else self._renormalise(cycle, request, agreement)
        return ClosedCycle(cycle, skip)

    def swap_in_sums(self, *, wide: bool) -> None:
        """Put the sums in the place of the gradients, until :meth:`restore_gradients`.

        Args:
            wide: whether the step reads gradients of another dtype than the parameters'.
        """
        assert self.cycle is not None
        for _, param, _ in self.cycle.params.values():
            if param.grad is not None:
                self._is_reused(param)  # where it is put back
            total, dtype = self._sums[param], param.grad_dtype
            self._replaced.append(_ReplacedGradient(param, param.grad, dtype))
            if wide and dtype is not None:
                dtype = total.dtype
            _put(param, total if dtype is None else total.to(dtype), dtype)
        self.cycle, self.swapped_in = None, True

    def _renormalise(
        self, cycle: AccumulationCycle, request: Request, agreement: ranks.Agreement | None
    ) -> Tensor:
        """Have the sums stand for all micro-batches; more than 0 where they cannot.

        As if they carried the share of those that were kept for a scale.
        """
        assert cycle.kept is not None
        judged = request.scale is not None
        share = cycle.kept.clamp(min=1) / cycle.calls
        asked = Request(scale=share, check=judged, write=True, apply=False)
        held = cycle.params.values()
        sums = [real(dtensor.local(self._sums[param])) for _, param, _ in held]
        if sums:
            rows = [
                Row(total.dtype, owner=owner) for total, (*_, owner) in zip(sums, held, strict=True)
            ]
            agree = None
            if agreement is not None and judged:
                agree = ranks.FlagAllReduce(agreement, asked, call=Call.RENORMALISES)
            works = works_of(rows, sums, self.uploads["renormalise"])
            decision = run(backend_for, works, replace(asked, agree=agree))
        else:
            decision = decided_elsewhere(
                asked, agreement, cycle.decision_device, call=Call.RENORMALISES
            )
        if decision is None:  # no rank has judged
            return torch.zeros_like(share)
        cycle.add_flag(decision)
        nothing_is_left = (cycle.kept <= 0) & judged
        return torch.maximum(to_device(decision.found_inf, cycle.decision_device), nothing_is_left)

    # --- what becomes of it -----------------------------------------------------------------------

    def restore_gradients(self) -> None:
        """The step has taken the sums: parameters get back the gradients they replaced."""
        self.unhook()
        for param, grad, dtype in self._replaced:
            _put(param, grad, dtype)
        self._replaced, self.swapped_in = [], False

    def discard(self) -> None:
        """Forget the window, or that a step was to take it."""
        self.restore_gradients()
        self.cycle = None

    def unhook(self) -> None:
        """A control point steps, and not a plain step, which would have to take the window."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    @property
    def groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups


def _is_placed_like(total: Any, param: Any) -> bool:
    """Whether the sum ``total`` has the shape and device that ``param`` has now."""
    return total.shape == param.shape and total.device == param.device


def _end_cycle_in_plain_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Have a step that no control point takes find the sums, whatever their flag."""
    ours = optimizer._ampopt
    if ours.accumulation.cycle is None:
        return
    if any(map(callable, (*args, *kwargs.values()))):
        raise RuntimeError(
            "step(closure): accumulate() was called, and the closure would make other gradients. "
            "Call step() or unscale_and_step() without one first, or zero_grad() to discard what "
            "was accumulated"
        )
    if {"found_inf", "grad_scale"} <= vars(optimizer).keys():
        del optimizer.found_inf, optimizer.grad_scale
        raise RuntimeError(
            "torch.amp.GradScaler steps an optimizer whose accumulate() was called, and knows "
            "nothing of that. Call optimizer.unscale_and_step(grads_scaled_by=scale) in place of "
            "scaler.step(optimizer), or use ampopt.GradScaler; zero_grad() discards what was "
            "accumulated"
        )
    ours.end_cycle(Request(check=False))


def _put(param: Any, grad: Any, dtype: torch.dtype | None) -> None:
    """Give ``param`` a gradient, and say of what dtype it may be."""
    param.grad = None
    if param.grad_dtype != dtype:
        param.grad_dtype = dtype
    param.grad = grad


def refuse_sparse(groups: list[dict[str, Any]]) -> None:
    """Refuse gradients that cannot be added up.

    Raises:
        TypeError: one is sparse.
    """
    for _, param in gradients.present(groups):
        assert param.grad is not None
        if param.grad.layout != torch.strided:
            raise TypeError(
                f"accumulate: the gradient of {gradients.name_of(groups, param)} is sparse, and "
                "sums are dense: make the layer with sparse=False, or leave accumulate out and let "
                "backward passes under one scale add up"
            )
