"""A compiler that works beside the program."""

import os
import subprocess
import sys
import time

import pytest

COMPILER = """#!/bin/sh
sh -c 'trap "echo > {folder}/ended; exit" TERM; echo > {folder}/started; sleep 60 & wait' &
wait
"""
PROGRAM = """
import pathlib, sys, time
from ampopt_kernels.cpu.build import Library

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
