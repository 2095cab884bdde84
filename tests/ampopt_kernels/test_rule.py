"""The declaration of a rule: what it computes, and which mistakes are refused."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ampopt_kernels import (
    Rule,
    State,
    as_float32,
    div_rn,
    jit,
    maximum,
    minimum,
    power,
    rules,
    sign,
    sqrt_rn,
    tl,
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
    kwargs = {where: (State("a", when="fats"),)}
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
    assert RULE.width(4) == 5
    assert Rule(update=update, hyper=("lr",)).width(3) == 3


def test_without_scalars_hyperparameters_pass_through():
    rule = Rule(update=update, hyper=("lr",))
    assert rule.torch_scalars((), (0.1,)) == ((), (0.1,))


@jit
def every_function(s, h):
    (x,), (y,) = s, h
    of_one = (tl.abs(x), tl.ceil(x), tl.cos(x), tl.exp(x), tl.exp2(x), tl.floor(x), tl.log(x))
    of_one += (tl.log2(x), tl.rsqrt(x), tl.sigmoid(x), tl.sin(x), tl.sqrt(x), as_float32(x))
    of_two = (div_rn(x, y), maximum(x, y), minimum(x, y), power(x, y), tl.where(x > y, 0.3, 0.7))
    return (x + 1,), (*of_one, sign(x), sqrt_rn(x), *of_two)


@given(
    counts=st.lists(st.floats(-8, 8) | st.integers(0, 10**6).map(float), min_size=1, max_size=9),
    lr=st.floats(0.0625, 8),
)
def test_scalars_have_the_same_bits_for_one_parameter_as_among_others(counts, lr):
    """Scalars are numbers if all parameters have the same count, and tensors otherwise."""
    rule = Rule(update=update, scalars=every_function, hyper=("lr",), scalar_state=(State("n"),))
    wide = [torch.tensor(x, dtype=torch.float64) for x in (counts, lr)]
    (together,), h = rule.host_scalars((wide[0],), (wide[1],), ())
    for i, count in enumerate(counts):
        (alone,), numbers = rule.scalars_on_numbers((count,), (lr,), ())
        expected = [float(x).hex() for x in (alone, *numbers)]
        assert [float(x[i]).hex() for x in (together, *h)] == expected


def test_runs_on_tensors():
    p, state = RULE.torch_update_in(torch.float32)(
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
        state = (torch.ones(2),) * len(rule.tensor_state_for(flags))
        if rule.reduces:
            s, h = rule.torch_before_reduce(s, h, flags)
            terms = rule.torch_reduce_in(torch.float32)(*[torch.ones(2)] * 2, state, h, flags)
            assert all(t.shape == (2,) for t in terms)
            sums = (one,) * len(terms)
        s, h = rule.torch_scalars(s, h, flags, sums, sums)
        assert len(s) == len(rule.scalar_state)
        p, new = rule.torch_update_in(torch.float32)(torch.ones(2), torch.ones(2), state, h, flags)
        assert len(new) == len(states)
        assert all(t.shape == (2,) for t in (p, *new))
