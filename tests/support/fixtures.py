"""What every test is given: poisoned memory, its backend, Hypothesis's settings, ranks."""

import contextlib
import os
from typing import Any

import hypothesis
import pytest
import torch

import ampopt
from ampopt import backend as backends
from support import quick_hypothesis, quick_interpreter
from support.gpus import skip_without_gpu
from support.local_ranks import Ranks
from support.requirements import skip_unless_it_runs

# Times vary with the machine, so no example has a deadline. By default every run draws the same
# examples, so that what fails was changed; "long" looks for what nobody has met yet.
hypothesis.settings.register_profile(
    "default", deadline=None, max_examples=12, derandomize=True, print_blob=True
)
hypothesis.settings.register_profile("long", deadline=None, max_examples=2000, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("AMPOPT_HYPOTHESIS_PROFILE", "default"))

quick_hypothesis.make_it_quick()
quick_interpreter.make_it_quick()


@pytest.fixture(autouse=True, scope="session")
def poisoned_memory():
    """``torch.empty`` gives NaN, so that whoever reads what nobody wrote is found out."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # pyright: ignore
    assert torch.empty(3).isnan().all()


@pytest.fixture(autouse=True, scope="session")
def checked_sparse_tensors():
    """Else torch warns of sparse tensors that it makes itself."""
    torch.sparse.check_sparse_tensor_invariants.enable()


@pytest.fixture(autouse=True, scope="session")
def guards_untimed():
    """Else torch's compiler times the guards of each graph, for its log, in a flushed cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch._dynamo.guards.profile_guard_manager", lambda *_: 0.0)
        yield


@pytest.fixture(autouse=True, scope="module")
def backend_of_the_environment():
    """What a file chooses is for it alone: even ``set_backend("auto")`` hides AMPOPT_BACKEND."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ampopt.backend._chosen", None)
        yield


@pytest.fixture(scope="module", params=["eager", "triton"])
def backend(request):
    """Each backend in turn; a test that takes it is one body over both.

    A test may name others: ``compiled``, ``eager on a device``, where the host may not look at the
    eager backend's tensors, so that it has to select, and ``ON_A_GPU`` of ``support.gpus``.
    """
    if "GPU" in request.param:
        skip_without_gpu()
    skip_unless_it_runs(request.param)
    return request.param


@pytest.fixture(autouse=True)
def backend_of_the_test(request):
    """The ``backend`` that a test takes, if it does; what it chooses is for it alone, too.

    Apart from ``backend``, which one test after another shares: between them, others may run.
    """
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setattr("ampopt.backend._chosen", backends._chosen)
        if "backend" in request.fixturenames:
            name = request.getfixturevalue("backend")
            ampopt.set_backend(name.split()[0])
            if name == "eager on a device":
                stack.enter_context(backends.host_looking_away())
            if "GPU" in name:
                stack.enter_context(torch.device("cuda"))
        yield


@pytest.fixture
def process_group():
    """A world of one, which outlives the models of the test; see ``ampopt.matrix.spread``."""
    dist: Any = torch.distributed
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("this build of torch has no gloo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    held = dist.group.WORLD
    yield
    dist.destroy_process_group()
    del held


def _pool(n: int):
    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        pytest.skip("this build of torch has no gloo")
    ranks = Ranks(n)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def two_ranks():
    """Two processes that have met; see ``support.local_ranks``."""
    yield from _pool(2)


@pytest.fixture(scope="session")
def four_ranks():
    """Four of them."""
    yield from _pool(4)
