"""Statements that only some backends would run are refused, with their line and a remedy."""

import inspect
import math

import numpy as np
import pytest
import torch
from support.refused_rules import assert_refused

import ampopt_kernels
from ampopt_kernels import Rule, State, jit, tl

HYPER = ("lr", "decay")


@jit
def calls_a_method(p, g, state, h, flags):
    return p - h[0] * g.abs(), state  # here


@jit
def calls_a_method_of_a_product(p, g, state, h, flags):
    return p - h[0] * (p * g).clamp(-1.0, 1.0), state  # here


twice = jit(
    lambda x: 2 * x  # here
)


@jit
def calls_a_lambda(p, g, state, h, flags):
    return p - h[0] * twice(g), state


@jit
def calls_math(p, g, state, h, flags):
    return p - math.sqrt(h[0]) * g, state  # here


@jit
def calls_math_of_triton(p, g, state, h, flags):
    return p - tl.math.sqrt(h[0]) * g, state  # here


@jit
def gives_arguments_by_name(p, g, state, h, flags):
    return p - h[0] * tl.where(g > 0, x=g, y=p), state  # here


@jit
def calls_numpy(p, g, state, h, flags):
    return p - h[0] * np.sign(g), state  # here


@jit
def calls_where_of_numpy(p, g, state, h, flags):
    return np.where(g > 0, p, g), state  # here


@jit
def calls_torch(p, g, state, h, flags):
    return p - h[0] * torch.pow(g, 2.0), state  # here


@jit
def calls_through_the_package(p, g, state, h, flags):
    return p - h[0] * ampopt_kernels.maximum(g, p), state  # here


@jit
def asserts(p, g, state, h, flags):
    assert h[0] > 0  # here
    return p - h[0] * g, state


@jit
def raises(p, g, state, h, flags):
    raise ValueError(h[0])  # here


@jit
def prints(p, g, state, h, flags):
    print(h[0])  # here
    return p - h[0] * g, state


@jit
def catches(p, g, state, h, flags):
    try:  # here
        p = p - h[0] * g.abs()
    except AttributeError:
        p = p - h[0] * g
    return p, state


@jit
def asserts_in_vain(p, g, state, h, flags):
    assert len(h) == 2  # here
    return p - h[0] * g, state


@jit
def root_in_vain(p, g, state, h, flags):
    return p - math.sqrt(2.0) * g, state  # here


@jit
def root_of_a_number(s, h):
    return (s[0] + 1,), (h[0].sqrt(), h[1])  # here


@jit
def length(x):
    return x.norm()  # here


@jit
def calls_one_that_is_refused(p, g, state, h, flags):
    return p - length(g), state


@jit
def halved(x):
    return tl.where(x > 1.0, halved(x * 0.5), x)  # here


@jit
def calls_one_that_calls_itself(p, g, state, h, flags):
    return p - h[0] * halved(g), state


@jit
def odd(x):
    return 1.0 - even(x)  # here


@jit
def even(x):
    return 1.0 - odd(x)


@jit
def calls_two_that_call_each_other(p, g, state, h, flags):
    return p - h[0] * odd(g), state


@jit
def plain(p, g, state, h, flags):
    return p - h[0] * g, state


@pytest.mark.parametrize(
    ("rule", "at_fault", "code", "advice"),
    [
        ({"update": calls_a_method}, calls_a_method, "g.abs()", "Write tl.abs(x)"),
        (
            {"update": calls_a_method_of_a_product},
            calls_a_method_of_a_product,
            "(p * g).clamp(-1.0, 1.0)",
            "Write minimum(maximum(x, low), high)",
        ),
        ({"update": calls_math}, calls_math, "cannot call math.sqrt", "Write tl.sqrt(x)"),
        (
            {"update": calls_math_of_triton},
            calls_math_of_triton,
            "cannot call tl.math.sqrt",
            "Write tl.sqrt(x)",
        ),
        (
            {"update": gives_arguments_by_name},
            gives_arguments_by_name,
            "unexpected keyword argument",
            "Pass arguments by position",
        ),
        (
            {"update": calls_numpy},
            calls_numpy,
            "cannot call np.sign",
            "Write sign(x), with sign of",
        ),
        (
            {"update": calls_where_of_numpy},
            calls_where_of_numpy,
            "cannot call np.where",
            "Write tl.where(condition, a, b)",
        ),
        ({"update": calls_torch}, calls_torch, "cannot call torch.pow", "Write power(x, y), for"),
        (
            {"update": calls_through_the_package},
            calls_through_the_package,
            "cannot call ampopt_kernels.maximum",
            "Write maximum(x, y), with maximum of ampopt_kernels",
        ),
        ({"update": asserts}, asserts, "`assert h[0] > 0`", "in __init__"),
        ({"update": raises}, raises, "`raise ValueError(h[0])`", "in __init__"),
        ({"update": catches}, catches, "`try:`", "in __init__"),
        ({"update": asserts_in_vain}, asserts_in_vain, "`assert len(h) == 2`", "in __init__"),
        ({"update": root_in_vain}, root_in_vain, "cannot call math.sqrt", "Write tl.sqrt(x)"),
        ({"update": prints}, prints, "`print(h[0])`", "ampopt.Watch"),
        (
            {"update": plain, "scalars": root_of_a_number, "scalar_state": (State("step"),)},
            root_of_a_number,
            "h[0].sqrt()",
            "Write tl.sqrt(x)",
        ),
        ({"update": calls_one_that_is_refused}, length, "x.norm()", "Rule(reduce=)"),
        (
            {"update": calls_a_lambda},
            twice,
            "a rule cannot be a lambda",
            "Write a function with def",
        ),
        ({"update": calls_one_that_calls_itself}, halved, "cannot call itself", "Write a loop: "),
        ({"update": calls_two_that_call_each_other}, odd, "cannot call itself", "Write a loop: "),
    ],
)
def test_what_only_some_backends_would_run_is_refused_everywhere(rule, at_fault, code, advice):
    lines, first = inspect.getsourcelines(at_fault.fn)
    (line,) = (first + i for i, text in enumerate(lines) if "# here" in text)
    place = f"{__file__}:{line}, in {at_fault.fn.__name__}: `"
    assert_refused(Rule(hyper=HYPER, **rule), place, code, advice)
