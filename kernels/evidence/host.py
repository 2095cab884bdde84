"""``TRITON_INTERPRET=1 python -m evidence.host``: host time of a GPU step, without a GPU.

CPU tensors are stepped by the Triton backend with all kernel launches replaced by nothing, ampopt's
own and those of torch's fused step and scaler. What remains is the host's work before the device
can start, except for the launches. torch makes about as many launches.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

import ampopt
from ampopt import backend
from ampopt.bench import contenders, workloads
from ampopt.bench.measure import Times, interleaved, warmed
from ampopt_kernels.native import objects
from ampopt_kernels.triton.backend import Triton

__all__ = ["alone", "main"]

_NOT_LAUNCHED = (
    "_fused_adamw_",
    "_foreach_add_",
    "_foreach_mul_",
    "_amp_foreach_non_finite_check_and_unscale_",
    "_amp_update_scale_",
)
_TENSORS = (20, 300, 2000)
_STEPS = 200
"""Steps to time for each contender."""
_CPU = torch.device("cpu")


def main() -> None:
    """Measure AdamW on tensors of 64 elements, and print the result."""
    before, threads = ampopt.get_backend(), torch.get_num_threads()
    ampopt.set_backend("triton")
    torch.set_num_threads(1)
    try:
        for name, prepare in (
            ("torch fused, GradScaler", None),
            ("ampopt, asked in Python", None),
            ("ampopt, asked in C++", _have_object_loops),
        ):
            if prepare is not None:
                prepare()
            for tensors in _TENSORS:
                with _no_launches(tensors):
                    times = [_of_steps(name, tensors, moves) for moves in (False, True)]
                (plain, clipped), (new_plain, new_clipped) = times
                print(
                    f"{name}, {tensors} tensors: {plain:.0f} us a step, {clipped:.0f} with "
                    f"clipping; {new_plain:.0f} and {new_clipped:.0f} with gradients at new "
                    "addresses",
                    flush=True,
                )
    finally:
        ampopt.set_backend(before)
        torch.set_num_threads(threads)


def alone(
    step: Callable[[], object],
    restore: Callable[[], object],
    device: torch.device,
    *,
    rounds: int,
    clock: str = "wall",
) -> Times:
    """Time one step, first warmed; see :func:`ampopt.bench.measure.interleaved`."""
    warmed(step, restore)
    times = interleaved(
        {"": step}, lambda _: restore(), device, rounds=rounds, seconds=math.inf, clock=clock
    )
    return times[""]


def _of_steps(name: str, tensors: int, moves: bool) -> tuple[float, float]:
    """Microseconds of a step and of a clipped one; ``moves`` alternates gradient addresses."""
    workload = workloads.Workload(name, ((64,),) * tensors)
    params = workload.parameters(torch.float32, _CPU)
    turns = itertools.cycle([workloads.Gradients(params) for _ in range(1 + moves)])
    contender = contenders.enter("fused" if name[0] == "t" else contenders.AMPOPT, "AdamW", params)

    def microseconds(step: Callable[[], Any]) -> float:
        restore = lambda: next(turns).restore()  # noqa: E731
        return 1e6 * alone(step, restore, _CPU, rounds=_STEPS, clock="cpu").median

    return microseconds(contender.step), microseconds(contender.clipped_step)


@contextmanager
def _no_launches(tensors: int) -> Iterator[None]:
    """Replace the kernel launches of ampopt and of torch's fused AdamW and scaler by nothing."""
    silent = Triton(lambda device, variant, programs, arguments: None)
    norms = list(torch.zeros(tensors).unbind())
    with (
        mock.patch.object(backend, "_triton_backend", lambda: silent),
        mock.patch.object(torch, "_foreach_norm", lambda *_: norms),
        mock.patch.multiple(torch, **dict.fromkeys(_NOT_LAUNCHED, lambda *_, **__: None)),
    ):
        yield


def _have_object_loops() -> None:
    """Compile the C++ loops over Python objects now, and wait for them."""
    objects.loops.want()
    objects.loops.load()


if __name__ == "__main__":
    main()
