"""C++ that reads and writes 24-bit masters, which are a parameter and low bits.

The loop that runs a rule leaves the new masters in an array; a loop after it splits them.
"""

from collections.abc import Iterator, Sequence

import torch

from ampopt_kernels.cpu.codecs import RandomBits, loop
from ampopt_kernels.cpu.dtypes import CDtype
from ampopt_kernels.cpu.expressions import Program
from ampopt_kernels.low_bits import LOW_BITS

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
        self._place, self._before = place, program.before
        self._exist = len(dtypes) > place and dtypes[place] == LOW_BITS
        self._of = "float16" if dtypes[1] == torch.float16 else "bfloat16"
        if self._exist:
            self._before.append(f"int8_t* __restrict t{place} = (int8_t*)tensors[{place}];")

    def __bool__(self) -> bool:
        """Whether there are low bits."""
        return self._exist

    def joined(self, i: int, value: str) -> str:
        """The C++ expression of an element of tensor ``i``: of the parameter, its master.

        Args:
            i: index of the tensor.
            value: the C++ expression of what it stores, as a float.
        """
        if i != 1 or not self._exist:
            return value
        return f"joined_{self._of}({value}, t{self._place}[i])"

    def stored(self, value: str) -> str:
        """The statement that leaves ``value``, the new master of element ``i``, in an array."""
        self._before.append("float masters[BLOCK];")
        return f"masters[i - block] = {value};"

    def split(self, bits: RandomBits, dtype: CDtype) -> Iterator[str]:
        """Statements that store the new parameters and low bits of a block.

        Args:
            bits: random bits for each element.
            dtype: how C++ stores the parameter.
        """
        yield from bits.drawn_for(-1)
        random, part = bits.part_of(-1)
        split = f"split_{self._of}(masters[j], chance_part({random}, {part}, 16), low)"
        each = [
            "int8_t low;",
            f"{'w1[j]' if dtype.by_block else 't1[block + j]'} = {split};",
            f"t{self._place}[block + j] = low;",
        ]
        yield loop("0", "size", each)
        if dtype.by_block:
            yield "narrow(w1, size, t1 + block);"
