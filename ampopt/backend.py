"""``set_backend``: the choice of the backend that runs the kernels, checked."""

import functools
import os

import torch

from ampopt._step.torch_private import records_operators
from ampopt._warnings import warn_user
from ampopt_kernels.cpu.compiled import Compiled
from ampopt_kernels.devices import ACCELERATORS
from ampopt_kernels.eager import Eager
from ampopt_kernels.language import HAS_TRITON, INTERPRETED
from ampopt_kernels.native.build import cpp_compiler
from ampopt_kernels.native.cache import CacheError, place
from ampopt_kernels.step import Backend

__all__ = [
    "ENVIRONMENT",
    "NAMES",
    "backend_for",
    "chosen_by",
    "get_backend",
    "lacking",
    "set_backend",
]

NAMES = ("auto", "triton", "compiled", "eager")
ENVIRONMENT = "AMPOPT_BACKEND"

_chosen: str | None = None


def set_backend(name: str) -> None:
    """Choose the backend of all optimizers, from their next step on.

    Until the first call, the environment variable ``AMPOPT_BACKEND`` chooses the backend. It is
    read when a backend is first needed, and its default is ``"auto"``.

    Args:
        name: the backend, one of these four.

            ``"auto"``: Triton on accelerators that it compiles for, else eager. On the CPU,
            compiled from the first step on, if there is a C++ compiler, else eager.

            ``"triton"``: always Triton. CPU tensors need its interpreter, which is meant for tests:
            set ``TRITON_INTERPRET=1`` in the environment before ``ampopt`` is imported.

            ``"compiled"``: C++ code made from the rule, for CPU tensors, compiled at the first use
            of each rule by the compiler that ``CXX`` names, or ``g++`` or ``clang++``. The compiled
            code, also that of ``"auto"``, is cached in ``$XDG_CACHE_HOME/ampopt`` or
            ``~/.cache/ampopt``, at most 64 MiB, or, if that cannot be written, in ``ampopt-UID`` in
            the folder for temporary files. A cache that other users may write to is an error;
            ``"auto"`` uses the second folder then. If neither can be used, ``"auto"`` stays eager,
            with a warning.

            ``"eager"``: always torch operations. On the CPU, results equal those of ``"compiled"``
            bit for bit where every operation is correctly rounded. Elsewhere (``tl.exp`` and
            similar functions, powers in ``Rule.scalars``, the square root of float64, sums of
            ``Rule.reduce``, and norms) they agree within rounding.

    Raises:
        ValueError: ``name`` is not a backend.
        RuntimeError: the backend cannot run here. The message names what is missing, or which users
            could change the cache.
    """
    global _chosen
    _chosen = _checked_name(name, "set_backend")


def get_backend() -> str:
    """The name of the chosen backend; see :func:`set_backend`."""
    return _chosen or _of_environment()


@functools.cache
def _of_environment() -> str:
    """The name of the backend that the environment chooses, which is read once."""
    return _checked_name(os.environ.get(ENVIRONMENT, "auto"), ENVIRONMENT)


def chosen_by() -> str | None:
    """Who chose the backend: ``set_backend`` or the environment variable; ``None`` for neither."""
    if _chosen is not None:
        return "ampopt.set_backend"
    return ENVIRONMENT if ENVIRONMENT in os.environ else None


def backend_for(device: torch.device) -> Backend:
    """The backend that runs tensors on ``device``.

    Raises:
        RuntimeError: the chosen backend cannot run on ``device``.
    """
    name = get_backend()
    if device.type == "cpu" and name != "triton":
        return Eager() if records_operators() else _cpu_backend(name)
    if name == "auto":
        name = "triton" if HAS_TRITON and device.type in ACCELERATORS else "eager"
    if name == "compiled":
        raise RuntimeError(
            f"the compiled backend cannot run on {device}: it compiles for the CPU; choose "
            "set_backend('auto')"
        )
    if name == "eager":
        return Eager()
    if device.type not in ACCELERATORS and (device.type != "cpu" or not INTERPRETED):
        raise RuntimeError(
            f"the triton backend cannot run on {device}: Triton compiles for "
            f"{', '.join(ACCELERATORS)}, and CPU tensors need its interpreter. Set "
            f"TRITON_INTERPRET=1 before importing ampopt, or choose set_backend('auto')"
        )
    return _triton_backend()


def lacking(name: str) -> str | None:
    """Why the backend ``name`` cannot run here, in a sentence; ``None`` if it can."""
    if name == "triton" and not HAS_TRITON:
        return (
            "the triton backend needs Triton, which cannot be imported here; "
            "install the triton package, or choose 'auto' or 'eager'"
        )
    if name == "triton" and not (INTERPRETED or _finds_accelerator()):
        return (
            f"the triton backend needs an accelerator ({', '.join(ACCELERATORS)}), and torch finds "
            "none: choose 'auto' or 'eager'; or, for tests, set TRITON_INTERPRET=1 before "
            "importing ampopt, so that kernels run on the CPU"
        )
    return _compiler_or_cache_lacking() if name == "compiled" else None


def _compiler_or_cache_lacking() -> str | None:
    """Why compiled C++ cannot be made or stored here, in a sentence; ``None`` if it can."""
    try:
        if cpp_compiler() is None:
            return (
                "the compiled backend needs a C++ compiler, and neither CXX nor g++ nor "
                "clang++ names one; install one, or choose 'auto' or 'eager'"
            )
        cache = place()
    except (ValueError, CacheError) as error:
        return f"the compiled backend cannot run: {error}, or choose 'auto' or 'eager'"
    if cache.distrusts:
        return (
            f"the compiled backend has no cache that is safe from other users: {cache.instead}. "
            "Remove that permission (chown, chmod go-w), or set XDG_CACHE_HOME to a folder that "
            "only you may write to, or choose 'auto' (which keeps what it compiles in "
            f"{cache.folder}) or 'eager'"
        )
    return None


def _cpu_backend(name: str) -> Backend:
    """The backend for CPU tensors if ``name`` is chosen."""
    if name == "compiled" or (name == "auto" and _has_compiler() and _compiled(name).can_compile):
        return _compiled(name)
    return Eager(host_sees=True)


@functools.cache
def _has_compiler() -> bool:
    """Whether there is a C++ compiler."""
    return cpp_compiler() is not None


@functools.cache
def _compiled(name: str) -> Compiled:
    """The compiled backend, if ``name`` is chosen; one object for each name."""
    return Compiled(warn=warn_user if name == "auto" else None)


@functools.cache
def _triton_backend() -> Backend:
    """The Triton backend; one object, made at its first use, since importing it is slow."""
    from ampopt_kernels.triton.backend import Triton

    return Triton()


@functools.cache
def _finds_accelerator() -> bool:
    """Whether this machine has an accelerator that Triton compiles for."""
    return any(getattr(torch, kind).is_available() for kind in ACCELERATORS)


def _checked_name(name: str, source: str) -> str:
    """``name``, if that backend can run here; ``source`` is what chose it, for the error."""
    if name not in NAMES:
        raise ValueError(f"{source}: unknown backend {name!r}; choose one of {', '.join(NAMES)}")
    lacks = lacking(name)
    if lacks is not None:
        raise RuntimeError(f"{source}: {lacks}")
    return name
