"""One decision for all ranks that share a model."""

import contextlib
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ampopt._step.rank_messages import (
    Call,
    Column,
    Comparison,
    RowsOnDevices,
    digest,
    row_of,
    seen,
    write_found,
)
from ampopt._step.sharding.dtensor import is_spread
from ampopt._step.sharding.fsdp1 import whole_parameters
from ampopt._step.torch_private import flattened, is_flattened_by_fsdp1, root_of
from ampopt.backend import backend_for
from ampopt.loss_scale.arguments import check_bool
from ampopt_kernels.decision import Partials, Request
from ampopt_kernels.found import FoundByRanks

__all__ = [
    "REPLICATED",
    "Agreement",
    "NoCommonGroupError",
    "UnpicklableGroup",
    "AgreementCache",
    "FlagAllReduce",
    "agreement",
    "are_several",
    "check_process_group",
    "check_replicated",
    "group_of",
    "has_others",
    "is_fsdp1",
    "may_be_replaced",
    "group_key",
]

REPLICATED = "replicated"
"""The option of a param group that says that all ranks hold its parameters alike."""


class Agreement:
    """The ranks that decide together, and which of them counts what towards their norm."""

    def __init__(
        self,
        param_groups: Sequence[dict[str, Any]],
        groups: Sequence[Any],
        mesh: Any,
        *,
        group_key: bool,
        step_has_collectives: bool,
    ) -> None:
        """Begin.

        Args:
            param_groups: whose parameters they decide about.
            groups: process groups that reach every rank between them, one after another: one,
                wherever torch has one.
            mesh: that all spread parameters are on; ``None`` if there is no such.
            group_key: whether the user has named these ranks, or FSDP1 has, so that what is not
                spread is a part of the model, unless its param group says otherwise.
            step_has_collectives: whether their step is one that works on whole tensors, so that the
                ranks of a mesh meet within it, for each gradient.
        """
        self._groups = groups
        self._told, self._mesh = group_key, mesh
        self._step_has_collectives = step_has_collectives and mesh is not None
        self._replicated = [check_replicated(group) for group in param_groups]
        every = (
            torch.distributed.get_process_group_ranks(groups[0]) if group_key else _ranks_of(mesh)
        )
        self._is_first = torch.distributed.get_rank() == min(every)
        self._first_of_mesh = None if mesh is None else min(_ranks_of(mesh))
        self._counted: dict[Any, bool] = {}
        params = [param for group in param_groups for param in group["params"]]
        self._whole = whole_parameters(params)
        of_group = torch.distributed.get_process_group_ranks
        self._ranks = of_group(groups[0]) if len(groups) == 1 else _ranks_of(mesh)
        self._place = self._ranks.index(torch.distributed.get_rank())
        self._rows = RowsOnDevices(len(self._ranks), self._place)
        self._params = _digest(
            param
            for group, replicated in zip(param_groups, self._replicated, strict=True)
            for param in group["params"]
            if replicated or (is_spread(param) and not group_key)
        )

    def in_norm(self, tensor: Any, group: int, key: int) -> bool:
        """Whether what this rank has of ``tensor``, of that group, counts towards the norm.

        ``key`` is the ``id`` of the parameter, which ``tensor`` is or stands for.

        Of what several ranks hold alike, one copy does: of a parameter that is not spread, or is
        on some dimensions of the mesh only, too.
        """
        if not is_spread(tensor):
            is_part = self._told and not self._replicated[group] and key not in self._whole
            return self._is_first or is_part
        where = tensor.device_mesh, tensor.placements
        if where not in self._counted:
            self._counted[where] = self._counts_at(*where)
        return self._counted[where]

    def _counts_at(self, mesh: Any, placements: Sequence[Any]) -> bool:
        here = mesh.get_coordinate()
        if here is None or self._first_of_mesh not in (None, *_ranks_of(mesh)):
            return False
        copies = zip(here, placements, strict=True)
        return not any(place and placement.is_replicate() for place, placement in copies)

    def said(
        self,
        request: Request,
        call: Call,
        found: Partials,
        flag: Tensor | None,
        device: torch.device,
        *,
        present: int,
    ) -> Tensor:
        """What all ranks say, by one all-reduce on the device: the same on each of them.

        Args:
            request: what this rank is asked.
            call: what it was called for.
            found: what it has.
            flag: a flag from elsewhere, more than 0 for overflow, to be joined.
            device: where the decision is made.
            present: how many gradients this rank has.

        Returns:
            ``widest``, shape (ranks, columns); see :class:`ampopt._step.rank_messages.Column`.

        Raises:
            RuntimeError: ranks ask for different things, as far as can be seen without waiting, or
                have different parameters; or not all have come.
        """
        row = row_of(
            request,
            call,
            params=self._params,
            present=present > 0,
            gradients=present if self._step_has_collectives else 0,
        )
        host_sees = backend_for(device).host_sees
        if host_sees:
            said = self._rows.matrix(seen(row, request, found, flag), device)
        else:
            said = self._rows.matrix(row, device)
            write_found(said[self._place], request, found, flag)
        self._all_reduce(said, self._groups)
        self._comparison.compare(said, row, self._ranks, at_once=host_sees)
        return said

    def found_by_ranks(self, overflows: Tensor) -> FoundByRanks:
        """Which ranks found an overflow; ``overflows`` has a flag for each."""
        return FoundByRanks(overflows, self._ranks, self._place)

    def gather_objects(self, taken: Any) -> list[Any]:
        """What all ranks have ``taken``, an object each. Synchronizes; all of them have to ask."""
        every = [taken]
        for group in self._groups:
            size = torch.distributed.get_world_size(group)
            if size == 1:
                continue
            others: list[Any] = [None] * size
            torch.distributed.all_gather_object(others, every, group)
            every = [one for other in others for one in other]
        return every

    def flag(self, flag: Any, device: torch.device) -> Tensor:
        """``flag``, more than 0 for overflow, of all ranks: by one all-reduce on the device."""
        given = torch.as_tensor(flag, device=device)
        vote = FlagAllReduce(self, Request(), call=Call.FLAG)
        return vote(Partials([], None), given, device).flags_on(device)

    def join_without_gradients(self, device: torch.device) -> None:
        """Have the others judge their gradients, when this rank cannot; without a norm."""
        with contextlib.suppress(RuntimeError):  # what ended this rank says more
            none = Partials([], None)
            self.said(Request(), Call.ABSTAINS, none, None, device, present=0)

    def closures(
        self, device: torch.device, evaluation: int, *, finite: bool, raised: bool
    ) -> tuple[bool, bool]:
        """What has come of the closure. Synchronizes.

        Args:
            device: where decisions are made.
            evaluation: how many times the step has evaluated it, 1 or more.
            finite: whether its loss is, on this rank.
            raised: whether it has, on this rank.

        Returns:
            Whether its loss is finite on every rank; whether it has raised on any.

        Raises:
            RuntimeError: see :meth:`said`.
        """
        row = row_of(Request(), Call.CLOSURE, params=self._params, evaluation=evaluation)
        said = self._rows.matrix(row, device)
        said[self._place, Column.OVERFLOW] = float(not finite)
        said[self._place, Column.SQUARES] = float(raised)
        self._all_reduce(said, self._groups)
        self._comparison.compare(said, row, self._ranks, at_once=True)
        doubts, raises = said[:, [Column.OVERFLOW, Column.SQUARES]].sum(0).tolist()
        return not doubts, raises > 0

    def add_up_sums(self, each: Tensor, totals: Tensor) -> tuple[Tensor, Tensor]:
        """Sums over what all ranks have, by one all-reduce on the device.

        By a second, where the user has named more ranks than the parameters are spread over.

        Args:
            each: shape (spread parameters, terms).
            totals: shape (terms,).

        Raises:
            RuntimeError: parameters are on meshes of which none covers the others.
        """
        said = torch.cat([each.reshape(-1), totals])
        if self._told and each.numel():
            self.add_up_parameters(each)
            said = totals.clone()
        self._all_reduce(said, self._groups)
        n = totals.numel()
        return (each if len(said) == n else said[:-n].view_as(each)), said[-n:]

    def add_up_parameters(self, each: Tensor) -> None:
        """Add up, in place, what the ranks have that parameters are spread over.

        Raises:
            RuntimeError: parameters are on meshes of which none covers the others.
        """
        if self._told and self._mesh is None:
            raise RuntimeError(
                "a rule that sums up over parameters needs them on one mesh; these are on "
                "several, of which none covers the others: make an optimizer for each"
            )
        self._all_reduce(each, _groups_of(self._mesh) if self._told else self._groups)

    def _all_reduce(self, tensor: Tensor, groups: Sequence[Any]) -> None:
        """Add up what the ranks of ``groups`` have in ``tensor``.

        Raises:
            RuntimeError: they cannot, as where not all have come within the timeout of their group.
        """
        try:
            for group in groups:
                if torch.distributed.get_world_size(group) == 1:
                    continue
                torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.SUM, group)
        except RuntimeError as error:
            raise RuntimeError(
                f"the all-reduce by which {len(self._ranks)} ranks decide together has failed: "
                f"{error}. If it was waited for in vain, not all of them have come: each has to "
                'make every call of unscale, unscale_and_step, accumulate(drop="micro_batch") '
                "and a scaler's step, with gradients or without; and none may leave the scale out, "
                "as grads_scaled_by=None without max_norm decides nothing and asks no other rank"
            ) from error

    @property
    def _comparison(self) -> Comparison:
        return _COMPARISONS.setdefault(self._groups[0], Comparison())


_COMPARISONS: WeakKeyDictionary[Any, Comparison] = WeakKeyDictionary()
"""By process group: an agreement is made anew whenever parameters change."""


@dataclass
class FlagAllReduce:
    """The part of this rank in one decision.

    Attributes:
        agreement: of which ranks.
        request: what this rank is asked.
        present: how many gradients this rank has, or just 1 for some.
        call: what it was called for.
        said: what all ranks have said, once it has been called.
    """

    agreement: Agreement
    request: Request
    present: int = 1
    call: Call = Call.JUDGES
    said: Tensor | None = None

    @property
    def ranks(self) -> Tensor:
        """How many ranks have gradients, 0-d, once it has been called."""
        assert self.said is not None
        return self.said[:, Column.PRESENT].sum()

    @property
    def loss(self) -> Tensor | None:
        """The mean of the losses that ranks have given, 0-d; ``None`` if nobody needs it."""
        if self.said is None or not any(cause.needs_loss for cause, _ in self.request.causes):
            return None
        return self.said[:, Column.LOSS].sum() / self.said[:, Column.GIVES_LOSS].sum()

    def __call__(self, found: Partials, flag: Tensor | None, device: torch.device) -> Partials:
        """What all ranks have found, as one part; see :meth:`Agreement.said`.

        Args:
            found: what this rank has.
            flag: a flag from elsewhere, more than 0 for overflow, to be joined.
            device: where the decision is made.
        """
        agreement = self.agreement
        said = agreement.said(self.request, self.call, found, flag, device, present=self.present)
        self.said, overflows = said, said[:, Column.OVERFLOW]
        by_ranks = (agreement.found_by_ranks(overflows),)
        squares = None if found.squares is None else said[:, Column.SQUARES].sum(0, keepdim=True)
        if backend_for(device).host_sees:
            bad = any(overflows.tolist())
            return Partials([bad], squares, by_ranks if bad else ())
        one = overflows.amax(0, keepdim=True).clamp(max=1.0).to(torch.float32)
        return Partials(one, squares, by_ranks)


class NoCommonGroupError(RuntimeError):
    """Parameters do not show which ranks decide together about them."""


def agreement(
    param_groups: Sequence[dict[str, Any]],
    process_group: Any = None,
    *,
    step_has_collectives: bool = False,
) -> Agreement | None:
    """The ranks that decide together about these parameters; ``None`` if this one does alone.

    Those are the ranks of ``process_group``; without one, those of the default group if FSDP1 has
    flattened the parameters, or else of the meshes that they are on. All of them take part, with
    gradients or without, as a rank that does not would leave the others waiting. May create a
    process group, for which all ranks have to come by. For ``step_has_collectives`` see
    :class:`Agreement`.

    Raises:
        NoCommonGroupError: the meshes do not show which ranks those are.
        TypeError: ``process_group`` is none, or ``replicated`` of a param group is no ``bool``.
        ValueError: ``process_group`` lacks this rank, or one of a mesh.
    """
    for group in param_groups:
        check_replicated(group)
    if process_group is not None:
        check_process_group(process_group)
    elif is_fsdp1(param_groups):
        process_group = torch.distributed.group.WORLD
    if process_group is None and "torch.distributed.tensor" not in sys.modules:
        return None
    spread: list[Any] = [p for group in param_groups for p in group["params"] if is_spread(p)]
    meshes = list(dict.fromkeys(param.device_mesh for param in spread))
    if process_group is not None:
        every = set(torch.distributed.get_process_group_ranks(process_group))
        for mesh in meshes:
            if lacks := sorted(set(_ranks_of(mesh)) - every):
                raise ValueError(
                    f"process_group lacks the ranks {lacks} of {mesh}, which have parts of the "
                    "same parameters: give a group that has them"
                )
        mesh = _covering(meshes)
        return Agreement(
            param_groups,
            [process_group],
            mesh,
            group_key=True,
            step_has_collectives=step_has_collectives,
        )
    if not meshes:
        return None
    mesh = _covering(meshes)
    if mesh is None:
        raise NoCommonGroupError(
            f"the parameters are on meshes of which none covers the others: {meshes}. Make them of "
            "one mesh, by its dimensions, as in mesh['dp'] and mesh['tp'], or give the optimizer "
            "the process_group of all their ranks"
        )
    return Agreement(
        param_groups,
        _groups_of(mesh),
        mesh,
        group_key=False,
        step_has_collectives=step_has_collectives,
    )


class AgreementCache:
    """The agreement of one optimizer, made anew once what it is made of has changed."""

    def __init__(self, *, step_has_collectives: bool) -> None:
        """Begin with none. For ``step_has_collectives`` see :class:`Agreement`."""
        self._step_has_collectives = step_has_collectives
        self._of: Any = None
        self._params: list[Any] = []  # which are alive, so that no other has the identity of one
        self._agreement: Agreement | None = None

    def now(self, param_groups: Sequence[dict[str, Any]], process_group: Any) -> Agreement | None:
        """See :func:`agreement`."""
        if process_group is None and self._agreement is None and not _are_connected():
            return None
        members = [list(map(id, group["params"])) for group in param_groups]
        of = members, group_key(param_groups, process_group), is_fsdp1(param_groups)
        if of != self._of:
            self._agreement = agreement(
                param_groups, process_group, step_has_collectives=self._step_has_collectives
            )
            self._of, self._params = of, [p for group in param_groups for p in group["params"]]
        return self._agreement


def check_process_group(given: Any) -> None:
    """Refuse what is no process group of this rank.

    Raises:
        TypeError: it is no process group.
        ValueError: it does not have this rank.
    """
    if given is None:
        return
    distributed: Any = torch.distributed
    outside = distributed.is_available() and given == distributed.GroupMember.NON_GROUP_MEMBER
    if not outside and not (
        distributed.is_available() and isinstance(given, distributed.ProcessGroup)
    ):
        raise TypeError(
            "process_group must be a torch.distributed.ProcessGroup, such as "
            "torch.distributed.group.WORLD, or mesh.get_group() of a DeviceMesh, or None, got "
            f"{type(given).__name__}"
        )
    if outside or distributed.get_rank(given) < 0:
        raise ValueError(
            f"process_group does not contain this rank, {distributed.get_rank()}: give each rank "
            "the group that it is in, of the ranks that share the model with it"
        )


def is_fsdp1(param_groups: Sequence[dict[str, Any]]) -> bool:
    """Whether FSDP1 has flattened parameters into one, of which each rank has a part."""
    if not _are_connected() or "torch.distributed.fsdp" not in sys.modules:
        return False
    return any(is_flattened_by_fsdp1(param) for group in param_groups for param in group["params"])


def _are_connected() -> bool:
    """Whether there are any ranks but this one, as far as torch has been told."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def may_be_replaced(param_groups: Sequence[dict[str, Any]], process_group: Any) -> bool:
    """Whether ``fully_shard`` may have put other parameters in the place of these."""
    if not _are_connected() or "torch.distributed.fsdp" not in sys.modules:
        return False
    return not has_others(param_groups, process_group)


def are_several() -> bool:
    """Whether there are other ranks, whatever they do."""
    return _are_connected() and torch.distributed.get_world_size() > 1


def has_others(param_groups: Sequence[dict[str, Any]], process_group: Any) -> bool:
    """Whether ranks decide together about these parameters. Does not make their agreement."""
    if not _are_connected():
        return False
    if process_group is not None or is_fsdp1(param_groups):
        return True
    return any(is_spread(param) for group in param_groups for param in group["params"])


def group_key(param_groups: Sequence[dict[str, Any]], process_group: Any) -> tuple[Any, list[Any]]:
    """What users say of ranks, to see whether it has changed."""
    return process_group, [group.get(REPLICATED) for group in param_groups]


class UnpicklableGroup:
    """A process group in what is copied, where it stays the same one, or pickled, where not."""

    def __init__(self, process_group: Any) -> None:
        """Hold on to it."""
        self.process_group = process_group

    def __deepcopy__(self, memo: Any) -> "UnpicklableGroup":
        """Processes are not copied."""
        return self

    def __reduce__(self) -> Any:
        """Refuse.

        Raises:
            TypeError: no other process could make anything of it.
        """
        raise TypeError(
            "an optimizer with a process_group cannot be pickled, as a group is of this process: "
            "save its state_dict(), or set process_group to None first"
        )


def check_replicated(group: dict[str, Any]) -> bool:
    """Whether ``group``, a param group, says that all ranks hold its parameters alike.

    Raises:
        TypeError: it says something else than ``True`` or ``False``.
    """
    return check_bool("replicated of a param group", group.get(REPLICATED, False))


def _digest(params: Iterable[Any]) -> int:
    """A number of what all ranks should have alike."""
    alike = [(*p.shape, p.dtype, p.placements if is_spread(p) else ()) for p in params]
    return digest(alike) if alike else 0


def _ranks_of(mesh: Any) -> list[int]:
    """Of a tensor that is on the CPU, whatever the mesh is of."""
    return mesh.mesh.flatten().tolist()


def _covering(meshes: list[Any]) -> Any:
    """The smallest mesh known that has all ranks of ``meshes``; ``None`` if there is none."""
    if not meshes:
        return None
    largest = max(meshes, key=lambda mesh: mesh.size())
    every = set(_ranks_of(largest))
    if all(every.issuperset(_ranks_of(mesh)) for mesh in meshes):
        return largest
    roots = [root_of(mesh) for mesh in meshes]
    names = {name for mesh in meshes for name in mesh.mesh_dim_names or ()}
    if all(root == roots[0] for root in roots) and names <= set(roots[0].mesh_dim_names or ()):
        return roots[0][tuple(name for name in roots[0].mesh_dim_names if name in names)]
    return None


def group_of(meshes: Sequence[Any]) -> Any:
    """One process group that reaches every rank of ``meshes``; ``None`` if there is no such.

    May create it, for which all ranks have to come by.
    """
    mesh = _covering(list(dict.fromkeys(meshes)))
    groups = [] if mesh is None else _groups_of(mesh)
    return groups[0] if len(groups) == 1 else None


def _groups_of(mesh: Any) -> list[Any]:
    """Process groups that reach every rank of ``mesh``: one, unless it lacks names."""
    if mesh.ndim == 1:
        return [mesh.get_group()]
    if mesh.size() == torch.distributed.get_world_size():
        return [torch.distributed.group.WORLD]
    if mesh.mesh_dim_names:
        return [flattened(mesh).get_group()]
    return mesh.get_all_groups()
