"""Runs scripts in processes forked from one that has already imported their modules.

Importing torch, and what torch imports for an optimizer, takes seconds; most trainings take less.
"""

import gc
import importlib
import json
import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Preloaded"]

_TIMEOUT = 600
"""Seconds after which a script is killed."""

# NumPy gives the ignored warning for the interpreter of Triton 3.6.
_OPTIONS = (
    *("-W", "error"),
    *("-W", "ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning"),
)


class Preloaded:
    """A process that has imported modules, and forks for each script that it runs.

    On Linux only. On other systems the imports may start threads, which a fork would lack, so each
    script is run by a new Python.
    """

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the process and its imports.

        Args:
            modules: names of the modules to import.
            environment: environment variables during the imports.
        """
        self._process = None
        if sys.platform == "linux":
            self._process = subprocess.Popen(
                [sys.executable, *_OPTIONS, __file__, *modules],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )

    def run(
        self, script: Path, *arguments: str, cwd: Path, environment: Mapping[str, str]
    ) -> subprocess.CompletedProcess[str]:
        """Return what ``subprocess.run`` would of ``python -W error script *arguments``.

        Args:
            script: a Python file.
            arguments: command line arguments.
            cwd: working directory, in which the output is also stored.
            environment: all environment variables of the script.
        """
        if self._process is None:
            command = [sys.executable, *_OPTIONS, str(script), *arguments]
            return subprocess.run(
                command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=_TIMEOUT
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        out, err = cwd / "stdout.txt", cwd / "stderr.txt"
        task = (str(script), arguments, str(cwd), dict(environment), str(out), str(err))
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        code = int(self._process.stdout.readline())
        printed = (file.read_text(encoding="utf-8") for file in (out, err))
        return subprocess.CompletedProcess([str(script), *arguments], code, *printed)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.communicate()


def _serve(modules: Sequence[str]) -> None:
    for name in modules:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a fork would touch, and so copy, the parent's pages
    context = multiprocessing.get_context("fork")
    for line in sys.stdin:
        # A multiprocessing process ends without the exit handlers of the parent's imports.
        script = context.Process(target=_become, args=json.loads(line))
        script.start()
        script.join(_TIMEOUT)
        script.kill()
        script.join()
        print(script.exitcode, flush=True)


def _become(
    script: str, arguments: list[str], cwd: str, environment: Any, out: str, err: str
) -> None:
    """Run the script in this process."""
    for file, flags, number in (
        (os.devnull, os.O_RDONLY, 0),
        (out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 1),
        (err, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 2),
    ):
        os.dup2(os.open(file, flags, 0o666), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:] = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    _serve(sys.argv[1:])
