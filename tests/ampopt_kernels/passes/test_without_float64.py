"""A step on a device that has no float64, such as Metal."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.kernel_rows import WorkPlan, works
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ampopt_kernels import eager, step, torch_language
from ampopt_kernels.eager import Eager
from ampopt_kernels.next_scale import PolicyConstants
from ampopt_kernels.step import run
from ampopt_kernels.step_data import Request
from ampopt_kernels.step_tensors import Work


class NoFloat64(TorchDispatchMode):
    """Raises if an operation makes a float64 tensor, as Metal does."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float64:
                raise AssertionError(f"{func} made a float64 tensor")
        return result


@pytest.fixture(scope="module")
def metal():
    """Treat the CPU as a device without float64."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (eager, step, torch_language):
            patch.setattr(module, "widest", lambda device: torch.float32)
        # Square roots of the CPU alone go by way of float64.
        patch.setattr(torch_language, "_ROOTS_BY_FLOAT64", frozenset())
        yield


@given(
    plan=works().filter(lambda plan: all(row.dtype != torch.float64 for row in plan.rows)),
    max_norm=st.sampled_from([None, 0.5]),
    overflow=st.booleans(),
)
@pytest.mark.usefixtures("metal")
def test_a_step_makes_no_float64(plan: WorkPlan, max_norm, overflow):
    built = plan.build()
    policy = PolicyConstants(2.0, 0.5, 1.0, 1.0, 1.0, 1.0, 0.0, 2.0**-126, float("inf"))
    request = Request(
        scale=torch.tensor(2.0),
        policy=policy,
        counters=torch.zeros(2, dtype=torch.int32),
        found_inf=torch.tensor(float(overflow)),
        max_norm=max_norm,
    )
    gradients_alone = Work(built.work.device, built.rows, built.grads)
    before = built.fingerprints()
    with NoFloat64():
        decision = run(lambda _: Eager(), [built.work], request)
        run(lambda _: Eager(), [gradients_alone], Request(write=True))
    assert (decision.found_inf > 0).item() == overflow
    assert decision.scale is not None
    assert decision.scale.item() == (1.0 if overflow else 4.0)
    if overflow:
        assert built.fingerprints() == before
