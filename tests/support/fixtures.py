"""Fixtures of every test: filled memory, the backend, Hypothesis profiles, processes."""

import contextlib
import functools
import os
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis.internal import reflection
from hypothesis.internal.conjecture import providers

import ampopt
from ampopt import backend as backends
from ampopt.testing.pretended_device import as_on_a_device
from ampopt_kernels.native import build, objects
from support import quick_interpreter
from support.gpus import DEVICE, skip_without_gpu
from support.local_ranks import Ranks, preloaded_for_ranks
from support.object_loops import need_object_loops
from support.preloaded import Preloaded
from support.requirements import skip_unless_it_runs

# Times vary with the machine, so no example has a deadline. By default every run draws the same
# examples, so that a new failure comes from a change; "long" and "minute" search for new failures.
hypothesis.settings.register_profile(
    "default", deadline=None, max_examples=12, derandomize=True, print_blob=True
)
hypothesis.settings.register_profile("long", deadline=None, max_examples=2000, print_blob=True)
hypothesis.settings.register_profile("minute", deadline=None, max_examples=40, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("AMPOPT_HYPOTHESIS_PROFILE", "default"))
# It takes the source of a test apart to seed its examples, which takes as long as a small example.
reflection._clean_source = functools.cache(reflection._clean_source)
# Hypothesis draws constants out of the source of all modules of ours that are imported by then, so
# that the examples of a test would depend on which tests its worker ran before.
if hypothesis.settings().derandomize and hasattr(providers, "_get_local_constants"):
    providers._get_local_constants = lambda: providers._local_constants

quick_interpreter.make_it_quick()
# Hundreds of rules, dtypes and flags are compiled, twice as fast with few optimizations. Those of
# users change no bit, as tests/ampopt_kernels/cpu shows, which has them.
build.SPEED["-O"] = "-O1"
# Without checks of sparse tensors, torch warns of them, also of those that it makes itself.
torch.sparse.check_sparse_tensor_invariants.enable()


@pytest.fixture(autouse=True, scope="session")
def poisoned_memory():
    """Fill ``torch.empty`` with NaN, so that reads of uninitialized memory show."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # pyright: ignore
    assert torch.empty(3).isnan().all()


@pytest.fixture(autouse=True, scope="session")
def guards_untimed():
    """Keep torch's compiler from timing the guards of each graph for its log."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch._dynamo.guards.profile_guard_manager", lambda *_: 0.0)
        yield


@pytest.fixture(autouse=True, scope="session")
def stacks_unformatted():
    """Keep ``torch.manual_seed`` from formatting the stack for CUDA and for XPU each time.

    Torch would show it if either could not be initialized later.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("traceback.format_stack", lambda *_, **__: [])
        yield


@pytest.fixture(autouse=True, scope="module")
def backend_of_the_environment():
    """Undo a file's ``set_backend``, which even as ``"auto"`` would override AMPOPT_BACKEND."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ampopt.backend._chosen", None)
        yield


@pytest.fixture(scope="module", params=["eager", "triton"])
def backend(request):
    """Each backend in turn; a test that uses this fixture runs on all of them.

    A test may select others by ``indirect`` parameters: ``compiled``, ``eager on a device``, in
    which the host must not read tensors, and ``ON_A_GPU`` of ``support.gpus``.
    """
    return _if_it_runs(request.param)


@pytest.fixture(scope="module", params=["eager", "eager on a device"])
def either_host(request):
    """The backend of files about what is above backends: those differ in what the host may read.

    Such a file has the line ``backend = either_host``.
    """
    return _if_it_runs(request.param)


def _if_it_runs(name: str) -> str:
    if "GPU" in name:
        skip_without_gpu()
    skip_unless_it_runs(name)
    return name


@pytest.fixture(params=["native", "python"])
def implementation(request, monkeypatch):
    """Checks of many objects: in one call of C++, or in a loop of Python."""
    if request.param == "python":
        monkeypatch.setattr(objects, "loops", objects.Loops())
    else:
        need_object_loops()


@pytest.fixture(autouse=True)
def backend_of_the_test(request):
    """Set the backend of the ``backend`` fixture, if the test uses it, and restore it afterwards.

    This is apart from ``backend``, whose parameter several tests share: between them, others may
    run.
    """
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setattr("ampopt.backend._chosen", backends._chosen)
        backends._of_environment.cache_clear()  # a test may change the environment
        if "backend" in request.fixturenames:
            name = request.getfixturevalue("backend")
            ampopt.set_backend(name.split()[0])
            if name == "eager on a device":
                stack.enter_context(as_on_a_device())
            if "GPU" in name:
                stack.enter_context(torch.device(DEVICE))
        yield
    backends._of_environment.cache_clear()


@pytest.fixture
def process_group():
    """A gloo group of one process that outlives a test's models; see ``evidence.matrix.spread``."""
    dist: Any = torch.distributed
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("this build of torch has no gloo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    yield
    dist.destroy_process_group()
    del group


@pytest.fixture(scope="session")
def with_torch():
    """A process that has imported torch, but neither ampopt nor Triton; see ``Preloaded``."""
    modules = ["torch.distributed.tensor", "torch.distributed.checkpoint", "hypothesis", "pytest"]
    with contextlib.closing(Preloaded(modules, os.environ)) as server:
        yield server


@pytest.fixture(scope="session")
def with_what_ranks_import(with_torch):
    """A process that is forked for each rank; see ``support.local_ranks``."""
    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        pytest.skip("this build of torch has no gloo")
    with contextlib.closing(preloaded_for_ranks(with_torch)) as server:
        yield server


@pytest.fixture(scope="session")
def two_ranks(with_what_ranks_import):
    """A pool of two processes with a process group; see ``support.local_ranks``."""
    with contextlib.closing(Ranks(2, with_what_ranks_import)) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def four_ranks(with_what_ranks_import):
    """A pool of four processes with a process group."""
    with contextlib.closing(Ranks(4, with_what_ranks_import)) as ranks:
        yield ranks
