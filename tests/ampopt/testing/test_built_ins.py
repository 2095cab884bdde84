"""Every built-in optimizer keeps the contract, on every backend that runs here."""

from typing import Any

import torch
from hypothesis import strategies as st
from support.contracts import INTERPRETED, OF_ONE_KERNEL, OF_ONE_RULE, OTHERS, Small, contract_of
from support.optimizers import BEYOND_TORCH, BUILT_IN, BY_RULE
from support.strategies import fewer
from support.torch_options import RICH

import ampopt
from ampopt.testing import strategies

SPARSE: dict[str, Any] = {
    "dense_gradients": False,
    "sparse_gradients": True,
    "layout_changes_no_bit": False,  # torch rounds otherwise for a strided parameter
    "tensor_learning_rates": False,  # torch's Adagrad divides one in float32
    "half_precision": (),
    "complex_parameters": False,
    "sync_free": False,
    "shapes": strategies.shapes(min_dims=1, max_dims=2, min_side=1),
}


def of_one_compilation(cls: type[ampopt.ElementwiseOptimizer]) -> st.SearchStrategy[dict[str, Any]]:
    """Any numbers; of the flags, those with most state: only flags need another compilation."""
    (richest,) = (options for options in RICH if options.name == cls.__name__)
    group = richest.torchs([torch.ones(())]).defaults
    structure = (*cls.rule.flags, "dampening")  # which SGD's nesterov forbids
    return strategies.hyperparameters(cls).map(
        lambda drawn: {k: group[k] if k in structure else v for k, v in drawn.items()}
    )


OF_THEIR_OWN = (
    *(ampopt.AdamW, ampopt.Muon, ampopt.SparseAdam, ampopt.LBFGS),
    *(ampopt.ScheduleFreeAdamW, ampopt.Sophia),
)
"""One of each kind of step: by a rule, by torch, of sparse gradients, of a closure; and rules whose
classes have more methods than a constructor."""
ON_KERNELS = (ampopt.AdamW, ampopt.Adafactor, ampopt.SparseAdam, ampopt.LBFGS)
"""One of each kind of passes: with states, with row statistics; over values of sparse gradients,
and before a step by torch."""


def on_eager(cls: type[Any], suffix: str = "", **claims: Any) -> Any:
    """The contract on the eager backend: all of it for one of each kind, else a part."""
    others = {} if cls in OF_THEIR_OWN else OF_ONE_RULE
    return contract_of(cls, suffix, **others, backend="eager", settings=fewer(0.075), **claims)


def on_kernels(cls: type[Any], suffix: str, bases: tuple[Any, ...] = (), **claims: Any) -> Any:
    """The contract on another backend than eager: the invariants that kernels can break."""
    # Each of LBFGS's takes a closure.
    others = {} if cls is ampopt.LBFGS else OTHERS
    if cls not in ON_KERNELS:
        others = {**others, **OF_ONE_KERNEL}
    return contract_of(cls, suffix, bases, **others, **claims)


# Each example as on the CPU; a way as on a device is Triton's own, and eager's.
TRITON: dict[str, Any] = {"backend": "triton", "on_device": (False,), "settings": INTERPRETED}
COMPILED: dict[str, Any] = {"backend": "compiled", "on_device": (False,), "settings": fewer(0.1)}
# What is compiled is fast, and has elements. Of the dtypes of half precision, which each take a
# compilation, steps/test_compiled.py has the other.
COMPILED_RULE: dict[str, Any] = {
    **COMPILED,
    "settings": fewer(0.25),
    "shapes": strategies.shapes(min_dims=1, min_side=1, boundaries=(64,)),
    "half_precision": (torch.bfloat16,),
}
CONTRACTS = [
    *map(on_eager, (*BUILT_IN, *BEYOND_TORCH)),
    on_eager(ampopt.SGD, "Sparse", **SPARSE),
    on_eager(ampopt.Adagrad, "Sparse", **SPARSE),
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
