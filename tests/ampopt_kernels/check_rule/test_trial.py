"""A rule that does otherwise than it declares is refused; a correct one is accepted."""

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.refused_rules import assert_refused, optimizer_of
from support.strategies import fewer
from torch.nn import Parameter

import ampopt
from ampopt.testing.bits import assert_close, everything
from ampopt_kernels import Rule, State, as_float32, jit, maximum, minimum, rand, sign, tl
from ampopt_kernels.check_rule import by_triton
from ampopt_kernels.cpu.cpp import Kind, source_of

STATE = (State("average"),)
COUNT = (State("count"),)
HYPER = ("lr", "decay")


def place_of(function: Any, line: int) -> str:
    """File and line of a ``jit`` function; line 1 is its ``def``."""
    return f"{__file__}:{function.fn.__code__.co_firstlineno + line}"


# --- update --------------------------------------------------------------------------------------


@jit
def branching(p, g, state, h, flags):
    if g > 0:
        p = p - h[0]
    return p, ()


@jit
def joining(p, g, state, h, flags):
    return tl.where(g > 0 and p > 0, p, g), ()


@pytest.mark.parametrize("update", [branching, joining])
def test_a_branch_on_a_gradient_is_refused_and_where_is_named(update):
    rule = Rule(update=update, hyper=HYPER)
    assert_refused(rule, place_of(update, 2), "tl.where(x > 0, a, b) in place of `if x")


@jit
def adds_to_the_gradient(p, g, state, h, flags):
    g += h[1] * p
    return p - h[0] * g, state


@jit
def decays_the_state(p, g, state, h, flags):
    average = state[0]
    average *= h[1]
    return p - h[0] * g, (average,)


@jit
def squares_of_a_decayed_state(p, g, state, h, flags):
    average = state[0]
    average *= 0.5
    return (average * average,)


@jit
def writes_to_the_tuple(p, g, state, h, flags):
    state[0] += g
    return p - h[0] * state[0], state


@jit
def adds_to_what_is_the_gradient(p, g, state, h, flags):
    rounded = as_float32(g)
    rounded += h[1]
    return p - h[0] * rounded, state


@jit
def counts_in_place(s, h):
    (count,) = s
    count += 1
    return (count,), h


@jit
def keeps_sums(s, h, flags, sums):
    return s, h


@pytest.mark.parametrize(
    ("role", "function", "line", "rule", "instead"),
    [
        ("update", adds_to_the_gradient, 2, {}, "Write `g = g + h[1] * p`"),
        ("update", decays_the_state, 3, {}, "Write `average = average * h[1]`"),
        (
            "reduce",
            squares_of_a_decayed_state,
            3,
            {"scalars": keeps_sums},
            "Write `average = average * 0.5`",
        ),
        ("scalars", counts_in_place, 3, {"scalar_state": COUNT}, "Write `count = count + 1`"),
        ("update", adds_to_what_is_the_gradient, 3, {}, "Write `rounded = rounded + h[1]`"),
        ("update", writes_to_the_tuple, 2, {}, "Write `new = state[0] + g`"),
    ],
)
def test_what_is_changed_in_place_is_refused_with_its_line(role, function, line, rule, instead):
    """On torch tensors, the code would change the caller's gradient, or a state too early."""
    rule = {"update": one_state, "hyper": HYPER, "state": STATE, role: function, **rule}
    message = (f"{role} of", place_of(function, line), "in place", instead)
    assert_refused(Rule(**rule), *message)


@jit
def zeroes_an_element(p, g, state, h, flags):
    g[0] = 0.0
    return p - h[0] * g, state


@jit
def writes_by_a_method(p, g, state, h, flags):
    p.sub_(h[0] * g)
    return p, state


@jit
def replaces_a_state(p, g, state, h, flags):
    state[0] = g
    return p - h[0] * g, state


@pytest.mark.parametrize(
    ("update", "instead"),
    [
        (zeroes_an_element, "to change some elements only, by tl.where(condition, a, b)"),
        (writes_by_a_method, "as p - lr * g, and return it"),
        (replaces_a_state, "as average = state[0] + g, and return it in a new tuple"),
    ],
)
def test_other_writes_are_refused_with_their_line(update, instead):
    rule = Rule(update=update, hyper=HYPER, state=STATE)
    assert_refused(rule, place_of(update, 2), "Compute a new value", instead)


@jit
def counts_by_a_number(p, g, state, h, flags):
    return g * g, 1.0


def test_a_number_as_a_term_is_refused_with_the_block_to_write():
    rule = Rule(update=one_state, hyper=HYPER, state=STATE, reduce=counts_by_a_number,
                scalars=keeps_sums)  # fmt: skip
    assert_refused(rule, "the number 1.0 as 'term 1'", "is p * 0 + 1.0")
    param = Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    optimizer_of(replace(rule, reduce=counts_with_blocks))([param]).step()
    assert param.eq(0.5).all()


@jit
def counts_with_blocks(p, g, state, h, flags):
    return g * g, p * 0 + 1.0


@pytest.mark.parametrize("value", ["no", "yes", ""])
def test_a_string_as_a_flag_is_refused(value):
    cls = optimizer_of(Rule(update=one_state, hyper=HYPER, state=STATE, flags=("extra",)))
    param = Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    optimizer = cls([param])
    optimizer.param_groups[0]["extra"] = value
    with pytest.raises(TypeError, match=f"flag 'extra' must be True or False, got .* {value!r}"):
        optimizer.step()
    assert not optimizer.state and param.eq(1).all()


@jit
def one_state(p, g, state, h, flags):
    return p - h[0] * g, (state[0] + g,)


@jit
def no_state(p, g, state, h, flags):
    return p - h[0] * g, ()


@jit
def param_alone(p, g, state, h, flags):
    return p - h[0] * g


@jit
def bare_state(p, g, state, h, flags):
    return p - h[0] * g, state[0] + g


def test_a_state_too_few_or_too_many_is_refused():
    assert_refused(
        Rule(update=no_state, hyper=HYPER, state=STATE),
        "update of",
        "returned a tuple of 0 as states",
        "declares 1, ['average']",
    )
    assert_refused(
        Rule(update=one_state, hyper=HYPER, state=(*STATE, State("other"))),
        "returned a tuple of 1 as states",
        "declares 2, ['average', 'other']",
    )


def test_states_that_depend_on_a_flag_are_counted_under_that_flag():
    rule = Rule(
        update=one_state, hyper=HYPER, state=(State("average", when="extra"),), flags=("extra",)
    )
    message = "declares 0, state=[] under flags {'extra': False}, but reads state[0]"
    assert_refused(rule, place_of(one_state, 2), message)
    optimizer = optimizer_of(rule)([Parameter(torch.ones(3))])
    optimizer.param_groups[0]["extra"] = True
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3)
    optimizer.step()  # keeps to it under this one


@jit
def nothing(p, g, state, h, flags):
    p = p - h[0] * g


@pytest.mark.parametrize(
    ("function", "returned"),
    [
        (param_alone, "returned a block"),
        (bare_state, "returned a block as states, but the rule declares 1"),
        (bare_state, "in their order. A tuple of one needs the comma"),
        (nothing, "returned None: return the new p and a tuple of 1 states"),
    ],
)
def test_what_is_no_parameter_and_tuple_of_states_is_refused(function, returned):
    rule = Rule(update=function, hyper=HYPER, state=STATE)
    place = f"({place_of(function, 0)}, {function.fn.__name__})"
    assert_refused(rule, "update of", place, returned, "['average']")


@jit
def reads_second_state(p, g, state, h, flags):
    return p - h[0] * state[1], (state[0],)


@jit
def unpacks_two_states(p, g, state, h, flags):
    first, second = state
    return p - h[0] * second, (first,)


@pytest.mark.parametrize(
    ("function", "reads"),
    [
        (reads_second_state, "but reads state[1]"),
        (unpacks_two_states, "not enough values to unpack (expected 2, got 1)"),
    ],
)
def test_a_state_that_is_not_declared_is_refused(function, reads):
    rule = Rule(update=function, hyper=HYPER, state=STATE)
    declaration = "he rule declares 1, state=['average']"
    assert_refused(rule, place_of(function, 2), declaration, reads)


@jit
def reads_third_hyper(p, g, state, h, flags):
    return p - h[2] * g, state


@jit
def unpacks_three_hypers(p, g, state, h, flags):
    lr, decay, eps = h
    return p - lr * g, state


@pytest.mark.parametrize(
    ("function", "reads"),
    [
        (reads_third_hyper, "but reads h[2]"),
        (unpacks_three_hypers, "not enough values to unpack (expected 3, got 2)"),
    ],
)
def test_a_hyperparameter_that_is_not_declared_is_refused(function, reads):
    rule = Rule(update=function, hyper=HYPER)
    declaration = "declares 2, hyper=('lr', 'decay')"
    assert_refused(rule, place_of(function, 2), declaration, reads)


@jit
def forgets_to_unpack_h(p, g, state, h, flags):
    return p - lr * g, state  # noqa: F821  # pyright: ignore[reportUndefinedVariable]


@jit
def unpacks_without_a_comma(p, g, state, h, flags):
    average = state
    return p - h[0] * average, state


@jit
def multiplies_without_a_comma(p, g, state, h, flags):
    average = state
    return p - 0.5 * average, state  # pyright: ignore


@jit
def adds_without_a_comma(p, g, state, h, flags):
    average = state
    return p - (average + 0.5), state  # pyright: ignore


@pytest.mark.parametrize(
    ("function", "line", "instead"),
    [
        (forgets_to_unpack_h, 2, "Unpack h, state or flags first, as lr, beta = h. The rule decl"),
        (unpacks_without_a_comma, 3, "unpack them, as (m,) = state, or read state[0]"),
        (multiplies_without_a_comma, 3, "unpack them, as (m,) = state"),
        (adds_without_a_comma, 3, "unpack them, as (m,) = state"),
    ],
)
def test_a_tuple_that_is_not_unpacked_is_refused_with_how_to_unpack_it(function, line, instead):
    rule = Rule(update=function, hyper=HYPER, state=STATE)
    assert_refused(rule, place_of(function, line), instead)


def test_a_hyperparameter_that_is_a_tuple_counts_as_its_numbers():
    class Author(ampopt.ElementwiseOptimizer):
        rule = Rule(update=unpacks_three_hypers, hyper=("betas",))

    param = Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    message = r"declares 2, hyper=\('betas',\), with tuples flattened"
    with pytest.raises(ValueError, match=message):
        Author([param], {"betas": (0.5, 0.5)}).step()


def test_a_hyperparameter_that_no_group_has_is_refused():
    param = Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    optimizer = optimizer_of(Rule(update=no_state, hyper=("lr", "momentum")))([param])
    before = everything(optimizer)
    with pytest.raises(KeyError, match="'momentum' from each param group.*optimizer's defaults"):
        optimizer.step()
    assert everything(optimizer) == before


@jit
def reads_a_flag(p, g, state, h, flags):
    if flags[0]:
        g = -g
    return p - h[0] * g, state


def test_a_flag_that_is_not_declared_is_refused():
    message = "the rule declares 0, flags=(), but reads flags[0]"
    assert_refused(Rule(update=reads_a_flag, hyper=HYPER), message)


@jit
def inverts_a_flag(p, g, state, h, flags):
    return p - h[0] * tl.where(~flags[0], g, -g), state


def test_a_flag_that_is_inverted_bit_by_bit_is_refused():
    """Triton would take both values for true, and so would C++; torch operations would not."""
    rule = Rule(update=inverts_a_flag, hyper=HYPER, flags=("extra",))
    message = "a rule inverts a flag by ~. Write `not flag` in place of `~flag`"
    assert_refused(rule, place_of(inverts_a_flag, 2), message)


@jit
def uses_what_torch_lacks(p, g, state, h, flags):
    return p - h[0] * tl.erf(g), state


@jit
def calls_what_uses_it(p, g, state, h, flags):
    return uses_what_torch_lacks(p, g, state, h, flags)


@pytest.mark.parametrize("function", [uses_what_torch_lacks, calls_what_uses_it])
def test_a_function_that_not_every_backend_has_is_refused(function):
    rule = Rule(update=function, hyper=HYPER)
    assert_refused(rule, "tl.erf", "All backends have:", "sqrt")


@jit
def drops_nan(p, g, state, h, flags):
    return p - h[0] * tl.maximum(g, 0.0), state


def test_a_function_that_is_not_the_same_everywhere_is_refused():
    rule = Rule(update=drops_nan, hyper=HYPER)
    assert_refused(rule, "tl.maximum", "from ampopt_kernels import maximum")


@jit
def signs(p, g, state, h, flags):
    return p - h[0] * tl.sign(g), state


@jit
def sums_up(p, g, state, h, flags):
    return p - h[0] * g / tl.sum(g), state


@jit
def reads_by_name(p, g, state, h, flags):
    return p - h["lr"] * g, state


@jit
def makes_a_float(p, g, state, h, flags):
    return p - h[0] * float(g), state


@jit
def subtracts_truth_values(p, g, state, h, flags):
    return p - h[0] * ((g > 0) - (g < 0)), state


@jit
def draws_without_a_seed(p, g, state, h, flags, at):
    return p - h[0] * rand(at), state  # pyright: ignore


@jit
def draws_without_an_index(p, g, state, h, flags):
    return p - h[0] * rand(h[0], h[1], 0), state


@jit
def draws_at_a_value(p, g, state, h, flags):
    return p - h[0] * rand(h[0], h[1], p), state


@jit
def gives_sign_two_numbers(p, g, state, h, flags):
    return p - h[0] * sign(g, p), state  # pyright: ignore


@pytest.mark.parametrize(
    ("function", "instead"),
    [
        (draws_without_a_seed, "Write rand(seed, step, at)"),
        (draws_without_an_index, "rand(seed, step, at), where at is its sixth argument"),
        (draws_at_a_value, "rand(seed, step, at), where at is its sixth argument"),
        (gives_sign_two_numbers, "Write sign(x)"),
        (signs, "tl.sign, which not every backend has. Write sign(x)"),
        (sums_up, "Rule(reduce=)"),
        (reads_by_name, "by position, as h[0]"),
        (makes_a_float, "Write x itself"),
        (subtracts_truth_values, "Write tl.where(x > 0, 1.0, 0.0)"),
    ],
)
def test_a_refusal_says_what_to_write(function, instead):
    assert_refused(Rule(update=function, hyper=HYPER), f"in {function.fn.__name__}", instead)


def test_a_misspelt_name_is_refused():
    assert_refused(Rule(update=misspelt, hyper=HYPER), "name 'momentun' is not defined. Call")


@jit
def misspelt(p, g, state, h, flags):
    return p - momentun * g, state  # noqa: F821  # pyright: ignore[reportUndefinedVariable]


@jit
def counts_elements(p, g, state, h, flags):
    return p - h[0] * g.shape[0], state


@jit
def returns_a_number(p, g, state, h, flags):
    return p - h[0] * g, (h[1],)


def test_a_result_that_is_not_elementwise_is_refused():
    rule = Rule(update=counts_elements, hyper=HYPER)
    assert_refused(rule, place_of(counts_elements, 2), "'shape'", "A rule is elementwise")
    rule = Rule(update=returns_a_number, hyper=HYPER, state=STATE)
    assert_refused(rule, "'average'", "a rule is elementwise")


@jit
def remainder(p, g, state, h, flags):
    return p - g % h[0], state


@jit
def branches_on_a_setting(p, g, state, h, flags):
    if h[0] > 0:
        p = p - h[0] * g
    return p, state


@jit
def larger_setting(s, h):
    return s, (max(h[0], h[1]), h[1])


@pytest.mark.parametrize(
    ("rule", "code", "advice"),
    [
        ({"update": remainder}, "`return p - g % h[0], state`", "Write x - y * tl.floor(x / y)"),
        ({"update": branches_on_a_setting}, "`if h[0] > 0:`", "tl.where(x > 0, a, b)"),
        (
            {"update": no_state, "scalars": larger_setting},
            "`return s, (max(h[0], h[1]), h[1])`",
            "maximum and minimum of ampopt_kernels",
        ),
    ],
)
def test_what_not_every_backend_has_is_refused_on_each(rule, code, advice, monkeypatch):
    """Also rules that Triton accepts, with Triton and without."""
    role = "scalars" if "scalars" in rule else "update"
    for targets in (by_triton.can_compile_for, lambda target: False):
        monkeypatch.setattr(by_triton, "can_compile_for", targets)
        message = f"{role} of Author's rule: {__file__}:"
        assert_refused(Rule(hyper=HYPER, **rule), message, code, advice)


# --- scalars -------------------------------------------------------------------------------------


@jit
def counts(s, h):
    return (s[0] + 1,), h


@jit
def counts_nothing(s, h):
    return (), h


@jit
def counts_bare(s, h):
    return s[0] + 1, h


@jit
def hands_on_no_tuple(s, h):
    return s, h[0]


@jit
def hands_on_a_tuple_in_h(s, h):
    return s, (h[0], (h[0], h[1]))


@jit
def hands_on_a_list(s, h):
    return s, [h[0]]


@jit
def forgets_h(s, h):
    return (s[0] + 1,)


@jit
def unpacks_three(s, h):
    lr, decay, eps = h
    return s, (lr,)


@jit
def chooses_by_the_count(s, h):
    (count,) = s
    return (count + 1,), (h[0] if count > 2 else 0.5 * h[0], h[1])


@jit
def takes_the_larger(s, h):
    (count,) = s
    return (count + 1,), (max(h[0], 1 / (count + 1)), h[1])


@pytest.mark.parametrize("scalars", [chooses_by_the_count, takes_the_larger])
def test_scalars_that_branch_on_a_count_are_refused_with_their_line(scalars):
    """Such a branch works for one parameter, but not for several with different counts."""
    rule = Rule(update=no_state, scalars=scalars, hyper=HYPER, scalar_state=COUNT)
    place = f"{place_of(scalars, 3)}, in {scalars.fn.__name__}: `return"
    assert_refused(rule, "scalars of", place, "tl.where(x > 0")


@jit
def one_term(p, g, state, h, flags):
    return (g * g,)


@jit
def reads_second_sum(s, h, flags, sums):
    return s, (h[0] / tl.sqrt(sums[1]), h[1])


def test_a_sum_that_reduce_does_not_return_is_refused():
    rule = Rule(update=no_state, reduce=one_term, scalars=reads_second_sum, hyper=HYPER)
    message = "the rule gets 1 sums, one for each term of reduce, but reads sums[1]"
    assert_refused(rule, "scalars of", message)


@jit
def sums_the_state(p, g, state, h, flags):
    return (state[0] * g,)


def test_a_reduce_that_fails_without_flags_is_refused_under_others_too():
    """How many terms there are is counted without flags."""
    state = (State("average", when="extra"),)
    rule = Rule(update=one_state, reduce=sums_the_state, scalars=keeps_sums, hyper=HYPER,
                state=state, flags=("extra",))  # fmt: skip
    param = Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    optimizer = optimizer_of(rule)([param])
    optimizer.param_groups[0]["extra"] = True
    with pytest.raises(ValueError, match=r"reduce of .* under flags .'extra': False.*state\[0\]"):
        optimizer.step()
    assert not optimizer.state and param.eq(1).all()


def test_a_state_that_begins_with_an_entry_no_group_has_is_refused():
    rule = Rule(update=one_state, hyper=HYPER, state=(State("average", init="gradient"),))
    param = Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    with pytest.raises(KeyError, match="State 'average' has init='gradient', an entry.*'decay'"):
        optimizer_of(rule)([param]).step()
    assert param.tolist() == [1.0, 1.0, 1.0]


def test_a_class_without_a_rule_is_refused_when_it_is_made():
    class Unruly(ampopt.ElementwiseOptimizer):
        pass

    with pytest.raises(TypeError, match=r"Unruly has no rule: .*rule = Rule\(update"):
        Unruly([Parameter(torch.ones(3))], {"lr": 0.5})


def test_scalars_too_few_or_too_many_are_refused():
    assert_refused(
        Rule(update=no_state, hyper=HYPER, scalars=counts_nothing, scalar_state=COUNT),
        "scalars of",
        "returned a tuple of 0 as scalar states",
        "declares 1, ['count']",
    )
    assert_refused(
        Rule(update=no_state, hyper=HYPER, scalars=counts, scalar_state=(*COUNT, State("b"))),
        "returned a tuple of 1 as scalar states",
    )
    rule = Rule(update=no_state, hyper=HYPER, scalars=counts)
    assert_refused(rule, "declares 0, scalar_state=[], but reads s[0]")


@pytest.mark.parametrize(
    "function", [counts_bare, hands_on_no_tuple, hands_on_a_list, forgets_h, unpacks_three]
)
def test_scalars_that_return_no_two_tuples_are_refused(function):
    rule = Rule(update=no_state, hyper=HYPER, scalars=function, scalar_state=COUNT)
    assert_refused(rule, "scalars of")


def test_scalars_that_return_something_other_than_numbers_are_refused():
    rule = Rule(update=no_state, hyper=HYPER, scalars=hands_on_a_tuple_in_h, scalar_state=COUNT)
    assert_refused(rule, "scalars of", "returned a tuple of 2 as h: return a tuple of numbers")


def test_an_update_that_reads_more_than_scalars_return_is_refused():
    rule = Rule(update=unpacks_three_hypers, hyper=HYPER, scalars=counts, scalar_state=COUNT)
    message = "gets 2 numbers, the h that scalars returns"
    assert_refused(rule, "update of", "(expected 3, got 2)", message)


# --- the declaration -----------------------------------------------------------------------------


def plain(p, g, state, h, flags):
    return p, state


@jit
def method(self, p, g, state, h, flags):
    return p, state


@jit
def gradient_first(g, p, state, h, flags):
    return p, state


@pytest.mark.parametrize(
    "declare, error, message",
    [
        (lambda: Rule(update=plain, hyper=()), TypeError, "marked with @ampopt_kernels.jit"),
        (
            lambda: Rule(update=counts, hyper=()),
            TypeError,
            r"update must take \(p, g, state, h, flags\) or .* takes 2 arguments",
        ),
        (lambda: Rule(update=one_state, hyper=(), scalars=plain), TypeError, "Rule scalars"),
        (lambda: Rule(update=method, hyper=()), TypeError, "not a method: leave out self"),
        (
            lambda: Rule(update=gradient_first, hyper=()),
            TypeError,
            r"must take \(p, g, .*, in this order, not \('g', 'p', ",
        ),
        (
            lambda: Rule(update=one_state, hyper=(), state=(State("a", when="nesterov"),)),
            ValueError,
            "'nesterov', which is not among the rule's flags",
        ),
        (
            lambda: Rule(update=one_state, hyper=(), state=(*STATE, *STATE)),
            ValueError,
            "'average' is declared twice",
        ),
        (
            lambda: Rule(update=one_state, hyper=(), state=STATE, scalar_state=STATE),
            ValueError,
            "'average' is declared twice",
        ),
        (
            lambda: Rule(update=one_state, hyper=(), state=(State("master_param"),)),
            ValueError,
            "'master_param' is where masters are kept",
        ),
        (
            lambda: Rule(update=one_state, hyper=(), state=(*STATE, State("average_scale"))),
            ValueError,
            "'average_scale' is where scales of 8-bit codes are kept",
        ),
    ],
)
def test_a_wrong_declaration_is_refused_where_it_is_made(declare, error, message):
    with pytest.raises(error, match=message):
        declare()


# --- good rules ----------------------------------------------------------------------------------


@jit
def unrolled(p, g, state, h, flags):
    for _ in tl.static_range(3):
        g = g + h[1] * state[0]
    return p - h[0] * g, (g,)


@jit
def ranged(p, g, state, h, flags):
    for _ in range(3):
        g = g + h[1] * state[0]
    return p - h[0] * g, (g,)


@jit
def repeated(p, g, state, h, flags):
    i = 0
    while i < 3:
        g = g + h[1] * state[0]
        i = i + 1
    return p - h[0] * g, (g,)


@pytest.mark.parametrize("function", [ranged, repeated])
def test_loops_become_the_cpp_of_an_unrolled_loop_and_compile_for_a_gpu(function):
    def source(update):
        rule = Rule(update=update, hyper=HYPER, state=(State("mean"),))
        return source_of(Kind(rule, (), (torch.float32,) * 3, (), 2))

    assert source(function) == source(unrolled)
    by_triton.check(Rule(update=function, hyper=HYPER, state=(State("mean"),)), (), 2, "Author")


@jit
def _warming_scalars(s, h):
    (count,) = s
    lr, decay, limit = h
    count = count + 1
    return (count,), (lr * minimum(count / 4, 1.0), decay, limit)


@jit
def _warming_update(p, g, state, h, flags):
    SIGNED: tl.constexpr = flags[0]
    rate, decay, limit = h
    average = state[0] + decay * (g - state[0])
    size = tl.abs(average)
    if SIGNED:
        step = tl.where(average > 0, 1.0, tl.where(average < 0, -1.0, 0.0))
    else:
        step = tl.where(size > limit, limit * average / maximum(size, limit), average)
    return p - rate * step, (average, maximum(state[1], size))


class Warming(ampopt.ElementwiseOptimizer):
    """An optimizer with all parts of a rule: states, flags, and scalars that it counts."""

    rule = Rule(
        update=_warming_update,
        scalars=_warming_scalars,
        hyper=("lr", "decay", "limit"),
        flags=("signed",),
        state=(State("average"), State("largest", init="floor")),
        scalar_state=(State("count"),),
    )

    def __init__(self, params: Any, lr: Any = 0.5, limit: float = 0.75, signed: bool = False):
        defaults = {"lr": lr, "decay": 0.25, "limit": limit, "signed": signed, "floor": 0.125}
        super().__init__(params, defaults)


def warming(
    p: torch.Tensor, grads: list[torch.Tensor], limit: float, signed: bool
) -> dict[str, torch.Tensor]:
    """The results of :class:`Warming`, computed in float64 by plain code."""
    p, average, largest = p.double(), torch.zeros_like(p).double(), torch.full_like(p, 0.125)
    for count, g in enumerate(grads, 1):
        average = average + 0.25 * (g.double() - average)
        step = average.sign() if signed else average.clamp(-limit, limit)
        p = p - 0.5 * min(count / 4, 1.0) * step
        largest = torch.maximum(largest.double(), average.abs())
    return {"param": p, "average": average, "largest": largest}


every_backend = pytest.mark.parametrize("backend", ["eager", "triton", "compiled"], indirect=True)


@every_backend
@fewer(0.25)
@given(
    numbers=st.lists(st.integers(-8, 8).map(lambda n: n / 4), min_size=15, max_size=15),
    signed=st.just(False),
    scale=st.sampled_from([1.0, 2.0**8, 2.0**-8]),
    skips=st.lists(st.booleans(), min_size=5, max_size=5),
)
def test_a_correct_rule_is_accepted_and_steps(backend, numbers, signed, scale, skips):
    param = Parameter(torch.tensor([1.0, -2.0, 0.5]))
    grads = list(torch.tensor(numbers).reshape(5, 3))
    optimizer = Warming([param], signed=signed)
    expected = warming(param.detach(), grads, 0.75, signed)
    for grad, skip in zip(grads, skips, strict=True):
        if skip:
            param.grad = torch.full((3,), float("inf"))
            assert optimizer.unscale_and_step(grads_scaled_by=scale).skipped
        param.grad = grad * scale
        optimizer.unscale_and_step(grads_scaled_by=scale)
    actual = {"param": param.detach(), **optimizer.state[param]}
    for name, value in expected.items():
        assert_close(actual[name], value.float(), size=4.0)
    assert float(optimizer.state[param]["count"]) == 5


@every_backend
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_an_authors_optimizer_can_be_copied_and_pickled(backend, duplicate):
    param = Parameter(torch.tensor([1.0, -2.0, 0.5]))
    optimizer = Warming([param])
    param.grad = torch.tensor([1.0, 2.0, -3.0])
    optimizer.step()
    twin = duplicate(optimizer)
    (twins,) = twin.param_groups[0]["params"]
    assert type(twin) is Warming
    assert everything(twin) == everything(optimizer)
    before = everything(twin)
    optimizer.step()
    assert everything(twin) == before  # nothing is shared
    twins.grad = torch.tensor([1.0, 2.0, -3.0])
    twin.step()
    assert everything(twin) == everything(optimizer)
