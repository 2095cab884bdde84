"""Parameters that are spread over ranks: what is here of each, and one decision for all ranks."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ampopt_kernels.step import Partials
from ampopt_kernels.tensors import widest

__all__ = ["Agreement", "Vote", "agreement", "is_spread", "local", "settle", "spread_like"]


# --- what is here ---------------------------------------------------------------------------------


def is_spread(tensor: Any) -> bool:
    """Whether ``tensor`` is a ``DTensor``, of which this rank has a part or a copy."""
    # Who has made one has imported this; nobody else should have to wait for that.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Any) -> Tensor:
    """The part of ``tensor`` that this rank has, in the same memory; an ordinary one itself."""
    if not is_spread(tensor):
        return tensor
    part = tensor._local_tensor
    return part if type(part) is Tensor else _waited_for(part)


def _waited_for(part: Any) -> Tensor:
    """``part``, if a collective is to bring it, once that has been waited for on the device."""
    return part.wait() if hasattr(part, "wait") else part


def settle(param: Any) -> None:
    """Place the gradient of ``param`` as ``param`` is: a sum still to be taken is taken.

    That is a collective for each such gradient, so that all ranks have to come by.
    """
    grad = param.grad
    if is_spread(grad) and is_spread(param) and grad.placements != param.placements:
        param.grad = grad.redistribute(param.device_mesh, param.placements)


def spread_like(part: Tensor, like: Any) -> Any:
    """``part`` as what this rank has of a tensor that is spread as ``like`` is, if it is."""
    if not is_spread(like):
        return part
    # Where the part begins inside a larger buffer, what is made around it would take over that
    # offset, and could not be copied. So it is made around another, and given the part.
    from torch.distributed.tensor import DTensor

    whole = DTensor.from_local(
        torch.empty_like(part),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
    whole._local_tensor = part
    return whole


# --- one decision ---------------------------------------------------------------------------------


class Agreement:
    """The ranks that decide together, and which of them counts what towards their norm."""

    def __init__(self, groups: Sequence[Any], first: int) -> None:
        """Begin.

        Args:
            groups: process groups that reach every rank between them, one after another: one,
                wherever torch has one.
            first: the global rank that counts what all of them hold alike.
        """
        self._groups = groups
        self._first = first
        self._is_first = torch.distributed.get_rank() == first

    def counts(self, tensor: Any) -> bool:
        """Whether what this rank has of ``tensor`` counts towards the norm.

        Of what several ranks hold alike, one copy does: of a parameter that is not spread, or is
        on some dimensions of the mesh only, too.
        """
        if not is_spread(tensor):
            return self._is_first
        mesh = tensor.device_mesh
        here = mesh.get_coordinate()
        if here is None or self._first not in _ranks_of(mesh):
            return False
        copies = zip(here, tensor.placements, strict=True)
        return not any(place and placement.is_replicate() for place, placement in copies)

    def reduce(
        self, found: Partials, flag: Tensor | None, device: torch.device, *, present: bool
    ) -> tuple[Partials, Tensor]:
        """What all ranks have found, by one all-reduce on the device: the same on each of them.

        Args:
            found: what this rank has.
            flag: a flag from elsewhere, more than 0 for overflow, to be joined.
            device: where the decision is made.
            present: whether this rank has gradients.

        Returns:
            It, as one part; and how many ranks have gradients, of one element.
        """
        flags = found.flags_on(device)
        numbers = torch.zeros(3, dtype=widest(device), device=device)
        overflows, squares, ranks = numbers.split(1)
        if flags.numel():
            overflows.copy_(flags.amax())
        if flag is not None:
            overflows.add_(flag.reshape(1) > 0)
        if found.squares is not None:
            squares.copy_(found.squares.sum())
        if present:
            ranks.fill_(1.0)
        for group in self._groups:
            torch.distributed.all_reduce(numbers, torch.distributed.ReduceOp.SUM, group)
        one = overflows.clamp(max=1.0).to(torch.float32)
        return Partials(one, None if found.squares is None else squares), ranks

    def flag(self, flag: Any, device: torch.device) -> Tensor:
        """``flag``, more than 0 for overflow, of all ranks: by one all-reduce on the device."""
        given = torch.as_tensor(flag, device=device)
        return self.reduce(Partials([], None), given, device, present=True)[0].flags_on(device)

    def all(self, true: bool, device: torch.device) -> bool:
        """Whether something is true on every rank. Synchronizes."""
        doubts = torch.full((1,), float(not true), device=device)
        for group in self._groups:
            torch.distributed.all_reduce(doubts, torch.distributed.ReduceOp.SUM, group)
        return not doubts.item()


@dataclass
class Vote:
    """The part of this rank in one decision.

    Attributes:
        agreement: of which ranks.
        present: whether this rank has gradients.
        ranks: how many ranks have gradients, of one element, once it has been called.
    """

    agreement: Agreement
    present: bool = True
    ranks: Tensor | None = None

    def __call__(self, found: Partials, flag: Tensor | None, device: torch.device) -> Partials:
        """What all ranks have found; see :meth:`Agreement.reduce`."""
        agreed, self.ranks = self.agreement.reduce(found, flag, device, present=self.present)
        return agreed


def agreement(param_groups: Sequence[dict[str, Any]]) -> Agreement | None:
    """The ranks that decide together about these parameters; ``None`` if this one does alone.

    Those are the ranks of the meshes that the parameters are on, whether they have gradients or
    not, as a rank that has none would leave the others waiting. May create a process group, for
    which all ranks have to come by.

    Raises:
        RuntimeError: the meshes do not show which ranks those are.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return None
    spread: list[Any] = [p for group in param_groups for p in group["params"] if is_spread(p)]
    meshes = list(dict.fromkeys(param.device_mesh for param in spread))
    if not meshes:
        return None
    mesh = _covering(meshes)
    return Agreement(_groups_of(mesh), min(_ranks_of(mesh)))


def _ranks_of(mesh: Any) -> list[int]:
    return mesh.mesh.flatten().tolist()


def _covering(meshes: list[Any]) -> Any:
    """The smallest mesh known that has all ranks of ``meshes``."""
    largest = max(meshes, key=lambda mesh: mesh.size())
    every = set(_ranks_of(largest))
    if all(every.issuperset(_ranks_of(mesh)) for mesh in meshes):
        return largest
    roots = [mesh._get_root_mesh() for mesh in meshes]
    names = {name for mesh in meshes for name in mesh.mesh_dim_names or ()}
    if all(root == roots[0] for root in roots) and names <= set(roots[0].mesh_dim_names or ()):
        return roots[0][tuple(name for name in roots[0].mesh_dim_names if name in names)]
    raise RuntimeError(
        f"the parameters are on meshes of which none covers the others: {meshes}. Make them of one "
        "mesh, by its dimensions, as in mesh['dp'] and mesh['tp']"
    )


def _groups_of(mesh: Any) -> list[Any]:
    """Process groups that reach every rank of ``mesh``: one, unless it lacks names."""
    if mesh.ndim == 1:
        return [mesh.get_group()]
    if mesh.size() == torch.distributed.get_world_size():
        return [torch.distributed.group.WORLD]
    if mesh.mesh_dim_names:
        return [mesh._flatten().get_group()]
    return mesh.get_all_groups()
