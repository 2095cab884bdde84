"""The table of small steps has a row for each case, and refuses what it cannot measure."""

import json

import pytest
from support.gpus import DEVICE, needs_gpu
from support.preloaded import python_path

from ampopt.bench import __main__ as bench
from ampopt.bench import small


def test_every_case_is_measured_beside_torchs_fused_step(monkeypatch, capsys, with_torch, tmp_path):
    """Also first steps, in processes of their own; here, in forks of one that has torch."""

    def run(command, env, **_):
        return with_torch.run(*command[1:], environment={**env, "PYTHONPATH": python_path()})

    monkeypatch.setattr(small.subprocess, "run", run)
    monkeypatch.setattr(small, "COUNTS", (1, 2, 4, 5))
    path = tmp_path / "figures.json"
    few = ["--repeats", "1", "--seconds", "0.1", "--json", str(path)]
    bench.main(["--small", "--device", "cpu", "--backend", "eager", *few])
    figures = json.loads(path.read_text())
    lines = [line.split(maxsplit=5) for line in capsys.readouterr().out.splitlines()[4:]]
    assert [(line[0], *line[5:]) for line in lines] == [
        *(("1",), ("2",), ("4",), ("5",)),
        ("4", "a random quarter absent"),
        ("4", "clipped"),
        ("4", "unscale_, clip_grad_norm_, step under GradScaler"),
        ("4", "a hand-written step of one torch operation"),
        ("4", "another learning rate"),
        ("4", "a new plan"),
        ("4", "first step, nothing compiled"),
        ("4", "first step, all compiled"),
    ]
    for count, torchs, ours, ratio, each, *_ in lines:
        assert float(ratio) == pytest.approx(float(ours) / float(torchs), rel=0.1, abs=0.001)
        assert float(each) == pytest.approx(float(ours) / int(count), rel=0.01)
    about = figures["environment"]
    assert [about[name] for name in ("backend", "threads", "clock")] == ["eager", 1, "cpu"]
    for row, (count, torchs, ours, _, _, *what) in zip(figures["rows"], lines, strict=True):
        assert (row["tensors"], row["what"]) == (int(count), "".join(what))
        assert row["torchs"] == pytest.approx(1e-6 * float(torchs), rel=0.01, abs=1e-7)
        assert row["ours"] == pytest.approx(1e-6 * float(ours), rel=0.01, abs=1e-7)


@pytest.mark.parametrize(
    "option", [("optimizer", "SGD"), ("dtype", "float64"), ("masters",), ("plot", "p.png")]
)
def test_what_the_table_does_not_measure_is_refused(option, capsys):
    name, *value = option
    with pytest.raises(SystemExit, match="2"):
        bench.main(["--small", "--device", "cpu", f"--{name}", *value])
    assert f"leave out --{name}" in capsys.readouterr().err


@needs_gpu(with_real="clocks")
def test_on_a_gpu_the_time_until_a_step_returns_is_measured(monkeypatch, capsys):
    monkeypatch.setattr(small, "COUNTS", (1, 2, 4, 5))
    bench.main(["--small", "--device", DEVICE, "--repeats", "1", "--seconds", "0.1"])
    header, *lines = capsys.readouterr().out.splitlines()[2:]
    assert "until a step returns" in header and len(lines) == 11
