"""Copies of the memory of tensors, from which a flag on the device restores it, bitwise.

Memory is restored by an update, as a step is: its rule takes the "gradient", which is the copy, and
it is skipped unless the step is to be undone. So it is one launch for hundreds of tensors, and
reads and writes nothing after a step that is kept.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from ampopt._step.torch_private import storage_key
from ampopt.backend import backend_for
from ampopt_kernels.devices import captures, to_device
from ampopt_kernels.language import jit
from ampopt_kernels.rule import Rule
from ampopt_kernels.step_data import Decision, Request
from ampopt_kernels.step_tensors import ParamRow, Work
from ampopt_kernels.tensors import widest

__all__ = ["StorageCopies"]


@jit
def _take_gradient(p, g, state, h, flags):
    """The rule of an update that copies."""
    return g, ()


_COPY = Rule(update=_take_gradient, hyper=())


class StorageCopies:
    """Copies of the storages of some tensors: all bytes, so also what only other views show."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """Find the storages of ``tensors``, and copy nothing yet."""
        works: dict[tuple[torch.device, torch.dtype], Work] = {}
        for tensor in {storage_key(tensor): tensor for tensor in tensors}.values():
            whole = _whole(tensor)
            kind = whole.device, whole.dtype
            if kind not in works:
                works[kind] = Work(whole.device, [], rule=_COPY)
            works[kind].rows.append(ParamRow(whole.dtype, whole))
        self._works = list(works.values())

    def make(self) -> None:
        """Copy all storages. Does not synchronize."""
        for work in self._works:
            copies = [torch.empty_like(whole) for whole in _wholes(work)]
            torch._foreach_copy_(copies, _wholes(work))  # pyright: ignore[reportPrivateImportUsage]
            work.refresh(copies, ((),))
            backend = backend_for(work.device)
            if not (backend.host_sees or captures(work.device)):
                backend.prepare(work, Request(), decides=False)

    def drop(self) -> None:
        """Free the memory of the copies."""
        for work in self._works:
            work.release()

    def restore(self) -> None:
        """Copy everything back, also to storages that were resized since."""
        for work in self._works:
            for whole in _wholes(work):
                if (storage := whole.untyped_storage()).nbytes() != whole.nbytes:
                    storage.resize_(whole.nbytes)
            torch._foreach_copy_(_wholes(work), work.grads)  # pyright: ignore[reportPrivateImportUsage]

    def restore_where(self, skip: Tensor) -> None:
        """Copy everything back where ``skip`` is true; synchronizes only if ``skip`` is on the CPU.

        Storages on the CPU are left alone if ``skip`` is on an accelerator.

        Args:
            skip: 0-d, bool, on any device.
        """
        if backend_for(skip.device).host_sees:
            if bool(skip):
                self.restore()
            return
        keeps: dict[torch.device, Decision] = {}
        for work in self._works:
            device = work.device
            if device.type == "cpu" != skip.device.type:
                continue
            if captures(device):  # the table of an update would have to be sent
                flag = to_device(skip, device)
                for whole, copy in zip(_wholes(work), work.grads, strict=True):
                    torch.where(flag, copy, whole, out=whole)
                continue
            if device not in keeps:
                keep = to_device(~skip, device, widest(device))
                coefficients = torch.ones(3, dtype=keep.dtype, device=device)
                coefficients[0] = keep
                keeps[device] = Decision(keep, coefficients)
            backend_for(device).update(work, keeps[device])

    def differ_on_cpu(self) -> bool:
        """Whether a storage on the CPU differs from its copy."""
        return any(
            not torch.equal(whole, copy)
            for work in self._works
            if work.device.type == "cpu"
            for whole, copy in zip(_wholes(work), work.grads, strict=True)
        )


def _wholes(work: Work) -> list[Tensor]:
    """The storages of ``work``."""
    return [row.param for row in work.rows]  # type: ignore[misc]


def _whole(tensor: Tensor) -> Tensor:
    """All bytes of the storage of ``tensor``, as a 1-d tensor of the widest integer that fits."""
    storage = tensor.untyped_storage()
    for dtype in (torch.int64, torch.int32, torch.int16):
        if (storage.nbytes() | storage.data_ptr()) % dtype.itemsize == 0:
            break
    else:
        dtype = torch.uint8
    whole = torch.empty(0, dtype=dtype, device=tensor.device)
    return whole.set_(storage)  # type: ignore[arg-type]
