"""Every built-in optimizer keeps the contract, on every backend that runs here."""

from typing import Any

import torch
from contracts import BUILT_IN, Small, contract_of
from hypothesis import strategies as st
from strategies import fewer
from torch_options import RICH

import ampopt
from ampopt.testing import OptimizerContract, strategies

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
SPARSE: dict[str, Any] = {
    "dense_gradients": False,
    "sparse_gradients": True,
    "layout_changes_no_bit": False,  # torch rounds otherwise for a strided parameter
    "half_precision": (),
    "complex_parameters": False,
    "sync_free": False,
    "shapes": strategies.shapes(min_dims=1, max_dims=2, min_side=1),
}


def of_one_compilation(cls: type[ampopt.ElementwiseOptimizer]) -> st.SearchStrategy[dict[str, Any]]:
    """Any numbers, but the flags that bring most state: compiled code differs by flags alone."""
    (richest,) = (options for options in RICH if options.name == cls.__name__)
    group = richest.torchs([torch.ones(())]).defaults
    structure = (*cls.rule.flags, "dampening")  # which SGD's nesterov forbids
    return strategies.hyperparameters(cls).map(
        lambda drawn: {k: group[k] if k in structure else v for k, v in drawn.items()}
    )


def on_kernels(cls: type[Any], suffix: str, bases: tuple[Any, ...] = (), **claims: Any) -> Any:
    """The contract on a backend other than eager: what kernels can break."""
    # Each of LBFGS's takes a closure.
    others = {} if cls is ampopt.LBFGS else OTHERS
    return contract_of(cls, suffix, bases, **others, **claims)


EAGER: dict[str, Any] = {"backend": "eager", "settings": fewer(0.075)}
# Each example as on the CPU; a way as on a device is Triton's own, and eager's.
TRITON: dict[str, Any] = {"backend": "triton", "on_device": (False,), "settings": fewer(0.05)}
COMPILED: dict[str, Any] = {"backend": "compiled", "on_device": (False,), "settings": fewer(0.1)}
BY_RULE = [cls for cls in BUILT_IN if issubclass(cls, ampopt.ElementwiseOptimizer)]
# What is compiled is fast, and has elements. Of the dtypes of half precision, which each take a
# compilation, test_compiled.py has the other.
COMPILED_RULE: dict[str, Any] = {
    **COMPILED,
    "settings": fewer(0.25),
    "shapes": strategies.shapes(min_dims=1, min_side=1, boundaries=(64,)),
    "half_precision": (torch.bfloat16,),
}
CONTRACTS = [
    *(contract_of(cls, "", (), **EAGER) for cls in BUILT_IN),
    contract_of(ampopt.SGD, "Sparse", (), **SPARSE, **EAGER),
    contract_of(ampopt.Adagrad, "Sparse", (), **SPARSE, **EAGER),
    *(on_kernels(cls, "OnTriton", (Small,), **TRITON) for cls in BUILT_IN),
    *(
        on_kernels(cls, "Compiled", (), options=of_one_compilation(cls), **COMPILED_RULE)
        for cls in BY_RULE
    ),
    *(on_kernels(cls, "Compiled", (), **COMPILED) for cls in BUILT_IN if cls not in BY_RULE),
]

for _contract in CONTRACTS:
    _contract.__module__ = __name__
    globals()[_contract.__name__] = _contract
