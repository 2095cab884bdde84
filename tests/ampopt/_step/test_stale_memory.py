"""The memory of tensors that were replaced between steps is freed by a garbage collection."""

import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from support.object_loops import need_object_loops
from support.tensor_only_optimizers import Foreach
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

import ampopt
from ampopt.testing.bits import bits, state_of

pytestmark = pytest.mark.usefixtures("loops")


@pytest.fixture
def loops():
    need_object_loops()


@pytest.fixture
def made(request: Any) -> Callable[[], Any]:
    """Makes an optimizer of two parameters that has taken steps."""
    if request.param is Foreach:
        request.getfixturevalue("as_on_a_device")
    options: Any = {}
    dtype = torch.float32
    if request.param is ampopt.AdamW:
        options, dtype = {"master_weights": True}, torch.bfloat16

    def make() -> Any:
        optimizer = request.param(
            [Parameter(torch.ones(n, dtype=dtype)) for n in (3, 4)], **options
        )
        step(optimizer, 4)
        return optimizer

    return make


def step(optimizer: Any, n: int = 1) -> None:
    for _ in range(n):
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.linspace(-1.0, 1.0, p.numel(), dtype=p.dtype)
        optimizer.unscale_and_step(grads_scaled_by=1.0)
        optimizer.zero_grad()


def offload(optimizer: Any) -> list[StorageWeakRef]:
    """Replace every state, and the memory of every parameter; return references to the old."""
    old = []
    for p, state in optimizer.state.items():
        old.append(StorageWeakRef(p.untyped_storage()))
        p.data = p.data.clone()
        for key in state:
            old.append(StorageWeakRef(state[key].untyped_storage()))
            state[key] = state[key].clone()
    return old


EACH = pytest.mark.parametrize("made", [ampopt.AdamW, Foreach], indirect=True)


@EACH
def test_a_collection_frees_what_was_replaced(made):
    optimizer, twin = made(), made()
    old = offload(optimizer)
    assert not all(ref.expired() for ref in old)
    gc.collect()
    assert all(ref.expired() for ref in old)
    step(optimizer, 2)
    step(twin, 2)
    assert bits(optimizer.param_groups[0]["params"]) == bits(twin.param_groups[0]["params"])
    assert state_of(optimizer) == state_of(twin)


@EACH
def test_a_collection_leaves_alone_what_the_next_step_needs(made):
    optimizer = made()
    ours = optimizer._ampopt
    kept = ours.runner.plan if ours.runner else ours.skip_policy._kept
    gc.collect()
    step(optimizer)
    assert (ours.runner.plan if ours.runner else ours.skip_policy._kept) is kept


@EACH
def test_an_optimizer_without_references_is_freed(made):
    made()  # torch imports some of its modules in a first step, and keeps frames alive
    gc.collect()
    gc.disable()
    try:
        optimizer = made()
        gone, ours = weakref.ref(optimizer), optimizer._ampopt
        del optimizer
        assert gone() is None
    finally:
        gc.enable()
    raised: list[Any] = []
    with mock.patch.object(sys, "unraisablehook", raised.append):
        gc.collect()  # asks nothing of the optimizer that is gone
    assert ours.optimizer is None and not raised
