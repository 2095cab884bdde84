"""A pool of processes with a gloo process group, which run functions of tests.

The processes are started once for many tests. If a function does not return on every rank in time,
the test fails with the function's name and each rank's stack, and the pool is started again.
"""

import contextlib
import faulthandler
import functools
import importlib.util
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ampopt_kernels.native import build
from support.preloaded import Preloaded, python_path
from support.quick_interpreter import make_it_quick

__all__ = ["Ranks", "mesh_of", "preloaded_for_ranks"]

_GRACE = 3.0
"""Seconds that other ranks have to return once one rank has raised: they may wait for it."""


@functools.cache
def mesh_of(*shape: int, names: tuple[str, ...] | None = None) -> Any:
    """Return the device mesh of that shape over all ranks of the pool.

    Cached for all tests of a pool: each gloo group has a thread that wakes up a hundred times a
    second even if idle, and there would be hundreds.
    """
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def preloaded_for_ranks(origin: Preloaded) -> Preloaded:
    """Return a process to fork ranks from: it has imported what their tests import."""
    modules = ("ampopt", "torch._inductor", "torch.distributed.checkpoint", "hypothesis", "pytest")
    environment = {**os.environ, "PYTHONPATH": python_path()}
    return Preloaded([*modules, __name__], environment, origin)


class Ranks:
    """``n`` processes of one gloo group."""

    def __init__(self, n: int, origin: Preloaded) -> None:
        """Store the arguments; the first :meth:`run` starts the processes.

        Args:
            n: the number of processes.
            origin: the process that is forked for each.
        """
        self.n = n
        self._origin = origin
        self._ranks: list[tuple[int, Connection]] = []

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 30.0) -> list[Any]:
        """Run ``function(*args)`` on each rank, and return the results by rank.

        Args:
            function: a top-level function of a test file, which every rank imports by path.
            args: arguments that can be pickled.
            timeout: seconds after which a rank that has not returned counts as hanging.

        Raises:
            AssertionError: a rank raised or hung; the message has its traceback or stack.
        """
        if not self._ranks:
            self._start()
        name = f"{function.__name__} of {Path(function.__code__.co_filename).name}"
        task = pickle.dumps((function.__code__.co_filename, function.__name__, args))
        for _, connection in self._ranks:
            connection.send_bytes(task)
        outcomes = self._outcomes(time.monotonic() + timeout)
        missing = [rank for rank in range(self.n) if rank not in outcomes]
        failures = [f"rank {rank}:\n{text}" for rank, (ok, text) in outcomes.items() if not ok]
        if missing:
            shown = self._kill()
            failures.append(f"ranks {missing} hang in {name} after {timeout} s:\n{shown}")
        if failures:
            raise AssertionError(f"{name}:\n" + "\n".join(failures))
        return [outcomes[rank][1] for rank in range(self.n)]

    def close(self) -> None:
        """End all processes."""
        for _, connection in self._ranks:
            with contextlib.suppress(BrokenPipeError):
                connection.send_bytes(b"")
        for _, connection in self._ranks:
            _wait_for_end(connection)
        self._kill()

    def _outcomes(self, deadline: float) -> dict[int, tuple[bool, Any]]:
        """By rank: whether its function returned, and the result or the traceback."""
        outcomes: dict[int, tuple[bool, Any]] = {}
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._ranks)}
        while waiting and (seconds := deadline - time.monotonic()) > 0:
            for ready in wait(list(waiting), seconds):
                rank = waiting.pop(ready)  # type: ignore[arg-type]
                try:
                    outcomes[rank] = pickle.loads(ready.recv_bytes())  # type: ignore[union-attr]
                except EOFError:
                    outcomes[rank] = False, "the process has ended"
                if not outcomes[rank][0]:
                    deadline = min(deadline, time.monotonic() + _GRACE)
        return outcomes

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(self.n):
            connection = self._origin.start(_serve, rank, self.n, self._folder.name)
            self._ranks.append((connection.recv(), connection))
        ready = self._outcomes(time.monotonic() + 60)
        assert len(ready) == self.n, f"of {self.n} ranks, {sorted(ready)} have met\n{self._kill()}"

    def _kill(self) -> str:
        """Kill all processes, and return their stacks."""
        if not self._ranks:
            return ""
        signals = [_signalled(process, signal.SIGUSR1) for process, _ in self._ranks]
        time.sleep(0.2 * any(signals))
        for process, connection in self._ranks:
            if _signalled(process, signal.SIGKILL):
                _wait_for_end(connection)
            connection.close()
        self._ranks = []
        with self._folder as folder:
            return "\n".join(
                f"{path.name}:\n{path.read_text()}" for path in Path(folder).glob("rank*")
            )


def _signalled(process: int, number: int) -> bool:
    """Send a signal; return whether there is such a process."""
    try:
        os.kill(process, number)
    except ProcessLookupError:
        return False
    return True


def _wait_for_end(connection: Connection) -> None:
    """Wait until the other end of ``connection`` is closed, but no longer than some seconds."""
    with contextlib.suppress(EOFError, ConnectionError):
        while connection.poll(5):
            connection.recv_bytes()


def _serve(connection: Connection, rank: int, n: int, folder: str) -> None:
    """Run tasks as one rank, until an empty task arrives or the connection closes."""
    connection.send(os.getpid())
    where = Path(folder, f"rank {rank}").open("w")
    faulthandler.register(signal.SIGUSR1, where)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    build.SPEED["-O"] = "-O1"  # as in support.fixtures, so that ranks load what is compiled already
    torch.use_deterministic_algorithms(True)  # as in fixtures.py
    torch.utils.deterministic.fill_uninitialized_memory = True  # pyright: ignore
    make_it_quick()
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=n
    )
    connection.send_bytes(pickle.dumps((True, None)))
    modules: dict[str, ModuleType] = {}
    with contextlib.suppress(EOFError):
        while task := connection.recv_bytes():
            try:
                file, name, args = pickle.loads(task)
                if file not in modules:
                    modules[file] = _imported(file)
                outcome = True, getattr(modules[file], name)(*args)
            except BaseException:
                outcome = False, traceback.format_exc()
            connection.send_bytes(pickle.dumps(outcome))
    os._exit(0)  # a normal exit would wait for ranks that may be gone


def _imported(file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
