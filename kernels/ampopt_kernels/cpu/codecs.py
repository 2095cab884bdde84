"""C++ that decodes and encodes the states of a parameter, around the loop that runs a rule.

For each block of elements, a loop decodes each state into an array, the rule reads and writes the
arrays, and further loops find the largest magnitudes and encode. Each loop is short, on floats or
on bytes, so that compilers use all lanes of a vector, and goes over a whole block, a constant
number of elements.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from ampopt_kernels import torch_language
from ampopt_kernels.codecs import Codec, limits, scale_of
from ampopt_kernels.cpu.expressions import LANGUAGE, Program, cast

__all__ = ["CODES", "CodedStates"]


class _Code(NamedTuple):
    """The C++ type of a code, and formats of C++ that make it a float, and a float a code."""

    c_type: str
    load: str
    store: str


CODES = {
    torch.int8: _Code("int8_t", "(float)({})", "int32_t({})"),
    torch.uint8: _Code("uint8_t", "(float)({})", "int32_t({})"),
    torch.float16: _Code("uint16_t", "from_float16({})", "to_float16({})"),
    torch.bfloat16: _Code("uint16_t", "from_bfloat16({})", "to_bfloat16({})"),
}
"""How C++ stores codes, by their dtype."""


class CodedStates:
    """The states of a parameter that have codecs, in a translated rule.

    Tensor ``i`` of the C++ function is ``t{i}``, and its scales are ``s{i}``. The values of a block
    are in the array ``v{i}``.
    """

    def __init__(
        self, program: Program, codecs: Sequence[Codec | None], n_tensors: int, block: int
    ) -> None:
        """Declare arrays, and the pointers to scales.

        Args:
            program: the program of the rule.
            codecs: the codec of each state, or ``None``. The first state is tensor 2.
            n_tensors: the number of tensors before the scales.
            block: the number of elements of a block of the loop.
        """
        self._before = program.before
        self._codecs = {i: codec for i, codec in enumerate(codecs, 2) if codec is not None}
        self._block = block
        scaled = (i for i, codec in self._codecs.items() if codec.has_scales)
        for place, i in enumerate(scaled, n_tensors):
            program.before.append(f"float* __restrict s{i} = (float*)tensors[{place}];")
        program.before += [f"float v{i}[BLOCK];" for i in self._codecs]
        program.before += ["int32_t codes[BLOCK];"] * bool(self._codecs)

    @property
    def n_scales(self) -> int:
        """The number of tensors of scales."""
        return sum(codec.has_scales for codec in self._codecs.values())

    def __bool__(self) -> bool:
        """Whether any state has a codec."""
        return bool(self._codecs)

    def __contains__(self, i: int) -> bool:
        """Whether tensor ``i`` is a state with a codec."""
        return i in self._codecs

    def element(self, i: int) -> str:
        """The C++ variable that has the value of an element of tensor ``i``."""
        return f"v{i}[i - block]"

    def decoding(self) -> Iterator[str]:
        """Statements that decode each state, for each block of the loop over elements."""
        for i, codec in self._codecs.items():
            program = Program(torch.float32)
            code = program.new(torch.float32, f"v{i}[j]", True)
            value = cast(torch_language.bind(codec.decode, LANGUAGE)(code), torch.float32)
            if codec.block >= self._block:
                yield f"const float scale{i} = s{i}[block / {codec.block}];" * codec.has_scales
                value += f" * scale{i}" * codec.has_scales
            elif codec.has_scales:
                value += f" * s{i}[(block + j) / {codec.block}]"
            load = f"v{i}[j] = {CODES[codec.dtype].load.format(f't{i}[block + j]')};"
            program.each.append(f"v{i}[j] = {value};")
            yield _loop("0", "size", [load])
            yield _loop("0", "BLOCK", program.each)

    def encoding(self, place: str) -> Iterator[str]:
        """Statements that encode and store the states, for each block of the loop over elements.

        Args:
            place: C++ for the place of element ``i``.
        """
        if not self._codecs:
            return
        for i in self._codecs:
            yield _loop("size", "BLOCK", [f"v{i}[j] = 0;"])
        for pair in sorted({(i - 2) // 2 for i in self._codecs}):
            yield from self._random(pair, place)
            for i, codec in self._codecs.items():
                if (i - 2) // 2 == pair:
                    yield from self._encoded(i, codec)

    def _random(self, pair: int, place: str) -> Iterator[str]:
        """Statements that draw random bits for two states."""
        self._before.append(f"const uint32_t key{pair} = key_of_pair(key, {pair});")
        yield f"uint32_t random{pair}[BLOCK];"
        if place == "position + i":
            # Only the 32 low bits of the place differ, but for at most one carry.
            yield (
                f"const uint32_t near{pair} = uint32_t(position + block);\n"
                f"const uint32_t here{pair} = key_at(position + block, key{pair});\n"
                f"const uint32_t next{pair} = key_at(position + block + (1ull << 32), key{pair});"
            )
            each = [
                f"const uint32_t x = near{pair} + uint32_t(j);",
                f"random{pair}[j] = mixed(x ^ (x < near{pair} ? next{pair} : here{pair}));",
            ]
            yield _loop("0", "BLOCK", each)
        else:
            each = [
                "const int64_t i = block + j;",
                f"const uint64_t x = {place};",
                f"random{pair}[j] = mixed(uint32_t(x) ^ key_at(x, key{pair}));",
            ]
            yield _loop("0", "size", each)

    def _encoded(self, i: int, codec: Codec) -> Iterator[str]:
        """Statements that encode and store one state."""
        size = codec.block if codec.has_scales else self._block
        program = Program(torch.float32)
        x = program.new(torch.float32, f"v{i}[j]", True)
        if codec.has_scales:
            x = program.new(torch.float32, f"{x.name} * reciprocal", True)
        half = f"uniform_half(random{(i - 2) // 2}[j], {i % 2})"
        u = program.new(torch.float32, half, True)
        code = cast(torch_language.bind(codec.encode, LANGUAGE)(x, u), torch.float32)
        program.each.append(f"int32_t code = {CODES[codec.dtype].store.format(code)};")
        if (range_ := limits(codec)) is not None:
            low, high = map(int, range_)
            program.each.append(f"code = code > {low} ? code : {low};")
            program.each.append(f"code = code < {high} ? code : {high};")
        program.each.append("codes[j] = code;")
        whole = size == self._block  # a constant number of elements makes simpler loops
        yield "{ const int32_t first = 0;" * whole
        yield f"for (int32_t first = 0; first < size; first += {size}) {{" * (not whole)
        end = f"first + {size}"
        if codec.has_scales:
            # As integers, magnitudes are in the same order, with NaN above all.
            top = [f"const int32_t x = bits(v{i}[j]) & 0x7FFFFFFF;", "top = x > top ? x : top;"]
            yield "int32_t top = 0;"
            yield _loop("first", end, top, " reduction(max:top)")
            yield from _scale(f"s{i}[(block + first) / {size}]")
        yield _loop("first", end, program.each)
        yield "}"
        store = f"t{i}[block + j] = ({CODES[codec.dtype].c_type})codes[j];"
        yield f"if (size == BLOCK) {{\n{_loop('0', 'BLOCK', [store])}\n}} else {{"
        yield f"{_loop('0', 'size', [store])}\n}}"


def _scale(to: str) -> list[str]:
    """Statements that store the scale of a block, and define its ``reciprocal``."""
    program = Program(torch.float32)
    largest = program.new(torch.float32, "number(uint32_t(top))", True)
    scale, reciprocal = torch_language.bind(scale_of, LANGUAGE)(largest)
    return [*program.each, f"{to} = {scale.name};", f"const float reciprocal = {reciprocal.name};"]


def _loop(first: str, last: str, each: Sequence[str], clause: str = "") -> str:
    """A loop of ``j`` over some elements of a block."""
    body = "\n".join(each)
    return f"#pragma omp simd{clause}\nfor (int32_t j = {first}; j < {last}; ++j) {{\n{body}\n}}"
