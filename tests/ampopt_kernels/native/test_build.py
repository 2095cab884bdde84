"""The compiler of a thread in the background: its priority, its end, and other threads."""

import os
import subprocess
import sys
import threading
import time

import pytest

from ampopt_kernels.native.build import Library

COMPILER = """#!/bin/sh
sh -c 'trap "echo > {folder}/ended; exit" TERM; echo > {folder}/started; sleep 60 & wait' &
wait
"""
PROGRAM = """
import os, pathlib, sys, threading, time
from ampopt_kernels.native.build import Library

threading.Thread(target=Library("").load, daemon=True).start()
while not pathlib.Path(sys.argv[1], "started").exists():
    time.sleep(0.01)
if pid := os.fork():  # the fork ends first, and ends nothing
    os.waitpid(pid, 0)
    if pathlib.Path(sys.argv[1], "ended").exists():
        os._exit(1)
"""


@pytest.mark.skipif(os.name != "posix", reason="the compiler here is a shell script")
def test_a_program_that_ends_ends_its_compiler_and_all_that_it_has_started(tmp_path):
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER.format(folder=tmp_path))
    compiler.chmod(0o755)
    environment = {**os.environ, "CXX": str(compiler), "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    subprocess.run(command, env=environment, check=True, timeout=100)
    until = time.monotonic() + 10
    while not (tmp_path / "ended").exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert (tmp_path / "ended").exists()
    assert not list((tmp_path / "ampopt").iterdir())


SOURCE = 'extern "C" int answer() { return 42; }'


def test_threads_may_load_a_library_at_once(starts, own_cache):
    answers = []
    libraries = [Library(SOURCE)] * 2 + [Library(SOURCE)]
    threads = [
        threading.Thread(target=lambda library=library: answers.append(library.load().answer()))
        for library in libraries
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [42] * 3 and 1 <= len(starts()) <= 3
    assert [path.suffix for path in own_cache.iterdir()] == [".so"]


@pytest.mark.skipif(os.name != "posix", reason="processes here have no niceness")
@pytest.mark.parametrize("niceness", [0, 19])
def test_a_compiler_has_the_priority_that_is_asked_for(niceness, tmp_path, monkeypatch, own_cache):
    expected = niceness or os.nice(0)
    compiler = tmp_path / "compiler"
    wait = f"for i in $(seq 200); do [ $(nice) = {expected} ] && break; sleep 0.05; done"
    compiler.write_text(f"#!/bin/sh\n{wait}; nice > {tmp_path}/niceness; exit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(RuntimeError, match="the compiler failed: exit status 1"):
        Library(SOURCE).load(niceness)
    assert int((tmp_path / "niceness").read_text()) == expected


@pytest.mark.skipif(os.name != "posix", reason="needs a command that does nothing")
def test_a_command_that_compiles_nothing_is_called_a_compiler_that_failed(monkeypatch, own_cache):
    monkeypatch.setenv("CXX", "true")
    with pytest.raises(RuntimeError, match="the compiler failed: exit status 0, and no library"):
        Library(SOURCE).load()
