"""How tests are run: with Triton's interpreter, unless ``-m`` selects tests marked ``gpu`` only.

The fixtures are in ``support.fixtures``.
"""

import atexit
import gc
import os
import sys
from pathlib import Path

import pytest
from support.selected_marks import command_line, selects_only

IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ

# Triton reads this when it is imported, so it is set before anything imports Triton. An xdist
# worker inherits it from the process that started it, which knows the command line.
os.environ["TRITON_INTERPRET"] = (
    os.environ["TRITON_INTERPRET"]
    if IS_WORKER
    else str(int(not selects_only("gpu", command_line(sys.argv[1:]))))
)
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # required by torch for deterministic cuBLAS
if IS_WORKER:
    os.environ["OMP_NUM_THREADS"] = "1"  # one core for each worker and its subprocesses
# Without this, Inductor spends seconds on compiling a program that tests the CPU's vector unit.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")


def pytest_addoption(parser):
    """Add the option that replaces a GPU."""
    parser.addoption(
        "--simulated-card",
        action="store_true",
        help="run the tests marked gpu (-m gpu) on a simulated card; see tests/simulated_card",
    )


def pytest_configure(config):
    """Keep the order of the tests under xdist, and stop when a worker ends.

    By default xdist starts with the files of most tests. A worker ends when a test hangs (see
    ``faulthandler_timeout``); xdist would otherwise start up to eight more workers, and run the
    hanging test in each.
    """
    config.option.loadscopereorder = False
    config.option.maxworkerrestart = "0"
    # The main process of xdist runs no tests, so it does not import the fixtures, and torch.
    has_workers = config.getoption("dist", "no") != "no" and not config.option.collectonly
    if IS_WORKER or not has_workers:
        if config.option.simulated_card:
            if os.environ["TRITON_INTERPRET"] != "0":
                raise pytest.UsageError("--simulated-card: select the tests by -m gpu")
            config.pluginmanager.import_plugin("simulated_card.plugin")
        config.pluginmanager.import_plugin("support.fixtures")


def pytest_collection_modifyitems(items):
    """Run the tests of whole programs first: they are few and long, and would delay the end.

    Files that run functions on ranks are last, since the idle ranks of a pool keep a core busy: the
    threads of each process group wake up a hundred times a second.
    """
    on_ranks = {item.path for item in items if "with_what_ranks_import" in item.fixturenames}
    first = Path(__file__).parent
    items.sort(key=lambda item: (item.path.parent != first, item.path in on_ranks))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection():
    """Exclude what exists before the first test from garbage collection.

    With ten thousand tests and torch imported, a collection takes a second each time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
        gc.set_threshold(10_000, 50, 100)  # collect less often
        # Libraries that count their objects at exit would report the frozen ones as leaks.
        atexit.register(gc.unfreeze)
