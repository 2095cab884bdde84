"""A driver of Triton whose device is the simulated card, and whose memory is the host's.

Everything above it is as with a card: ampopt's tables and launches, Triton's ``kernel[grid]``, and
Triton's compiler down to PTX. A tensor counts as live if it is a Python object, or the gradient of
one, made after ``gc.freeze()``.
"""

import functools
import gc
import os
from typing import Any

import numpy as np
import torch

from simulated_card import STATE
from simulated_card.ptx import Kernel, build_folder

__all__ = ["install"]


def install(capability: int = 90) -> None:
    """Let CPU tensors run on the card, on the backends ``auto`` and ``triton``.

    Args:
        capability: 90 for sm_90, which the kernels are compiled for.
    """
    assert os.environ.get("TRITON_INTERPRET", "0") == "0", "Triton's interpreter is on"
    # What is compiled here is PTX where Triton expects machine code: no real launch may find it.
    os.environ["TRITON_CACHE_DIR"] = str(build_folder() / "triton")
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime import driver

    import ampopt.backend as backend

    backends: Any = CUDABackend
    backends.make_cubin = lambda self, source, metadata, options, capability: source.encode()
    driver.set_active(_Driver(capability))  # type: ignore[arg-type]
    on_a_cpu = backend._cpu_backend
    backend.ACCELERATORS = (*backend.ACCELERATORS, "cpu")
    backend._finds_accelerator = lambda: True  # type: ignore[assignment]
    backend._cpu_backend = lambda name: (  # type: ignore[assignment]
        backend._triton_backend() if name == "auto" else on_a_cpu(name)
    )
    STATE.installed = True


class _Driver:
    """What Triton asks of a driver."""

    def __init__(self, capability: int) -> None:
        self._capability = capability
        self.utils, self.launcher_cls = self, _Launcher

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        assert device == 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        """Module, function, registers and spills of a thread, and the most threads."""
        kernel = _kernel(binary.decode())
        assert kernel.name == name
        return 1, kernel, 0, 0, 1024

    def unload_module(self, module: int) -> None:
        pass


_kernel = functools.cache(Kernel)


class _Launcher:
    """Launches a kernel; see ``CudaLauncher`` in Triton."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self._types, self._shared = list(source.signature.values()), metadata.shared
        assert metadata.global_scratch_size == metadata.profile_scratch_size == 0, metadata
        assert not metadata.launch_cooperative_grid and not metadata.launch_pdl

    def __call__(
        self, x: int, y: int, z: int, stream: int, kernel: Kernel, *hooks_and_arguments: Any
    ) -> None:
        # Two kinds of metadata, and hooks before and after a launch, come first.
        arguments = hooks_and_arguments[4:]
        values = []
        for value, kind in zip(arguments, self._types, strict=True):
            if kind == "constexpr":
                continue
            if kind.startswith("*") and isinstance(value, torch.Tensor):
                value = value.data_ptr()
            # Triton's own launcher would take the low bits of a number that is too large.
            assert type(value) is int, (kind, value)
            assert kind.startswith("*") or (kind == "i32" and -(2**31) <= value < 2**31), kind
            values.append(value)
        assert y == z == 1 and 0 <= x < 2**31
        if x:
            kernel = _kernel(STATE.changed(kernel.text))
            kernel.launch(x, values, _live_memory(), self._shared, STATE.order)


def _live_memory() -> np.ndarray:
    """Where the memory of all tensors begins and ends, sorted, neighbours joined."""
    found = set()
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            grad = thing.grad if thing.is_leaf else None
            for tensor in (thing,) if grad is None else (thing, grad):
                if tensor.device.type != "cpu" or tensor.layout != torch.strided:
                    continue
                try:
                    storage = tensor.untyped_storage()
                except (NotImplementedError, RuntimeError):  # of a wrapper
                    continue
                if storage.nbytes():
                    found.add((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
    joined: list[list[int]] = []
    for begin, end in sorted(found):
        if joined and begin <= joined[-1][1]:
            joined[-1][1] = max(end, joined[-1][1])
        else:
            joined.append([begin, end])
    return np.array(joined, np.uint64).reshape(-1, 2)
