"""Copies of the memory of tensors, from which a flag on the device restores it, bitwise.

An update pass restores the memory: its "gradient" is the copy, its rule returns the gradient, and
it is skipped unless the step is to be undone. So one launch restores hundreds of tensors, and after
a step that is kept, it reads and writes nothing.
"""

from array import array
from collections import defaultdict
from collections.abc import Iterable
from itertools import accumulate

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
    """Copies of the storages of some tensors: all bytes, so also what only other views show.

    Attributes:
        nbytes: the bytes that the copies take.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """Find the storages of ``tensors``, and copy nothing yet."""
        wholes: defaultdict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for tensor in {storage_key(tensor): tensor for tensor in tensors}.values():
            whole = _whole(tensor)
            wholes[whole.device, whole.dtype].append(whole)
        self._parts = [_Part(own) for own in wholes.values()]
        self.nbytes = sum(whole.nbytes for part in self._parts for whole in part.wholes)

    def make(self) -> None:
        """Copy all storages. Does not synchronize."""
        for part in self._parts:
            part.copy()
            backend = backend_for(part.device)
            if not (backend.host_sees or captures(part.device)):
                backend.prepare(part.work, Request(), decides=False)

    def drop(self) -> None:
        """Free the memory of the copies."""
        for part in self._parts:
            part.work.release()

    def restore(self) -> None:
        """Copy everything back, also to storages that were resized since."""
        for part in self._parts:
            for whole in part.wholes:
                if (storage := whole.untyped_storage()).nbytes() != whole.nbytes:
                    storage.resize_(whole.nbytes)
            torch._foreach_copy_(part.wholes, part.work.grads)  # pyright: ignore[reportPrivateImportUsage]

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
        for part in self._parts:
            device = part.device
            if device.type == "cpu" != skip.device.type:
                continue
            if captures(device):  # the table of an update would have to be sent
                flag = to_device(skip, device)
                for whole, copy in zip(part.wholes, part.work.grads, strict=True):
                    torch.where(flag, copy, whole, out=whole)
                continue
            if device not in keeps:
                keep = to_device(~skip, device, widest(device))
                coefficients = torch.ones(3, dtype=keep.dtype, device=device)
                coefficients[0] = keep
                keeps[device] = Decision(keep, coefficients)
            backend_for(device).update(part.work, keeps[device])

    def differ_on_cpu(self) -> bool:
        """Whether a storage on the CPU differs from its copy."""
        return any(
            not torch.equal(whole, copy)
            for part in self._parts
            if part.device.type == "cpu"
            for whole, copy in zip(part.wholes, part.work.grads, strict=True)
        )


class _Part:
    """The storages of one device that are copied as integers of one dtype.

    Attributes:
        device: their device.
        wholes: the storages, as 1-d tensors.
        work: the update that restores them.
    """

    def __init__(self, wholes: list[Tensor]) -> None:
        """Store the storages, of which there is at least one."""
        self.device, self.wholes = wholes[0].device, wholes
        self.work = Work(self.device, [ParamRow(w.dtype, w) for w in wholes], rule=_COPY)
        self._sizes = [whole.numel() for whole in wholes]
        ends = accumulate(self._sizes, initial=0)
        self._offsets = [end * wholes[0].itemsize for end in ends][:-1]

    def copy(self) -> None:
        """Copy the storages to one block of memory, as hundreds of allocations take longer."""
        block = torch.cat(self.wholes)
        begin = block.data_ptr()
        addresses = array("q", [begin + offset for offset in self._offsets])
        self.work.refresh(lambda: [*block.split(self._sizes)], ((),), addresses=addresses)


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
