"""A rule that cannot be translated to C++ is refused, so that none stays on the eager backend."""

import pytest
import torch
from support.refused_rules import assert_refused

from ampopt_kernels import Rule, State, jit, tl
from ampopt_kernels.check_rule import by_triton
from ampopt_kernels.cpu.cpp import Kind, source_of

HYPER = ("lr", "decay")


@jit
def remainder(p, g, state, h, flags):
    return p - g % h[0], state


@jit
def branches_on_a_setting(p, g, state, h, flags):
    if h[0] > 0:
        p = p - h[0] * g
    return p, state


@jit
def plain(p, g, state, h, flags):
    return p - h[0] * g, state


@jit
def larger_setting(s, h):
    return s, (max(h[0], h[1]), h[1])


@pytest.mark.parametrize(
    ("rule", "code", "advice"),
    [
        ({"update": remainder}, "`return p - g % h[0], state`", "Write x - y * tl.floor(x / y)"),
        ({"update": branches_on_a_setting}, "`if h[0] > 0:`", "tl.where(x > 0, a, b)"),
        (
            {"update": plain, "scalars": larger_setting},
            "`return s, (max(h[0], h[1]), h[1])`",
            "maximum and minimum of ampopt_kernels",
        ),
    ],
)
def test_what_has_no_cpp_is_refused_on_every_backend(rule, code, advice, monkeypatch):
    """Also rules that Triton accepts, with Triton and without."""
    role = "scalars" if "scalars" in rule else "update"
    for targets in (by_triton.can_compile_for, lambda target: False):
        monkeypatch.setattr(by_triton, "can_compile_for", targets)
        message = f"{role} of Author's rule cannot be compiled for the CPU: {__file__}:"
        assert_refused(Rule(hyper=HYPER, **rule), ValueError, message, code, advice)


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
