"""Compiles C++, and keeps the libraries on disk for later programs.

The folder, and the conditions for loading a file from it, are in ``cache``.
"""

import atexit
import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

from ampopt_kernels.native import cache

__all__ = ["Library", "cpp_command", "cpp_compiler"]

SPEED = {"-O": "-O3", "-march": "-march=native"}
"""Options that are added unless ``CXX`` has one that begins with the key. They change no result."""
# No option that changes a result: IEEE 754 exactly, and a fused multiply-add only where the code
# calls one.
_OPTIONS = (
    *("-x", "c++", "-std=c++17", "-fPIC", "-shared", "-fno-fast-math"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
    *(() if platform.system() == "Darwin" else ("-fopenmp",)),  # Apple's clang has none
)

# A process group, so that a compiler can be ended with all processes that it has started. Not a
# session where avoidable: Linux gives each session an equal share of the processors (autogroup),
# and niceness has no effect between sessions.
_own_group: dict[str, Any] = (
    {"process_group": 0} if sys.version_info >= (3, 11) else {"start_new_session": True}
)
_start_in_group: Any = functools.partial(subprocess.Popen, **_own_group)

_OUTPUT = "library.so"


def cpp_command() -> list[str] | None:
    """Return the command of the C++ compiler: that in ``CXX``, else ``g++``, else ``clang++``.

    Returns:
        The path of the compiler and the further words of ``CXX``, which is split as a shell does;
        ``None`` if no compiler is found.

    Raises:
        ValueError: ``CXX`` has a quotation mark without its closing one.
    """
    command = os.environ.get("CXX", "")
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ValueError(
            f"CXX: {error} in {command!r}; quote it as for a shell, or unset it"
        ) from None
    for name, *others in (words, ["g++"], ["clang++"]) if words else (["g++"], ["clang++"]):
        path = shutil.which(name)
        if path is not None:
            return [path, *others]
    return None


def cpp_compiler() -> str | None:
    """Return the path of the compiler of :func:`cpp_command`, or ``None``.

    Raises:
        ValueError: ``CXX`` has a quotation mark without its closing one.
    """
    command = cpp_command()
    return None if command is None else command[0]


class Library:
    """C++ source with the shared library that it is compiled to."""

    def __init__(self, source: str, options: tuple[str, ...] = ()) -> None:
        """Store the source; compiles nothing yet.

        Args:
            source: C++ with ``extern "C"`` functions.
            options: compiler options in addition to those of every library.

        Raises:
            FileNotFoundError: there is no C++ compiler.
            ValueError: ``CXX`` has a quotation mark without its closing one.
        """
        words = cpp_command()
        if words is None:
            raise FileNotFoundError("there is no C++ compiler")
        speed = [x for start, x in SPEED.items() if not any(w.startswith(start) for w in words)]
        self._command = [*words, *speed, *_OPTIONS, "-", *options]
        self._key = repr((source, self._command, _identity(words)))
        self._source = source

    @functools.cached_property
    def _path(self) -> Path:
        """The file of the library: its name is a digest of source, command and machine."""
        return cache.place().folder / f"{hashlib.sha256(self._key.encode()).hexdigest()[:32]}.so"

    def is_compiled(self) -> bool:
        """Return whether the library is on disk, so that :meth:`load` need not compile it.

        Raises:
            CacheError: there is no folder for the library.
        """
        with cache.as_cache_errors(self._path.parent):
            return cache.is_whole(self._path)

    def load(self, niceness: int = 0) -> ctypes.CDLL:
        """Compile the library if necessary, and load it. Two threads may do so at once.

        Args:
            niceness: that of the compiler, where the system permits it.

        Raises:
            OSError: the compiler cannot be started.
            RuntimeError: the compiler failed, and the message has its first error; or the library
                cannot be loaded.
            CacheError: there is no folder for the library.
        """
        if not self.is_compiled():
            self._compile(niceness)
        try:
            return ctypes.CDLL(str(self._path))
        except OSError as error:
            raise RuntimeError(
                f"the compiled library cannot be loaded: {error}. If programs may not run from "
                "there (a file system mounted noexec), set XDG_CACHE_HOME to another folder"
            ) from error

    def _compile(self, niceness: int) -> None:
        """Compile the library in a folder of its own, and move it into the cache."""
        folder = self._path.parent
        with cache.as_cache_errors(folder):
            work = cache.work_folder(self._path)
        try:
            status, lines = self._run_compiler(work, niceness)
            if status or not (work / _OUTPUT).exists():
                if full := cache.full_disk(folder, lines):
                    raise full
                why = f"exit status {status}, and no library"
                why = next((line for line in lines if "error" in line), why)
                raise RuntimeError(f"the compiler failed: {why}")
            with cache.as_cache_errors(folder):
                cache.keep(work / _OUTPUT, self._path)
                cache.sweep(folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def _run_compiler(self, work: Path, niceness: int) -> tuple[int, list[str]]:
        """Run the compiler in the folder ``work``; its exit status, and the lines that it prints.

        If the program ends meanwhile, it ends the compiler, too, and removes the folder.
        """
        with contextlib.ExitStack() as stack:
            with cache.as_cache_errors(work.parent):
                source, output = (stack.enter_context(_unnamed_file(work)) for _ in range(2))
                source.write(self._source.encode())
                source.seek(0)
            process = _start_in_group(
                [*self._command, "-o", str(work / _OUTPUT)],
                stdin=source,
                stdout=subprocess.DEVNULL,
                stderr=output,
                env={**os.environ, "TMPDIR": str(work), "LC_ALL": "C"},
            )
            abandon = functools.partial(_abandon, process, work, os.getpid())
            atexit.register(abandon)
            try:
                if niceness and hasattr(os, "setpriority"):
                    with contextlib.suppress(OSError):  # not permitted, or it has ended
                        os.setpriority(os.PRIO_PGRP, process.pid, niceness)
                status = process.wait()
            except BaseException:
                abandon()
                raise
            finally:
                atexit.unregister(abandon)
            output.seek(0)
            return status, output.read().decode(errors="replace").splitlines()


def _unnamed_file(folder: Path) -> IO[bytes]:
    """Open a nameless file to write and read, in memory if possible.

    The output of a compiler that fails on a full disk must not need space on that disk.
    """
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("ampopt"), "w+b")
    return tempfile.TemporaryFile(dir=folder)


def _abandon(process: "subprocess.Popen[bytes]", work: Path, owner: int) -> None:
    """End a compiler, with the processes that it has started, and remove its folder.

    Args:
        process: the compiler.
        work: its folder.
        owner: the process that has started it. A fork of that process does nothing.
    """
    if os.getpid() != owner:
        return
    if process.poll() is None:
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGTERM)  # its children would continue without it
        else:
            process.terminate()
        process.wait()
    shutil.rmtree(work, ignore_errors=True)


def _identity(words: list[str]) -> tuple[object, ...]:
    """Identify compiler, C library and processor: different machines may share the folder.

    Args:
        words: the command of the compiler, which may begin with a wrapper such as ``ccache``.
    """
    programs = [path for word in words if (path := shutil.which(word)) is not None]
    files = [(path, s.st_size, s.st_mtime_ns) for path in programs for s in [os.stat(path)]]
    return *files, _c_library(), platform.machine(), *_processor()


@functools.cache
def _processor(file: Path = Path("/proc/cpuinfo")) -> tuple[str, ...]:
    """Return model and features of the processor; where they are hidden, the machine's name."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        lines = []
    kinds = ("model name", "flags", "Features", "CPU part")
    return tuple(sorted({x for x in lines if x.startswith(kinds)})) or (platform.node(),)


def _c_library() -> str | None:
    """Return the version of the C library: a library linked with a later one cannot be loaded."""
    try:
        return os.confstr("CS_GNU_LIBC_VERSION")
    except (AttributeError, ValueError, OSError):
        return None
