"""C++ compiled beside the program, in a process of its own, and kept on disk for later programs.

Nothing here takes Python's lock for longer than it takes to start a process, so that training goes
on meanwhile at full speed.
"""

import atexit
import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

__all__ = ["Library", "cache_folder", "cpp_compiler", "users_cache"]

# Nothing that changes a result: IEEE 754 to the letter, and no fused multiply-add unless asked for.
_OPTIONS = (
    *("-x", "c++", "-std=c++17", "-O3", "-march=native", "-fPIC", "-shared"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
    *(() if platform.system() == "Darwin" else ("-fopenmp",)),  # Apple's clang has none
)

# So that all that a compiler starts can be ended with it. Linux gives a session a share of the
# processors of its own, on which no priority has any effect.
_apart: dict[str, Any] = (
    {"process_group": 0} if sys.version_info >= (3, 11) else {"start_new_session": True}
)
_start_apart: Any = functools.partial(subprocess.Popen, **_apart)

_BESIDE, _LOWEST = 5, 19  # niceness of a compiler that comes after the program; after all else

CLAIM = 60.0
"""Seconds for which other processes leave a library to the one that has begun to compile it."""


def cpp_compiler() -> str | None:
    """The path of the C++ compiler, that of ``CXX`` or ``g++`` or ``clang++``, or ``None``."""
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        path = shutil.which(name) if name else None
        if path is not None:
            return path
    return None


class Library:
    """C++ that has been compiled, or can be."""

    def __init__(
        self, source: str, options: tuple[str, ...] = (), *, can_wait: bool = False
    ) -> None:
        """Look whether it has been compiled at an earlier time.

        Args:
            source: with ``extern "C"`` functions.
            options: of the compiler, besides those for every library.
            can_wait: let the compiler have the time that nobody else wants. Where torch has a
                thread on every core, one that takes its share of a core makes all of them wait.

        Raises:
            FileNotFoundError: there is no compiler.
        """
        compiler = cpp_compiler()
        if compiler is None:
            raise FileNotFoundError("there is no C++ compiler")
        key = repr((source, _OPTIONS, options, _identity(compiler)))
        self._path = cache_folder() / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.so"
        self._claim = self._path.with_suffix(".claim")
        self._command = [compiler, *_OPTIONS, "-", *options]
        self._source, self._can_wait = source, can_wait
        self._lock = threading.Lock()
        self._loaded: ctypes.CDLL | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._started_by = 0
        self._there = self._path.exists()

    def start(self) -> None:
        """Start the compiler, unless that has been done, here or elsewhere, and do not wait.

        Raises:
            OSError: it cannot be started.
        """
        # A fork of the program starts its own.
        if not self._there and self._started_by != os.getpid() and self._is_ours():
            self._start(_LOWEST if self._can_wait else _BESIDE)

    def ready(self) -> bool:
        """Whether :meth:`load` would not wait."""
        process = self._process
        if self._there or process is None or self._started_by != os.getpid():
            return self._is_there()
        if process.poll() is None:
            self._claim.touch()
            return False
        return True

    def load(self) -> ctypes.CDLL:
        """Wait for the compiler, and load what it has made.

        Raises:
            OSError: it cannot be started, or what it made cannot be loaded.
            RuntimeError: it failed; the message has what it said first.
        """
        with self._lock:
            process = self._process if self._started_by == os.getpid() else None
            if process is not None and self._can_wait and process.poll() is None:
                self._give_up()  # who calls this cannot wait for one that may take minutes
                process = None
            # Nobody else is waited for, who may never be asked to go on.
            if process is None and not self._is_there():
                process = self._start()
            if process is not None:
                self._finish(process)
            if self._loaded is None:
                self._loaded = ctypes.CDLL(str(self._path))
            return self._loaded

    def _is_there(self) -> bool:
        self._there = self._there or self._path.exists()
        return self._there

    def _is_ours(self) -> bool:
        """Whether nobody else has begun with it lately, as ranks do that start together."""
        try:
            self._claim.touch(exist_ok=False)
            return True
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):  # it has been done meanwhile
                return time.time() - self._claim.stat().st_mtime > CLAIM
            return False

    def _start(self, niceness: int = 0) -> "subprocess.Popen[bytes]":
        self._started_by = os.getpid()
        # Of this process alone, and given its name once it is whole.
        self._made = self._path.with_suffix(f".{self._started_by}-{id(self)}")
        self._said = tempfile.TemporaryFile()
        with tempfile.TemporaryFile() as given:
            given.write(self._source.encode())
            given.seek(0)
            self._process = process = _start_apart(
                [*self._command, "-o", str(self._made)],
                stdin=given,
                stdout=subprocess.DEVNULL,
                stderr=self._said,
            )
        if niceness and hasattr(os, "setpriority"):
            with contextlib.suppress(OSError):  # where it is not allowed, it takes its share
                os.setpriority(os.PRIO_PGRP, process.pid, niceness)
        atexit.register(self._give_up)
        return process

    def _finish(self, process: "subprocess.Popen[bytes]") -> None:
        status = process.wait()
        self._claim.unlink(missing_ok=True)
        self._started_by = 0  # so that who asks again, after a failure, has it tried again
        atexit.unregister(self._give_up)
        with self._said as said:
            said.seek(0)
            lines = said.read().decode(errors="replace").splitlines()
        if status:
            self._made.unlink(missing_ok=True)
            why = next((line for line in lines if "error" in line), f"exit status {status}")
            raise RuntimeError(f"the compiler failed: {why}")
        os.replace(self._made, self._path)
        self._there = True

    def _give_up(self) -> None:
        """At the end of a program that did not wait; its forks leave the compiler alone."""
        assert self._process is not None
        if self._started_by == os.getpid():
            if self._process.poll() is None:
                _end(self._process)
            self._process.wait()
            self._said.close()
            self._made.unlink(missing_ok=True)
            self._claim.unlink(missing_ok=True)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a compiler, and what does its work: a process of its own, which would go on."""
    if hasattr(os, "killpg"):
        os.killpg(process.pid, signal.SIGTERM)
    else:
        process.terminate()


def users_cache() -> Path:
    """Where libraries are kept if they can be."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ampopt"


@functools.cache
def cache_folder() -> Path:
    """Where libraries are kept: the user's cache, or, where that cannot be, until the end."""
    folder = users_cache()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        temporary = tempfile.TemporaryDirectory(prefix="ampopt-")
        atexit.register(temporary.cleanup)
        return Path(temporary.name)


def _identity(compiler: str) -> tuple[object, ...]:
    """What a library is made by and for: a folder may be shared by machines that differ."""
    status = os.stat(compiler)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        kinds = ("model name", "flags", "Features", "CPU part")
        cpu = sorted({line for line in lines if line.startswith(kinds)})
    except OSError:
        cpu = [platform.processor()]
    return compiler, status.st_size, status.st_mtime_ns, platform.machine(), *cpu
