"""Processes on this machine that have met: a pool of ranks, which runs the functions of tests.

They are started once for many tests. A function that does not come back on every rank in time is
a failure with its name and where each rank was; the pool is then made anew.
"""

import contextlib
import faulthandler
import functools
import gc
import importlib.util
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from support.quick_interpreter import make_it_quick

__all__ = ["Ranks", "mesh_of"]

_GRACE = 3.0
"""Seconds that others have to come back once one rank has raised: it may have left them waiting."""


@functools.cache
def mesh_of(*shape: int, names: tuple[str, ...] | None = None) -> Any:
    """The device mesh of that shape over all ranks, on each of them.

    Made once, for all tests of a pool: a group of gloo's has a thread that wakes up a hundred times
    a second, however idle it is, and there would be hundreds.
    """
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=names)


class Ranks:
    """``n`` processes of one gloo group."""

    def __init__(self, n: int) -> None:
        """Start none: the first :meth:`run` does."""
        self.n = n
        self._ranks: list[tuple[Any, Connection]] = []

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 30.0) -> list[Any]:
        """What ``function(*args)`` returns on each rank.

        Args:
            function: at the top of a test file, which every rank imports by its path.
            args: what pickle takes.
            timeout: seconds until a rank that has not come back counts as hanging.

        Raises:
            AssertionError: a rank raised, which is shown, or hung.
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
        for process, _ in self._ranks:
            process.join(5)
        self._kill()

    def _outcomes(self, deadline: float) -> dict[int, tuple[bool, Any]]:
        """By rank: whether its function returned, and what, or how it raised."""
        outcomes: dict[int, tuple[bool, Any]] = {}
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._ranks)}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for ready in wait(list(waiting), left):
                rank = waiting.pop(ready)  # type: ignore[arg-type]
                try:
                    outcomes[rank] = pickle.loads(ready.recv_bytes())  # type: ignore[union-attr]
                except EOFError:
                    outcomes[rank] = False, "the process has ended"
                if not outcomes[rank][0]:
                    deadline = min(deadline, time.monotonic() + _GRACE)
        return outcomes

    def _start(self) -> None:
        # Forked from one process that has the imports of tests behind it: a pool takes no time.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            ["ampopt", "torch._inductor", "torch.distributed.checkpoint", "hypothesis", "pytest"]
        )
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(self.n):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.n, self._folder.name, theirs, sys.path), daemon=True
            )
            process.start()
            theirs.close()
            self._ranks.append((process, ours))
        ready = self._outcomes(time.monotonic() + 60)
        assert len(ready) == self.n, f"of {self.n} ranks, {sorted(ready)} have met\n{self._kill()}"

    def _kill(self) -> str:
        """End all processes at once; return where they were."""
        for process, _ in self._ranks:
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.2 * any(process.is_alive() for process, _ in self._ranks))
        for process, connection in self._ranks:
            process.kill()
            process.join()
            connection.close()
        if not self._ranks:
            return ""
        self._ranks = []
        with self._folder as folder:
            return "\n".join(
                f"{path.name}:\n{path.read_text()}" for path in Path(folder).glob("rank*")
            )


def _serve(rank: int, n: int, folder: str, connection: Connection, path: list[str]) -> None:
    """Be one rank, until an empty task or the end of the other side."""
    gc.freeze()  # no collection looks at what has been imported
    sys.path[:] = path
    where = Path(folder, f"rank {rank}").open("w")
    faulthandler.register(signal.SIGUSR1, where)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # as fixtures.py has it
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
    os._exit(0)  # without waiting for ranks that may be gone


def _imported(file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
