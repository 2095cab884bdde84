"""C++ compiled beside the program, in a process of its own, and kept for later programs.

Where it is kept, and when it may be loaded, is in ``cache``. Nothing here takes Python's lock for
longer than it takes to start a process, so that training goes on meanwhile at full speed.
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

# Each unless CXX has another that begins so.
_SPEED = {"-O": "-O3", "-march": "-march=native"}
# Nothing that changes a result: IEEE 754 to the letter, and no fused multiply-add unless asked for.
_OPTIONS = (
    *("-x", "c++", "-std=c++17", "-fPIC", "-shared", "-fno-fast-math"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
    *(() if platform.system() == "Darwin" else ("-fopenmp",)),  # Apple's clang has none
)

# So that all that a compiler starts can be ended with it. Linux gives a session a share of the
# processors of its own, on which no priority has any effect.
_apart: dict[str, Any] = (
    {"process_group": 0} if sys.version_info >= (3, 11) else {"start_new_session": True}
)
_start_apart: Any = functools.partial(subprocess.Popen, **_apart)

_MADE = "library.so"
_BESIDE, _LOWEST = 5, 19  # niceness of a compiler that comes after the program; after all else


def cpp_command() -> list[str] | None:
    """The C++ compiler: ``CXX``, split as a shell does, or ``g++`` or ``clang++``, or ``None``.

    Returns:
        Its path, and the further words of ``CXX``.

    Raises:
        ValueError: ``CXX`` has a quotation without its end.
    """
    named = os.environ.get("CXX", "")
    try:
        words = shlex.split(named)
    except ValueError as error:
        raise ValueError(
            f"CXX: {error} in {named!r}; quote it as for a shell, or unset it"
        ) from None
    for name, *others in (words, ["g++"], ["clang++"]) if words else (["g++"], ["clang++"]):
        path = shutil.which(name)
        if path is not None:
            return [path, *others]
    return None


def cpp_compiler() -> str | None:
    """The path of the compiler of :func:`cpp_command`, or ``None``.

    Raises:
        ValueError: ``CXX`` has a quotation without its end.
    """
    command = cpp_command()
    return None if command is None else command[0]


class Library:
    """C++ that has been compiled, or can be."""

    def __init__(
        self, source: str, options: tuple[str, ...] = (), *, can_wait: bool = False
    ) -> None:
        """Name what is to be compiled.

        Args:
            source: with ``extern "C"`` functions.
            options: of the compiler, besides those for every library.
            can_wait: let the compiler have the time that nobody else wants. Where torch has a
                thread on every core, one that takes its share of a core makes all of them wait.

        Raises:
            FileNotFoundError: there is no compiler.
            ValueError: ``CXX`` has a quotation without its end.
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
        return cache.place().folder / f"{hashlib.sha256(self._key.encode()).hexdigest()[:32]}.so"

    @property
    def _claim(self) -> Path:
        return self._path.with_suffix(".claim")

    def start(self) -> None:
        """Start the compiler, unless that has been done, here or elsewhere, and do not wait.

        Raises:
            OSError: it cannot be started.
            CacheError: there is no place for what it makes.
        """
        # A fork of the program starts its own.
        if not self._is_there() and self._started_by != os.getpid():
            with cache.said(self._path.parent):
                if not cache.claim(self._claim):
                    return
            self._start(_LOWEST if self._can_wait else _BESIDE)

    def ready(self) -> bool:
        """Whether :meth:`load` would not wait.

        Raises:
            CacheError: there is no place where it could be.
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
        """Wait for the compiler, and load what it has made.

        Raises:
            OSError: the compiler cannot be started.
            RuntimeError: it failed, and the message has what it said first; or what it made cannot
                be loaded.
            CacheError: there is no place for what it makes.
        """
        with self._lock:
            if self._loaded is not None:
                return self._loaded
            process = self._process if self._started_by == os.getpid() else None
            if process is not None and self._can_wait and process.poll() is None:
                self._give_up()  # who calls this cannot wait for one that may take minutes
                process = None
            # Nobody else is waited for, who may never be asked to go on.
            if process is None and not self._is_there():
                process = self._start()
            if process is not None:
                self._finish(process)
            try:
                self._loaded = ctypes.CDLL(str(self._path))
            except OSError as error:
                raise RuntimeError(
                    f"what was compiled cannot be loaded: {error}. If programs may not run from "
                    "there (a file system mounted noexec), set XDG_CACHE_HOME to another folder"
                ) from error
            return self._loaded

    def _is_there(self) -> bool:
        with cache.said(self._path.parent):
            self._there = self._there or cache.is_whole(self._path)
        return self._there

    def _start(self, niceness: int = 0) -> "subprocess.Popen[bytes]":
        with cache.said(self._path.parent):
            self._work = cache.work_folder(self._path)
        try:
            self._process = process = self._started()
        except BaseException:
            self._clean_up()
            raise
        self._started_by = os.getpid()
        if niceness and hasattr(os, "setpriority"):
            with contextlib.suppress(OSError):  # where it is not allowed, it takes its share
                os.setpriority(os.PRIO_PGRP, process.pid, niceness)
        atexit.register(self._give_up)
        return process

    def _started(self) -> "subprocess.Popen[bytes]":
        with contextlib.ExitStack() as stack:
            with cache.said(self._path.parent):
                given = stack.enter_context(_unnamed_file(self._work))
                given.write(self._source.encode())
                given.seek(0)
                self._said = _unnamed_file(self._work)
            return _start_apart(
                [*self._command, "-o", str(self._work / _MADE)],
                stdin=given,
                stdout=subprocess.DEVNULL,
                stderr=self._said,
                env={**os.environ, "TMPDIR": str(self._work), "LC_ALL": "C"},
            )

    def _finish(self, process: "subprocess.Popen[bytes]") -> None:
        folder = self._path.parent
        status = process.wait()
        self._started_by = 0  # so that who asks again, after a failure, has it tried again
        atexit.unregister(self._give_up)
        try:
            with self._said as said:
                said.seek(0)
                lines = said.read().decode(errors="replace").splitlines()
            if status:
                if full := cache.full_disk(folder, lines):
                    raise full
                why = next((line for line in lines if "error" in line), f"exit status {status}")
                raise RuntimeError(f"the compiler failed: {why}")
            with cache.said(folder):
                cache.keep(self._work / _MADE, self._path)
                self._there = True
                cache.sweep(folder)
        finally:
            self._clean_up()

    def _give_up(self) -> None:
        """At the end of a program that did not wait; its forks leave the compiler alone."""
        assert self._process is not None
        if self._started_by == os.getpid():
            if self._process.poll() is None:
                _end(self._process)
            self._process.wait()
            self._said.close()
            self._clean_up()

    def _clean_up(self) -> None:
        shutil.rmtree(self._work, ignore_errors=True)
        self._claim.unlink(missing_ok=True)


def _unnamed_file(folder: Path) -> IO[bytes]:
    """A file to write and read, in memory if possible: a full disk is told of in one."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("ampopt"), "w+b")
    return tempfile.TemporaryFile(dir=folder)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a compiler, and what does its work: a process of its own, which would go on."""
    if hasattr(os, "killpg"):
        os.killpg(process.pid, signal.SIGTERM)
    else:
        process.terminate()


def _identity(words: list[str]) -> tuple[object, ...]:
    """What a library is made by and for: a folder may be shared by machines that differ.

    ``words`` name the compiler, and what it may be called through, as ``ccache``.
    """
    programs = [path for word in words if (path := shutil.which(word)) is not None]
    made = [(path, s.st_size, s.st_mtime_ns) for path in programs for s in [os.stat(path)]]
    return *made, _c_library(), platform.machine(), *_processor()


@functools.cache
def _processor() -> tuple[str, ...]:
    """What the processor can do, or, where it does not say so, which machine it is in."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    kinds = ("model name", "flags", "Features", "CPU part")
    return tuple(sorted({x for x in lines if x.startswith(kinds)})) or (platform.node(),)


def _c_library() -> str | None:
    """The version of the C library, without which what was linked with a later one cannot be."""
    try:
        return os.confstr("CS_GNU_LIBC_VERSION")
    except (AttributeError, ValueError, OSError):
        return None
