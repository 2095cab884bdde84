"""Compiles C++ in a background process and keeps the libraries on disk for later programs.

The folder, and the conditions for loading a file from it, are in ``cache``. Python's lock is held
only while the process starts, so training continues at full speed.
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
import threading
from pathlib import Path
from typing import IO, Any

from ampopt_kernels.native import cache

__all__ = ["Library", "cpp_command", "cpp_compiler"]

# Options that are added unless CXX has one that begins with the key.
_SPEED = {"-O": "-O3", "-march": "-march=native"}
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
_BESIDE, _LOWEST = 5, 19  # niceness: after this program; after all programs


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

    def __init__(
        self, source: str, options: tuple[str, ...] = (), *, can_wait: bool = False
    ) -> None:
        """Store the source; compiles nothing yet.

        Args:
            source: C++ with ``extern "C"`` functions.
            options: compiler options in addition to those of every library.
            can_wait: whether :meth:`start` gives the compiler only idle processor time. Where
                torch has a thread on every core, a compiler that takes its share of a core makes
                all of them wait.

        Raises:
            FileNotFoundError: there is no C++ compiler.
            ValueError: ``CXX`` has a quotation mark without its closing one.
        """
        words = cpp_command()
        if words is None:
            raise FileNotFoundError("there is no C++ compiler")
        speed = [x for start, x in _SPEED.items() if not any(w.startswith(start) for w in words)]
        self._command = [*words, *speed, *_OPTIONS, "-", *options]
        self._key = repr((source, self._command, _identity(words)))
        self._source, self._can_wait = source, can_wait
        self._lock = threading.Lock()
        self._loaded: ctypes.CDLL | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._started_by = 0
        self._there = False

    @functools.cached_property
    def _path(self) -> Path:
        """The file of the library: its name is a digest of source, command and machine."""
        return cache.place().folder / f"{hashlib.sha256(self._key.encode()).hexdigest()[:32]}.so"

    @property
    def _claim(self) -> Path:
        """The file that says that a process compiles this library."""
        return self._path.with_suffix(".claim")

    def start(self) -> None:
        """Start the compiler in the background.

        Does nothing if the library exists or another process compiles it.

        Raises:
            OSError: the compiler cannot be started.
            CacheError: there is no folder for the library.
        """
        # A fork of the program has inherited ``_process``, but cannot wait for it.
        if not self._is_there() and self._started_by != os.getpid():
            with cache.as_cache_errors(self._path.parent):
                if not cache.claim(self._claim):
                    return
            self._start(_LOWEST if self._can_wait else _BESIDE)

    def ready(self) -> bool:
        """Return whether :meth:`load` would return without waiting for a compiler.

        Raises:
            CacheError: there is no folder for the library.
        """
        process = self._process
        if self._there or process is None or self._started_by != os.getpid():
            return self._is_there()
        if process.poll() is None:
            with contextlib.suppress(OSError):
                os.utime(self._claim)
            return False
        return True

    def load(self) -> ctypes.CDLL:
        """Compile the library if necessary, wait for the compiler, and load the library.

        Raises:
            OSError: the compiler cannot be started.
            RuntimeError: the compiler failed, and the message has its first error; or the library
                cannot be loaded.
            CacheError: there is no folder for the library.
        """
        with self._lock:
            if self._loaded is not None:
                return self._loaded
            process = self._process if self._started_by == os.getpid() else None
            if process is not None and self._can_wait and process.poll() is None:
                self._give_up()  # it may take minutes with idle time alone: start another
                process = None
            # Do not wait for another process that compiles the same: it may be suspended.
            if process is None and not self._is_there():
                process = self._start()
            if process is not None:
                self._finish(process)
            try:
                self._loaded = ctypes.CDLL(str(self._path))
            except OSError as error:
                raise RuntimeError(
                    f"the compiled library cannot be loaded: {error}. If programs may not run from "
                    "there (a file system mounted noexec), set XDG_CACHE_HOME to another folder"
                ) from error
            return self._loaded

    def _is_there(self) -> bool:
        """Whether the library is on disk, whole."""
        with cache.as_cache_errors(self._path.parent):
            self._there = self._there or cache.is_whole(self._path)
        return self._there

    def _start(self, niceness: int = 0) -> "subprocess.Popen[bytes]":
        """Start the compiler in a folder of its own, at ``niceness`` if the system permits."""
        with cache.as_cache_errors(self._path.parent):
            self._work = cache.work_folder(self._path)
        try:
            self._process = process = self._started()
        except BaseException:
            self._clean_up()
            raise
        self._started_by = os.getpid()
        if niceness and hasattr(os, "setpriority"):
            with contextlib.suppress(
                OSError
            ):  # not permitted: the compiler keeps a normal share of time
                os.setpriority(os.PRIO_PGRP, process.pid, niceness)
        atexit.register(self._give_up)
        return process

    def _started(self) -> "subprocess.Popen[bytes]":
        """The process of the compiler, which reads the source from its standard input."""
        with contextlib.ExitStack() as stack:
            with cache.as_cache_errors(self._path.parent):
                source = stack.enter_context(_unnamed_file(self._work))
                source.write(self._source.encode())
                source.seek(0)
                self._output = _unnamed_file(self._work)
            return _start_in_group(
                [*self._command, "-o", str(self._work / _OUTPUT)],
                stdin=source,
                stdout=subprocess.DEVNULL,
                stderr=self._output,
                env={**os.environ, "TMPDIR": str(self._work), "LC_ALL": "C"},
            )

    def _finish(self, process: "subprocess.Popen[bytes]") -> None:
        """Wait for the compiler, and move its output into the cache.

        Raises:
            RuntimeError: the compiler failed.
            CacheError: the output cannot be kept.
        """
        folder = self._path.parent
        status = process.wait()
        self._started_by = 0  # after a failure, the next call tries again
        atexit.unregister(self._give_up)
        try:
            with self._output as output:
                output.seek(0)
                lines = output.read().decode(errors="replace").splitlines()
            if status:
                if full := cache.full_disk(folder, lines):
                    raise full
                why = next((line for line in lines if "error" in line), f"exit status {status}")
                raise RuntimeError(f"the compiler failed: {why}")
            with cache.as_cache_errors(folder):
                cache.keep(self._work / _OUTPUT, self._path)
                self._there = True
                cache.sweep(folder)
        finally:
            self._clean_up()

    def _give_up(self) -> None:
        """End the compiler and remove its files; in a fork of the program, do nothing."""
        assert self._process is not None
        if self._started_by == os.getpid():
            if self._process.poll() is None:
                _end(self._process)
            self._process.wait()
            self._output.close()
            self._clean_up()

    def _clean_up(self) -> None:
        """Remove the compiler's folder and the claim."""
        shutil.rmtree(self._work, ignore_errors=True)
        self._claim.unlink(missing_ok=True)


def _unnamed_file(folder: Path) -> IO[bytes]:
    """Open a nameless file to write and read, in memory if possible.

    The output of a compiler that fails on a full disk must not need space on that disk.
    """
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("ampopt"), "w+b")
    return tempfile.TemporaryFile(dir=folder)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a compiler with the processes that it has started, which would continue without it."""
    if hasattr(os, "killpg"):
        os.killpg(process.pid, signal.SIGTERM)
    else:
        process.terminate()


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
