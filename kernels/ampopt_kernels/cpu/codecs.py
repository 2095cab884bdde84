"""C++ that decodes and encodes the states of a parameter, around the loop that runs a rule.

For each block of elements, the loop that runs the rule decodes the states, and writes their new
values to arrays. Further loops find the largest magnitudes, draw random bits, and encode. Each loop
over a whole block has a constant number of elements, so that compilers use all lanes of a vector.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ampopt_kernels import torch_language
from ampopt_kernels.codecs import BFLOAT16, Codec, pair_and_part, scale_of
from ampopt_kernels.cpu.dtypes import CODES
from ampopt_kernels.cpu.expressions import LANGUAGE, Program, cast, whole

__all__ = ["CodedStates", "RandomBits", "loop"]


class RandomBits:
    """Random bits for the elements of a block, which two states and a 24-bit master share."""

    def __init__(self, before: list[str], index: str) -> None:
        """Draw nothing yet.

        Args:
            before: statements that run once, before the loop over blocks.
            index: C++ for the index of element ``i``.
        """
        self._before, self._index = before, index
        self._drawn: set[int] = set()

    def uniform(self, state: int, program: Program) -> Any:
        """The random number of the element ``j`` of a block, by statements of ``program``.

        Args:
            state: the index of the state; -1 for a 24-bit master.
            program: the program of a loop over the elements of a block.
        """
        pair, part = pair_and_part(state)
        u = program.new(torch.float32, f"uniform_part(random{pair}[j], {part})", True)
        u.chance = f"chance_part(random{pair}[j], {part}, {{}})"
        return u

    def drawn_for(self, state: int) -> Iterator[str]:
        """Statements that draw the bits, unless they were drawn for another state."""
        pair, _ = pair_and_part(state)
        if pair in self._drawn:
            return
        self._drawn.add(pair)
        self._before.append(f"const uint32_t key{pair} = key_of_pair(key, {pair});")
        yield f"uint32_t random{pair}[BLOCK];"
        if self._index == "position + i":
            # Only the 32 low bits of the index differ, but for at most one carry, which is rare.
            yield (
                f"const uint32_t near{pair} = uint32_t(position + block);\n"
                f"const uint32_t here{pair} = key_at(position + block, key{pair});"
            )
            each = [f"random{pair}[j] = mixed((near{pair} + uint32_t(j)) ^ here{pair});"]
            yield loop("0", "BLOCK", each)
            yield f"const uint32_t carry{pair} = 0u - near{pair};  // elements before the carry"
            yield f"if (near{pair} && carry{pair} < BLOCK) {{"
            yield f"const uint32_t next = key_at(position + block + (1ull << 32), key{pair});"
            each = [f"random{pair}[j] = mixed((near{pair} + uint32_t(j)) ^ next);"]
            yield loop(f"int32_t(carry{pair})", "BLOCK", each) + "\n}"
        else:
            each = [
                "const int64_t i = block + j;",
                f"const uint64_t x = {self._index};",
                f"random{pair}[j] = mixed(uint32_t(x) ^ key_at(x, key{pair}));",
            ]
            yield loop("0", "size", each)


class CodedStates:
    """The states of a parameter that have codecs, in a translated rule.

    Tensor ``i`` of the C++ function is ``t{i}``, and its scales are ``s{i}``. The new values of a
    block are in the array ``v{i}``.
    """

    def __init__(
        self, program: Program, codecs: Sequence[Codec | None], n_tensors: int, block: int
    ) -> None:
        """Declare arrays, and the pointers to scales.

        Args:
            program: the program of the rule.
            codecs: the codec of each state, or ``None``. The first state is tensor 2.
            n_tensors: the number of tensors before the scales.
            block: the number of elements of a block of the loop; 0 if blocks begin anywhere.
        """
        self._before = program.before
        self._codecs = {i: codec for i, codec in enumerate(codecs, 2) if codec is not None}
        self._block = block
        with_scales = (i for i, codec in self._codecs.items() if codec.has_scales)
        for place, i in enumerate(with_scales, n_tensors):
            program.before.append(f"float* __restrict s{i} = (float*)tensors[{place}];")
        program.before += [f"float v{i}[BLOCK];" for i in self._codecs]

    def __bool__(self) -> bool:
        """Whether any state has a codec."""
        return bool(self._codecs)

    def __contains__(self, i: int) -> bool:
        """Whether tensor ``i`` is a state with a codec."""
        return i in self._codecs

    def element(self, i: int) -> str:
        """The C++ variable that takes the new value of an element of tensor ``i``."""
        return f"v{i}[i - block]"

    def decoded(self, i: int, program: Program) -> Any:
        """The value of an element of tensor ``i``, decoded by statements of ``program``."""
        codec = self._codecs[i]
        element = f"{CODES[codec.dtype].load}(t{i}[i])"
        if codec.dtype.is_floating_point:
            code = program.new(torch.float32, element, True)
        else:
            code = program.new(torch.int32, element, True).to(torch.float32)
        value = cast(torch_language.bind(codec.decode, LANGUAGE)(code), torch.float32)
        if codec.has_scales:
            scale = f"scale{i}" if self._shares_scale(codec) else f"s{i}[i / {codec.block}]"
            value += f" * {scale}"
        return program.new(program.compute, value, True)

    def scales(self) -> list[str]:
        """Statements that load the scale of each state, for each block of the loop."""
        return [
            f"const float scale{i} = s{i}[block / {codec.block}];"
            for i, codec in self._codecs.items()
            if codec.has_scales and self._shares_scale(codec)
        ]

    def _shares_scale(self, codec: Codec) -> bool:
        """Whether all elements of a block of the loop have the same scale."""
        return 0 < self._block <= codec.block

    def encoding(self, bits: RandomBits) -> Iterator[str]:
        """Statements that encode and store the states, for each block of the loop over elements."""
        if not self._codecs:
            return
        for i in self._codecs:
            yield loop("size", "BLOCK", [f"v{i}[j] = 0;"])
        for size in sorted({codec.block for codec in self._codecs.values() if codec.has_scales}):
            yield from self._scaled(size)
        for i, codec in self._codecs.items():
            yield from bits.drawn_for(i - 2)
            yield from self._encoded(i, codec, bits)

    def _scaled(self, size: int) -> Iterator[str]:
        """Statements that store the scales of all states with blocks of ``size`` elements.

        The reciprocals of the scales are kept in the arrays ``r{i}``. One loop finds the largest
        magnitudes of all states, so that it is not their number that processors wait for.
        """
        states = [i for i, codec in self._codecs.items() if codec.block == size]
        each = []
        for i in states:
            yield f"float r{i}[BLOCK / {size}];"
            # As integers, magnitudes are in the same order, with NaN above all.
            each.append(f"const int32_t x{i} = bits(v{i}[j]) & 0x7FFFFFFF;")
            each.append(f"top{i} = x{i} > top{i} ? x{i} : top{i};")
        yield f"for (int32_t first = 0; first < size; first += {size}) {{"
        yield f"int32_t {', '.join(f'top{i} = 0' for i in states)};"
        clause = f" reduction(max:{', '.join(f'top{i}' for i in states)})"
        yield loop("first", f"first + {size}", each, clause)
        program = Program(torch.float32)
        for i in states:
            largest = program.new(torch.int32, f"top{i}", True)
            scale, reciprocal = torch_language.bind(scale_of, LANGUAGE)(largest)
            program.each.append(f"s{i}[(block + first) / {size}] = {scale.name};")
            program.each.append(f"r{i}[first / {size}] = {reciprocal.name};")
        yield from program.each
        yield "}"

    def _encoded(self, i: int, codec: Codec, bits: RandomBits) -> Iterator[str]:
        """Statements that encode and store one state.

        Args:
            i: the index of its tensor.
            codec: its codec.
            bits: random bits for each element.
        """
        size = codec.block if codec.has_scales else self._block
        program = Program(torch.float32)
        x = program.new(torch.float32, f"v{i}[j]", True)
        if codec.has_scales:
            x = program.new(torch.float32, f"{x.name} * reciprocal", True)
        code = torch_language.bind(codec.encode, LANGUAGE)(x, bits.uniform(i - 2, program))
        # A float is clamped before it becomes an integer: of others, such as inf, C++ makes any.
        program.each.append(f"auto code = {whole(code) or cast(code, torch.float32)};")
        if (range_ := codec.limits) is not None:
            low, high = map(int, range_)
            program.each.append(f"code = code > {low} ? code : {low};")
            program.each.append(f"code = code < {high} ? code : {high};")
        c_type, _, store = CODES[codec.dtype]
        if codec is BFLOAT16:
            store = "as_bfloat16"
        program.each.append(f"t{i}[block + j] = ({c_type}){store}(code);")
        yield f"for (int32_t first = 0; first < size; first += {size}) {{"
        yield f"const float reciprocal = r{i}[first / {size}];" * codec.has_scales
        end = f"first + {size}"  # compilers make faster loops of it than of the lesser of two
        yield loop("first", f"(size % {size} ? lesser({end}, size) : {end})", program.each)
        yield "}"


def loop(first: str, last: str, each: Sequence[str], clause: str = "") -> str:
    """A loop of ``j`` over some elements of a block, in vectors."""
    body = "\n".join(each)
    return f"#pragma omp simd{clause}\nfor (int32_t j = {first}; j < {last}; ++j) {{\n{body}\n}}"
