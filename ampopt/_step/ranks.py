"""Which ranks take part in the all-reduces of an optimizer; :mod:`rank_agreement` makes them."""

import gc
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ampopt._step.gradients import params_of
from ampopt._step.rank_agreement import Agreement
from ampopt._step.rank_settings import RankSettings, is_initialized, replicated_of
from ampopt._step.sharding.dtensor import is_dtensor, placements
from ampopt._step.sharding.meshes import covering, group_of, ranks_of
from ampopt._step.torch_private import (
    any_flattened_by_fsdp1,
    is_flattened_by_fsdp1,
    replicas_of_fsdp1,
)

__all__ = [
    "AgreementCache",
    "NoCommonGroupError",
    "UnpicklableGroup",
    "agreement",
    "are_several",
    "check_process_group",
    "has_others",
    "is_fsdp1",
    "may_be_replaced",
]


class NoCommonGroupError(RuntimeError):
    """The meshes of the parameters do not show which ranks to all-reduce over."""


def agreement(optimizers: Sequence[Any], process_group: Any = None) -> Agreement | None:
    """The ranks that all-reduce overflow flags and norms of these optimizers.

    They are the ranks of ``process_group``. Without one: the ranks of the default group if FSDP1
    has flattened parameters, else the ranks of the meshes of ``DTensor`` parameters. A rank without
    gradients takes part too, because the others would wait for it. May create a process group,
    which is a collective call.

    Args:
        optimizers: one optimizer, or several that step together.
        process_group: the process group that the user named; ``None`` without one.

    Returns:
        ``None`` if no other rank has a part or a copy of these parameters.

    Raises:
        NoCommonGroupError: no known mesh contains the meshes of all parameters.
        TypeError: ``process_group`` is not a process group, or ``replicated`` of a param group is
            neither a ``bool`` nor a list of ranks.
        ValueError: ``process_group`` lacks this rank, or a rank that has a shard or a copy of a
            parameter of this rank; or there are no parameters on this rank, so that no device for
            the all-reduce is known.
    """
    param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for group in param_groups:
        replicated_of(group)
    is_named = process_group is not None
    if is_named:
        check_process_group(process_group)
    elif is_fsdp1(param_groups):
        process_group = torch.distributed.group.WORLD
    sharded_params: list[Any] = [param for param in params_of(param_groups) if is_dtensor(param)]
    meshes = list(dict.fromkeys(param.device_mesh for param in sharded_params))
    if process_group is None and not meshes:
        return None
    holders = _holders(param_groups)
    mesh = covering(meshes)
    if process_group is not None:
        _check_has_all(process_group, [*map(ranks_of, meshes), *holders.values()])
    elif mesh is None:
        raise NoCommonGroupError(
            f"no mesh with names for its dimensions covers all the meshes of parameters: {meshes}. "
            "Make one mesh with names for its dimensions, and shard over its submeshes, such as "
            "mesh['dp'] and mesh['tp']; or give the optimizer the process_group of all their ranks"
        )
    names_ranks = process_group is not None
    process_group = process_group if names_ranks else group_of(mesh)
    if process_group is None or torch.distributed.get_world_size(process_group) == 1:
        return None
    if next(params_of(param_groups), None) is None:
        raise ValueError(
            "the optimizer has no parameters on this rank, so it does not know the device on which "
            "to all-reduce with the other ranks of process_group: give it one parameter on that "
            "device, such as torch.nn.Parameter(torch.zeros(1)), which needs no gradient"
        )
    settings = RankSettings(optimizers, is_named=is_named, names_ranks=names_ranks)
    return Agreement(param_groups, holders, process_group, mesh, settings, names_ranks=names_ranks)


class AgreementCache:
    """The :func:`agreement` of some optimizers, remade once parameters or ranks have changed."""

    def __init__(self) -> None:
        """Start with an empty cache."""
        self._key: Any = None
        self._members: Any = None  # held, since the key has their ids
        self._agreement: Agreement | None = None

    def get(self, optimizers: Sequence[Any], process_group: Any) -> Agreement | None:
        """The :func:`agreement` of ``optimizers``, the same ones in every call."""
        if self._key is None and process_group is None and not is_initialized():
            return None
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        params = [param for group in groups for param in group["params"]]
        of_groups = [(id(group), len(group["params"]), replicated_of(group)) for group in groups]
        # A parameter may stay the same object on another mesh: torch.utils.swap_tensors.
        key = process_group, of_groups, list(map(id, params)), placements(params)
        if key != self._key:
            old, self._agreement = self._agreement, agreement(optimizers, process_group)
            self._key, self._members = key, (groups, params)
            if old and self._agreement and self._agreement.ranks == old.ranks:
                # Other ranks, which may not have changed, go on to read later what is compared.
                self._agreement.comparison = old.comparison
        return self._agreement


# --- what users pass ------------------------------------------------------------------------------


def check_process_group(process_group: Any) -> None:
    """Check that ``process_group`` is ``None`` or a process group of this rank.

    Raises:
        TypeError: ``process_group`` is not a ``torch.distributed.ProcessGroup``.
        ValueError: ``process_group`` does not contain this rank, or was destroyed.
    """
    if process_group is None:
        return
    distributed: Any = torch.distributed
    available = distributed.is_available()
    if available and process_group == distributed.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"process_group does not contain this rank, {distributed.get_rank()}: give each rank "
            "a group that contains it, and the ranks that share the model with it"
        )
    if not (available and isinstance(process_group, distributed.ProcessGroup)):
        raise TypeError(
            "process_group must be a torch.distributed.ProcessGroup, such as "
            "torch.distributed.group.WORLD, or mesh.get_group() of a DeviceMesh, or None, got "
            f"{type(process_group).__name__}"
        )
    distributed.get_rank(process_group)  # raises for a group that was destroyed


def _check_has_all(process_group: Any, holders: Iterable[Sequence[int]]) -> None:
    """Raise ``ValueError`` if ``process_group`` lacks one of the ranks in ``holders``."""
    every = torch.distributed.get_process_group_ranks(process_group)
    if lacks := sorted(set().union(*holders).difference(every)):
        raise ValueError(
            f"process_group lacks the ranks {lacks}, which have shards or copies of parameters of "
            "this rank, and the copies could diverge: give a group that contains these ranks; "
            "under FullyShardedDataParallel with HYBRID_SHARD, leave process_group out"
        )


class UnpicklableGroup:
    """Holds a process group while an optimizer is copied or pickled.

    A deep copy shares the process group, and pickling raises an error.
    """

    def __init__(self, process_group: Any) -> None:
        """Store the process group."""
        self.process_group = process_group

    def __deepcopy__(self, memo: Any) -> "UnpicklableGroup":
        """Return ``self``: the copy has the same process group."""
        return self

    def __reduce__(self) -> Any:
        """Refuse to pickle.

        Raises:
            TypeError: always, as a process group means nothing in another process.
        """
        raise TypeError(
            "an optimizer with a process_group cannot be pickled, because a group belongs to its "
            "process: save its state_dict(), or set process_group to None first"
        )


# --- FSDP1 --------------------------------------------------------------------------------------


_HOLDERS: Any = WeakIdKeyDictionary()
"""The ranks that hold the same elements of each parameter that FSDP1 has flattened."""


def _holders(param_groups: Sequence[dict[str, Any]]) -> dict[int, list[int]]:
    """By ``id``, the ranks that hold the same elements of a parameter, where that is known.

    A parameter of FSDP1 does not know its module, so the first call goes through all objects of the
    process.
    """
    holders = {}
    for group in param_groups:
        if isinstance(ranks := replicated_of(group), list):
            holders.update((id(param), ranks) for param in group["params"])
    flattened_params = [p for p in params_of(param_groups) if is_flattened_by_fsdp1(p)]
    if not all(param in _HOLDERS for param in flattened_params):
        _note_strategies()
    here = torch.distributed.get_rank()
    return holders | {id(p): _HOLDERS.setdefault(p, [here]) for p in flattened_params}


def _note_strategies() -> None:
    """Note which ranks hold the same elements, for the parameters of each FSDP1 module."""
    fsdp: Any = sys.modules["torch.distributed.fsdp"]
    strategies = fsdp.ShardingStrategy
    # By type(m): isinstance reads __class__, which raises for a dead weakref.proxy.
    cls = fsdp.FullyShardedDataParallel
    modules = [m for m in gc.get_objects() if issubclass(type(m), cls)]
    # Outer modules first: an inner FSDP1 module has a strategy of its own.
    for module in sorted(modules, key=lambda module: -len(list(module.modules()))):
        ranks = [torch.distributed.get_rank()]
        if module.sharding_strategy == strategies.NO_SHARD:
            ranks = torch.distributed.get_process_group_ranks(module.process_group)
        elif "HYBRID" in module.sharding_strategy.name:
            ranks = torch.distributed.get_process_group_ranks(replicas_of_fsdp1(module))
        for param in module.parameters():
            _HOLDERS[param] = ranks


# --- what can be known without an agreement -------------------------------------------------------


def is_fsdp1(param_groups: Sequence[dict[str, Any]]) -> bool:
    """Whether a parameter is one that FSDP1 has flattened, and usually sharded."""
    if "torch.distributed.fsdp" not in sys.modules:
        return False
    return any_flattened_by_fsdp1(params_of(param_groups)) and is_initialized()


def may_be_replaced(param_groups: Sequence[dict[str, Any]], process_group: Any) -> bool:
    """Whether the model may have ``DTensor`` parameters in place of these, by ``fully_shard``."""
    if not is_initialized() or "torch.distributed.fsdp" not in sys.modules:
        return False
    return not has_others(param_groups, process_group)


def are_several() -> bool:
    """Whether the default process group has more than one rank."""
    return is_initialized() and torch.distributed.get_world_size() > 1


def has_others(param_groups: Sequence[dict[str, Any]], process_group: Any) -> bool:
    """Whether :func:`agreement` is not ``None``. Creates no process group."""
    if not is_initialized():
        return False
    if process_group is not None or is_fsdp1(param_groups):
        return True
    return any(map(is_dtensor, params_of(param_groups)))
