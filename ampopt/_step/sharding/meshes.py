"""Device meshes: their ranks, and the process groups that contain all of these ranks."""

from typing import Any

import torch

from ampopt._step.torch_private import flatten, root_of

__all__ = ["covering", "group_of", "ranks_of"]


def ranks_of(mesh: Any) -> list[int]:
    """The global ranks in ``mesh``. Does not synchronize: ``mesh.mesh`` is a CPU tensor."""
    return mesh.mesh.flatten().tolist()


def covering(meshes: list[Any]) -> Any:
    """The smallest known mesh that contains every rank of ``meshes``, and has a process group.

    ``None`` if there is none.
    """
    if not meshes:
        return None
    largest = max(meshes, key=lambda mesh: mesh.size())
    every = set(ranks_of(largest))
    if all(every.issuperset(ranks_of(mesh)) for mesh in meshes):
        is_world = len(every) == torch.distributed.get_world_size()
        return largest if largest.ndim == 1 or is_world or largest.mesh_dim_names else None
    # Submeshes of one mesh, such as mesh["dp"] and mesh["tp"]: the submesh with all their names.
    roots = [root_of(mesh) for mesh in meshes]
    names = {name for mesh in meshes for name in mesh.mesh_dim_names or ()}
    if all(root == roots[0] for root in roots) and names <= set(roots[0].mesh_dim_names or ()):
        return roots[0][tuple(name for name in roots[0].mesh_dim_names if name in names)]
    return None


def group_of(mesh: Any) -> Any:
    """The process group of all ranks of a mesh that :func:`covering` returned.

    ``None`` on a rank outside of the mesh. May create a process group, which is a collective call.
    """
    if mesh.get_coordinate() is None:
        return None
    if mesh.ndim == 1:
        return mesh.get_group()
    if mesh.size() == torch.distributed.get_world_size():
        return torch.distributed.group.WORLD
    return flatten(mesh).get_group()
