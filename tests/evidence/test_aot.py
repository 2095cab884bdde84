"""Kernels compiled without a GPU, in a separate process: this one interprets them."""

import itertools
import os
import re
import subprocess
import sys

import pytest
import torch

from ampopt_kernels import rules
from ampopt_kernels.language import HAS_TRITON
from evidence import aot, machine_code

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton cannot be imported here")

LINE = re.compile(
    r"(?P<kernel>\w+) (?P<variant>\S+) (?P<dtype>\w+) (?P<target>\w+) ok "
    r"registers=(?P<registers>\d+) spills=(?P<spills>\d+)"
    r"(?: vectorized=(?P<vectorized>yes|no) barriers=(?P<barriers>\d+) bytes=(?P<bytes>\S+))?"
)


def command(*arguments):
    variables = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-m", "evidence.aot", *arguments],
        env={**variables, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The line of the report for each compilation, and the folder with the assembly."""
    directory = tmp_path_factory.mktemp("aot")
    process = command("--dump", str(directory), "--quick")
    assert process.returncode == 0, process.stdout + process.stderr
    *lines, total = process.stdout.splitlines()
    assert total == f"{len(lines)} compiled, 0 failed"
    assert (directory / "report.txt").read_text().splitlines() == lines
    matches = [LINE.fullmatch(line) for line in lines]
    assert all(matches), [line for line, m in zip(lines, matches, strict=True) if not m]
    reports = [m for m in matches if m is not None]
    assert len(list(directory.glob("*.ptx"))) + len(list(directory.glob("*.amdgcn"))) == len(lines)
    assert len({m.group("kernel", "variant", "dtype") for m in reports}) == len(reports)
    return reports, directory


def of(compiled, kernel, variant, dtype):
    """The line of a kernel that was compiled for one target: see ``aot.tasks``."""
    by_name = {line.group("kernel", "variant", "dtype"): line for line in compiled[0]}
    return by_name[kernel, variant, dtype]


def assembly(compiled, line):
    suffix = "ptx" if line["target"].startswith("sm_") else "amdgcn"
    name = "-".join(line.group("kernel", "variant", "dtype", "target"))
    return (compiled[1] / f"{name}.{suffix}").read_text()


@pytest.mark.parametrize(
    ("kernel", "variant", "dtype", "bytes_moved"),
    [
        # What has to be moved at least: AdamW in float32, 4 in detect and 28 in update; 16-bit
        # gradients and parameters with float32 masters, 30 in all.
        ("detect", "scale", "float32", 4),
        ("detect", "scale+norm", "float32", 4),
        ("detect", "scale", "bfloat16", 2),
        ("detect", "scale+write", "float32", 8),
        ("detect", "scale+write", "bfloat16", 4),
        ("accumulate", "scale", "float32", 12),
        ("accumulate", "scale+empty", "bfloat16", 6),
        ("line", "adafactor+rows", "float32", 4),
        ("update", "adam", "float32", 28),
        ("update", "adam", "bfloat16", 14),
        ("update", "adam+masters", "bfloat16", 28),
    ],
)
def test_moves_what_it_has_to(compiled, kernel, variant, dtype, bytes_moved):
    line = of(compiled, kernel, variant, dtype)
    assert float(line["bytes"]) == bytes_moved, line[0]


def test_control_takes_powers_without_dividing(compiled):
    """Control, for which all else waits, computes two powers for each parameter of Adam."""
    line = of(compiled, "control", "adam+flags+scale+constants+h_out+drop", "float32")
    divisions = re.findall(r"\bdiv\.rn\.f64|\bv_div_fixup_f64", assembly(compiled, line))
    assert 1 <= len(divisions) <= 2  # by the scale and by a bias correction


@pytest.mark.parametrize("dtype", aot.DTYPES)
def test_detect_asks_for_64_bytes_for_each_thread_at_once(compiled, dtype):
    variants = ("scale", "norm", "scale+norm", "scale+write")
    lines = [of(compiled, "detect", variant, dtype) for variant in variants]
    nvidias = [line for line in lines if line["target"].startswith("sm_")]
    assert nvidias
    for line in nvidias:
        loop = machine_code.main_loop(assembly(compiled, line))
        loads = re.findall(r"\bld\.global\.(?:v4\.b32|v2\.b64)\b", loop)
        assert 16 * len(loads) == 64, line[0]


@pytest.mark.parametrize("dtype", aot.DTYPES)
@pytest.mark.parametrize("name", rules.__all__)
def test_every_rule_moves_each_byte_once_sixteen_at_a_time(compiled, name, dtype):
    rule, size = getattr(rules, name), getattr(torch, dtype).itemsize
    variants = set()
    for line in updates(compiled, name):
        words = line["variant"].split("+")
        special = {"unaligned", "stochastic", "8_bits", "16_bits", "24_bit_masters"}
        if line["dtype"] != dtype or special.intersection(words):
            continue
        flags = tuple(flag in words for flag in rule.flags)
        variants.add((flags, "masters" in words))
        param_size, copy = (4, 2) if "masters" in words else (size, 0)
        total = size + param_size * 2 * (1 + len(rule.state_for(flags))) + copy
        if rule.row_column_states_for(flags):  # narrow accesses, of what is in caches
            assert (line["vectorized"], line["barriers"]) == ("no", "0"), line[0]
        elif name == "sophia_hessian":  # keeps parameters, which a compiler may see
            assert total - 2 * param_size <= float(line["bytes"]) <= total, line[0]
        else:
            assert_streams(line, total)
    none, every = ((flag,) * len(rule.flags) for flag in (False, True))
    expected = {"float32": {(none, False), (every, False)}, "float64": {(every, False)}}
    for way in ways_of(name):
        if way in ("float16", "bfloat16"):
            expected.setdefault(way, set()).add((none, False))
        elif way == "masters":
            expected.setdefault("bfloat16", set()).add((none, True))
    assert expected.get(dtype, set()) <= variants


def ways_of(name):
    """The ways to keep 16-bit parameters that are compiled for a rule."""
    if name in aot.IN_EVERY_WAY:
        return aot.IN_16_BITS
    return (aot.IN_16_BITS[rules.__all__.index(name) % len(aot.IN_16_BITS)],)


def test_small_states_are_moved_in_few_bytes_and_without_barriers(compiled):
    """With 8 bits, 4 of the 20 bytes are for scales; 128 elements share each scale."""
    lines = [line for line in updates(compiled, "adam") if "_bits" in line["variant"]]
    lines = [line for line in lines if "24_bit_masters" not in line["variant"]]
    assert len(lines) == 6
    for line in lines:
        assert_streams(line, 20)


def test_24_bit_masters_are_moved_in_few_bytes_and_without_barriers(compiled):
    """With 8 bits, states take 8 of the 16 bytes; 4 of these are for scales."""
    lines = [line for line in updates(compiled, "adam") if "24_bit_masters" in line["variant"]]
    assert len(lines) == 4
    for line in lines:
        assert line["barriers"] == "0", line[0]
        assert float(line["bytes"]) == (16 if "8_bits" in line["variant"] else 24), line[0]


@pytest.mark.parametrize("name", rules.__all__)
def test_rules_that_take_their_turn_are_compiled_with_small_states_and_24_bit_masters(
    compiled, name
):
    rule, variants = getattr(rules, name), [line["variant"] for line in updates(compiled, name)]
    every = itertools.product((False, True), repeat=len(rule.flags))
    in_turn = aot.LOW_MASTERS[-1] in ways_of(name)
    has_small_states = in_turn and any(any(rule.codecs_for(flags, 8)) for flags in every)
    assert any("8_bits" in variant for variant in variants) == has_small_states
    assert any("24_bit_masters" in variant for variant in variants) == in_turn


def updates(compiled, name):
    """The lines of the update kernel of a rule, in all dtypes."""
    kernels = [line for line in compiled[0] if line["kernel"] == "update"]
    return [line for line in kernels if line["variant"].split("+")[0] == name]


@pytest.mark.parametrize("dtype", aot.DTYPES)
@pytest.mark.parametrize("variant", ["scale", "norm", "scale+norm", "scale+write"])
def test_detect_reads_each_byte_once_sixteen_at_a_time(compiled, variant, dtype):
    size = getattr(torch, dtype).itemsize
    assert_streams(of(compiled, "detect", variant, dtype), size * (1 + ("write" in variant)))


@pytest.mark.parametrize("dtype", aot.DTYPES)
@pytest.mark.parametrize("variant", ["scale", "scale+empty", "scale+reject"])
def test_accumulate_moves_each_byte_once_sixteen_at_a_time(compiled, variant, dtype):
    size = getattr(torch, dtype).itemsize
    sums = max(size, 4) * (1 if "empty" in variant else 2)
    assert_streams(of(compiled, "accumulate", variant, dtype), size + sums)


def test_sums_of_lines_read_sixteen_bytes_at_a_time_on_nvidia(compiled):
    lines = [line for line in compiled[0] if line["kernel"] == "line" and "sm_" in line["target"]]
    plain = [line for line in lines if line["dtype"] == "float32" and "bits" not in line["variant"]]
    assert plain
    assert [line[0] for line in plain if line["vectorized"] != "yes"] == []


def assert_streams(line, bytes_moved):
    assert line["vectorized"] == "yes", line[0]
    assert line["barriers"] == "0", line[0]
    assert float(line["bytes"]) == bytes_moved, line[0]


def test_products_are_rounded_before_they_are_added(compiled):
    """A fused multiply-add would make ``unscale_and_step`` round differently from two calls."""
    lines = updates(compiled, "sgd")
    assert {line["dtype"] for line in lines} == set(aot.DTYPES)
    for line in lines:
        # AMD reads float16 by such operations: times 1 or plus 0, which is no fusion.
        assert not re.search(r"fma(?!_mix)", assembly(compiled, line)), line[0]


def test_no_operation_is_approximate(compiled):
    """Except in NVIDIA's float64 ``exp2`` and ``log2``, which control uses.

    These begin with an estimate of a reciprocal, which they refine, and compare a magnitude in
    float32. ``floor`` treats subnormal numbers as 0: codecs round down multiples of 2**-23, and
    24-bit masters round numbers that are not negative.
    """
    guesses = {"abs.ftz.f32", "rcp.approx.ftz.f64"}
    nvidias = [line for line in compiled[0] if line["target"].startswith("sm_")]
    assert {line["kernel"] for line in nvidias} == {line["kernel"] for line in compiled[0]}
    for line in nvidias:
        inexact = set(re.findall(r"\b\S*\.(?:approx|full|ftz)\b\S*", assembly(compiled, line)))
        floor = {"cvt.rmi.ftz.f32.f32"} if "_bit" in line["variant"] else set()
        assert inexact <= (guesses if line["kernel"] == "control" else floor), line[0]


def test_nothing_is_added_up_in_an_order_that_may_vary(compiled):
    """The assembly has no atomic operation."""
    files = [f for f in compiled[1].iterdir() if f.suffix in (".ptx", ".amdgcn")]
    assert len(files) == len(compiled[0])
    for path in files:
        assert not re.search(r"atomic|\batom\.|\bred\.(?!sync)", path.read_text()), path.name


@pytest.mark.parametrize(
    ("name", "operations"), [("adamax", {"max"}), ("adam", {"max"}), ("rprop", {"max", "min"})]
)
def test_maxima_keep_nan(compiled, name, operations):
    """By an instruction that keeps NaN; a GPU without one, as for float64, has a test for NaN."""
    rule = getattr(rules, name)
    flags = "+".join((name, *rule.flags))
    for dtype in ("float32", "float64"):
        line = of(compiled, "update", flags, dtype)
        text = assembly(compiled, line)
        maxima = re.findall(r"\b(?:v_)?(max|min)(\.NaN)?[._]f(?:32|64)", text)
        assert {operation for operation, _ in maxima} == operations, line[0]
        apart = re.search(r"\bsetp\.\w*nan\w*\.f64|\bv_cmp_[ou]_f", text)
        assert apart or all(keeps for _, keeps in maxima), line[0]


def test_unaligned_tensors_take_narrow_accesses(compiled):
    """The report says so."""
    name = rules.__all__[0]
    rule = getattr(rules, name)
    line = of(compiled, "update", f"{name}+unaligned", "float32")
    states = len(rule.state_for((False,) * len(rule.flags)))
    assert line["vectorized"] == "no"
    assert float(line["bytes"]) == 4 * (1 + 2 * (1 + states))


def test_nothing_spills(compiled):
    kernels = {(line["kernel"], line["variant"].split("+")[0]) for line in compiled[0]}
    assert {("control", name) for name in rules.__all__} <= kernels
    assert [line[0] for line in compiled[0] if line["spills"] != "0"] == []


def test_every_dtype_is_compiled_for_every_target(compiled):
    """Kernels that depend on a dtype are compiled for all dtypes."""
    for kernel in ("detect", "update"):
        pairs = {m.group("dtype", "target") for m in compiled[0] if m["kernel"] == kernel}
        assert pairs == set(itertools.product(aot.DTYPES, aot.TARGETS)), kernel


@pytest.mark.parametrize("name", rules.__all__)
def test_every_rule_is_compiled_for_every_target(compiled, name):
    assert {line["target"] for line in updates(compiled, name)} == set(aot.TARGETS)


@pytest.mark.parametrize(
    ("arguments", "interpreted", "error"),
    [
        ((), True, "TRITON_INTERPRET=1 replaces the compiler by the interpreter: unset it"),
        (("--target", "h100"), False, "--target must be like sm_90 or gfx942, got 'h100'"),
    ],
    ids=["interpreted", "no target"],
)
def test_refuses_what_it_cannot_compile(arguments, interpreted, error, monkeypatch, capsys):
    monkeypatch.setattr(aot, "INTERPRETED", interpreted)
    with pytest.raises(SystemExit) as ended:
        aot.main(list(arguments))
    assert ended.value.code == 2
    assert error in capsys.readouterr().err


@pytest.mark.parametrize("name", rules.__all__)
def test_every_built_in_rule_is_among_the_cases(name):
    """A new rule is compiled without an entry in any other list."""
    cases = [case for case in aot.cases(rules.__all__, aot.DTYPES) if case.rule == name]
    assert {case.dtype for case in cases} == set(aot.DTYPES)
    flags = getattr(rules, name).flags
    assert len({case.flags for case in cases}) == 2 ** len(flags)
    kernels = [launch.name for launch in aot.launches(cases[0])]
    rule = getattr(rules, name)
    summing = ["line"] * len(rule.row_column_states_for((False,) * len(rule.flags)))
    summing += ["reduce", "sum", "control"] if rule.reduces else []
    assert kernels == ["detect", "control", *summing, "update"]


PTX = """
$L__BB0_1:
 ld.global.b64 %rd1, [ %rd2 + 0 ];
$L__BB0_2:
 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
 bar.sync 0;
 @%p1 st.global.b16 [ %rd3 + 0 ], { %rs1 };
 @%p2 bra $L__BB0_2;
 @%p3 bra $L__BB0_3;
 st.global.b32 [ %rd3 + 0 ], { %r1 };
$L__BB0_3:
"""
AMD = """
.LBB0_1:
	global_load_dwordx2 v[0:1], v2, s[4:5]
.LBB0_2:
	global_load_dwordx4 v[20:23], v[36:37], off
	global_load_ushort v1, v[0:1], off
	global_load_short_d16_hi v1, v[0:1], off
	global_store_dword v[40:41], v20, off
	s_cbranch_vccnz .LBB0_2
	global_store_byte v[40:41], v20, off
"""


@pytest.mark.parametrize(("assembly", "widths"), [(PTX, [16, 2]), (AMD, [16, 2, 2, 4])])
def test_reads_the_loop(assembly, widths):
    assert list(machine_code.access_widths(machine_code.main_loop(assembly))) == widths


def test_reads_no_loop_where_there_is_none():
    assert machine_code.main_loop("ld.global.b64 %rd1, [ %rd2 + 0 ];") == ""
