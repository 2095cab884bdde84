"""C++ that reads and writes 24-bit masters, which are a parameter and low bits.

The loop that runs a rule leaves the new masters in an array; a loop after it splits them.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ampopt_kernels import torch_language
from ampopt_kernels.cpu.codecs import RandomBits, loop
from ampopt_kernels.cpu.expressions import LANGUAGE, Program, cast, whole
from ampopt_kernels.low_bits import LOW_BITS, joined, split

__all__ = ["LowBits"]


class LowBits:
    """The low bits of a parameter, tensor 1 of a translated rule; false if there are none."""

    def __init__(self, program: Program, dtypes: Sequence[torch.dtype], place: int) -> None:
        """Declare the pointer to the low bits.

        Args:
            program: the program of the rule.
            dtypes: the dtypes of all tensors.
            place: the index of the low bits among them, if there are any.
        """
        self._place, self._program = place, program
        self._exist = len(dtypes) > place and dtypes[place] == LOW_BITS
        self._half = dtypes[1] == torch.float16
        if self._exist:
            program.before.append(f"int8_t* __restrict t{place} = (int8_t*)tensors[{place}];")

    def __bool__(self) -> bool:
        """Whether there are low bits."""
        return self._exist

    def joined(self, param: Any) -> Any:
        """The master of which ``param`` is an element of the parameter, an expression."""
        program = self._program
        low = program.new(torch.int32, f"t{self._place}[i]", True)
        master = torch_language.bind(joined, LANGUAGE)(param.to(torch.float32), low, self._half)
        return master.to(program.compute)

    def stored(self, value: str) -> str:
        """The statement that leaves ``value``, the new master of element ``i``, in an array."""
        self._program.before.append("float masters[BLOCK];")
        return f"masters[i - block] = {value};"

    def split(self, bits: RandomBits) -> Iterator[str]:
        """Statements that store the new parameters and low bits of a block.

        Args:
            bits: random bits for each element.
        """
        yield from bits.drawn_for(-1)
        program = Program(torch.float32)
        master = program.new(torch.float32, "masters[j]", True)
        u = bits.uniform(-1, program)
        param, low = torch_language.bind(split, LANGUAGE)(master, u, self._half)
        expression = cast(param, torch.float32)
        if self._half:
            program.each.append(f"w1[j] = {expression};")
        else:
            # All lower bits are 0.
            program.each.append(f"t1[block + j] = bits({expression}) >> 16;")
        program.each.append(f"t{self._place}[block + j] = {whole(low)};")
        yield loop("0", "size", program.each)
        if self._half:
            yield "narrow<to_float16>(w1, size, t1 + block);"
