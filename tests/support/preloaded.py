"""Processes that have imported modules, and are forked for each task.

To start Python and import torch takes seconds, which is longer than most tasks take.
"""

import contextlib
import gc
import importlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

__all__ = ["Preloaded", "python_path"]

_TIMEOUT = 600
"""Seconds after which a script is killed."""

_IGNORED = "Conversion of an array with ndim > 0 to a scalar"
"""A warning that NumPy gives for the interpreter of Triton 3.6, a DeprecationWarning."""

_site: list[str] = []
"""In a process that forks: ``sys.path`` without the folders of ``PYTHONPATH``."""


def python_path() -> str:
    """Return a ``PYTHONPATH`` with which other processes find what this one finds."""
    return os.pathsep.join(path for path in sys.path if path)


class Preloaded:
    """A process that has imported modules, and is forked for each task.

    On Linux only. On other systems the imports may start threads, which a fork would lack, so each
    task is run by a new Python.
    """

    def __init__(
        self,
        modules: Sequence[str],
        environment: Mapping[str, str],
        origin: "Preloaded | None" = None,
    ) -> None:
        """Start the process and its imports.

        Args:
            modules: names of the modules to import.
            environment: all environment variables during the imports.
            origin: the process to fork, whose imports come first; without it, a new Python.
        """
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        if sys.platform != "linux":
            return
        if origin is not None:
            self._connection = origin.start(_serve, modules, dict(environment))
            return
        self._connection, theirs = multiprocessing.Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BEGIN, str(theirs.fileno())],
            env={**environment, "PYTHONPATH": str(Path(__file__).parents[1])},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self._connection.send((modules, dict(environment)))

    def start(self, function: Callable[..., None], *args: Any) -> Connection:
        """Start ``function(connection, *args)`` in a fork.

        Args:
            function: a top-level function of a module that the process can import.
            args: arguments that can be pickled.

        Returns:
            The other end of ``connection``, which closes when the function returns.
        """
        ours, theirs = multiprocessing.Pipe()
        with theirs:
            if self._connection is None:
                context = multiprocessing.get_context("spawn")
                context.Process(target=function, args=(theirs, *args), daemon=True).start()
            else:
                self._connection.send((function, args))
                reduction.send_handle(self._connection, theirs.fileno(), None)
        return ours

    def run(
        self, *arguments: str | Path, environment: Mapping[str, str], cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Return what ``subprocess.run`` would of ``python -W error *arguments``.

        Args:
            arguments: a Python file, or ``-c`` and code, or ``-m`` and the name of a module; then
                the arguments of that program.
            environment: all environment variables of the program.
            cwd: its working directory; by default, that of this process.
        """
        command = [str(argument) for argument in arguments]
        where = str(cwd or Path.cwd())
        if self._connection is None:
            strict = ["-W", "error", "-W", f"ignore:{_IGNORED}:DeprecationWarning"]
            return subprocess.run(
                [sys.executable, *strict, *command],
                cwd=where, env=environment, capture_output=True, text=True, timeout=_TIMEOUT,
            )  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            files = Path(folder, "out"), Path(folder, "err")
            with self.start(
                _run, command, dict(environment), where, *map(str, files)
            ) as connection:
                code = connection.recv()
            outputs = [file.read_text(encoding="utf-8") for file in files]
        return subprocess.CompletedProcess(command, code, *outputs)

    def close(self) -> None:
        """End the process; processes that it has started continue."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.wait()


_BEGIN = "import sys; from support.preloaded import begin; begin(int(sys.argv[1]))"


def begin(descriptor: int) -> None:
    """Serve the process that has the other end of the connection ``descriptor``."""
    _site[:] = [path for path in sys.path if path not in ("", str(Path(__file__).parents[1]))]
    connection = Connection(descriptor)
    _serve(connection, *connection.recv())


def _serve(connection: Connection, modules: Sequence[str], environment: dict[str, str]) -> None:
    """Import the modules, and start tasks until the connection closes."""
    _become_of(environment)
    for name in modules:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a fork would touch, and so copy, the pages of this process
    signal.signal(signal.SIGCHLD, _reap)
    with contextlib.suppress(EOFError):
        while True:
            function, args = connection.recv()
            with Connection(reduction.recv_handle(connection)) as theirs:
                if os.fork() == 0:
                    connection.close()
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    try:
                        function(theirs, *args)
                    finally:
                        os._exit(0)  # without the exit handlers of the imports


def _reap(*_: Any) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _become_of(environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    path = environment.get("PYTHONPATH", "")
    sys.path[:] = [*filter(None, path.split(os.pathsep)), *_site]


def _run(
    connection: Connection, command: list[str], environment: dict[str, str], *places: str
) -> None:
    """Send the exit status of a program."""
    _become_of(environment)
    # A process of multiprocessing has an exit status as that of a program.
    program = multiprocessing.get_context("fork").Process(target=_become, args=(command, *places))
    program.start()
    program.join(_TIMEOUT)
    program.kill()
    program.join()
    connection.send(program.exitcode)


def _become(command: list[str], cwd: str, out: str, err: str) -> None:
    """Run the program in this process."""
    for file, flags, number in (
        (os.devnull, os.O_RDONLY, 0),
        (out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 1),
        (err, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 2),
    ):
        os.dup2(os.open(file, flags, 0o666), number)
    os.chdir(cwd)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", _IGNORED, DeprecationWarning)
    kind, *rest = command
    if kind == "-c":
        sys.argv[:] = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    elif kind == "-m":
        sys.argv[:] = rest
        sys.path.insert(0, cwd)
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = command
        sys.path.insert(0, str(Path(kind).parent))
        runpy.run_path(kind, run_name="__main__")
