"""The first hour: parts run in order, each in its own process, and write to one folder."""

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import ampopt
from ampopt.bench import workloads
from ampopt_kernels.language import HAS_TRITON
from evidence.first_hour import __main__ as first_hour
from evidence.first_hour import gpu_tests, hour, launches, parity, races, start
from evidence.first_hour.bandwidth import STORAGES, prediction_of
from evidence.first_hour.parts import PARTS, Part
from evidence.first_hour.record import PartRecord, read

CPU = torch.device("cpu")
PREDICTIONS = Path(__file__).parents[2] / "kernels/PREDICTIONS.md"


def stub(name: str, body: str, seconds: float = 60.0, ends: bool = False) -> Part:
    """A part whose process runs the code ``body``; the code calls ``record`` to write a line."""

    def command(folder: Path, device: str) -> list[str]:
        path = str(folder / f"{name}.jsonl")
        prepared = (
            "import json, os, signal, sys, time\n"
            "def record(**line): print(json.dumps(line), file=open(path, 'a'))\n"
            f"path = {path!r}; device = {device!r}\n"
        )
        return [sys.executable, "-S", "-c", prepared + body]

    return Part(name, f"what {name} tells", seconds, command, ends)


PASSES = "record(kind='passed', what='it holds', detail=device)"
FAILS = "record(kind='FAILED', what='that holds', detail=[1, 2])"
MEASURES = "record(kind='figure', what='speed', value=0.9, unit='of copy', predicted=0.98)"
# Its child would keep the log open, and the machine busy.
HANGS = (
    "import subprocess; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
    f"{PASSES}\nprint('before', flush=True); time.sleep(60)"
)
CRASHES = f"{PASSES}; os.kill(os.getpid(), signal.SIGSEGV)"


def test_each_part_ends_by_itself_alone_and_leaves_what_it_found(tmp_path, capsys):
    parts = [
        stub("passing", f"{PASSES}; {MEASURES}; print('printed')"),
        stub("hanging", HANGS, seconds=2.0),
        stub("crashing", CRASHES),
        stub("raising", "raise ValueError('of its own')"),
        stub("failing", FAILS),
        stub("last", PASSES),
    ]
    began = time.monotonic()
    outcomes = hour.run(parts, tmp_path / "new", "cpu", {"torch": "2.x"})
    assert time.monotonic() - began < 30
    assert [outcome.status for outcome in outcomes] == [
        "passed",
        "hung: ended after 2 s",
        "crashed: SIGSEGV",
        "ended with status 1",
        "FAILED",
        "passed",
    ]
    assert [len(outcome.results) for outcome in outcomes] == [2, 1, 1, 0, 1, 1]
    folder = tmp_path / "new"
    left = {f"{part.name}.log" for part in parts} | {"summary.json", "summary.md"}
    left |= {f"{part.name}.jsonl" for part in parts if part.name != "raising"}
    assert {path.name for path in folder.iterdir()} == left
    assert (folder / "passing.log").read_text() == "printed\n"
    assert "of its own" in (folder / "raising.log").read_text()
    assert (folder / "hanging.log").read_text() == "before\n"
    whole = json.loads((folder / "summary.json").read_text())
    assert whole["environment"] == {"torch": "2.x"}
    assert [part["name"] for part in whole["parts"]] == [part.name for part in parts]
    text = (folder / "summary.md").read_text()
    assert "| hanging | what hanging tells | hung: ended after 2 s |" in text
    assert "- FAILED: that holds: [1, 2]" in text
    assert "| speed | 0.9 of copy | 0.98 |" in text
    assert capsys.readouterr().out.startswith("passing: passed\nhanging: hung")


def test_nothing_is_run_behind_a_part_that_ends_the_hour(tmp_path):
    parts = [stub("first", "sys.exit(3)", ends=True), stub("second", PASSES)]
    outcomes = hour.run(parts, tmp_path, "cpu", {})
    assert [one.status for one in outcomes] == ["ended with status 3", "not run: first failed"]
    assert not (tmp_path / "second.log").exists()
    parts[0] = stub("first", PASSES, ends=True)
    assert all(one.passed for one in hour.run(parts, tmp_path, "cpu", {}))


def test_another_run_leaves_nothing_of_the_last(tmp_path):
    hour.run([stub("part", FAILS)], tmp_path, "cpu", {})
    assert hour.run([stub("part", PASSES)], tmp_path, "cpu", {})[0].passed


def test_parts_that_others_depend_on_come_first():
    names = [part.name for part in PARTS]
    assert names[:4] == ["start", "races", "capture", "parity"]
    assert names.index("gpu_tests") < names.index("bandwidth") < names.index("figures")
    assert [part.name for part in PARTS if part.ends] == ["start"]
    assert sum(part.seconds for part in PARTS) <= 5400


def test_each_test_that_fails_is_reported_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record = PartRecord(tmp_path / "gpu_tests.jsonl")
    gpu_tests.run(record, CPU)
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "conftest.py").write_text("")
    (tests / "test_it.py").write_text(
        "import pytest\n@pytest.mark.gpu\ndef test_a(): pass\n"
        "@pytest.mark.gpu\ndef test_b(): assert 1 == 2\ndef test_c(): assert False\n"
    )
    gpu_tests.run(record, CPU)
    lines = [(line["kind"], line["what"]) for line in read(tmp_path / "gpu_tests.jsonl")]
    assert lines == [
        ("skipped", "pytest -m gpu"),
        ("FAILED", "tests/test_it.py::test_b"),
        ("FAILED", "pytest -m gpu"),
    ]


@pytest.mark.skipif(not HAS_TRITON, reason="Triton cannot be imported here")
def test_parts_are_asked_for_by_name_and_run_in_their_order(monkeypatch, tmp_path):
    asked = ["--part", "host", "--part", "races"]
    runs: list[Any] = []
    monkeypatch.setattr(hour, "run", lambda *given: runs.append(given) or [])
    first_hour.main(["--device", "cpu", str(tmp_path), *asked])
    [(parts, folder, device, about)] = runs
    assert ([part.name for part in parts], folder, device) == (["races", "host"], tmp_path, "cpu")
    assert about["torch"] == torch.__version__
    command = parts[0].arguments(folder, device)
    assert command[1:] == ["-m", "evidence.first_hour.one_part", "races", str(tmp_path), "cpu"]


def test_an_unknown_part_is_refused_by_name(capsys):
    with pytest.raises(SystemExit):
        first_hour.main(["there", "--part", "none"])
    assert "invalid choice: 'none'" in capsys.readouterr().err


def test_without_an_accelerator_there_is_nothing_to_find_out(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("ampopt.backend.INTERPRETED", False)
    before = ampopt.get_backend()
    with pytest.raises(SystemExit):
        first_hour.main(["--device", "cpu", str(tmp_path / "no")])
    assert re.search("triton backend (needs|cannot)", capsys.readouterr().err)
    assert ampopt.get_backend() == before
    assert not (tmp_path / "no").exists()


def test_a_line_that_a_crash_cut_off_is_left_out(tmp_path):
    record = PartRecord(tmp_path / "part.jsonl")
    record.check("whole", True)
    record.skip("other", "there is one device")
    with record.trying("third"):
        raise KeyError("lr")
    with (tmp_path / "part.jsonl").open("a") as file:
        file.write('{"kind": "pas')
    kinds = [line["kind"] for line in read(tmp_path / "part.jsonl")]
    assert kinds == ["passed", "skipped", "FAILED"]


def test_predictions_are_those_that_are_written():
    """The table in ``kernels/PREDICTIONS.md`` has these numbers first in each cell."""
    power, found = None, {}
    for line in PREDICTIONS.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        storage = "".join(cells[1:2]).removeprefix("bfloat16, ")
        if re.fullmatch(r"(2\^\d+)?", cells[0]) and storage in STORAGES:
            power = int(cells[0][2:]) if cells[0] else power
            found[power, storage] = [float(cell.split(",")[0]) for cell in cells[2:]]
    assert len(found) == 9
    for (power, storage), shares in found.items():
        wanted = [("detect", False), ("detect", True), ("update", True), ("step", False)]
        wanted.append(("step", True))
        told = [prediction_of(power, storage, name, clipped=clipped) for name, clipped in wanted]
        assert told == shares, (power, storage)
    assert prediction_of(20, "float32", "detect", clipped=False) is None
    assert prediction_of(24, "float32", "control", clipped=False) is None


@pytest.mark.skipif(not HAS_TRITON, reason="Triton cannot be imported here")
def test_parts_pass_where_kernels_are_interpreted(tmp_path, monkeypatch):
    monkeypatch.setattr(parity, "_SIZES", (1, 3, 8200))  # the last has small states
    record = PartRecord(tmp_path / "all.jsonl")
    try:
        start.run(record, CPU)
        races.run(record, CPU)
        parity.run(record, CPU, ("NovoGrad",))
    finally:
        ampopt.set_backend("auto")
    lines = read(tmp_path / "all.jsonl")
    assert not [line for line in lines if line["kind"] == "FAILED"]
    assert sum(line["kind"] == "passed" for line in lines) == 3 + 2 + 18


@pytest.mark.skipif(not HAS_TRITON, reason="Triton cannot be imported here")
def test_parity_finds_a_kernel_that_is_wrong(tmp_path, monkeypatch):
    trained = parity._train

    def wrong(name: str, backend: str, *given: Any) -> Any:
        params, scale = trained(name, backend, *given)
        return [p * (1.01 if backend == "triton" else 1.0) for p in params], scale

    monkeypatch.setattr(parity, "_train", wrong)
    monkeypatch.setattr(parity, "_SIZES", (1, 3))
    record = PartRecord(tmp_path / "parity.jsonl")
    try:
        parity.run(record, CPU, ("SGD",))
    finally:
        ampopt.set_backend("auto")
    kinds = {line["what"]: line["kind"] for line in read(tmp_path / "parity.jsonl")}
    assert kinds["SGD, float32"] == kinds["SGD, float64, shifted"] == "FAILED"


@pytest.mark.skipif(not HAS_TRITON, reason="Triton cannot be imported here")
def test_each_launch_is_timed_with_the_bytes_that_it_moves(monkeypatch):
    monkeypatch.setattr(launches, "_ROUNDS", 1)
    ampopt.set_backend("triton")
    rows = launches.measure(
        "AdamW",
        workloads.of(256),
        dtype=torch.bfloat16,
        device=CPU,
        master_weights=True,
        max_norm=1.0,
    )
    assert [row.name for row in rows] == [
        *("step", "detect_kernel", "control_kernel", "update_kernel")
    ]
    step, *each = [row.bytes for row in rows]
    assert step == sum(each) and each[1] == 0
