"""The declaration of a rule: what it computes, and which mistakes are refused."""

import itertools
from typing import Any

import pytest
import torch

from ampopt_kernels import (
    Rule,
    State,
    jit,
    rules,
)
from evidence.aot import count_hyper


@jit
def update(p, g, state, h, flags):
    return p - h[0] * g, state


@jit
def scalars(s, h):
    return (s[0] + 1,), (*h, s[0])


def plain(p, g, state, h, flags):
    return p, state


RULE = Rule(
    update=update,
    scalars=scalars,
    hyper=("lr", "betas", "eps"),
    flags=("fast", "decay"),
    state=(State("a"), State("b", init=2.0, when="fast")),
    scalar_state=(State("step"), State("count", when="decay")),
)
GROUP = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "fast": True, "decay": 0.0, "params": []}


@pytest.mark.parametrize("role", ["update", "scalars"])
def test_functions_must_be_marked(role):
    functions = {"update": update, "scalars": scalars, role: plain}
    with pytest.raises(TypeError, match=rf"Rule {role} must be .* marked with @ampopt_kernels.jit"):
        Rule(hyper=("lr",), **functions)


@pytest.mark.parametrize(
    ("role", "slip", "example"),
    [
        ("hyper", ("lr"), r'a tuple of str, such as \("lr",\), got \'lr\''),
        ("hyper", ["lr"], r"got \['lr'\]"),
        ("hyper", ("lr", 0.9), r"got \('lr', 0.9\)"),
        ("flags", ("amsgrad"), r"a tuple of str.*got 'amsgrad'"),
        ("state", State("mean"), r'a tuple of State, such as \(State\("exp_avg"\),\), got State'),
        ("state", ("mean",), r"got \('mean',\)"),
        ("scalar_state", "step", "a tuple of State.*got 'step'"),
    ],
)
def test_what_is_no_tuple_is_named_with_the_comma_that_makes_one(role, slip, example):
    with pytest.raises(TypeError, match=f"Rule {role} must be .*{example}.*the comma"):
        Rule(**{"update": update, "hyper": ("lr",), role: slip})


@pytest.mark.parametrize("where", ["state", "scalar_state"])
def test_a_condition_must_be_a_flag(where):
    kwargs: Any = {where: (State("a", when="fats"),)}
    with pytest.raises(ValueError, match=r"'a' exists when 'fats'.*\('fast',\).*add it to flags"):
        Rule(update=update, hyper=("lr",), flags=("fast",), **kwargs)


def test_reads_a_group():
    assert RULE.flag_values(GROUP) == (True, False)
    assert RULE.hyper_values(GROUP) == [0.1, 0.9, 0.99, 1e-8]


def test_a_tensor_is_on_whatever_it_holds():
    """The value of a flag is known without reading a device."""
    off = torch.zeros((), device="meta")
    assert RULE.flag_values({**GROUP, "decay": off}) == (True, True)


def test_tensors_among_hyperparameters_stay_tensors():
    rate = torch.tensor(0.5)
    assert RULE.hyper_values({**GROUP, "lr": rate})[0] is rate


@pytest.mark.parametrize(("reads", "missing"), [("flag_values", "decay"), ("hyper_values", "eps")])
def test_a_missing_entry_is_named(reads, missing):
    group = {k: v for k, v in GROUP.items() if k != missing}
    with pytest.raises(KeyError, match=f"reads '{missing}' from each param group.*defaults"):
        getattr(RULE, reads)(group)


def test_states_exist_under_their_flags():
    def names(parts):
        return [part.name for part in parts]

    assert names(RULE.state_for((True, False))) == ["a", "b"]
    assert names(RULE.state_for((False, True))) == ["a"]
    assert names(RULE.scalar_state_for((True, False))) == ["step"]
    assert names(RULE.scalar_state_for((False, True))) == ["step", "count"]


def test_width_is_what_scalars_return():
    assert RULE.widths(4).update == 5
    assert Rule(update=update, hyper=("lr",)).widths(3).update == 3


def test_without_scalars_hyperparameters_pass_through():
    rule = Rule(update=update, hyper=("lr",))
    assert rule.on_tensors("scalars", torch.float64)((), (0.1,)) == ((), (0.1,))


def test_runs_on_tensors():
    p, state = RULE.on_tensors("update", torch.float32)(
        torch.ones(2), torch.full((2,), 2.0), (), (0.25,), ()
    )
    assert p.tolist() == [0.5, 0.5]
    assert state == ()


@pytest.mark.parametrize("name", rules.__all__)
def test_built_in_rules_keep_to_what_they_declare(name):
    """The rule returns one new value for each state that its flags declare."""
    rule = getattr(rules, name)
    one = torch.ones((), dtype=torch.float64)
    n_hyper = count_hyper(rule, (False,) * len(rule.flags))
    for flags in itertools.product((False, True), repeat=len(rule.flags)):
        s, h, sums = (one,) * len(rule.scalar_state), (one * 0.5,) * n_hyper, ()
        states = rule.state_for(flags)
        state = (torch.ones(2),) * len(rule.inputs_for(flags))
        if rule.reduces:
            s, h = rule.torch_before_sums(s, h, flags)
            terms = rule.on_tensors("reduce", torch.float32)(*[torch.ones(2)] * 2, state, h, flags)
            assert all(t.shape == (2,) for t in terms)
            sums = (one,) * len(terms)
        s, h = rule.on_tensors("scalars", torch.float64)(s, h, flags, sums, sums)
        assert len(s) == len(rule.scalar_state)
        p, new = rule.on_tensors("update", torch.float32)(
            torch.ones(2), torch.ones(2), state, h, flags
        )
        assert len(new) == len(states)
        assert all(t.shape == (2,) for t in (p, *new))
