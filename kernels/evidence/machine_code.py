"""Reads the machine code of a kernel, as a GPU compiler has emitted it."""

import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = [
    "access_widths",
    "assembly_of",
    "count_barriers",
    "main_loop",
    "registers_and_spills",
]


def assembly_of(asm: Mapping[str, Any]) -> str:
    """PTX, or AMD's assembly.

    Args:
        asm: all forms of the kernel, by name, as ``triton.compile`` returns them.
    """
    return asm["ptx"] if "ptx" in asm else asm["amdgcn"]


def registers_and_spills(asm: Mapping[str, Any]) -> tuple[int, int]:
    """The registers of a thread; and its spills: bytes of memory (NVIDIA), or registers (AMD)."""
    if "cubin" in asm:
        return _usage_of_cubin(asm["cubin"])
    assembly = asm["amdgcn"]
    spills = _number(r"\.vgpr_spill_count:\s+(\d+)", assembly)
    return _number(r"\.vgpr_count:\s+(\d+)", assembly), spills


def _usage_of_cubin(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and its bytes of stack and local memory, from ``cuobjdump``."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    spills = _number(r"STACK:(\d+)", usage) + _number(r"LOCAL:(\d+)", usage)
    return _number(r"REG:(\d+)", usage), spills


def _number(pattern: str, text: str) -> int:
    """The number that the group of ``pattern`` matches in ``text``."""
    match = re.search(pattern, text)
    assert match is not None, f"{pattern} is not in the compiler's output"
    return int(match[1])


_LABEL = re.compile(r"^\s*(\S*BB\d+_\d+):", re.MULTILINE)
_BRANCH = re.compile(r"\b(?:bra(?:\.uni)?|s_branch|s_cbranch_\w+)\s+(\S*BB\d+_\d+)")
_PTX_ACCESS = re.compile(r"\b(?:ld|st)\.global\S*?(?:\.v(\d+))?\.[bfsu](\d+)\s")
_AMD_ACCESS = re.compile(r"\b(?:global|buffer|flat)_(?:load|store)_([a-z]+?)(?:x(\d))?(?:_\w+)?\s")


def main_loop(assembly: str) -> str:
    """The first loop, which is over whole blocks: from its label to the last branch back to it.

    Empty if there is no loop.
    """
    labels = {match[1]: match.end() for match in _LABEL.finditer(assembly)}
    spans = [
        (labels[match[1]], match.start())
        for match in _BRANCH.finditer(assembly)
        if labels.get(match[1], len(assembly)) < match.start()
    ]
    if not spans:
        return ""
    first = min(start for start, _ in spans)
    return assembly[first : max(stop for start, stop in spans if start == first)]


def access_widths(assembly: str) -> Iterator[int]:
    """The width in bytes of each access to global memory."""
    for match in _PTX_ACCESS.finditer(assembly):
        yield int(match[1] or 1) * int(match[2]) // 8
    for match in _AMD_ACCESS.finditer(assembly):
        size = {"dword": 4, "short": 2, "ushort": 2, "sshort": 2}.get(match[1], 1)
        yield size * int(match[2] or 1)


def count_barriers(assembly: str) -> int:
    """The number of points where the threads of a program wait for each other."""
    return len(re.findall(r"\bbar\.sync|\bs_barrier", assembly))
