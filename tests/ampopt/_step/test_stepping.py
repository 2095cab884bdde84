"""``optimizer._ampopt``: when it is made, how long it lives, and what copies get."""

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from support.optimizers import Plain
from torch.nn import Parameter

import ampopt
from ampopt import AdamW, Muon
from ampopt._step.handwritten_step import HandwrittenStep
from ampopt._step.rule_step import RuleStep


class KeepsAll(Plain):
    """Copies and pickles every attribute that it has."""

    def __getstate__(self) -> dict[str, Any]:
        return vars(self).copy()


class AroundRule(AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def stepped(cls: Any) -> Any:
    param = Parameter(torch.ones(2, 2))
    param.grad = torch.ones(2, 2)
    optimizer = cls([param])
    optimizer.unscale_and_step(grads_scaled_by=2.0, max_norm=1.0)
    return optimizer


EACH = pytest.mark.parametrize("cls", [Plain, AdamW, AroundRule, Muon, KeepsAll])


@EACH
def test_an_optimizer_has_one_private_attribute_of_ours(cls):
    theirs = {"_zero_grad_profile_name", "_warned_capturable_if_run_uncaptured", "_opt_called"}
    names = {name for name in vars(stepped(cls)) if not name.startswith("_optimizer_")} - theirs
    assert {name for name in names if name.startswith("_")} == {"_ampopt"}
    assert not names & {"pending", "grad_norm", "found_inf", "skip_by"}
    assert {n for n in vars(ampopt.Optimizer) if n[0] == "_" != n[1]} == {
        *("_ampopt", "_step_supports_amp_scaling"),
        *("_optimizer_step_code", "_patch_step_function"),  # torch's own, extended
        *{n for n in vars(ampopt.Optimizer) if n.startswith("_abc")},
    }


@EACH
def test_an_optimizer_without_references_is_freed(cls):
    optimizer = stepped(cls)
    gone = [weakref.ref(optimizer), weakref.ref(optimizer.param_groups[0]["params"][0])]
    gc.collect()
    gc.disable()
    try:
        del optimizer
        assert [ref() for ref in gone] == [None, None]
    finally:
        gc.enable()


@EACH
@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))]
)
def test_a_copy_steps_itself_and_not_what_it_was_copied_from(cls, copied):
    optimizer = stepped(cls)
    other = copied(optimizer)
    assert other._ampopt.optimizer is other and other.pending is None
    optimizer.unscale(grads_scaled_by=1.0)
    assert other.pending is None
    with pytest.raises(RuntimeError, match="copying or pickling: an unscale is pending"):
        copied(optimizer) if cls is not KeepsAll else pickle.dumps(optimizer)


def test_a_wrapper_that_takes_over_all_attributes_steps_itself():
    optimizer = stepped(AdamW)

    class Wrapper(AdamW):
        def __init__(self, inner: Any) -> None:
            self.__dict__ = vars(inner).copy()

    wrapper = Wrapper(optimizer)
    assert wrapper._ampopt.optimizer is wrapper
    wrapper.unscale(grads_scaled_by=1.0)
    assert wrapper.pending is not None and optimizer.pending is None
    wrapper.step_after_unscale()
    assert optimizer._ampopt.optimizer is optimizer


def test_the_step_strategy_follows_from_the_class():
    assert type(stepped(AdamW)._ampopt) is RuleStep
    for cls in (Plain, AroundRule, Muon):
        assert type(stepped(cls)._ampopt) is HandwrittenStep
