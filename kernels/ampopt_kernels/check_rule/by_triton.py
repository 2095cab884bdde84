"""Compile a rule with Triton, without a GPU, before its first step.

CPU backends run a rule as Python, which accepts more than Triton does, such as a module-level
number. This check makes such a rule fail on the author's machine, and not on the first GPU. It
compiles minimal kernels that call ``update``, ``scalars`` or ``reduce``, so that an error is one of
the rule.
"""

import inspect
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator
from traceback import FrameSummary
from typing import Any

import torch

from ampopt_kernels.check_rule.function import Function, functions_of, own_codecs
from ampopt_kernels.language import HAS_TRITON, jit, rounded, tl
from ampopt_kernels.rule import Rule
from ampopt_kernels.triton.compiler import compilable, compiler

__all__ = ["TARGETS", "can_compile_for", "check", "compile_for", "gpu_target"]

TARGETS = ("sm_80", "sm_90", "gfx942")
"""The GPUs that rules and kernels are compiled for without one: A100, H100 and MI300."""


@jit
def _loaded(pointers, N: tl.constexpr, APART: tl.constexpr):
    """A tuple of ``N`` loads, from ``pointers`` and at distances of ``APART`` elements."""
    values = ()
    for i in tl.static_range(N):
        values = values + (tl.load(pointers + i * APART),)
    return values


@jit
def _blocks_kernel(
    blocks,
    numbers,
    FUNCTION: tl.constexpr,
    ARGUMENTS: tl.constexpr,
    FLAGS: tl.constexpr,
    N_STATES: tl.constexpr,
    N_H: tl.constexpr,
    UPDATES: tl.constexpr,
):
    """A kernel that calls an ``update``, or a ``reduce`` or ``averages`` unless it ``UPDATES``."""
    at = tl.arange(0, 128)
    h, state = _loaded(numbers, N_H, 1), _loaded(blocks + 2 * 128 + at, N_STATES, 128)
    p, g = _loaded(blocks + at, 2, 128)
    results = FUNCTION(*(p, g, state, h, FLAGS, (at.to(tl.int64), p))[:ARGUMENTS])
    if UPDATES:
        results = (results[0],) + results[1]
    for i in tl.static_range(len(results)):
        tl.store(blocks + i * 128 + at, rounded(results[i], tl.float32))


@jit
def _codec_kernel(blocks, FUNCTION: tl.constexpr, N: tl.constexpr):
    """A kernel that calls a function of a codec, with ``N`` arguments."""
    at = tl.arange(0, 128)
    x = FUNCTION(*_loaded(blocks + at, N, 128))
    tl.store(blocks + at, x.to(tl.float32))


@jit
def _scalars_kernel(
    blocks,
    FUNCTION: tl.constexpr,
    ARGUMENTS: tl.constexpr,
    FLAGS: tl.constexpr,
    N_SCALARS: tl.constexpr,
    N_H: tl.constexpr,
    N_TERMS: tl.constexpr,
):
    """A kernel that calls a ``scalars`` or ``before_reduce``, with the first ``ARGUMENTS``."""
    at = tl.arange(0, 128)
    s = _loaded(blocks + at, N_SCALARS, 128)
    h = _loaded(blocks + N_SCALARS * 128 + at, N_H, 128)
    sums = _loaded(blocks + (N_SCALARS + N_H) * 128 + at, N_TERMS, 128)
    new_s, new_h = FUNCTION(*(s, h, FLAGS, sums, sums)[:ARGUMENTS])
    for i in tl.static_range(N_SCALARS):
        tl.store(blocks + i * 128 + at, new_s[i].to(tl.float32))
    for i in tl.static_range(len(new_h)):
        tl.store(blocks + (N_SCALARS + i) * 128 + at, new_h[i])


def check(
    rule: Rule,
    flags: tuple[bool, ...],
    n_hyper: int,
    owner: str,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Refuse a rule that Triton cannot compile. Does nothing if Triton cannot be imported.

    Takes tens of milliseconds.

    Args:
        rule: the rule, compiled as far as Triton's intermediate code.
        flags: values of ``rule.flags``.
        n_hyper: number of hyperparameters, tuples flattened.
        owner: name of the optimizer class, for the message.
        dtype: the dtype that the rule computes in.

    Raises:
        ValueError: Triton cannot compile a function of the rule. The message has the line, and what
            to write instead.
    """
    name = next(filter(can_compile_for, ("sm_90", "gfx942")), None)
    if name is not None:
        target = gpu_target(name)
        _compile(rule, flags, n_hyper, owner, lambda source: _intermediate(source, target), dtype)


def compile_for(target: str, rule: Rule, flags: tuple[bool, ...], n_hyper: int, owner: str) -> None:
    """Compile a rule to machine code. Takes about a second, unless Triton's cache has it.

    Args:
        target: ``sm_NN`` or ``gfxNNN``, for which :func:`can_compile_for` is true.
        rule: the rule.
        flags: values of ``rule.flags``.
        n_hyper: number of hyperparameters, tuples flattened.
        owner: name of the optimizer class, for the message.

    Raises:
        ValueError: see :func:`check`.
    """
    import triton

    from ampopt_kernels.triton.launch import options

    gpu = gpu_target(target)

    def finish(source: Any) -> None:
        triton.compile(source, target=gpu, options=options(gpu.warp_size))

    _compile(rule, flags, n_hyper, owner, finish)


def can_compile_for(target: str) -> bool:
    """Whether Triton can be imported, and was built to compile for ``target``."""
    if not HAS_TRITON:
        return False
    from triton.backends import backends

    return ("nvidia" if target.startswith("sm_") else "amd") in backends


def gpu_target(name: str) -> Any:
    """Triton's ``GPUTarget`` for ``sm_NN`` or ``gfxNNN``."""
    from triton.backends.compiler import GPUTarget

    if name.startswith("sm_"):
        return GPUTarget("cuda", int(name.removeprefix("sm_")), 32)
    return GPUTarget("hip", name, 64 if name.startswith("gfx9") else 32)


def _compile(
    rule: Rule,
    flags: tuple[bool, ...],
    n_hyper: int,
    owner: str,
    finish: Callable[[Any], None],
    dtype: torch.dtype = torch.float32,
) -> None:
    """Call ``finish`` on a kernel for each function of the rule, and explain its errors."""
    from triton.compiler.errors import CompilationError

    with warnings.catch_warnings(), compiler():
        warnings.simplefilter("ignore")  # deprecation warnings of Triton
        for function, source in _sources(rule, flags, n_hyper, owner, dtype):
            try:
                finish(source)
            except CompilationError as error:
                raise _refused(function, error) from error
            except RuntimeError as error:  # from MLIR, which has printed the line to stderr
                raise function.refused("it cannot be compiled for a GPU", None) from error


def _refused(function: Function, error: Any) -> ValueError:
    """The error about a ``triton.CompilationError`` of a kernel that calls ``function``."""
    errors = [error]
    while hasattr(errors[-1].__cause__, "node"):  # from the caller to the called function
        errors.append(errors[-1].__cause__)
    message = next((e.error_message for e in reversed(errors) if e.error_message), str(error))
    line, authored = None, [(fn, *inspect.getsourcelines(fn)) for fn in function.authored]
    for e in errors:  # the last one is of the innermost function
        for fn, lines, first in authored:
            # The source of an error begins with the "def" of its function.
            source = textwrap.dedent("".join(lines))
            if e.src and source.endswith(e.src) and hasattr(e.node, "lineno"):
                number = first + len(lines) - len(e.src.splitlines()) + e.node.lineno - 1
                line = FrameSummary(fn.__code__.co_filename, number, fn.__name__)
    return function.refused(f"it cannot be compiled for a GPU: {_plain(message)}", line)


def _plain(message: str) -> str:
    """The first sentence of Triton's message, which may be the ``repr`` of an exception."""
    inner = re.fullmatch(r"\w+\((['\"])(.*)\1\)", message, re.DOTALL)
    text = (inner[2] if inner else message).replace("\\n", " ").replace("\\'", "'")
    text = re.sub(r"<function (\w+) at 0x\w+>", r"\1", text)
    return " ".join(text.split()).split(". ")[0].rstrip(".")


def _sources(
    rule: Rule, flags: tuple[bool, ...], n_hyper: int, owner: str, dtype: torch.dtype
) -> Iterator[tuple[Function, Any]]:
    """The functions that run under ``flags``, each with a kernel to compile that calls it."""
    from triton.compiler import ASTSource

    functions, widths = functions_of(rule, owner), rule.widths(n_hyper)
    n_inputs = len(rule.inputs_for(flags))
    pointer = "*fp64" if dtype == torch.float64 else "*fp32"

    def of_numbers(arguments: int, n_h: int) -> tuple[Any, ...]:
        sizes = {"N_SCALARS": len(rule.scalar_state), "N_H": n_h, "N_TERMS": widths.terms}
        constants = {"ARGUMENTS": arguments, "FLAGS": flags, **sizes}
        return _scalars_kernel, {"blocks": "*fp64"}, constants

    def of_blocks(arguments: int, n_states: int, n_h: int, *, updates: bool) -> tuple[Any, ...]:
        sizes = {"N_STATES": n_states, "N_H": n_h, "UPDATES": updates}
        constants = {"ARGUMENTS": arguments, "FLAGS": flags, **sizes}
        return _blocks_kernel, dict.fromkeys(("blocks", "numbers"), pointer), constants

    kernels = {
        "scalars": of_numbers(rule.scalars_arguments, widths.reduce if rule.reduces else n_hyper),
        "update": of_blocks(5 + rule.draws, n_inputs, widths.update, updates=True),
    }
    if rule.reduces:
        kernels["before_reduce"] = of_numbers(3, n_hyper)
        kernels["reduce"] = of_blocks(5, n_inputs, widths.reduce, updates=False)
    if rule.averages_for(flags):
        n_states = len(rule.state_for(flags))
        kernels["averages"] = of_blocks(5, n_states, widths.reduce, updates=False)
    calls = [(functions[role], *kernel) for role, kernel in kernels.items()]
    for own in own_codecs(rule, owner):
        for function, n in ((own.encode, 2), (own.decode, 1)):
            calls.append((function, _codec_kernel, {"blocks": "*fp32"}, {"N": n}))
    for function, kernel, pointers, constants in calls:
        constants = {"FUNCTION": compilable(function.jitted), **constants}
        signature = {**pointers, **dict.fromkeys(constants, "constexpr")}
        yield function, ASTSource(compilable(kernel), signature, constants)


def _intermediate(source: Any, target: Any) -> None:
    """Compile to Triton's intermediate code: the first, quick stage of ``triton.compile``."""
    from triton._C.libtriton import ir
    from triton.compiler import make_backend

    backend: Any = make_backend(target)
    options = backend.parse_options({"enable_fp_fusion": False})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    source.make_ir(target, options, functions, modules, context)
