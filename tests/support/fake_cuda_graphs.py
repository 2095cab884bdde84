"""A stand-in for CUDA graphs on CPU tensors.

As with CUDA, captured operations are not executed during capture; a replay repeats them on the same
memory without running the model's Python; the host must not read tensors during capture; and no
collective may run. Memory allocated during capture belongs to the graph. Memory allocated before is
not kept alive by the graph, and a replay that uses freed memory is an error. Recorded are
operations that go through torch's dispatcher, and launches of Triton kernels.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ampopt._synchronization import watching
from ampopt.backend import backend_for

__all__ = ["FakeGraphs"]

CPU = torch.device("cpu")


class FakeGraphs:
    """Fakes CUDA graphs, with the interface of :class:`ampopt.train_step.cuda_graphs.Graphs`.

    Attributes:
        captures: number of captures.
        replays: number of replays.
    """

    def __init__(self) -> None:
        self.captures = self.replays = 0

    @contextmanager
    def aside(self) -> Iterator[None]:
        yield

    @contextmanager
    def capture(self) -> Iterator[Callable[[], None]]:
        tape = _Tape()

        def replay() -> None:
            self.replays += 1
            tape.play()

        memory, random = _memory(), torch.get_rng_state()
        try:
            with (
                watching(_refuse),
                mock.patch("ampopt_kernels.devices.captures", lambda device: True),
                mock.patch.object(backend_for(CPU), "_launch", tape.launch),
                tape,
            ):
                yield replay
        finally:  # a capture that fails has computed nothing either
            for storage, content in memory:
                storage.copy_(content)
            torch.set_rng_state(random)
        self.captures += 1


def _refuse(look: str) -> None:
    raise AssertionError(f"the host looked while capturing: {look}")


def _memory() -> list[tuple[Any, Any]]:
    """All CPU storages of tensors known to the garbage collector, with copies of their contents."""
    gc.collect()
    tensors = [o for o in gc.get_objects() if type(o) in (Tensor, Parameter)]
    storages = {
        t.untyped_storage()._cdata: t.untyped_storage()
        for t in tensors
        if t.layout == torch.strided and t.device == CPU
    }
    return [(storage, storage.clone()) for storage in storages.values()]


class _Tape(TorchDispatchMode):
    """Records operations while it executes them, so that the capturing code gets results."""

    def __init__(self) -> None:
        super().__init__()
        self._played: list[Callable[[], None]] = []
        self._outputs: list[Tensor] = []  # memory that belongs to the graph
        self._launching = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self._launching:
            inputs = {_place(t) for t in _tensors((args, kwargs))}
            outputs = [None if _place(t) in inputs else t for t in _tensors(result)]
            captured = self._borrowed(func.__name__, (args, kwargs))
            self._outputs += [t for t in outputs if t is not None]

            def again() -> None:
                args, kwargs = _lent(captured)
                for old, value in zip(outputs, _tensors(func(*args, **kwargs)), strict=True):
                    if old is not None:
                        old.copy_(value)

            self._played.append(again)
        return result

    def launch(self, device: Any, variant: Any, programs: int, arguments: dict[str, Any]) -> None:
        from ampopt_kernels.triton.launch import launch

        captured = self._borrowed(variant.name, arguments)

        def again() -> None:
            launch(device, variant, programs, _lent(captured))

        self._played.append(again)
        self._launching = True
        try:
            launch(device, variant, programs, arguments)
        finally:
            self._launching = False

    def _borrowed(self, name: str, arguments: Any) -> Any:
        """Replace tensors that do not belong to the graph by references that may dangle."""
        own = {_place(t) for t in self._outputs}
        return pytree.tree_map_only(
            Tensor, lambda t: t if _place(t) in own else _Borrowed(name, t), arguments
        )

    @torch.no_grad()
    def play(self) -> None:
        for again in self._played:
            again()


class _Borrowed:
    """A tensor that a captured operation reads but does not keep alive."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        self._name, self._dtype = name, tensor.dtype
        self._layout = tensor.storage_offset(), tensor.shape, tensor.stride()
        self._storage = StorageWeakRef(tensor.untyped_storage())

    def tensor(self) -> Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)  # pyright: ignore
        assert storage is not None, f"memory that the captured {self._name} uses was freed"
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._layout)  # pyright: ignore


def _lent(captured: Any) -> Any:
    return pytree.tree_map_only(_Borrowed, _Borrowed.tensor, captured)


def _tensors(value: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
