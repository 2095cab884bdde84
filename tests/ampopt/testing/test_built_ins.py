"""Every built-in optimizer keeps the contract, on every backend that runs here."""

from typing import Any

import pytest
import torch
from contracts import BUILT_IN, Small, contract_of
from hypothesis import strategies as st
from strategies import fewer

import ampopt
from ampopt.testing import OptimizerContract, strategies
from ampopt_kernels.compiled import cpp_compiler
from ampopt_kernels.language import HAS_TRITON


@pytest.fixture(autouse=True, scope="class")
def backend(request):
    """The backend that the contract is about."""
    name = request.cls.backend
    if name == "triton" and not HAS_TRITON:
        pytest.skip("Triton cannot be imported here")
    if name == "compiled" and cpp_compiler() is None:
        pytest.skip("there is no C++ compiler here")
    ampopt.set_backend(name)
    yield
    ampopt.set_backend("auto")


OF_KERNELS = (
    "a_finite_gradient_is_never_skipped",
    "a_power_of_two_changes_no_bit",
    "a_scale_on_the_device_that_is_no_scale_skips",
    "a_skipped_step_changes_nothing",
    "a_sum_of_flags_skips",
    "any_sequence_of_calls",
    "clipping_does_not_depend_on_the_scale",
    "complex_parameters",
    "gradients_are_judged_after_unscaling",
    "half_precision_parameters",
    "layout_does_not_matter",
    "max_norm_is_clip_grad_norm",
    "no_control_point_waits_for_the_device",
    "order_and_groups_of_parameters_do_not_matter",
    "split_is_joined",
    "the_scale_follows_its_schedule_within_its_bounds",
    "training_goes_on_as_if_skipped_steps_had_never_been",
    "unscale_divides_gradients_by_the_scale",
)
"""The invariants that kernels can break; the others are kept above them, and tested with eager."""
OTHERS = {
    name: None
    for name in dir(OptimizerContract)
    if name.startswith("test_") and name.removeprefix("test_") not in OF_KERNELS
}
# Each example as on the CPU; a way as on a device is Triton's own, and eager's.
KERNELS: dict[str, Any] = {**OTHERS, "on_device": (False,)}
SPARSE: dict[str, Any] = {
    "dense_gradients": False,
    "sparse_gradients": True,
    "layout_changes_no_bit": False,  # torch rounds otherwise for a strided parameter
    "half_precision": (),
    "complex_parameters": False,
    "sync_free": False,
    "shapes": strategies.shapes(min_dims=1, max_dims=2, min_side=1),
}
# Compiling takes seconds for each set of flags and each dtype.
COMPILED: dict[str, Any] = {
    **KERNELS,
    "backend": "compiled",
    "options": st.just({"lr": 0.125, "weight_decay": 0.25}),
    "dtypes": (torch.float32,),
    "half_precision": (),
    "complex_parameters": False,
}
BY_RULE = [cls for cls in BUILT_IN if issubclass(cls, ampopt.ElementwiseOptimizer)]
EAGER = {"backend": "eager", "settings": fewer(0.075)}
TRITON = {**KERNELS, "backend": "triton", "settings": fewer(0.05)}
CONTRACTS = [
    *(contract_of(cls, "", (), **EAGER) for cls in BUILT_IN),
    contract_of(ampopt.SGD, "Sparse", (), **SPARSE, **EAGER),
    contract_of(ampopt.Adagrad, "Sparse", (), **SPARSE, **EAGER),
    *(contract_of(cls, "OnTriton", (Small,), **TRITON) for cls in BY_RULE),
    contract_of(ampopt.AdamW, "Compiled", (Small,), **{**EAGER, **COMPILED}),
]

for _contract in CONTRACTS:
    _contract.__module__ = __name__
    globals()[_contract.__name__] = _contract
