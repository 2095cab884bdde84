"""``Rule.before_reduce`` and ``Rule.scalars`` for the rows of a block: on the host, or compiled.

Each row gets the bits that it would get alone, whichever of both computes them, and whatever the
step counts of the other rows are.
"""

import ctypes
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampopt_kernels import torch_language
from ampopt_kernels.cpu.bundles import Numbers
from ampopt_kernels.cpu.cpp import CppSource
from ampopt_kernels.cpu.expressions import C_TYPES, LANGUAGE, Program, cast
from ampopt_kernels.cpu.loops import PREAMBLE
from ampopt_kernels.rule import Rule
from ampopt_kernels.sums import Sums

__all__ = ["CompiledScalars", "ScalarRows", "scalars_on_host", "scalars_source"]


class ScalarRows(NamedTuple):
    """The rows of a block that scalars are computed for.

    Attributes:
        n: the number of rows.
        states: for each scalar state, its values, contiguous, of shape (n,), float32 or float64;
            ``None`` where the flags omit it.
        mask: which rows have a gradient, bool, of shape (n,); ``None`` if all have one.
        sums: the sums of the terms of ``Rule.reduce`` over each row, and the totals; ``None``
            before ``reduce``, and if the rule has none.
    """

    n: int
    states: Sequence[Tensor | None]
    mask: Tensor | None
    sums: Sums | None = None

    def store(self, new: Sequence[Any]) -> None:
        """Write new values, numbers or tensors, of the scalar states of rows with a gradient."""
        for state, value in zip(self.states, new, strict=True):
            if state is not None:
                value = value if self.mask is None else torch.where(self.mask, value, state)
                state.copy_(value) if isinstance(value, Tensor) else state.fill_(value)


def scalars_on_host(
    rule: Rule, flags: tuple[bool, ...], rows: ScalarRows, h: Sequence[float]
) -> Numbers:
    """Compute the numbers of the rows by Python or torch, and store their scalar states.

    Args:
        rule: the update rule.
        flags: its flags.
        rows: the rows.
        h: the reciprocal of the scale, the clip coefficient, and the hyperparameters.

    Returns:
        The first two numbers of ``h``, and the ``h`` of ``Rule.update``. Before ``Rule.reduce``
        has run, the ``h`` of that instead; then nothing is stored.
    """
    numbers = _of_each if rule.reduces else _of_distinct
    result = numbers(rule, flags, rows, tuple(h[:2]), tuple(h[2:]))
    return result if rows.mask is None else result.of_present(rows.mask)


def _of_each(
    rule: Rule,
    flags: tuple[bool, ...],
    rows: ScalarRows,
    coefficients: tuple[float, ...],
    h: tuple[float, ...],
) -> Numbers:
    """Compute all rows at once by torch operations, as each has sums of its own."""
    s, hyper = tuple(column.clone() for column in _columns(rows)), _wide(h)
    new_s, new_h = rule.host_before_reduce(s, hyper, flags)
    if rows.sums is not None:
        each, totals = rows.sums.each.unbind(1), rows.sums.totals.unbind()
        new_s, new_h = rule.host_scalars(new_s, new_h, flags, each, totals)
        rows.store(new_s)
    table = torch.stack([x.expand(rows.n) for x in _wide((*coefficients, *new_h))], 1)
    return Numbers(table, torch.arange(rows.n, device="cpu"))


def _of_distinct(
    rule: Rule,
    flags: tuple[bool, ...],
    rows: ScalarRows,
    coefficients: tuple[float, ...],
    h: tuple[float, ...],
) -> Numbers:
    """Run ``Rule.scalars`` once for all rows that have the same states, on Python numbers."""
    indices: dict[tuple[int, ...], int] = {}  # of the bits, which tell -0.0 from 0.0
    bits = map(tuple, torch.stack(_columns(rows), 1).view(torch.int64).tolist())
    of_rows = torch.tensor([indices.setdefault(s, len(indices)) for s in bits], device="cpu")
    distinct = torch.tensor(list(indices), device="cpu").view(torch.float64).tolist()
    results = [rule.scalars_on_numbers(tuple(s), h, flags) for s in distinct]
    new_s, table = (
        torch.tensor([list(map(float, x)) for x in column], dtype=torch.float64, device="cpu")
        for column in zip(*((s, (*coefficients, *h)) for s, h in results), strict=True)
    )
    rows.store(new_s[of_rows].unbind(1))
    return Numbers(table, of_rows)


def _columns(rows: ScalarRows) -> list[Tensor]:
    """Return the scalar states as float64, with 0 for those that the flags omit."""
    none = torch.zeros(rows.n, dtype=torch.float64, device="cpu")
    return [none if s is None else s.to(torch.float64) for s in rows.states]


def _wide(numbers: Iterable[Any]) -> tuple[Tensor, ...]:
    """Return each number as a 0-d float64 tensor."""
    # Tensors, not numbers: torch computes number / tensor as number * (1 / tensor), which rounds
    # twice.
    return tuple(torch.as_tensor(x, dtype=torch.float64, device="cpu") for x in numbers)


# --- compiled ------------------------------------------------------------------------------------

# No function of the C library is replaced by another one, or computed by the compiler.
_OPTIONS = ("-fno-builtin",)

# Rows with the inputs of the row before share its result. ``results`` has one result after another,
# ``of_rows`` gets the index of that of each row, or -1 for a row without a gradient.
_SCALARS = """
extern "C" const int64_t {role}_width = {width};

extern "C" int64_t {role}(
    void* const* states, const double* h, const bool* present, const double* sums,
    const double* totals, int64_t n_rows, double* results, int64_t* of_rows
) {{
    int64_t n_results = 0;
    double last[{n_inputs}], next[{n_inputs}];
    for (int64_t row = 0; row < n_rows; ++row) {{
        of_rows[row] = -1;
        if (present && !present[row]) continue;
        const double inputs[] = {{{inputs}}};
        if (!n_results || __builtin_memcmp(inputs, last, sizeof inputs)) {{
            __builtin_memcpy(last, inputs, sizeof inputs);
            double* result = results + {width} * n_results++;
            result[0] = h[0], result[1] = h[1];
            {statements}
        }}
        {stores}
        of_rows[row] = n_results - 1;
    }}
    return n_results;
}}
"""


def scalars_source(
    rule: Rule, flags: tuple[bool, ...], dtypes: Sequence[torch.dtype | None], width: int
) -> CppSource:
    """Translate ``scalars`` and, if the rule has a ``reduce``, ``before_reduce``.

    Args:
        rule: the update rule.
        flags: its flags.
        dtypes: the dtype of each scalar state, float32 or float64; ``None`` where the flags omit
            it.
        width: the number of hyperparameters, and 2.

    Returns:
        The source. Its results are not exact if the rule divides a number that stands in its
        source, and is no power of two, by another number.

    Raises:
        Exception: as :func:`ampopt_kernels.cpu.cpp.source_of`.
    """
    n_terms = rule.widths(width - 2).terms
    parts, exact = ["#define BLOCK 1", PREAMBLE], True  # no function here has blocks
    for role in ("before_reduce", "scalars") if rule.reduces else ("scalars",):
        program = Program(torch.float64, of_scalars=True)

        def numbers(name: str, of: Iterable[int], program: Program = program) -> tuple[Any, ...]:
            return tuple(program.new(torch.float64, f"{name}[{i}]", False) for i in of)

        s, h = numbers("inputs", range(len(dtypes))), numbers("h", range(2, width))
        inputs = [
            "0" if dtype is None else f"(({C_TYPES[dtype]}*)states[{i}])[row]"
            for i, dtype in enumerate(dtypes)
        ]
        stores = []
        if rule.reduces:
            s, h = torch_language.bind(rule.before_reduce, LANGUAGE)(s, h, flags)
        if role == "scalars":
            inputs += [f"sums[row * {n_terms} + {i}]" for i in range(n_terms)]
            sums = numbers("inputs", range(len(dtypes), len(inputs)))
            totals = numbers("totals", range(n_terms * (rule.scalars_arguments > 4)))
            function = torch_language.bind(rule.scalars, LANGUAGE)
            s, h = function(*(s, h, flags, sums, totals)[: rule.scalars_arguments])
            program.before += [f"next[{i}] = {cast(x, torch.float64)};" for i, x in enumerate(s)]
            stores = [
                f"(({C_TYPES[dtype]}*)states[{i}])[row] = next[{i}];"
                for i, dtype in enumerate(dtypes)
                if dtype is not None
            ]
        program.before += [f"result[{i}] = {cast(x, torch.float64)};" for i, x in enumerate(h, 2)]
        inputs.append("0")  # an array has at least one element
        parts.append(
            _SCALARS.format(
                role=role,
                width=2 + len(h),
                n_inputs=len(inputs),
                inputs=", ".join(inputs),
                statements="\n            ".join(program.before),
                stores="\n        ".join(stores),
            )
        )
        exact = exact and program.exact
    return CppSource("\n".join(parts), exact, _OPTIONS)


class CompiledScalars:
    """The compiled ``before_reduce`` and ``scalars`` of a rule."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Look up the functions in ``library``."""
        self._functions = {}
        for role in ("before_reduce", "scalars"):
            if hasattr(library, role):
                function = getattr(library, role)
                pointer, count = ctypes.c_void_p, ctypes.c_int64
                function.argtypes = (*(pointer,) * 5, count, pointer, pointer)
                function.restype = count
                width = count.in_dll(library, f"{role}_width").value
                self._functions[role] = function, width
        self._first = next(iter(self._functions))

    def __call__(self, rows: ScalarRows, h: Sequence[float]) -> Numbers:
        """Return what :func:`scalars_on_host` does, and store what it stores."""
        function, width = self._functions["scalars" if rows.sums is not None else self._first]
        states = array("q", [0 if s is None else s.data_ptr() for s in rows.states])
        numbers, mask = array("d", h), rows.mask
        of_rows = torch.empty(rows.n, dtype=torch.int64, device="cpu")
        table = torch.empty(rows.n, width, dtype=torch.float64, device="cpu")
        sums = () if rows.sums is None else tuple(x.contiguous() for x in rows.sums)
        n_results = function(
            states.buffer_info()[0],
            numbers.buffer_info()[0],
            None if mask is None else mask.data_ptr(),
            *(map(Tensor.data_ptr, sums) if sums else (None, None)),
            rows.n,
            table.data_ptr(),
            of_rows.data_ptr(),
        )
        return Numbers(table[: n_results or 1], of_rows)
