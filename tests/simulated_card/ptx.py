"""PTX, as Triton writes it, parsed for ``card.cpp`` and run there."""

import ctypes
import functools
import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Fault", "Kernel", "build_folder"]

HERE = Path(__file__).parent
_INSTRUCTION = np.dtype(
    [
        *((name, "i4") for name in ("operation", "predicate", "negated", "target")),
        *((name, "i4") for name in ("n_results", "n_operands", "width", "line")),
        ("results", "i4", 8),
        ("operands", "i4", 8),
        ("offset", "i8"),
    ],
    align=True,
)
_SPECIAL = ("%tid.x", "%ctaid.x", "%laneid", "%ntid.x", "%nctaid.x")
# They say how memory is cached and ordered, which makes no difference here.
_WITHOUT_EFFECT = re.compile(
    r"\.(uni|cta|gpu|sys|relaxed|volatile|nc|aligned|weak|L1::\w+|L2::\w+)(?=\.|$)"
)


class Fault(RuntimeError):
    """The kernel did what a card would not bear, or would not do alike each time."""


def build_folder() -> Path:
    """The folder for what is compiled here: the user's own, and not beside the sources."""
    folder = Path(tempfile.gettempdir()) / f"ampopt-simulated-card-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@functools.cache
def _library() -> Any:
    """``card.cpp``, compiled once."""
    sources = [HERE / "card.cpp", HERE / "operations.h"]
    content = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    library = build_folder() / f"card-{content[:16]}.so"
    if not library.exists():
        new = library.with_suffix(f".{os.getpid()}")
        # Products and sums are not fused, as in the kernels.
        flags = "-std=c++20 -O2 -ffp-contract=off -fno-strict-aliasing -shared -fPIC"
        subprocess.run(["g++", *flags.split(), "-o", new, sources[0]], check=True)
        new.rename(library)
    return ctypes.CDLL(str(library))


class Kernel:
    """The one kernel of a PTX text.

    Attributes:
        text: the PTX.
        name: its name.
        parameters: the type of each parameter, such as ``"u64"``.
        threads: the threads of each program.
    """

    def __init__(self, text: str) -> None:
        """Parse ``text``.

        Raises:
            NotImplementedError: it has an operation that ``operations.h`` lacks.
        """
        entry = re.search(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)", text)
        assert entry is not None
        self.text, self.name = text, entry[1]
        self.parameters = re.findall(r"\.param\s+\.(\w+)", entry[2])
        threads = re.search(r"\.reqntid (\d+)", text)
        self.threads = int(threads[1]) if threads else 128
        begin = text.index("{", entry.end())
        body = text[begin + 1 : text.index("\n}", begin)]
        local = re.search(r"\.local \.align \d+ \.b8\s+([\w$]+)\[(\d+)\]", body)
        self._local_bytes = int(local[2]) if local else 0
        constants = re.findall(r"\.global \.align \d+ \.b8 ([\w$]+)\[\d+\] = \{([^}]+)\}", text)
        self._constants = {name: np.array(v.split(","), "u1") for name, v in constants}
        self._symbols = {name: table.ctypes.data for name, table in self._constants.items()}
        self._symbols["global_smem"] = 0
        if local:
            self._symbols[local[1]] = 0
        self._registers: dict[Any, int] = {}  # by name, or by value of a constant, or by parameter
        self._initial: list[int] = []  # the value of each register before the first instruction
        self._code = self._parsed(_statements(body, text[:begin].count("\n") + 1))
        self._special = np.array([self._registers.get(name, -1) for name in _SPECIAL], "i4")

    def launch(
        self,
        programs: int,
        arguments: Sequence[int],
        memory: np.ndarray,
        shared_bytes: int = 0,
        order: int = 0,
    ) -> None:
        """Run the kernel.

        Args:
            programs: the number of programs.
            arguments: numbers and addresses; parameters beyond them are 0.
            memory: where live memory begins and ends, sorted: uint64, of shape (n, 2).
            shared_bytes: the size of shared memory.
            order: 1 runs warps from the last to the first, 2 programs, 3 both.

        Raises:
            Fault: what the kernel did that it must not do.
        """
        initial = np.array(self._initial, np.uint64)
        for place, kind in enumerate(self.parameters):
            if ("parameter", place) in self._registers:
                value = arguments[place] if place < len(arguments) else 0
                bits = int(kind[1:])
                initial[self._registers["parameter", place]] = value & (2**bits - 1)
        own = [[t.ctypes.data, t.ctypes.data + t.nbytes] for t in self._constants.values()]
        memory = np.array(sorted([*memory.tolist(), *own]), np.uint64) if own else memory
        error = ctypes.create_string_buffer(400)
        failed = _library().card_launch(
            *(_pointer(self._code), len(self._code), len(initial), _pointer(initial)),
            *(_pointer(self._special), programs, self.threads, shared_bytes, self._local_bytes),
            *(_pointer(memory), len(memory), order, 1, error, len(error)),
        )
        if failed:
            raise Fault(f"{self.name}: {error.value.decode()}")

    def _register(self, key: Any, value: int = 0) -> int:
        """The number of the register ``key``, which begins as ``value``."""
        if key not in self._registers:
            self._registers[key] = len(self._initial)
            self._initial.append(value)
        return self._registers[key]

    def _operand(self, text: str) -> int:
        """The register of an operand: a register, a number, or the address of a symbol."""
        if text[0] in "%_" or text.startswith("tmp"):
            return self._register(text)
        symbol, _, offset = text.partition("+")
        if symbol in self._symbols:
            value = self._symbols[symbol] + int(offset or 0)
        else:
            value = int(text[2:], 16) if re.match("0[dDfF]", text) else int(text.rstrip("U"), 0)
        return self._register(("constant", value & (2**64 - 1)), value & (2**64 - 1))

    def _parsed(self, statements: Iterator[tuple[str, int]]) -> np.ndarray:
        """The instructions of the statements."""
        rows: list[dict[str, Any]] = []
        labels, jumps = {}, []
        for text, line in statements:
            if text.endswith(":"):
                labels[text[:-1]] = len(rows)
                continue
            row: dict[str, Any] = {"predicate": -1, "line": line}
            if found := re.match(r"@(!?)(%\w+)\s+", text):
                row |= {"predicate": self._operand(found[2]), "negated": bool(found[1])}
                text = text[found.end() :]
            name, rest = (*re.split(r"\s+", text, maxsplit=1), "")[:2]
            name = _WITHOUT_EFFECT.sub("", name)
            if name == "bra":
                jumps.append((len(rows), rest))
                rows.append({**row, "operation": _number("bra")})
            else:
                rows += [{**row, **one} for one in self._instructions(name, _split(rest))]
        code = np.zeros(len(rows), _INSTRUCTION)
        for instruction, row in zip(code, rows, strict=True):
            for key, value in row.items():
                if isinstance(value, list):
                    instruction[key][: len(value)] = value
                    instruction["n_" + key] = len(value)
                else:
                    instruction[key] = value
        for place, label in jumps:
            code[place]["target"] = labels[label]
        return code

    def _instructions(self, name: str, given: list[str]) -> Iterator[dict[str, Any]]:
        """What ``card.cpp`` runs for one instruction: mostly one of the same name."""
        if name in ("bar.sync", "barrier.sync"):
            assert given == ["0"], given
            yield {"operation": _number(name)}
        elif name in ("ret", "exit", "bar.warp.sync"):
            yield {"operation": _number(name)}
        elif name.startswith("ld.param."):
            place = re.match(r"\[\w+_param_(\d+)\]", given[1])
            assert place is not None, given
            register = self._register(("parameter", int(place[1])))
            bits = re.sub("[a-z]", "", name.rpartition(".")[2])
            yield self._row(f"mov.b{bits}", given[:1], operands=[register])
        elif found := re.fullmatch(r"(ld|st)\.(global|shared|local)(?:\.v\d)?\.[bfus](\d+)", name):
            loads = found[1] == "ld"
            address = re.fullmatch(r"\[\s*([%\w$]+)\s*(?:\+\s*(-?\d+))?\s*\]", given[loads])
            assert address is not None, given
            values = _split(given[not loads].strip("{}"))
            row = self._row(
                f"{found[1]}.{found[2]}",
                values if loads else [],
                [address[1], *([] if loads else values)],
            )
            yield {**row, "width": int(found[3]) // 8, "offset": int(address[2] or 0)}
        elif name.startswith("mov.") and any(one.startswith("{") for one in given):
            packs = given[1].startswith("{")
            parts = _split(given[packs].strip("{}"))
            whole = [given[not packs]]
            row = self._row(*(("pack", whole, parts) if packs else ("unpack", parts, whole)))
            yield {**row, "width": int(name[5:]) // 8 // len(parts)}
        elif "|" in given[0] and "x2" in name:  # a comparison with a predicate for each half
            for half, result in zip(("lo", "hi"), given[0].split("|"), strict=True):
                yield self._row(f"{name}.{half}", [result], given[1:])
        elif name == "mad.lo.cc.u32":  # whose carry is a register here
            yield self._row("carry.u32", ["%carry"], given[1:])
            yield self._row("mad.lo.u32", given[:1], given[1:])
        elif name == "madc.hi.u32":
            yield self._row(name, given[:1], [*given[1:], "%carry"])
        else:
            yield self._row(name, [given[0].split("|")[0]], given[1:])

    def _row(
        self, name: str, results: list[str], given: Sequence[str] = (), operands: Any = None
    ) -> dict[str, Any]:
        """The operation ``name``, whose operands are ``given``, or registers by number."""
        if operands is None:
            operands = [self._operand(one) for one in given]
        results_ = [self._operand(one) for one in results]
        return {"operation": _number(name), "results": results_, "operands": operands}


def _statements(body: str, line: int) -> Iterator[tuple[str, int]]:
    """Each instruction and label (with its colon) of ``body``, and its line."""
    pending, begin = "", line
    for number, raw in enumerate(body.split("\n"), line):
        text = raw.split("//")[0]
        if re.match(r"\s*\.(loc|file|section|pragma)\b", text):
            continue
        for piece in re.split(r"(;|\$L\w+:)", text):
            if piece == ";" or piece.startswith("$L"):
                # Braces of inline assembly hold no instruction.
                statement = piece if piece != ";" else re.sub(r"^[\s{}]+", "", pending).strip()
                if statement and not statement.startswith("."):  # not a declaration
                    yield statement, begin
                pending = ""
            else:
                if not pending.strip():
                    begin = number
                pending += " " + piece


def _split(text: str) -> list[str]:
    """The parts between commas outside of brackets."""
    return [part.strip() for part in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{\[])+", text)]


@functools.cache
def _number(name: str) -> int:
    """The number of an operation in ``card.cpp``."""
    number = _library().card_operation(name.encode())
    if number < 0:
        raise NotImplementedError(f"the simulated card has no operation {name}: see operations.h")
    return number


def _pointer(array: np.ndarray) -> Any:
    """The address of ``array``, which stays alive meanwhile."""
    return array.ctypes.data_as(ctypes.c_void_p)
