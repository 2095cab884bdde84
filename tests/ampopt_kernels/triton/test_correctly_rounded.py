"""The operations in the code that Triton's compiler makes of rules, without a GPU."""

import re
from unittest import mock

import pytest

from ampopt_kernels import Rule, jit, rules, sqrt_rn, tl
from ampopt_kernels.check_rule import by_triton
from ampopt_kernels.language import HAS_TRITON
from evidence.aot import count_hyper

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton cannot be imported here")


def operations(rule, flags, n_hyper):
    """For each function of a rule, the operations that Triton and torch round differently."""
    from triton.compiler import ASTSource

    make_ir, codes = ASTSource.make_ir, {}

    def keep_code(source, *arguments):
        module = make_ir(source, *arguments)
        codes[source.fn.fn.__name__] = str(module)
        return module

    with mock.patch.object(ASTSource, "make_ir", keep_code):
        by_triton.check(rule, flags, n_hyper, "Author")
    pattern = r"(arith\.divf|tt\.precise_\w+|math\.(?!abs|floor|ceil)\w+) .*(f32|f64)\b"
    return {name: set(re.findall(pattern, code)) for name, code in codes.items()}


@pytest.mark.parametrize("name", rules.__all__)
def test_built_in_rules_compile_to_no_approximate_operation_in_float32(name):
    """All of them compile; only authors' rules are checked before their first step.

    ``scalars`` are float64, for which Triton's divisions and square roots are exact.
    """
    rule = getattr(rules, name)
    for on in (False, True):
        flags = (on,) * len(rule.flags)
        pairs = set().union(*operations(rule, flags, count_hyper(rule, flags)).values())
        approximate = {operation for operation, dtype in pairs if dtype == "f32"}
        assert approximate <= {"tt.precise_divf", "tt.precise_sqrt"}, flags


@jit
def _root(x):
    return tl.sqrt(x)  # of the author's own function


@jit
def _rounds_everywhere(p, g, state, h, flags):
    over = g / (_root(p) + h[0])  # of a block by a block
    over = over / h[0] + h[0] / p + 2.0 / g  # by a number and of a number
    over /= p
    return p - over * tl.rsqrt(p) * (1 / 4), state


@jit
def _scalars(s, h):
    return s, (1 / tl.sqrt(h[0]),)


def test_authors_divisions_and_roots_are_correctly_rounded_in_float32():
    rule = Rule(update=_rounds_everywhere, scalars=_scalars, hyper=("lr",))
    by_kernel = operations(rule, (), 1)
    assert by_kernel["_blocks_kernel"] == {("tt.precise_divf", "f32"), ("tt.precise_sqrt", "f32")}
    assert by_kernel["_scalars_kernel"] == {("arith.divf", "f64"), ("math.sqrt", "f64")}


def test_a_function_of_another_module_that_is_called_sqrt_stays():
    @jit
    def update(p, g, state, h, flags):
        return p - h[0] * sqrt_rn(g), state

    by_kernel = operations(Rule(update=update, hyper=("lr",)), (), 1)
    assert by_kernel["_blocks_kernel"] == {("tt.precise_sqrt", "f32")}


def test_compiled_code_is_kept_apart_from_that_of_an_older_version():
    """Triton's cache on disk uses this key, and the source text is the same in both versions."""
    from triton.runtime.jit import JITFunction

    from ampopt_kernels.triton.correctly_rounded import CorrectlyRounded

    assert CorrectlyRounded(_root.fn).cache_key != JITFunction(_root.fn).cache_key
