"""How tests are run: unless ``-m`` asks for ``gpu``, in Triton's interpreter.

What they are given is in ``support.fixtures``.
"""

import atexit
import gc
import os
import sys
from pathlib import Path

import pytest
from support.selected_marks import command_line, selects_only

IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ

# Read by Triton when it is imported, so set before anything imports it. A worker of xdist's has it
# from the process that started it, which knows the command line.
os.environ["TRITON_INTERPRET"] = (
    os.environ["TRITON_INTERPRET"]
    if IS_WORKER
    else str(int(not selects_only("gpu", command_line(sys.argv[1:]))))
)
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read by CUDA; torch asks it of who wants bits
if IS_WORKER:
    os.environ["OMP_NUM_THREADS"] = "1"  # each has a core, and so has what it starts
# Else Inductor compiles a program, for seconds, to see that the CPU has the vectors it says it has.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")


def pytest_configure(config):
    """Have xdist keep the order of the tests, where it would begin with the files of most.

    And have it stop where a worker ends, which in a test that hangs is its end: see
    ``faulthandler_timeout``. Else that test would be run, and hang, in eight more of them.
    """
    config.option.loadscopereorder = False
    config.option.maxworkerrestart = "0"
    # Where workers do all the work, nobody needs to wait for torch.
    has_workers = config.getoption("dist", "no") != "no" and not config.option.collectonly
    if IS_WORKER or not has_workers:
        config.pluginmanager.import_plugin("support.fixtures")


def pytest_collection_modifyitems(items):
    """Whole programs first: few and long, and other workers would wait for them at the end."""
    items.sort(key=lambda item: item.path.parent != Path(__file__).parent)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection():
    """What is there before the first test stays, so no collection of garbage has to look at it.

    With ten thousand tests, and torch, that would be a second each time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
        gc.set_threshold(10_000, 50, 100)  # and what tests leave is looked at less often
        # Else libraries that count what is left of theirs at the end would report leaks.
        atexit.register(gc.unfreeze)
