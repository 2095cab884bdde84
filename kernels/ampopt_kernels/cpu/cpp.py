"""Translates a rule to C++ by running its functions once on expressions in place of tensors.

This is the third implementation of the language that rules are written in, after Triton and
``torch_language``. The C++ performs the same operations as ``torch_language`` in the same order and
precision, each rounded as IEEE 754 requires, so the results are bitwise the same. Two exceptions
make a source inexact: functions that IEEE 754 does not specify, such as the exponential, come from
another library than torch's; and sums over matrix rows and columns are added in another order.

Arithmetic on Python numbers (``h``) is done in float64, once for each call, as in Python.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ampopt_kernels import places, random_numbers, torch_language
from ampopt_kernels.codecs import Codec
from ampopt_kernels.cpu.codecs import CODES, CodedStates, RandomBits
from ampopt_kernels.cpu.dtypes import DTYPES
from ampopt_kernels.cpu.expressions import C_TYPES, LANGUAGE, Program, cast
from ampopt_kernels.cpu.loops import (
    AVERAGES,
    BLOCKS,
    PREAMBLE,
    SPREAD,
    SUMS,
    UPDATE,
    WHOLE_BLOCKS,
)
from ampopt_kernels.cpu.low_bits import LowBits
from ampopt_kernels.cpu.sums import BLOCK, PART
from ampopt_kernels.language import up_or_down
from ampopt_kernels.rule import Rule
from ampopt_kernels.tensors import arithmetic

__all__ = ["CppSource", "source_of"]

CONVERTED = 320
"""Elements of a block of an update that converts half precision, such as gradients, beside float32
parameters. Each of its loops reads so much of one tensor after another, which takes up to a seventh
less time than 64 elements do; with parameters and states in half precision, up to a fifth more."""


@dataclass(frozen=True)
class CppSource:
    """A translated rule.

    Attributes:
        text: C++ that defines ``update``, ``sums`` or ``averages``; see ``loops``.
        exact: whether its results are bitwise those of the eager backend.
        options: compiler options in addition to those of every library.
    """

    text: str
    exact: bool
    options: tuple[str, ...] = ()


def source_of(
    rule: Rule,
    flags: tuple[bool, ...],
    dtypes: tuple[torch.dtype, ...],
    width: int,
    role: str = "update",
    rounds_stochastically: bool = False,
    jumps: int = 0,
    codecs: tuple[Codec | None, ...] = (),
) -> CppSource:
    """Translate a function of ``rule`` to C++.

    In the array of tensors that the C++ takes, the scales of states with codecs follow the tensors;
    or ``RowColumnStates.addresses``, if the rule has row and column states, for ``averages`` only
    the two sizes of the matrix. If the rule draws random numbers, or anything is rounded
    stochastically, ``h`` goes on with the place of the first element, the key (if anything is
    rounded), and three numbers for each of the ``jumps``.

    Args:
        rule: the update rule.
        flags: its flags.
        dtypes: the dtypes of gradient, parameter, elementwise states, and the low-precision copy
            or the low bits of a 24-bit master, if there are any.
        width: the length of ``h``: the reciprocal of the scale, the clip coefficient, and the
            numbers that the function takes as ``h``.
        role: which function: ``"update"``, ``"reduce"`` or ``"averages"``. Only ``"update"`` may
            have a copy.
        rounds_stochastically: whether to round the parameter, bfloat16, stochastically.
        jumps: the number of jumps in the places of the elements; see ``places``.
        codecs: the codec of each state, or ``None``. Empty if no state has one.

    Raises:
        Exception: the rule uses something that the language does not have; of any type, as the
            functions of the rule run here.
    """
    compute = arithmetic(*dtypes[:2])
    program = Program(compute)
    block = BLOCK  # of a sum, which is added up block by block
    converts = any(dtype in DTYPES and DTYPES[dtype].load for dtype in dtypes)
    if role == "update":
        blocks = [codec.block for codec in codecs if codec is not None]
        if converts and not blocks and not DTYPES[dtypes[1]].load:
            blocks = [CONVERTED]
        block = max([BLOCK, *blocks])
    coded = CodedStates(program, codecs, len(dtypes), block)
    n_state = len(rule.state_for(flags))
    low, n_tensors = LowBits(program, dtypes, 2 + n_state), len(dtypes)
    dtypes = dtypes[: n_tensors - bool(low)]
    for i, dtype in enumerate(dtypes):
        pointer = f"{(CODES.get(dtype) or DTYPES[dtype]).c_type}*"
        program.before.append(f"{pointer} __restrict t{i} = static_cast<{pointer}>(tensors[{i}]);")
        if i not in coded and DTYPES[dtype].load:
            program.before.append(f"alignas(64) float w{i}[BLOCK];")
    inverse, clip, *rest = (program.new(torch.float64, f"h[{i}]", False) for i in range(width))
    grad, *values = (
        coded.decoded(i, program) if i in coded else program.new(compute, _element(i, dtype), True)
        for i, dtype in enumerate(dtypes)
    )
    param = low.joined(values[0]) if low else values[0]
    function = torch_language.bind(getattr(rule, role), LANGUAGE)
    row_column_states, state = rule.row_column_states_for(flags), values[1 : 1 + n_state]
    statements = coded.scales()
    for i, part in enumerate(row_column_states if role != "averages" else (), n_tensors):
        m, n = (f"(int64_t)tensors[{n_tensors + len(row_column_states) + k}]" for k in range(2))
        c, rows = C_TYPES[compute], str(part.shape == "rows").lower()
        program.before.append(f"{c} t{i}[BLOCK];")
        program.before.append(f"Spread<{c}> spread{i}(tensors[{i}], {rows}, {m}, {n}, start);")
        statements.append(f"spread{i}.next(size, t{i});")
        state.append(program.new(compute, f"t{i}[i - block]", True))
    arguments = (param, grad * inverse * clip, tuple(state), tuple(rest), flags)
    preamble = f"#define BLOCK {block}\n{PREAMBLE}{SPREAD * bool(row_column_states)}"
    if role != "update":
        loop, adds = (SUMS, "+=") if role == "reduce" else (AVERAGES, "=")
        terms = function(*arguments)
        for k, term in enumerate(terms):
            program.each.append(f"terms[{k}][j] {adds} {cast(term, torch.float64)};")
        indices = [i for i, x in enumerate((grad, *values)) if x.used]
        statements += _widened(dtypes, (grad, *values), coded)
        of_rows = ", ".join(str(int(part.shape == "rows")) for part in row_column_states)
        sizes = {"part": PART, "n_terms": len(terms), "n_tensors": n_tensors, "width": width}
        text = loop.format(**sizes, of_rows=of_rows, **program.body(indices, statements))
        return CppSource(preamble + text, program.exact and role == "reduce")
    keyed = rounds_stochastically or bool(coded) or bool(low)
    if rule.draws or keyed:
        preamble += random_numbers.CPP
        program.place = "position + i"
        program.before.append(f"const uint64_t position = (int64_t)h[{width}];")
        if jumps:
            preamble += places.CPP
            program.place = "places[i - block]"
            program.before.append("uint64_t places[BLOCK];")
            numbers = f"h + {width + 1 + keyed}"
            statements.append(f"places_of({numbers}, {jumps}, position, block, size, places);")
        arguments += (program,) * rule.draws
    param, state = function(*arguments)
    if keyed:
        program.before.append(f"const uint64_t key = h[{width + 1}];")
    if rounds_stochastically:
        chance = f"random_bits({program.place}, key, key >> 32) >> 16"
        new_param = program.new(torch.float32, cast(param, torch.float32), True)
        param = torch_language.bind(up_or_down, LANGUAGE)(
            new_param, program.new(torch.int32, chance, True)
        )
    new = (param, *state, *[param] * (len(values) - 1 - n_state))
    outputs = list(zip(range(1, len(dtypes)), dtypes[1:], new, strict=True))
    bits = RandomBits(program.before, program.place)
    if low:
        program.each.append(low.stored(cast(param, torch.float32)))
        program.after += low.split(bits)
    for i, dtype, value in outputs[bool(low) :]:
        if i in coded:
            program.each.append(f"{coded.element(i)} = {cast(value, torch.float32)};")
            continue
        program.each.append(f"{_element(i, dtype)} = {cast(value, arithmetic(dtype))};")
        if store := DTYPES[dtype].store:
            program.after.append(f"narrow<{store}>(w{i}, size, t{i} + block);")
    statements += _widened(dtypes, (grad, *values), coded)
    program.after += coded.encoding(bits)
    width += (rule.draws or keyed) + keyed + places.NUMBERS * jumps
    encodes = bool(coded) or bool(low)
    body = program.body(range(1 + len(values)), statements, fetches=encodes)
    blocks = (WHOLE_BLOCKS if encodes or converts else BLOCKS).format(**body)
    n_tensors += coded.n_scales
    text = UPDATE.format(width=width, n_tensors=n_tensors, before=body["before"], blocks=blocks)
    return CppSource(preamble + text, program.exact)


def _element(i: int, dtype: torch.dtype) -> str:
    """Return the C++ variable that has an element of tensor ``i``, of ``dtype``, in a loop."""
    return f"w{i}[i - block]" if DTYPES[dtype].load else f"t{i}[i]"


def _widened(
    dtypes: Sequence[torch.dtype], elements: Iterable[Any], coded: CodedStates
) -> list[str]:
    """Return the C++ statements that convert a block of each tensor that is read so.

    Args:
        dtypes: the dtype of each tensor.
        elements: the expression for an element of each.
        coded: the tensors that are decoded instead.
    """
    return [
        f"widen<{DTYPES[dtype].load}>(t{i} + block, size, w{i});"
        for i, (dtype, element) in enumerate(zip(dtypes, elements, strict=True))
        if i not in coded and DTYPES[dtype].load and element.used
    ]
