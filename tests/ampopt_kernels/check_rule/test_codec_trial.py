"""A codec that would spoil states is refused before the first step, with its line and a remedy."""

import pytest
import torch
from support.refused_rules import assert_refused, optimizer_of

from ampopt_kernels import Codec, Rule, State, jit, tl
from ampopt_kernels.check_rule.by_triton import can_compile_for


@jit
def update(p, g, state, h, flags):
    buf = h[1] * state[0] + g
    return p - h[0] * buf, (buf,)


@jit
def encode(x, u):
    return tl.floor(x * 120.0 + u)


@jit
def decode(code):
    return code * (1 / 120)


def rule_of(*, encode=encode, decode=decode, dtype=torch.int8, block=64, **options):
    codec = Codec(encode, decode, dtype, block)
    state = (State("buf", codec=codec, **options),)
    return Rule(update=update, hyper=("lr", "decay"), state=state)


@jit
def forgets_to_return(x, u):
    tl.floor(x * 120.0 + u)


@jit
def returns_two(x, u):
    return tl.floor(x * 120.0 + u), u


@jit
def sums(x, u):
    return x.sum()


@jit
def calls_torch(x, u):
    return torch.floor(x * 120.0 + u)


@jit
def branches(x, u):
    if x > 0:
        x = x + u
    return tl.floor(x * 120.0)


@jit
def unrounded(x, u):
    return x * 120.0


@jit
def logarithm(x, u):
    return tl.floor(tl.log2(tl.abs(x)) * 12.0 + u)


@jit
def rounded_up(x, u):
    return tl.ceil(x * 120.0 + u)


@jit
def remainder(x, u):
    return tl.floor(x * 120.0 + u % 1)


@jit
def powered(x, u):
    return tl.floor(x**1 * 120.0 + u)


SCALE = 120.0


@jit
def scaled_outside(x, u):
    return tl.floor(x * SCALE + u)


@jit
def shifted(code):
    return (code + 1) * (1 / 120)


@jit
def reciprocal(code):
    return tl.where(code == 0, 0.0, 1 / (code - 100))


@jit
def too_large(code):
    return code * 1.0


@jit
def as_is(code):
    return code


@jit
def halves(code):
    return code * 0.5


@jit
def infinite(x, u):
    return tl.where(x == 0, 0.0, x / (x - x))


@jit
def doubles(x, u):
    return x * 2.0


REFUSED = {
    "no return": (
        {"encode": forgets_to_return},
        "encode of state 'buf'",
        "returned None as 'code'",
    ),
    "two": ({"encode": returns_two}, "returned a tuple of 2 as 'code'"),
    "method": (
        {"encode": sums},
        "encode of state 'buf'",
        "no attribute 'sum'",
        "`return x.sum()`",
    ),
    "torch": (
        {"encode": calls_torch},
        "cannot call torch.floor. Write tl.floor(x)",
        f"{__file__}:",
    ),
    "branch": ({"encode": branches}, "`if x > 0:`", "tl.where(x > 0, a, b)"),
    "unrounded": ({"encode": unrounded}, "must be a whole number: round by tl.floor(y + u)"),
    "infinite": ({"encode": logarithm}, "returned -inf for x = 0", "return 0 for 0"),
    "not zero": ({"encode": rounded_up}, "returned 1 for x = 0 and u = 1.526e-05", "stays 0"),
    "no C++": ({"encode": remainder}, "encode of state 'buf'", "x - y * tl.floor(x / y)"),
    "no power": ({"encode": powered}, "encode of state 'buf'", "Write x * x"),
    "not for a GPU": ({"encode": scaled_outside}, "encode of state 'buf'", "compiled for a GPU"),
    "zero decoded": ({"decode": shifted}, "decode of state 'buf'", "returned 0.00833333 for code"),
    "infinite decoded": ({"decode": reciprocal}, "returned inf for code 100: return a finite"),
    "not undone": ({"decode": too_large}, "returned 120 for the code of x = 1: it must undo"),
    "signs lost": ({"dtype": torch.uint8}, "the code of x = -1", "declared with positive=True"),
    "infinite float": (
        {"encode": infinite, "decode": as_is, "dtype": torch.float16, "block": 1},
        "a code of torch.float16 must be finite",
    ),
    "floats": (
        {"encode": doubles, "decode": halves, "dtype": torch.float16, "block": 1},
        "has dtype torch.float16 and block=1: return the code as it is",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_codec_that_cannot_work_is_refused_by_its_line(case):
    changed, *message = REFUSED[case]
    if case == "not for a GPU" and not can_compile_for("sm_90"):
        pytest.skip("Triton cannot be imported")
    assert_refused(rule_of(**changed), *message)


@jit
def whole(x, u):
    return tl.where(x > 0, tl.floor(255.0 * x + u), 0.0)


@jit
def as_it_is(x, u):
    return x


@jit
def of_255(code):
    return code / 255


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"encode": whole, "decode": of_255, "dtype": torch.uint8, "positive": True},
        {"encode": doubles, "decode": halves, "dtype": torch.float16, "block": 256},
        {"encode": encode, "decode": decode, "block": 1},
        {"encode": as_it_is, "decode": as_is, "dtype": torch.float16, "block": 1},
    ],
)
def test_a_codec_that_works_is_accepted(changed):
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    optimizer_of(rule_of(**changed))([param]).step()
    assert param[0] == 0.5


def test_a_declaration_that_no_backend_knows_is_refused_where_it_is_written():
    with pytest.raises(TypeError, match=r"encode must take \(x, u\), but decode takes \(code\)"):
        Codec(decode, decode, torch.int8)
    with pytest.raises(TypeError, match=r"decode must take \(code\), but encode takes \(x, u\)"):
        Codec(encode, encode, torch.int8)
    for block in (True, 32.0, -128, 100):
        with pytest.raises(ValueError, match=f"block must be 32, 64, .* got {block}"):
            Codec(encode, decode, torch.int8, block)  # pyright: ignore[reportArgumentType]
