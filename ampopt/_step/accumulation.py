"""Buffers, in float32 at least, to which ``accumulate`` adds unscaled gradients for a step.

An accumulation cycle begins with the first ``accumulate`` and ends with the step (see
``accumulated_step``) or with ``zero_grad``. The buffers outlive the cycle: a CUDA graph needs them
at the same addresses in every cycle.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampopt._step import gradients
from ampopt._step.descriptors import RefersToOptimizer
from ampopt._step.gradient_rows import GradientRows, works_of
from ampopt._step.overflow import check_and_unscale
from ampopt._step.rank_agreement import Agreement, DecisionAllReduce, decision_all_reduce
from ampopt._step.rank_messages import ControlPoint
from ampopt._step.sharding import dtensor
from ampopt.backend import backend_for
from ampopt_kernels.devices import to_device
from ampopt_kernels.gradient_reports import GradientReport
from ampopt_kernels.memory import all_have_memory
from ampopt_kernels.step import run
from ampopt_kernels.step_data import Decision, Request
from ampopt_kernels.step_tensors import ParamRow
from ampopt_kernels.tensors import dense_like, is_dense, real
from ampopt_kernels.uploads import Uploads

__all__ = ["DROPS", "Accumulation", "AccumulationCycle", "refuse_sparse"]

DROPS = ("window", "micro_batch")
"""Whether an overflow drops the whole accumulation cycle, or only its own micro-batch."""


@dataclass
class AccumulationCycle:
    """The micro-batches that were accumulated since the last step.

    Attributes:
        decision_device: the device on which the overflow flag is kept.
        drop: what an overflow drops, one of :data:`DROPS`.
        params: the parameters that have a sum, by ``id``.
        flag: a 0-d tensor, more than 0 after an overflow on this rank; ``None`` before the first
            gradients. The step all-reduces it.
        reports: the records that tell which parameters of this rank overflowed.
        calls: the number of micro-batches in which any rank had a gradient: a number on one rank,
            else a float32 0-d tensor. Counted with ``drop="micro_batch"`` only.
        n_kept: the number of these that overflowed on no rank, a float32 0-d tensor. With
            ``drop="micro_batch"`` only; else ``None``.
        is_checked: whether a call had a scale that drops overflows, so that a step without a scale
            follows ``flag``, too.
        skip: a 0-d tensor, more than 0 if this rank has to skip the step: with
            ``drop="micro_batch"``, if every micro-batch overflowed, or the sum of those that did
            not overflows; else :attr:`flag`. ``None`` without gradients on this rank, and before
            the cycle is closed.
    """

    decision_device: torch.device
    drop: str
    params: dict[int, gradients.ParamWithGrad] = field(default_factory=dict)
    flag: Tensor | None = None
    reports: tuple[GradientReport, ...] = ()
    calls: Any = 0
    n_kept: Tensor | None = None
    is_checked: bool = False
    skip: Tensor | None = None

    def add_flag(self, decision: Decision, all_reduce: DecisionAllReduce | None) -> None:
        """Combine the overflow flag of this rank with that of the cycle, by their maximum."""
        found_inf = decision.found_inf if all_reduce is None else all_reduce.own(decision.found_inf)
        flag = to_device(found_inf, self.decision_device)
        self.flag = flag if self.flag is None else torch.maximum(self.flag, flag)
        self.reports += tuple(r for r in decision.reports if isinstance(r, GradientReport))

    def count(self, decision: Decision, all_reduce: DecisionAllReduce | None) -> None:
        """Count a micro-batch of which any rank has gradients, as kept unless it overflowed."""
        n_kept = to_device(decision.found_inf <= 0, self.decision_device, torch.float32)
        if all_reduce is None:
            self.calls += 1
        else:
            is_present = to_device(all_reduce.any_gradients, self.decision_device, torch.float32)
            self.calls, n_kept = self.calls + is_present, n_kept * is_present
        self.n_kept = n_kept if self.n_kept is None else self.n_kept + n_kept


@dataclass
class _Sum:
    """The sum of the gradients of one parameter.

    Attributes:
        total: the buffer that has it.
        address: the address of the memory that was made for the buffer.
    """

    total: Any = None
    address: int = 0


class _ReplacedGradient(NamedTuple):
    """The gradient of a parameter while ``p.grad`` is its sum."""

    param: Tensor
    grad: Tensor | None
    dtype: torch.dtype | None  # ``param.grad_dtype`` before the swap


class Accumulation(RefersToOptimizer):
    """The accumulation buffers of one optimizer.

    Attributes:
        cycle: the open accumulation cycle; ``None`` if there is none.
        swapped_in: whether ``p.grad`` is the sum now, for the duration of a step.
        uploads: the constants cached on each device, by the purpose of the call.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Store a weak reference to ``optimizer``.

        Args:
            optimizer: the optimizer of the accumulated gradients.
        """
        super().__init__(optimizer)
        self.cycle: AccumulationCycle | None = None
        self.swapped_in = False
        self._replaced_grads: list[_ReplacedGradient] = []
        # No weak references: torch refuses to move a DTensor parameter to which there is one.
        self._sums: defaultdict[Any, _Sum] = defaultdict(_Sum)
        # The last gradient of each parameter, by the id of the parameter.
        self._latest_grads: dict[int, weakref.ref[Any]] = {}
        self._rows: dict[bool, GradientRows | None] = {}  # by whether the sums were still empty
        self.uploads: dict[str, dict[torch.device, Uploads]] = defaultdict(dict)

    # --- filling ----------------------------------------------------------------------------------

    @torch.no_grad()
    def add(
        self,
        request: Request,
        agreement: Agreement | None,
        drop: str,
        check_gradients: Callable[[], None],
    ) -> Decision | None:
        """Unscale the gradients, add them to the sums, and clear them. Does not synchronize.

        With several ranks, one all-reduce makes the decision the same on all of them.

        Args:
            request: the request of the call, with the scale of the gradients.
            agreement: the all-reduce over the ranks of the process group; ``None`` on one rank.
            drop: one of :data:`DROPS`, the same in all calls of a cycle.
            check_gradients: raises for gradients that a step cannot use; called unless they are
                like those of an earlier call.

        Returns:
            The decision on these gradients; ``None`` if no rank has any.

        Raises:
            RuntimeError: a parameter was resized or moved since the cycle began; or ranks make
                different requests, which discards the cycle.
            TypeError: a gradient is sparse. Nothing has changed then.
            ValueError: ``drop`` differs from that of an earlier call. Nothing has changed then.
        """
        rows = self._rows_of_earlier_call()
        if rows is None:
            check_gradients()
            refuse_sparse(self.groups)
            self.check_sums()
        cycle = self._open_cycle(drop)
        call = ControlPoint.MICRO_BATCH if drop == "micro_batch" else ControlPoint.ACCUMULATE
        present = self._present(rows)
        all_reduce = decision_all_reduce(agreement, request, bool(present), call)
        try:
            decision = self._add(cycle, request, all_reduce, present, rows)
        except RuntimeError:
            if all_reduce is not None:  # some sums may have been added to before ranks compared
                self.discard()
            raise
        cycle.is_checked |= request.scale is not None and request.drop
        self._clear_gradients(present)
        return decision

    def _rows_of_earlier_call(self) -> GradientRows | None:
        """The rows of an earlier call that fit the gradients of this one; ``None`` without such."""
        begun = {} if self.cycle is None else self.cycle.params
        rows = self._rows.get(not begun)
        if rows is None:
            return None
        if begun and not rows.by_id.keys() <= begun.keys():
            return None
        return rows if rows.take_gradients(self.groups) else None

    def _present(self, rows: GradientRows | None) -> Sequence[gradients.ParamWithGrad]:
        """The parameters that have gradients, which are those of ``rows`` if there are rows."""
        return gradients.params_with_grads(self.groups) if rows is None else rows.present

    def _open_cycle(self, drop: str) -> AccumulationCycle:
        """The open cycle, or a new one.

        Raises ``ValueError`` if the open cycle has another ``drop``.
        """
        cycle = self.cycle
        if cycle is None:
            if len(self._sums) > sum(len(group["params"]) for group in self.groups):
                for param in self._sums.keys() - set(gradients.params_of(self.groups)):
                    del self._sums[param]
                    self._latest_grads.pop(id(param), None)
                self._rows.clear()  # they have the sums of removed parameters
            device = gradients.device_of(self.groups)
            cycle = self.cycle = AccumulationCycle(device, drop)
        elif drop != cycle.drop:
            raise ValueError(
                f"accumulate(drop={drop!r}), but an earlier call since the last step had "
                f"drop={cycle.drop!r}: pass the same drop to all calls before a step"
            )
        return cycle

    def _add(
        self,
        cycle: AccumulationCycle,
        request: Request,
        all_reduce: DecisionAllReduce | None,
        present: Sequence[gradients.ParamWithGrad],
        rows: GradientRows | None,
    ) -> Decision | None:
        """Add the gradients to the sums; first check them if the cycle drops micro-batches.

        Args:
            cycle: the open cycle.
            request: see :meth:`add`.
            all_reduce: makes the decision of all ranks; ``None`` on one rank.
            present: the parameters that have gradients.
            rows: the rows of the gradients; ``None`` to make them.
        """
        decision = reject = None
        checks_first = cycle.drop == "micro_batch"
        if checks_first or not present:
            to_check = GradientRows.of(present, present, None, self.uploads["check"])
            decision = check_and_unscale(to_check, request, all_reduce, cycle.decision_device)
            reject = None if decision is None else decision.found_inf
        if present:
            # Check even if this call has no scale: the step that ends the cycle may have one.
            add_request = replace(
                request,
                found_inf=reject,
                check=True,
                accumulate=True,
                agree=None if checks_first else all_reduce,
            )
            rows = self._rows_of_sums(cycle, present) if rows is None else rows
            try:
                decision_on_sums = run(backend_for, rows.works, add_request)
            finally:
                rows.release()
            decision = decision if checks_first else decision_on_sums
            # Recorded only now: if a kernel could not be compiled, nothing was added.
            cycle.params.update(rows.by_id)
        if decision is not None:
            cycle.add_flag(decision, all_reduce)
            if checks_first:
                cycle.count(decision, all_reduce)
        return decision

    def _rows_of_sums(
        self, cycle: AccumulationCycle, present: Sequence[gradients.ParamWithGrad]
    ) -> GradientRows:
        """The rows by which each gradient is added to its sum; kept if they may be used again."""
        of_sums, grads = [], []
        for _, param, owner in present:
            values = gradients.values_of(param)
            fresh = id(param) not in cycle.params
            total = real(dtensor.local(self._sum_of(param, fresh)))
            grads.append(dense_like(values, total))
            of_sums.append(ParamRow(values.dtype, total, flags=(fresh,), owner=owner))
        rows = GradientRows(present, present, works_of(of_sums, grads, self.uploads["add"]))
        (was_empty,) = of_sums[0].flags
        self._rows[was_empty] = rows.kept(self.groups)
        return rows

    def _sum_of(self, param: Any, fresh: bool) -> Any:
        """The buffer to which the gradients of ``param`` are added, made if it is missing.

        With ``fresh``, nothing was added in this cycle yet, and the first addition overwrites the
        contents of the buffer.
        """
        wide = torch.promote_types(param.dtype, param.grad.dtype)
        wide = torch.promote_types(wide, torch.float32)
        known = self._sums[param]
        total = known.total
        if total is None or (fresh and not _may_be_written(known, param)):
            own = torch.empty_like(dtensor.local(param.detach()), dtype=wide)
            total = dtensor.from_local_like(own, param)
        total = total.to(torch.promote_types(wide, total.dtype))
        if total is not known.total:
            known.total, known.address = total, dtensor.local(total).data_ptr()
            self._rows.clear()  # they may have the old sum
        return total

    def check_sums(self) -> None:
        """Refuse sums of parameters that were resized or moved during the open cycle.

        Raises:
            RuntimeError: a parameter was resized or moved. Nothing has changed then.
        """
        for _, param, owner in () if self.cycle is None else self.cycle.params.values():
            total = self._sums[param].total
            if not _is_placed_like(total, param):
                raise RuntimeError(
                    f"accumulate: the sum of the gradients of {owner.name} has shape "
                    f"{tuple(total.shape)} on {total.device}, and the parameter shape "
                    f"{tuple(param.shape)} on {param.device} now: resize or move a parameter only "
                    "after the step that applies the sum, or call zero_grad() to discard it"
                )

    def _clear_gradients(self, present: Sequence[gradients.ParamWithGrad]) -> None:
        """Set the gradients to ``None``, but to zero those that were ``p.grad`` in the last call.

        A CUDA graph may write to them.
        """
        latest, reused_grads = self._latest_grads, []
        for _, param, owner in present:
            grad, known = param.grad, latest.get(owner.key)
            latest[owner.key] = weakref.ref(grad)
            if known is not None and known() is grad:
                reused_grads.append(dtensor.local(grad))
            else:
                param.grad = None
        if reused_grads:
            torch._foreach_zero_(reused_grads)  # pyright: ignore[reportPrivateImportUsage]

    # --- the step ---------------------------------------------------------------------------------

    def close(self, request: Request, agreement: Agreement | None) -> AccumulationCycle:
        """Add what is in ``p.grad`` to the sums and close the cycle; open one if there is none.

        Args:
            request: the request of the step, with the scale of ``p.grad``.
            agreement: the all-reduce over the ranks of the process group; ``None`` on one rank.
        """
        cycle = self._open_cycle("window") if self.cycle is None else self.cycle
        rows = self._rows_of_earlier_call()
        all_reduce, present = None, self._present(rows)
        if cycle.drop == "micro_batch":  # else the step all-reduces the flag of the whole cycle
            call = ControlPoint.LAST_MICRO_BATCH
            all_reduce = decision_all_reduce(agreement, request, bool(present), call)
        if all_reduce is not None or present:
            self._add(cycle, request, all_reduce, present, rows)
        cycle.skip = cycle.flag if cycle.n_kept is None else self._renormalise(cycle, request)
        return cycle

    def swap_in_sums(self, *, wide: bool) -> None:
        """Put the sums in the place of the gradients, until :meth:`restore_gradients`.

        Args:
            wide: whether the step accepts gradients of another dtype than the parameters'. Else
                the sums are cast to ``p.grad_dtype``.
        """
        assert self.cycle is not None
        for _, param, _ in self.cycle.params.values():
            if param.grad is not None:  # restore_gradients puts the same tensor back
                self._latest_grads[id(param)] = weakref.ref(param.grad)
            total, dtype = self._sums[param].total, param.grad_dtype
            self._replaced_grads.append(_ReplacedGradient(param, param.grad, dtype))
            if wide and dtype is not None:
                dtype = total.dtype
            _put(param, total if dtype in (None, total.dtype) else total.to(dtype), dtype)
        self.cycle, self.swapped_in = None, True

    def _renormalise(self, cycle: AccumulationCycle, request: Request) -> Tensor:
        """Multiply the sums by ``calls / n_kept``, in place of the micro-batches that overflowed.

        This is an unscale by the scale ``n_kept / calls``.

        Returns:
            A 0-d tensor, more than 0 if no micro-batch was kept or a sum of this rank overflows.
        """
        assert cycle.n_kept is not None
        calls = cycle.calls
        skip = (cycle.n_kept < calls) & (cycle.n_kept <= 0) & request.check
        share = cycle.n_kept.clamp(min=1) / (
            calls.clamp(min=1) if isinstance(calls, Tensor) else calls
        )
        rescale_request = Request(scale=share, check=request.check, write=True)
        params = cycle.params.values()
        sums = [real(dtensor.local(self._sums[param].total)) for _, param, _ in params]
        if sums:
            rows = [
                ParamRow(total.dtype, owner=owner)
                for total, (*_, owner) in zip(sums, params, strict=True)
            ]
            works = works_of(rows, sums, self.uploads["renormalise"])
            decision = run(backend_for, works, rescale_request)
            cycle.add_flag(decision, None)
            skip = torch.maximum(to_device(decision.found_inf, cycle.decision_device), skip)
        return skip.to(torch.float32)

    # --- the end ------------------------------------------------------------------------------

    def restore_gradients(self, *, keep_present: bool = False) -> None:
        """Restore the gradients that the sums replaced, after the step.

        With ``keep_present``, the sums are gone already, and what is in ``p.grad`` stays there.
        """
        for param, grad, dtype in self._replaced_grads:
            if keep_present:
                grad = param.grad if param.grad is None or dtype is None else param.grad.to(dtype)
            _put(param, grad, dtype)
        self._replaced_grads, self.swapped_in = [], False

    def discard(self) -> None:
        """Drop the open cycle, and restore the gradients if the sums are swapped in."""
        self.restore_gradients()
        self.cycle = None

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The param groups of the optimizer."""
        return self.optimizer.param_groups


def _may_be_written(known: _Sum, param: Any) -> bool:
    """Whether a sum of an earlier cycle can be overwritten.

    A step has read it in ``p.grad``, where users may have given it other memory: of another
    tensor, by ``p.grad.data = other``, or less.
    """
    own = dtensor.local(known.total)
    return (
        _is_placed_like(known.total, param)
        and own.data_ptr() == known.address
        and is_dense(own)
        and all_have_memory([own])
    )


def _is_placed_like(total: Any, param: Any) -> bool:
    """Whether the sum ``total`` has the shape and device that ``param`` has now."""
    return total.shape == param.shape and total.device == param.device


def _put(param: Any, grad: Any, dtype: torch.dtype | None) -> None:
    """Set ``param.grad``, and ``param.grad_dtype`` if it differs from ``dtype``."""
    param.grad = None
    if param.grad_dtype != dtype:
        param.grad_dtype = dtype
    param.grad = grad


def refuse_sparse(groups: list[dict[str, Any]]) -> None:
    """Refuse sparse gradients: the sums are dense.

    Raises:
        TypeError: a gradient is sparse.
    """
    for _, param in gradients.present(groups):
        assert param.grad is not None
        if param.grad.layout != torch.strided:
            raise TypeError(
                f"accumulate: the gradient of {gradients.name_of(groups, param)} is sparse, and "
                "sums are dense: make the layer with sparse=False, or leave accumulate out and let "
                "backward passes under one scale add up"
            )
