"""The compiler in the background: its priority, its end, and other processes."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ampopt_kernels.native.build import Library
from ampopt_kernels.native.cache import CLAIM

COMPILER = """#!/bin/sh
sh -c 'trap "echo > {folder}/ended; exit" TERM; echo > {folder}/started; sleep 60 & wait' &
wait
"""
PROGRAM = """
import pathlib, sys, time
from ampopt_kernels.native.build import Library

Library("").start()
while not pathlib.Path(sys.argv[1], "started").exists():
    time.sleep(0.01)
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


def test_what_another_process_is_compiling_is_left_to_it(starts):
    ours, theirs = Library(SOURCE), Library(SOURCE)
    theirs.start()
    ours.start()
    assert not ours.ready()
    assert theirs.load().answer() == 42
    assert ours.ready() and ours.load().answer() == 42
    assert len(starts()) == 1


def test_a_caller_that_must_wait_does_not_wait_for_another_process(starts):
    ours, theirs = Library(SOURCE), Library(SOURCE)
    theirs.start()
    assert ours.load().answer() == theirs.load().answer() == 42
    assert len(starts()) == 2


def test_another_process_that_does_not_finish_is_given_up(starts, own_cache):
    ours, theirs = Library(SOURCE), Library(SOURCE)
    theirs.start()
    (claim,) = own_cache.glob("*.claim")
    then = time.time() - 2 * CLAIM
    os.utime(claim, (then, then))
    ours.start()
    assert ours.load().answer() == theirs.load().answer() == 42
    assert len(starts()) == 2
    assert [path.suffix for path in own_cache.iterdir()] == [".so"]


def test_a_background_compiler_has_a_lower_priority(starts):
    library = Library(SOURCE)
    library.start()
    process = library._process
    assert process is not None and os.getpriority(os.PRIO_PGRP, process.pid) >= 5
    assert library.load().answer() == 42 and len(starts()) == 1


def test_a_compiler_that_can_wait_takes_what_time_is_left_until_somebody_waits_for_it(
    starts, own_cache, tmp_path
):
    compiler, counted = Path(os.environ["CXX"]), tmp_path / "starts"
    slow = f"[ $(wc -l < {counted}) -eq 1 ] && sleep 60\nexec"
    compiler.write_text(compiler.read_text().replace("exec", slow))
    library = Library(SOURCE, can_wait=True)
    library.start()
    process, until = library._process, time.monotonic() + 10
    while not counted.exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert process is not None and os.getpriority(os.PRIO_PGRP, process.pid) == 19
    assert not library.ready()
    assert library.load().answer() == 42  # of one that was started again
    assert process.poll() is not None and len(starts()) == 2
    assert [path.suffix for path in own_cache.iterdir()] == [".so"]
