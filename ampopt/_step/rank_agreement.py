"""The all-reduces by which ranks share one decision to step or to skip.

:mod:`rank_messages` has the contents of the tensors, :mod:`ranks` says which ranks take part.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ampopt._step.gradients import params_of
from ampopt._step.rank_messages import (
    Column,
    Comparison,
    ControlPoint,
    RankRow,
    difference,
    local_results,
    row_of,
)
from ampopt._step.rank_settings import RankSettings, replicated_of
from ampopt._step.sharding.dtensor import is_dtensor
from ampopt._step.sharding.meshes import group_of, ranks_of
from ampopt._step.torch_private import count_of_groups
from ampopt.backend import backend_for
from ampopt_kernels.gradient_reports import RankFlags
from ampopt_kernels.step_data import Partials, Request
from ampopt_kernels.tensors import widest
from ampopt_kernels.uploads import Uploads

__all__ = ["Agreement", "DecisionAllReduce", "decision_all_reduce"]


class Agreement:
    """The ranks that share one decision, and the all-reduces between them.

    A group of one rank makes no collective.

    Attributes:
        ranks: the global rank of each, in the order of the rows that they all-reduce.
        place: the index of this rank among them.
        settings: what all ranks have to set alike.
        comparison: of what they all-reduce.
        in_norm: by the ``id`` of a parameter, whether the global norm counts this rank's elements
            of its gradient. Of copies on several ranks it counts one: of a plain replicated tensor,
            and of a ``DTensor`` that is replicated along some dimensions of the mesh.
        in_sums: by the ``id`` of each ``DTensor``, whether :meth:`add_up_parameters` counts this
            rank's elements. It counts one copy among the ranks of the meshes, which need not be all
            ranks.
        is_sharded_throughout: whether every parameter is a ``DTensor`` that is sharded over all of
            these ranks. The flag of torch's scaler is then all-reduced already.
    """

    def __init__(
        self,
        param_groups: Sequence[dict[str, Any]],
        holders: Mapping[int, Sequence[int]],
        process_group: Any,
        mesh: Any,
        settings: RankSettings,
        *,
        names_ranks: bool,
    ) -> None:
        """Find the place of this rank; makes no collective.

        Args:
            param_groups: the param groups of one optimizer, or of several.
            holders: by the ``id`` of a parameter, the ranks that hold the same elements of it. Only
                of parameters that FSDP1 has flattened, and of param groups that name these ranks.
            process_group: the group to all-reduce over.
            mesh: a mesh that contains the meshes of all ``DTensor`` parameters; ``None`` without.
            settings: what all ranks have to set alike.
            names_ranks: whether the user passed ``process_group``, or it is the default group for
                FSDP1, and not that of a mesh. Plain tensors are then shards of the model, unless
                ``replicated``; otherwise they are copies.
        """
        self._group_of_model, self.settings = process_group, settings
        self._names_ranks, self._mesh = names_ranks, mesh
        self.comparison = Comparison()
        self._here = torch.distributed.get_rank()
        self.ranks = torch.distributed.get_process_group_ranks(process_group)
        self.place = self.ranks.index(self._here)
        self._uploads: dict[torch.device, Uploads] = {}
        self.is_sharded_throughout = not names_ranks and all(
            is_dtensor(param)
            and param.device_mesh == mesh
            and not any(placement.is_replicate() for placement in param.placements)
            for param in params_of(param_groups)
        )
        self.in_norm: dict[int, bool] = {}
        self.in_sums: dict[int, bool] = {}
        first, first_of_mesh = min(self.ranks), None if mesh is None else min(ranks_of(mesh))
        is_counted_copy = cache(_is_counted_copy)
        for group in param_groups:
            is_part = names_ranks and replicated_of(group) is not True
            for param in group["params"]:
                key, is_counted = id(param), is_part or self._here == first
                if is_dtensor(param):
                    where = param.device_mesh, param.placements
                    self.in_sums[key] = is_counted_copy(*where, first_of_mesh)
                    is_counted = is_counted_copy(*where, first_of_mesh if is_part else first)
                if key in holders:
                    is_counted = self._here == min(holders[key])
                self.in_norm[key] = is_counted

    @property
    def _group(self) -> Any:
        """The process group to all-reduce over."""
        return _GROUPS_APART.get(self._group_of_model, self._group_of_model)

    def prepare_for_closures(self, device: torch.device, max_replays: int) -> None:
        """Make all-reduces over a process group of their own from now on. The first call makes it.

        A rank whose closure raises takes part in the all-reduces of the others, which may still be
        in collectives of the model. In one group, the two would meet. Collective and synchronizing.

        Args:
            device: the device on which the step is decided.
            max_replays: the number of times that an evaluation may be repeated.
        """
        if self._group_of_model in _GROUPS_APART:
            return
        self.closures(device, max_replays, 0, finite=True, raised=False)  # do all ranks come here?
        self._even_counts_of_groups(device)
        backend = torch.distributed.get_backend(self._group_of_model)
        _GROUPS_APART[self._group_of_model] = torch.distributed.new_group(
            self.ranks, backend=backend, use_local_synchronization=True
        )

    def _even_counts_of_groups(self, device: torch.device) -> None:
        """Put each of these ranks in equally many process groups, by groups of it alone.

        Torch names a group of some ranks by them and that count, and ranks with different names
        would wait for each other without end. Synchronizes.
        """
        most = torch.tensor(count_of_groups(), device=device)
        self._all_reduce(most, self._group, torch.distributed.ReduceOp.MAX)
        for _ in range(int(most) - count_of_groups()):
            torch.distributed.new_group([self._here], use_local_synchronization=True)

    # --- overflow flag, norm and loss ---------------------------------------------------------

    def exchange(
        self,
        row: RankRow,
        results: dict[int, float | Tensor],
        device: torch.device,
        *,
        at_once: bool = False,
    ) -> Tensor:
        """All-reduce the rows of all ranks, by one collective on the device.

        Args:
            row: the row of this rank, without what may change with every call; see ``row_of``.
            results: what may change with every call, by column.
            device: the device on which the step is decided.
            at_once: whether to compare the rows in this call, though it may synchronize.

        Returns:
            The rows of all ranks, equal on every rank: dtype ``widest``, shape (ranks, columns);
            see :class:`ampopt._step.rank_messages.Column`.

        Raises:
            RuntimeError: ranks make different requests (where that takes a synchronization, it is
                raised in a later step), or have different parameters; or the all-reduce failed.
        """
        rows = self._matrix(row, results, device)
        self._all_reduce(rows, self._group)
        difference_of = partial(difference, ranks=self.ranks, settings=self.settings)
        self.comparison.compare(rows, difference_of, at_once=at_once)
        return rows

    def _matrix(
        self, row: RankRow, results: dict[int, float | Tensor], device: torch.device
    ) -> Tensor:
        """A new matrix with the row of this rank, and 0 in the rows of others.

        Does not synchronize. Arguments as for :meth:`exchange`.

        Raises:
            RuntimeError: a CUDA graph is being captured, and ``row`` was not sent to ``device``
                before.
        """
        matrix = torch.zeros(len(self.ranks), Column.COUNT, dtype=widest(device), device=device)
        results = {Column.LEFT_OUT: self.settings.left_out(), **results}
        if backend_for(device).host_sees:
            row, results = [float(results.get(i, number)) for i, number in enumerate(row)], {}
        uploads = self._uploads.setdefault(device, Uploads())
        own = matrix[self.place]
        own.copy_(uploads.get(f"row of call {row[Column.CALL]}", row, own.dtype, device))
        for column, result in results.items():
            own[column] = result
        uploads.keep_while_captured(device)
        return matrix

    def flag(self, flag: Any, device: torch.device) -> Tensor:
        """All-reduce ``flag``, which is more than 0 for overflow, by one collective on the device.

        Returns:
            A tensor of one element, more than 0 if the flag of any rank is.
        """
        tensor = torch.as_tensor(flag, device=device)
        all_reduce = DecisionAllReduce(self, Request(), call=ControlPoint.FLAG)
        return all_reduce(Partials([], None), tensor, device).flags_on(device)

    def join_after_raise(self, device: torch.device) -> None:
        """Take part in the all-reduce of the other ranks after the closure of this rank raised.

        Does not wait for them, so that the error of the closure is seen.
        """
        row = row_of(Request(), ControlPoint.NONE, self.settings)
        row[Column.RAISED] = 1.0
        self._post(self._matrix(row, {}, device))

    def closures(
        self,
        device: torch.device,
        max_replays: int,
        evaluation: int,
        *,
        finite: bool,
        raised: bool,
    ) -> tuple[bool, bool]:
        """All-reduce the outcome of one evaluation of the closure.

        Synchronizes, but does not wait for other ranks if the closure has raised on this one.

        Args:
            device: the device on which the step is decided.
            max_replays: the number of times that an evaluation may be repeated.
            evaluation: the number of the evaluation, from 1; 0 before the first.
            finite: whether the loss is finite on this rank.
            raised: whether the closure raised on this rank.

        Returns:
            Whether the loss is finite on every rank; whether the closure raised on any.

        Raises:
            RuntimeError: see :meth:`exchange`.
        """
        row = row_of(Request(), ControlPoint.CLOSURE, self.settings)
        row[Column.EVALUATION] = float(evaluation)
        row[Column.MAX_REPLAYS] = float(max_replays)
        row[Column.RAISED] = float(raised)
        results: dict[int, float | Tensor] = {Column.OVERFLOW: float(not finite)}
        if raised:
            self._post(self._matrix(row, results, device))
            return True, True
        rows = self.exchange(row, results, device, at_once=True)
        not_finite, raises = rows[:, [Column.OVERFLOW, Column.RAISED]].sum(0).tolist()
        return not_finite == 0, raises > 0

    # --- sums of rules ----------------------------------------------------------------------------

    def add_up_sums(self, each: Tensor, totals: Tensor) -> tuple[Tensor, Tensor]:
        """Add up sums over all ranks, by one all-reduce on the device.

        By two, if the user named more ranks than the parameters are sharded over.

        Args:
            each: the sums of each sharded parameter, shape (parameters, terms).
            totals: the sums over all parameters, shape (terms,).

        Raises:
            RuntimeError: see :meth:`add_up_parameters`.
        """
        n = each.numel()
        if self._names_ranks and n:
            self.add_up_parameters(each)
            self._all_reduce(totals := totals.clone(), self._group)
            return each, totals
        self._all_reduce(sums := torch.cat([each.reshape(-1), totals]), self._group)
        return sums[:n].view_as(each), sums[n:]

    def add_up_parameters(self, each: Tensor) -> None:
        """Add ``each`` up, in place, over the ranks that the parameters are sharded over.

        Raises:
            RuntimeError: no known mesh contains the meshes of all parameters.
        """
        if self._mesh is None:
            raise RuntimeError(
                "a rule that sums over parameters needs all of them on one mesh with names for its "
                "dimensions, or on its submeshes: make one, or make an optimizer for each mesh"
            )
        group = group_of(self._mesh) if self._names_ranks else self._group
        if group is not None:
            self._all_reduce(each, group)

    # --- collectives ------------------------------------------------------------------------------

    def gather_objects(self, mine: Any) -> list[Any]:
        """The objects of all ranks, of which ``mine`` is this rank's. A collective; synchronizes.

        Args:
            mine: an object that can be pickled.
        """
        objects: list[Any] = [None] * len(self.ranks)
        torch.distributed.all_gather_object(objects, mine, self._group)
        return objects

    def _all_reduce(self, tensor: Tensor, group: Any, op: Any = None) -> None:
        """Reduce ``tensor``, in place, over the ranks of ``group``: by a sum, or by ``op``.

        Raises:
            RuntimeError: the all-reduce failed, for example by the timeout of the process group.
        """
        if (size := torch.distributed.get_world_size(group)) == 1:
            return
        try:
            torch.distributed.all_reduce(tensor, op or torch.distributed.ReduceOp.SUM, group)
        except RuntimeError as error:
            raise RuntimeError(
                f"an all-reduce over {size} ranks has failed: {error}. If it timed out, some rank "
                "did not make the same call: every rank has to make every call of unscale, "
                "unscale_and_step, accumulate and a scaler's step, with gradients or without. "
                "grads_scaled_by=None without max_norm makes no all-reduce, so all ranks have to "
                "pass a scale, or none"
            ) from error

    def _post(self, rows: Tensor) -> None:
        """Add up ``rows`` over the ranks in the background."""
        options = torch.distributed.AllreduceOptions()
        if rows.device.type == "cpu":  # a process ends only after what gloo does in the background
            options.timeout = _PATIENCE
        posted = _POSTED.setdefault(self._group, deque(maxlen=4))
        posted.append(self._group.allreduce([rows], options))


def _is_counted_copy(mesh: Any, placements: Sequence[Any], first: int | None) -> bool:
    """Whether this rank's copy of a ``DTensor`` is the one that is counted.

    Of several equal submeshes, that with the rank ``first`` is counted.
    """
    here = mesh.get_coordinate()
    if here is None or first not in (None, *ranks_of(mesh)):
        return False
    copies = zip(here, placements, strict=True)
    return not any(place and placement.is_replicate() for place, placement in copies)


_PATIENCE = timedelta(seconds=10)
"""How long the outcome of a closure that has raised waits for other ranks to read it."""

_GROUPS_APART: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""The process groups of :meth:`Agreement.prepare_for_closures`, by the group of the model."""

_POSTED: WeakKeyDictionary[Any, deque[Any]] = WeakKeyDictionary()
"""By process group: its last all-reduces that run in the background, kept until they end."""


def decision_all_reduce(
    agreement: Agreement | None,
    request: Request,
    has_gradients: bool,
    call: ControlPoint = ControlPoint.CHECK,
) -> "DecisionAllReduce | None":
    """The all-reduce of ``request``; ``None`` on one rank, or if nothing is to be all-reduced."""
    if agreement is None or not request.needs_agreement:
        return None
    return DecisionAllReduce(agreement, request, has_gradients, call)


@dataclass
class DecisionAllReduce:
    """The all-reduce of one decision: what :attr:`ampopt_kernels.step_data.Request.agree` calls.

    Attributes:
        agreement: the ranks that take part.
        request: the request of this rank.
        has_gradients: whether this rank has gradients.
        call: the control point of this rank.
        rows: what :meth:`Agreement.exchange` returned; only after the call.
    """

    agreement: Agreement
    request: Request
    has_gradients: bool = True
    call: ControlPoint = ControlPoint.CHECK
    rows: Tensor = field(init=False)

    @property
    def any_gradients(self) -> Tensor:
        """Whether any rank has gradients: bool, 0-d. Only after the call."""
        return self.rows[:, Column.PRESENT].amax() > 0

    @property
    def any_must_skip(self) -> Tensor:
        """1 if the accumulation cycle of any rank must be skipped, else 0: 0-d. After the call."""
        return self.rows[:, Column.MUST_SKIP].amax()

    def own(self, found_inf: Tensor) -> Tensor:
        """The part of this rank in ``found_inf``, which was decided with it. Only after the call.

        That is 1 if a gradient of this rank overflowed, or the scale cannot be used.
        """
        overflows = self.rows[:, Column.OVERFLOW].to(found_inf.dtype)
        return torch.where(overflows.amax() > 0, overflows[self.agreement.place], found_inf)

    def __call__(
        self,
        partials: Partials,
        flag: Tensor | None,
        device: torch.device,
        must_skip: Tensor | None = None,
    ) -> Partials:
        """The overflow flag and squared norm of all ranks; see :meth:`Agreement.exchange`.

        Args:
            partials: overflow flags and squared norms of this rank's gradients.
            flag: a further overflow flag, more than 0 for overflow.
            device: the device on which the step is decided.
            must_skip: more than 0 if the accumulation cycle of this rank must be skipped.

        Returns:
            One flag, one squared norm if ``partials`` has any, and the mean of the losses that
            ranks passed if a cause needs the loss.
        """
        agreement, request = self.agreement, self.request
        row = row_of(request, self.call, agreement.settings)
        row[Column.PRESENT] = float(self.has_gradients)
        results = local_results(request, partials, flag, must_skip, agreement.settings, device)
        self.rows = rows = agreement.exchange(row, results, device)
        overflows = rows[:, Column.OVERFLOW]
        by_ranks = (RankFlags(overflows, agreement.ranks, agreement.place),)
        squares = None if partials.squares is None else rows[:, Column.SQUARES].sum(0, keepdim=True)
        loss = None
        if any(cause.needs_loss for cause in request.causes):
            loss = rows[:, Column.LOSS].sum() / rows[:, Column.GIVES_LOSS].sum()
        if backend_for(device).host_sees:
            overflowed = any(overflows.tolist())
            return Partials([overflowed], squares, by_ranks if overflowed else (), loss)
        one = overflows.amax(0, keepdim=True).clamp(max=1.0).to(torch.float32)
        return Partials(one, squares, by_ranks, loss)
