"""Every test runs under Triton's interpreter and with poisoned uninitialised memory."""

import os
from typing import Any

# Read by Triton when it is imported, so set before anything imports it.
os.environ["TRITON_INTERPRET"] = "1"

import hypothesis
import pytest
import torch

import ampopt
from ampopt_kernels.compiled import cpp_compiler
from ampopt_kernels.eager import Eager
from ampopt_kernels.language import HAS_TRITON

# Times vary with the machine, so no example has a deadline.
hypothesis.settings.register_profile("default", deadline=None, max_examples=40, print_blob=True)
hypothesis.settings.register_profile("long", deadline=None, max_examples=2000, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("AMPOPT_HYPOTHESIS_PROFILE", "default"))


if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # each of them has a core


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


@pytest.fixture(scope="module", params=["eager", "triton"])
def backend(request):
    """Each backend in turn; a test that takes it is one body over both.

    A test may name others: ``compiled``, and ``eager on a device``, where the host may not look at
    the eager backend's tensors, so that it has to select.
    """
    if request.param == "triton" and not HAS_TRITON:
        pytest.skip("Triton cannot be imported here")
    if request.param == "compiled" and cpp_compiler() is None:
        pytest.skip("there is no C++ compiler here")
    ampopt.set_backend(request.param.split()[0])
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "eager on a device":
            on_device = Eager(reads_cpu=False)
            patch.setattr("ampopt.backend._cpu_backend", lambda name: on_device)
        yield request.param
    ampopt.set_backend("auto")


@pytest.fixture
def process_group():
    """A world of one."""
    dist: Any = torch.distributed
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("this build of torch has no gloo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
