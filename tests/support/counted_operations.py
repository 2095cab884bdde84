"""Counts of the torch operations that a call runs, and of the Triton kernels that it launches."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from ampopt import backend
from ampopt_kernels.triton.backend import Triton

__all__ = ["counted", "silent_launches"]

_NOTHING_RUNS = (
    "empty",
    "view",
    "as_strided",
    "split",
    "unbind",
    "slice",
    "select",
    "unsqueeze",
    "expand",
    "detach",
    "permute",
    "t",
)
"""Operations that only allocate memory or make a view."""


class _Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__.strip("_")
        if not name.startswith(_NOTHING_RUNS[:-1]) and name != "t":
            self.operations[name] += 1
        return func(*args, **(kwargs or {}))


def counted(call: Callable[[], object]) -> Counter[str]:
    """Count the torch operations that ``call`` runs, except for ampopt's own kernels."""
    with _Count() as count:
        call()
    return count.operations


@contextmanager
def silent_launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Replace the triton backend by one that launches nothing, and count its kernels by name."""
    launches: Counter[str] = Counter()

    def launch(device: Any, variant: Any, programs: int, arguments: Any) -> None:
        launches[variant.name] += programs > 0

    silent = Triton(launch)
    with monkeypatch.context() as patch:
        patch.setattr(backend, "_triton_backend", lambda: silent)
        yield launches
