"""Translates a rule to C++ by running its functions once on expressions in place of tensors.

This is the third implementation of the language that rules are written in, after Triton and
``torch_language``. The C++ performs the same operations on elements as ``torch_language`` in the
same order and precision, each rounded as IEEE 754 requires, so the results are bitwise those of
the eager backend, given the same numbers ``h``. Exceptions are functions that IEEE 754 does not
specify, such as the exponential, and the square root of float64: torch calls other libraries; and
the bits of a NaN that arithmetic makes or passes on, as compilers swap operands.

Arithmetic on numbers (``h``, and all of ``Rule.scalars``) is done in float64, with the bits of
Python's functions.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from ampopt_kernels import element_indices, random_numbers, torch_language
from ampopt_kernels.codecs import Codec
from ampopt_kernels.cpu import loops
from ampopt_kernels.cpu.codecs import CodedStates, RandomBits
from ampopt_kernels.cpu.dtypes import CODES, DTYPES, preamble
from ampopt_kernels.cpu.expressions import C_TYPES, LANGUAGE, Program, cast
from ampopt_kernels.cpu.low_bits import LowBits
from ampopt_kernels.language import up_or_down
from ampopt_kernels.low_bits import LOW_BITS
from ampopt_kernels.rule import Rule
from ampopt_kernels.tensors import arithmetic

__all__ = ["BLOCK", "OPTIONS", "PART", "Kind", "source_of", "translate"]

BLOCK = 1 << 6
"""Elements of a block: a few terms of it in float64 fit the first cache of a core."""
CONVERTED = 320
"""Elements of a block of an update that converts half precision, such as gradients, beside float32
parameters. Each of its loops reads so much of one tensor after another, which takes up to a seventh
less time than 64 elements do; with parameters and states in half precision, up to a fifth more."""
PART = 1 << 11
"""Elements of which one thread adds up the terms of ``reduce`` or ``averages``."""
WORTH_THREADS = 1 << 16
"""Elements of a pass, more of which threads share: for fewer, that takes longer than the work."""
OPTIONS = ("-fno-builtin",)
"""Compiler options for a source: no function of the C library is replaced by another one, or
computed by the compiler, so that scalars have the bits of Python's functions."""


class Kind(NamedTuple):
    """What is compiled into a library; rows of one kind share a table and a call.

    Attributes:
        rule: the update rule.
        flags: its flags.
        dtypes: the dtypes of gradient, parameter, elementwise states, and the low-precision copy or
            the low bits of a master weight, if there are any.
        scalar_dtypes: the dtype of each scalar state, float32 or float64; ``None`` where the flags
            omit it.
        n_hyper: the number of hyperparameters, tuples flattened.
        rounds: whether the parameter, bfloat16, is rounded stochastically.
        codecs: the codec of each state, or ``None``. Empty if no state has one.
        jumps: the number of jumps in the indices of the elements; see ``element_indices``.
    """

    rule: Rule
    flags: tuple[bool, ...]
    dtypes: tuple[torch.dtype, ...]
    scalar_dtypes: tuple[torch.dtype | None, ...]
    n_hyper: int
    rounds: bool = False
    codecs: tuple[Codec | None, ...] = ()
    jumps: int = 0

    @property
    def has_random_key(self) -> bool:
        """Whether anything is rounded stochastically, with a key for each step."""
        return self.rounds or bool(self.codecs) or LOW_BITS in self.dtypes

    @property
    def has_indices(self) -> bool:
        """Whether a row needs the indices of its elements, from which random numbers follow."""
        return self.has_random_key or self.rule.draws

    @property
    def n_tensors(self) -> int:
        """The number of addresses of a row before those of scalar states; see ``table``."""
        means = len(self.rule.averages_for(self.flags))
        scales = sum(codec is not None and codec.has_scales for codec in self.codecs)
        return len(self.dtypes) + scales + (means + 2) * bool(means)

    def width_of(self, role: str) -> int:
        """How many numbers a row takes for ``"update"``, or for ``"reduce"``."""
        widths = self.rule.widths(self.n_hyper)
        if role == "reduce":
            return 2 + widths.reduce
        of_indices = 1 + 2 * self.has_random_key + element_indices.NUMBERS * self.jumps
        return 2 + widths.update + of_indices * self.has_indices

    @property
    def roles(self) -> "dict[str, Callable[[Kind], str]]":
        """The functions of the rule that are translated, in an order for the compiler."""
        roles: dict[str, Callable[[Kind], str]] = {"scalars": _scalars, "update": _update}
        averages = self.rule.averages_for(self.flags)
        if self.rule.reduces or averages:
            roles["before_sums"] = _before_sums
        if self.rule.reduces:
            roles["reduce"] = _reduce
        if averages:
            roles["averages"] = _averages
        return roles


def source_of(kind: Kind) -> str:
    """Translate a rule to C++: one library with a function for each pass over a table.

    Args:
        kind: the rule, and what its library is compiled for.

    Raises:
        Exception: the rule uses something that the language does not have; of any type, as the
            functions of the rule run here.
    """
    head = loops.TABLE.format(
        tensors=kind.n_tensors,
        scalars=len(kind.scalar_dtypes),
        has_indices=str(kind.has_indices).lower(),
        jumps=element_indices.NUMBERS * kind.jumps,
        worth_threads=WORTH_THREADS,
    )
    parts = [preamble(), head]
    parts += [random_numbers.CPP] * kind.has_indices + [element_indices.CPP] * bool(kind.jumps)
    return "\n".join((*parts, *(translate(kind, role) for role in kind.roles)))


def translate(kind: Kind, role: str) -> str:
    """The C++ of one function of a rule: a namespace; see ``loops``.

    Args:
        kind: as for :func:`source_of`.
        role: one of ``kind.roles``.

    Raises:
        Exception: as :func:`source_of`.
    """
    return f"namespace of_{role} {{\n{kind.roles[role](kind)}\n}}"


# --- scalars -------------------------------------------------------------------------------------


def _scalars(kind: Kind) -> str:
    """C++ of ``scalars``, after ``before_reduce`` if the rule has a ``reduce``."""
    return _of_scalars(kind, stores=True)


def _before_sums(kind: Kind) -> str:
    """C++ of what computes the numbers of ``reduce`` and ``averages``, and stores nothing."""
    return _of_scalars(kind, stores=False) + loops.BEFORE_SUMS


def _of_scalars(kind: Kind, *, stores: bool) -> str:
    """C++ that computes the numbers of rows, of those before the sums unless it ``stores``."""
    rule, flags, dtypes = kind.rule, kind.flags, kind.scalar_dtypes
    program = Program(torch.float64)

    def numbers(name: str, of: Iterable[int]) -> tuple[Any, ...]:
        return tuple(program.new(torch.float64, f"{name}[{i}]", False) for i in of)

    states = [
        "" if dtype is None else f"*({C_TYPES[dtype]}*)row[TENSORS + {i}]"
        for i, dtype in enumerate(dtypes)
    ]
    inputs = [state or "0" for state in states]
    s, h = numbers("inputs", range(len(dtypes))), numbers("h", range(kind.n_hyper))
    to_store, of_indices = [], []
    if rule.reduces:
        s, h = rule.bound("before_reduce", LANGUAGE)(s, h, flags)
    if stores or not rule.reduces:
        n_terms = rule.widths(kind.n_hyper).terms
        inputs += [f"sums[row[0] * {n_terms} + {i}]" for i in range(n_terms)]
        sums = numbers("inputs", range(len(dtypes), len(inputs)))
        totals = numbers("totals", range(n_terms * (rule.scalars_arguments > 4)))
        s, h = rule.bound("scalars", LANGUAGE)(s, h, flags, sums, totals)
    if stores:
        program.before += [f"next[{i}] = {cast(x, torch.float64)};" for i, x in enumerate(s)]
        to_store = [f"{state} = next[{i}];" for i, state in enumerate(states) if state]
        if kind.has_indices:
            of_indices = ["row[FIRST]"]
            if kind.has_random_key:  # in halves, as float64 does not hold every int64
                key = "*(uint64_t*)row[KEY]"
                of_indices += [f"uint32_t({key})", f"uint32_t({key} >> 32)"]
            of_indices += [f"row[JUMPS + {i}]" for i in range(element_indices.NUMBERS * kind.jumps)]
    results = [*(cast(x, torch.float64) for x in h), *of_indices]
    program.before += [f"result[{i}] = {x};" for i, x in enumerate(results, 2)]
    inputs.append("0")  # an array has at least one element
    return loops.SCALARS.format(
        n_inputs=len(inputs),
        inputs=", ".join(inputs),
        n_hyper=kind.n_hyper,
        width=2 + len(results),
        has_indices=str(bool(of_indices)).lower(),
        statements="\n            ".join(program.before),
        stores="\n        ".join(to_store),
    )


# --- elements ------------------------------------------------------------------------------------


class _Elements:
    """The expressions for one element of each tensor of a row, in a loop over blocks.

    Attributes:
        program: the program of the loop.
        n_state: the number of elementwise states.
        coded: the states with codecs.
        low: the low bits of a 24-bit master.
        dtypes: the dtypes of the tensors but low bits.
        read: the expression for each of these tensors.
        arguments: the arguments of the rule's function.
        statements: C++ that runs for each block, before its elements.
    """

    def __init__(self, kind: Kind, width: int, block: int, *, of_lines: bool = False) -> None:
        """Declare the tensors.

        Args:
            kind: the rule, and what its library is compiled for.
            width: how many numbers the function of the rule takes.
            block: the number of elements of a block.
            of_lines: whether the function is ``averages``: it takes no factors, and a block begins
                where a row does.
        """
        rule, compute = kind.rule, arithmetic(*kind.dtypes[:2])
        self.program = program = Program(compute)
        self.coded = coded = CodedStates(
            program, kind.codecs, len(kind.dtypes), 0 if of_lines else block
        )
        self.n_state = len(rule.state_for(kind.flags))
        self.low = LowBits(program, kind.dtypes, 2 + self.n_state)
        self.dtypes = kind.dtypes[: len(kind.dtypes) - bool(self.low)]
        for i, dtype in enumerate(self.dtypes):
            pointer = f"{(CODES.get(dtype) or DTYPES[dtype]).c_type}*"
            declared = f"{pointer} __restrict t{i} = static_cast<{pointer}>(tensors[{i}]);"
            program.before.append(declared)
            if i not in coded and DTYPES[dtype].load:
                program.before.append(f"alignas(64) float w{i}[BLOCK];")
        inverse, clip, *h = (program.new(torch.float64, f"h[{i}]", False) for i in range(width))
        self.read = [
            coded.decoded(i, program) if i in coded else program.new(compute, _at(i, dtype), True)
            for i, dtype in enumerate(self.dtypes)
        ]
        grad, *values = self.read
        param = self.low.joined(values[0]) if self.low else values[0]
        state, self.statements = values[1 : 1 + self.n_state], coded.scales()
        over = () if of_lines else rule.averages_for(kind.flags)
        for i, lines in enumerate(over, kind.n_tensors - 2 - len(over)):
            m, n = (f"(int64_t)tensors[TENSORS - {k}]" for k in (2, 1))
            c, rows = C_TYPES[compute], str(lines == "rows").lower()
            program.before.append(f"{c} t{i}[BLOCK];")
            program.before.append(f"Spread<{c}> spread{i}(tensors[{i}], {rows}, {m}, {n}, start);")
            self.statements.append(f"spread{i}.next(size, t{i});")
            state.append(program.new(compute, f"t{i}[i - block]", True))
        self.arguments = (param, grad * inverse * clip, tuple(state), tuple(h), kind.flags)

    def widened(self) -> list[str]:
        """C++ statements that convert a block of each tensor in half precision that is read."""
        return [
            f"widen<{DTYPES[dtype].load}>(t{i} + block, size, w{i});"
            for i, (dtype, element) in enumerate(zip(self.dtypes, self.read, strict=True))
            if i not in self.coded and DTYPES[dtype].load and element.used
        ]


def _at(i: int, dtype: torch.dtype) -> str:
    """The C++ variable that has an element of tensor ``i``, of ``dtype``, in a loop."""
    return f"w{i}[i - block]" if DTYPES[dtype].load else f"t{i}[i]"


def _with_block(block: int, text: str) -> str:
    """``text`` after the number of elements of its blocks."""
    return f"constexpr int32_t BLOCK = {block};\n{text}"


def _terms(kind: Kind, role: str, loop: str, adds: str, **constants: Any) -> str:
    """C++ that adds up the terms that ``reduce`` or ``averages`` returns.

    Args:
        kind: the rule, and what its library is compiled for.
        role: the name of the function.
        loop: the template.
        adds: the C++ operator that combines a term with the place for terms.
        constants: what else the template needs.
    """
    width = kind.width_of("reduce")
    elements = _Elements(kind, width, BLOCK, of_lines=role == "averages")
    program = elements.program
    terms = kind.rule.bound(role, LANGUAGE)(*elements.arguments)
    for k, term in enumerate(terms):
        program.each.append(f"terms[{k}][j] {adds} {cast(term, torch.float64)};")
    indices = [i for i, x in enumerate(elements.read) if x.used]
    body = program.body(indices, elements.statements + elements.widened())
    sizes = {"part": PART, "n_terms": len(terms), "width": width}
    return _with_block(BLOCK, loop.format(**sizes, **constants, **body))


def _reduce(kind: Kind) -> str:
    """C++ of ``reduce``."""
    return _terms(kind, "reduce", loops.REDUCE, "+=")


def _averages(kind: Kind) -> str:
    """C++ of ``averages``."""
    of_rows = ", ".join(str(int(over == "rows")) for over in kind.rule.averages_for(kind.flags))
    return _terms(kind, "averages", loops.AVERAGES, "=", of_rows=of_rows)


def _update(kind: Kind) -> str:
    """C++ of ``update``."""
    width = 2 + kind.rule.widths(kind.n_hyper).update
    converts = any(dtype in DTYPES and DTYPES[dtype].load for dtype in kind.dtypes)
    blocks = [codec.block for codec in kind.codecs if codec is not None]
    if converts and not blocks and not DTYPES[kind.dtypes[1]].load:
        blocks = [CONVERTED]
    block = max([BLOCK, *blocks])
    elements = _Elements(kind, width, block)
    program, coded, low, dtypes = elements.program, elements.coded, elements.low, elements.dtypes
    statements, arguments = elements.statements, elements.arguments
    if kind.has_indices:
        program.index = "position + i"
        program.before.append(f"const uint64_t position = (int64_t)h[{width}];")
        if kind.jumps:
            program.index = "indices[i - block]"
            program.before.append("uint64_t indices[BLOCK];")
            numbers = f"h + {width + 1 + 2 * kind.has_random_key}"
            call = f"indices_of({numbers}, {kind.jumps}, position, block, size, indices);"
            statements.append(call)
    param, state = kind.rule.bound("update", LANGUAGE)(*arguments, program)
    if kind.has_random_key:
        program.before.append(
            f"const uint64_t key = (uint64_t)h[{width + 1}] | (uint64_t)h[{width + 2}] << 32;"
        )
    if kind.rounds:
        chance = f"random_bits({program.index}, key, key >> 32) >> 16"
        new_param = program.new(torch.float32, cast(param, torch.float32), True)
        param = torch_language.bind(up_or_down, LANGUAGE)(
            new_param, program.new(torch.int32, chance, True)
        )
    new = (param, *state, *[param] * (len(dtypes) - 2 - elements.n_state))
    outputs = list(zip(range(1, len(dtypes)), dtypes[1:], new, strict=True))
    bits = RandomBits(program.before, program.index)
    if low:
        program.each.append(low.stored(cast(param, torch.float32)))
        program.after += low.split(bits)
    for i, dtype, value in outputs[bool(low) :]:
        if i in coded:
            program.each.append(f"{coded.element(i)} = {cast(value, torch.float32)};")
            continue
        program.each.append(f"{_at(i, dtype)} = {cast(value, arithmetic(dtype))};")
        if store := DTYPES[dtype].store:
            program.after.append(f"narrow<{store}>(w{i}, size, t{i} + block);")
    program.after += coded.encoding(bits)
    encodes = bool(coded) or bool(low)
    body = program.body(range(len(dtypes)), statements + elements.widened(), fetches=encodes)
    template = loops.WHOLE_BLOCKS if encodes or converts else loops.BLOCKS
    apply = loops.APPLY.format(before=body["before"], blocks=template.format(**body))
    grad = DTYPES[kind.dtypes[0]]
    update = loops.UPDATE.format(
        width=kind.width_of("update"),
        grad=grad.c_type,
        number=C_TYPES[program.compute],
        load=grad.load,
        store=grad.store,
    )
    return _with_block(block, apply + update)
