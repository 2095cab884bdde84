"""The C++ that is not made from rules: ``numbers.cpp`` and ``objects.cpp``, compiled apart.

Loops over numbers need no header but C++'s own, and half a second. Loops over Python's objects need
torch's, whose compiler takes ten seconds and more, so nobody waits for them: until they are there,
and where they cannot be made, Python answers what they would.
"""

import contextlib
import ctypes
import functools
import sysconfig
from pathlib import Path

import torch

from ampopt_kernels.cpu.build import Library

__all__ = ["PART", "library", "loops", "object_loops", "want_object_loops"]

PART = 1 << 12
"""Elements that a thread takes at once, with room for their squares in a core's cache."""
QUESTIONS = 1000
"""Those that Python answers before loops over objects are compiled: some hundred steps."""


# --- numbers --------------------------------------------------------------------------------------


@functools.cache
def library() -> Library:
    """What holds the loops over numbers.

    Raises:
        OSError: there is no compiler.
    """
    return Library(_source("numbers.cpp"), (f"-DPART={PART}",))


numbers: ctypes.CDLL | None = None
"""What :func:`loops` has returned; ``None`` while nobody has called it."""


def loops() -> ctypes.CDLL:
    """The loops over numbers, compiled at once, or found among those compiled before.

    Raises:
        OSError: there is no compiler.
        RuntimeError: it failed.
    """
    global numbers
    if numbers is not None:
        return numbers
    made = library().load()
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    for loop in (made.gather, made.scatter):
        loop.argtypes, loop.restype = (pointer, pointer, count, pointer), None
    made.all_finite.argtypes = (pointer, pointer, pointer, count, count)
    made.measure.argtypes = (pointer, pointer, pointer, count, count, pointer, pointer)
    made.measure.restype = None
    made.common.argtypes, made.common.restype = (pointer, count), ctypes.c_double
    numbers = made
    return made


# --- objects --------------------------------------------------------------------------------------


class _ObjectLoops:
    """The loops over objects, from when they are wanted to when they are there."""

    def __init__(self) -> None:
        self._library: Library | None = None
        self._loaded: ctypes.PyDLL | None = None
        self._questions = 0

    def want(self) -> None:
        if self._library is None:
            with contextlib.suppress(FileNotFoundError):  # there is no compiler
                self._library = _object_library()

    def __call__(self, wait: bool = False) -> ctypes.PyDLL | None:
        """The loops; ``None`` while there are none, and where nobody wants them.

        Args:
            wait: for the compiler.
        """
        if self._loaded is not None or self._library is None:
            return self._loaded
        self._questions += 1
        try:
            if wait or self._library.ready():
                self._loaded = _declared(self._library.load())
            elif self._questions > QUESTIONS:
                self._library.start()
        except Exception:  # torch's headers or Python's may be missing, or want another compiler
            self._library = None
        return self._loaded


object_loops = _ObjectLoops()


def want_object_loops() -> None:
    """Have loops over objects compiled beside the program once they pay, if that is possible.

    Those that have been compiled before are there at once.
    """
    object_loops.want()


@functools.cache
def _object_library() -> Library:
    root = Path(torch.__file__).parent
    includes = (root / "include", root / "include/torch/csrc/api/include")
    options = (
        "-std=c++20",  # which torch's headers are written in, of late
        *(f"-I{folder}" for folder in (*includes, sysconfig.get_paths()["include"])),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-L{root / 'lib'}",
        "-ltorch_python",
        "-ltorch_cpu",
        "-lc10",
        f"-DTORCH_VERSION={torch.__version__}",  # whose headers they are
    )
    return Library(_source("objects.cpp"), options)


def _declared(made: ctypes.CDLL) -> ctypes.PyDLL:
    library = ctypes.PyDLL(made._name, handle=made._handle)
    pointer, count, objects = ctypes.c_void_p, ctypes.c_int64, ctypes.py_object
    library.hold.argtypes = (objects, pointer, objects, objects)
    library.addresses.argtypes = library.laid_out.argtypes = (objects, pointer)
    library.bump_versions.argtypes = (objects,)
    library.layouts.argtypes, library.layouts.restype = (objects, pointer, count), count
    return library


def _source(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
