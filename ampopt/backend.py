"""Which backend runs the kernels: the one setting of the library, read and checked here."""

import functools
import os

import torch
from ampopt_kernels.cpu import Cpu
from ampopt_kernels.eager import Eager
from ampopt_kernels.language import HAS_TRITON, INTERPRETED
from ampopt_kernels.work import Backend

__all__ = ["backend_for", "get_backend", "set_backend"]

NAMES = ("auto", "triton", "eager")
ENVIRONMENT = "AMPOPT_BACKEND"
_TRITON_DEVICES = ("cuda", "xpu")

_chosen: str | None = None


def set_backend(name: str) -> None:
    """Choose the backend of every optimizer, from its next step on.

    Args:
        name: ``"auto"``: Triton on the accelerators it compiles for, else eager. ``"triton"``:
            Triton always; CPU tensors run in its interpreter, which is for tests, and needs
            ``TRITON_INTERPRET=1`` in the environment before ``ampopt`` is imported.
            ``"eager"``: torch operations always. The environment variable ``AMPOPT_BACKEND``
            sets the same until this is called; without either it is ``"auto"``.

    Raises:
        ValueError: the name is unknown.
        RuntimeError: the backend cannot run here; the message names what is missing.
    """
    global _chosen
    _chosen = _checked(name, "set_backend")


def get_backend() -> str:
    """The chosen backend, ``"auto"`` unless another was chosen; see :func:`set_backend`."""
    if _chosen is not None:
        return _chosen
    return _checked(os.environ.get(ENVIRONMENT, "auto"), ENVIRONMENT)


def backend_for(device: torch.device) -> Backend:
    """The backend that runs tensors on ``device``.

    Raises:
        RuntimeError: the chosen backend cannot run there.
    """
    name = get_backend()
    if name == "auto":
        name = "triton" if HAS_TRITON and device.type in _TRITON_DEVICES else "eager"
    elif name == "triton" and device.type not in _TRITON_DEVICES:
        if device.type != "cpu" or not INTERPRETED:
            raise RuntimeError(
                f"the triton backend cannot run on {device}: Triton compiles for "
                f"{', '.join(_TRITON_DEVICES)}, and CPU tensors need its interpreter. Set "
                f"TRITON_INTERPRET=1 before importing ampopt, or choose set_backend('auto')"
            )
    return _backend(name, device.type)


@functools.cache
def _backend(name: str, device_type: str) -> Backend:
    if name == "eager":
        return Cpu() if device_type == "cpu" else Eager()
    from ampopt_kernels.multi_tensor import Triton

    return Triton()


def _checked(name: str, source: str) -> str:
    if name not in NAMES:
        raise ValueError(f"{source}: unknown backend {name!r}; choose one of {', '.join(NAMES)}")
    if name == "triton" and not HAS_TRITON:
        raise RuntimeError(
            f"{source}: the triton backend needs Triton, which cannot be imported here; "
            "install the triton package, or choose 'auto' or 'eager'"
        )
    return name
