"""A program: two steps through Triton's compiler and launcher, with a driver that only records.

``python -m support.recorded_launches`` prints the arguments of each launch as JSON. Needs no GPU.
TRITON_INTERPRET must be off.
"""

import json
from types import SimpleNamespace

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from ampopt_kernels import rules
from ampopt_kernels.step import run
from ampopt_kernels.step_data import Request
from ampopt_kernels.step_tensors import ParamRow, Work
from ampopt_kernels.triton.backend import Triton
from ampopt_kernels.triton.launch import launch

launches, hooked = [], []


class Launcher:
    """The object that Triton makes for each compiled kernel, and calls for each launch."""

    def __init__(self, source, metadata):
        self.name, self.signature = metadata.name, list(source.signature.values())

    def __call__(self, x, y, z, stream, function, packed, metadata, enter, leave, *arguments):
        values = [
            a.data_ptr() if isinstance(a, torch.Tensor) else a
            for a, kind in zip(arguments, self.signature, strict=True)
            if kind != "constexpr"
        ]
        enter(metadata)
        launches.append(
            {
                "kernel": self.name,
                "grid": [x, y, z],
                "stream": stream,
                "given": values,
                "by_address": not any(isinstance(a, torch.Tensor) for a in arguments),
            }
        )


class Listener:
    """The driver of one H100 that does not exist."""

    launcher_cls = Launcher
    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 1 << 17},
        load_binary=lambda *binary: (1, 2, 0, 0, 1024),
        unload_module=lambda module: None,
    )

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 7


def main() -> None:
    """Take two steps, and launch once more with tensors of another dtype."""
    driver.set_active(Listener())  # pyright: ignore
    knobs.runtime.launch_enter_hook.add(lambda metadata: hooked.append(metadata.get()["name"]))
    expected = []

    def record(device, variant, programs, arguments):
        values = [arguments[p.name] for p in variant.kernel.params if not p.is_constexpr]
        given = [a for a in values if a is not None]  # None is a constant of the compiler's
        expected.append([a.data_ptr() if isinstance(a, torch.Tensor) else a for a in given])
        launch(device, variant, programs, arguments)

    backend = Triton(record)

    def row(n):
        flags = (False,) * len(rules.sgd.flags)
        return ParamRow(torch.float32, param=torch.ones(n), flags=flags)

    for sizes, dtype in (((5, 7), torch.float32), ((9,), torch.float32), ((9,), torch.float64)):
        rows, grads = [row(n) for n in sizes], [torch.ones(n) for n in sizes]
        hyper = [[0.1] * len(rules.sgd.hyper)]
        work = Work(torch.device("cpu"), rows, grads, rules.sgd, hyper)
        scale = torch.ones((), dtype=dtype)
        run(lambda _: backend, [work], Request(scale=scale, max_norm=1.0))
    for launched, given in zip(launches, expected, strict=True):
        launched["as_asked"] = launched.pop("given") == given
    print(json.dumps({"launches": launches, "hooked": hooked}))


if __name__ == "__main__":
    main()
