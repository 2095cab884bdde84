"""Which backend runs the kernels: the one setting of the library, read and checked here."""

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ampopt_kernels.cpu.backend import Cpu
from ampopt_kernels.cpu.build import cpp_compiler
from ampopt_kernels.cpu.cache import CacheError, place
from ampopt_kernels.cpu.compiled import PATIENCE, Compiled
from ampopt_kernels.devices import ACCELERATORS
from ampopt_kernels.eager import Eager
from ampopt_kernels.language import HAS_TRITON, INTERPRETED
from ampopt_kernels.step import Backend

__all__ = [
    "ENVIRONMENT",
    "NAMES",
    "backend_for",
    "chosen_by",
    "get_backend",
    "host_looking_away",
    "host_may_look",
    "lacking",
    "set_backend",
]

NAMES = ("auto", "triton", "compiled", "eager")
ENVIRONMENT = "AMPOPT_BACKEND"

_chosen: str | None = None
_looks_away = False


def set_backend(name: str) -> None:
    """Choose the backend of every optimizer, from its next step on.

    Args:
        name:
            ``"auto"``: Triton on the accelerators it compiles for. On the CPU, eager at first;
            after a twentieth of a second in a rule, a C++ compiler, if there is one, compiles it in
            a process of its own, while training goes on. Results do not depend on when that is
            done: to the bit they are the same. Only where C++ and torch round differently
            (``tl.exp`` and its like, the square root of float64, and the sums over rows and columns
            of ``Rule(averages=)``) the first step waits for the compiler, a third of a second.
            Elsewhere eager.

            ``"triton"``: Triton always. CPU tensors run in its interpreter, which is for tests,
            and needs ``TRITON_INTERPRET=1`` in the environment before ``ampopt`` is imported.

            ``"compiled"``: C++ made of the rule, at the first use of each, by the compiler that
            ``CXX`` names, or ``g++`` or ``clang++``. For CPU tensors. What is compiled, also by
            ``"auto"``, is kept in ``$XDG_CACHE_HOME/ampopt`` or ``~/.cache/ampopt``, at most
            64 MiB. It is refused where other users may write there; ``"auto"`` then keeps it in
            ``ampopt-UID`` in the folder for temporary files, as both do where the cache cannot be
            written, and stays eager if that does not do either, with a warning.

            ``"eager"``: torch operations always.

            The environment variable ``AMPOPT_BACKEND`` sets the same until this is called;
            without either it is ``"auto"``.

    Raises:
        ValueError: the name is unknown.
        RuntimeError: the backend cannot run here; the message names what is missing, or who may
            change what it would load.
    """
    global _chosen
    _chosen = _checked(name, "set_backend")


def get_backend() -> str:
    """The chosen backend, ``"auto"`` unless another was chosen; see :func:`set_backend`."""
    if _chosen is not None:
        return _chosen
    return _checked(os.environ.get(ENVIRONMENT, "auto"), ENVIRONMENT)


def chosen_by() -> str | None:
    """What chose the backend, ``set_backend`` or the environment variable; ``None`` if nothing."""
    if _chosen is not None:
        return "ampopt.set_backend"
    return ENVIRONMENT if ENVIRONMENT in os.environ else None


def backend_for(device: torch.device) -> Backend:
    """The backend that runs tensors on ``device``.

    Raises:
        RuntimeError: the chosen backend cannot run there.
    """
    name = _chosen or get_backend()
    if _looks_away and device.type == "cpu" and name != "triton":
        return Eager()
    if name == "auto":
        if device.type == "cpu":
            return _cpu_backend(name)
        name = "triton" if HAS_TRITON and device.type in ACCELERATORS else "eager"
    if name == "compiled" and device.type != "cpu":
        raise RuntimeError(
            f"the compiled backend cannot run on {device}: it compiles for the CPU; choose "
            "set_backend('auto')"
        )
    if name == "triton" and device.type not in ACCELERATORS:
        if device.type != "cpu" or not INTERPRETED:
            raise RuntimeError(
                f"the triton backend cannot run on {device}: Triton compiles for "
                f"{', '.join(ACCELERATORS)}, and CPU tensors need its interpreter. Set "
                f"TRITON_INTERPRET=1 before importing ampopt, or choose set_backend('auto')"
            )
    if name == "triton":
        return _triton_backend()
    return _cpu_backend(name) if device.type == "cpu" else Eager()


def lacking(name: str) -> str | None:
    """What the backend ``name`` cannot run here without, in a sentence; ``None`` if it runs."""
    if name == "triton" and not HAS_TRITON:
        return (
            "the triton backend needs Triton, which cannot be imported here; "
            "install the triton package, or choose 'auto' or 'eager'"
        )
    if name == "triton" and not (INTERPRETED or _finds_accelerator()):
        return (
            f"the triton backend needs an accelerator ({', '.join(ACCELERATORS)}), and "
            "torch finds none, or Triton's interpreter, for tests: set TRITON_INTERPRET=1 before "
            "importing ampopt, or choose 'auto' or 'eager'"
        )
    return _compiler_or_cache_lacking() if name == "compiled" else None


def _compiler_or_cache_lacking() -> str | None:
    try:
        if cpp_compiler() is None:
            return (
                "the compiled backend needs a C++ compiler, and neither CXX nor g++ nor "
                "clang++ names one; install one, or choose 'auto' or 'eager'"
            )
        found = place()
    except (ValueError, CacheError) as error:
        return f"the compiled backend cannot run: {error}, or choose 'auto' or 'eager'"
    if found.distrusts:
        return (
            f"the compiled backend has no cache that nobody else can change: {found.instead}. "
            "Take that from them (chown, chmod go-w), or set XDG_CACHE_HOME to a folder that you, "
            "and nobody else, may write to, or choose 'auto' (which keeps what it compiles in "
            f"{found.folder}) or 'eager'"
        )
    return None


def host_may_look(device: torch.device) -> bool:
    """Whether the host sees what is on ``device`` at no cost, so that it need not avoid it."""
    return backend_for(device).host_sees


@contextmanager
def host_looking_away() -> Iterator[None]:
    """Within this, CPU tensors are treated as those of a device, which the host may not look at.

    For tests; it is not safe across threads.
    """
    global _looks_away
    before, _looks_away = _looks_away, True
    try:
        yield
    finally:
        _looks_away = before


@functools.cache
def _cpu_backend(name: str) -> Backend:
    if name == "eager" or (name == "auto" and cpp_compiler() is None):
        return Cpu()
    return Compiled(patience=PATIENCE if name == "auto" else 0.0)


@functools.cache
def _triton_backend() -> Backend:
    from ampopt_kernels.triton.backend import Triton

    return Triton()


@functools.cache
def _finds_accelerator() -> bool:
    return any(getattr(torch, kind).is_available() for kind in ACCELERATORS)


def _checked(name: str, source: str) -> str:
    if name not in NAMES:
        raise ValueError(f"{source}: unknown backend {name!r}; choose one of {', '.join(NAMES)}")
    lacks = lacking(name)
    if lacks is not None:
        raise RuntimeError(f"{source}: {lacks}")
    return name
