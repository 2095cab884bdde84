"""The benchmark: all contenders do the same work, and every row and column is measured."""

import concurrent.futures
import contextlib
import gc
import importlib.util
import json
import re
import sys
import time
import types
from dataclasses import replace

import pytest
import torch

import ampopt
from ampopt.bench import __main__ as bench
from ampopt.bench import (
    contenders,
    measure,
    memory_bandwidth,
    report,
    rows,
    workloads,
)
from ampopt.bench.byte_counts import bytes_by_kernel
from ampopt.bench.device_cost import DeviceCost

CPU = torch.device("cpu")
OURS = ("ampopt", "ampopt:16", "ampopt:8")
TINY = {
    "large": lambda on_cpu, room: ((3, 5), (7,)),
    "small": lambda on_cpu, room: ((2,),) * 4,
    "mix": lambda on_cpu, room: ((), (4, 4), (1,)),
}


@pytest.fixture(autouse=True, scope="module")
def nothing_to_collect():
    """Exclude objects of earlier tests from garbage collection, which would disturb timings."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def eager():
    ampopt.set_backend("eager")


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(workloads, "WORKLOADS", TINY)
    monkeypatch.setattr(rows, "_CACHES", 8 * 32)
    monkeypatch.setattr(memory_bandwidth, "_BEYOND_CACHES", 16)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run(*arguments):
    bench.main(["--device", "cpu", "--backend", "eager", "--seconds", "0.1", *arguments])


def test_finds_the_optimizers_that_torch_has_too():
    found = contenders.optimizers()
    assert {"SGD", "Adam", "AdamW", "RMSprop"} <= set(found)
    assert not {"Optimizer", "ElementwiseOptimizer", "LBFGS"} & set(found)


def test_what_torch_lacks_is_measured_beside_another_package_and_no_rule_has_no_floor(tiny, capsys):
    others = contenders.others()
    assert {"Lion", "Adan", "LAMB", "NovoGrad", "ScheduleFreeAdamW", "Muon"} <= set(others)
    run("--optimizer", "Lion", "--optimizer", "Adafactor", "--workload", "large", "--repeats", "2")
    shown = capsys.readouterr().out
    assert re.search(r"^Lion +large +no +\d", shown, re.M)
    assert re.search(r"^Adafactor +large +no +\d", shown, re.M)
    assert "torch has no Lion, and pytorch_optimizer none fused" in shown


def test_tables_and_json_have_every_row_and_column(tiny, tmp_path, capsys):
    path = tmp_path / "figures.json"
    run("--optimizer", "AdamW", "--optimizer", "RMSprop", "--repeats", "2", "--json", str(path))
    figures = json.loads(path.read_text())
    expected = [
        (optimizer, workload, clip)
        for workload in TINY
        for optimizer in ("AdamW", "RMSprop")
        for clip in (False, True)
    ]
    assert [(r["optimizer"], r["workload"], r["clip"]) for r in figures["rows"]] == expected
    for row in figures["rows"]:
        assert list(row["contenders"]) == (
            ["for-loop", "foreach", "fused", *OURS]
            if row["optimizer"] == "AdamW"
            else ["for-loop", "foreach", *OURS, "fused"]
        )
        for name, there in row["contenders"].items():
            if (row["optimizer"], name) == ("RMSprop", "fused"):
                assert there == {"missing": "torch has no fused RMSprop"}
            else:
                assert there["rounds"] == 2
                assert 0 < there["least"] <= there["median"]
                assert there["iqr"] >= 0
        assert row["best"] in contenders.TORCH
        ours, best = row["contenders"]["ampopt"], row["contenders"][row["best"]]
        assert row["ratio"] == ours["median"] / best["median"]
        if row["workload"] == "small":
            assert row["to_floor"] is None
        else:
            assert row["floor"] == row["bytes"] / row["bandwidth"]
            assert row["to_floor"] == ours["median"] / row["floor"]
    assert figures["bandwidth"] > 0
    assert {"cpu", "cores", "threads", "torch", "python", "date"} <= set(figures["environment"])
    assert figures["environment"]["backend"] == "eager"

    printed = capsys.readouterr().out
    lines = [line.split() for line in printed.splitlines()]
    assert [line for line in lines if line[:1] == ["optimizer"]][0][3:9] == [
        *contenders.TORCH,
        *OURS,
    ]
    for optimizer, workload, clip in expected:
        assert any(line[:3] == [optimizer, workload, "yes" if clip else "no"] for line in lines)
    assert "RMSprop, fused: torch has no fused RMSprop" in printed
    assert ampopt.get_backend() == "eager"


@pytest.mark.parametrize(
    ("name", "steps_before"), [("foreach", 0), ("ampopt", 1), ("foreach", 7), ("ampopt", 7)]
)
def test_a_contender_that_fails_is_missing_from_the_table_with_its_reason(
    tiny, monkeypatch, tmp_path, capsys, name, steps_before
):
    """Also if ampopt fails, and in any step; the first six steps are not timed."""
    enter = contenders.enter

    def failing(entered, optimizer, params, masters):
        made = enter(entered, optimizer, params, masters)
        if entered != name:
            return made
        budget = iter(range(steps_before))

        def failing_after(step):
            def stepped():
                if next(budget, None) is None:
                    raise AssertionError("no room\nfor more")
                step()

            return stepped

        return replace(
            made, step=failing_after(made.step), clipped_step=failing_after(made.clipped_step)
        )

    monkeypatch.setattr(contenders, "enter", failing)
    figures, picture = tmp_path / "figures.json", tmp_path / "figures.png"
    plot = ["--plot", str(picture)] if importlib.util.find_spec("matplotlib") else []
    asked = ("--optimizer", "AdamW", "--workload", "large", "--repeats", "3")
    run(*asked, "--json", str(figures), *plot)
    found = json.loads(figures.read_text())["rows"]
    assert len(found) == 2
    for row in found:
        assert row["contenders"].pop(name) == {"missing": "AssertionError: no room"}
        assert all(there["rounds"] == 3 for there in row["contenders"].values())
        assert len(row["contenders"]) == 5
        assert (row["ratio"] is None) == (name == "ampopt")
    assert f"AdamW, {name}: AssertionError: no room" in capsys.readouterr().out


def test_a_workload_that_does_not_fit_is_a_row_that_says_so(tiny, monkeypatch, tmp_path, capsys):
    def parameters(self, dtype, device):
        if self.name == "large":
            raise torch.OutOfMemoryError("no room")
        return made(self, dtype, device)

    made = workloads.Workload.parameters
    monkeypatch.setattr(workloads.Workload, "parameters", parameters)
    figures = tmp_path / "figures.json"
    run("--optimizer", "SGD", "--repeats", "1", "--json", str(figures))
    found = json.loads(figures.read_text())["rows"]
    assert [row["workload"] for row in found] == [name for name in TINY for _ in range(2)]
    for row in found:
        missing = [c for c, there in row["contenders"].items() if "missing" in there]
        assert missing == (["for-loop", "foreach", "fused", *OURS] * (row["workload"] == "large"))
    assert "SGD, ampopt: OutOfMemoryError: no room" in capsys.readouterr().out


@pytest.mark.parametrize("room", [None, 10**10, 10**8, 0])
def test_workloads_fit_the_room_there_is(room):
    for name in ("large", "mix"):
        elements = workloads.make(name, torch.device("cuda"), room).elements
        least = 4 * 10**7  # one block and the embedding
        assert elements <= max(least, 10**9 if room is None else min(room, 10**9))


def test_plot_draws_every_workload(tiny, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "figures.png"
    run("--optimizer", "SGD", "--repeats", "1", "--plot", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_processors_time_is_less_than_what_passes():
    times = {
        clock: measure.interleaved(
            {"sleep": lambda: time.sleep(0.02)},
            lambda _: None,
            CPU,
            rounds=1,
            seconds=0.0,
            clock=clock,
        )["sleep"].median
        for clock in measure.CLOCKS
    }
    assert times["cpu"] < 0.02 <= times["wall"] + 1e-3


@pytest.mark.skipif(sys.platform != "linux", reason="reads the clocks of threads as Linux has them")
def test_the_busiest_of_several_threads_is_timed():
    def work() -> None:
        start = time.thread_time()
        while time.thread_time() < start + 0.02:
            pass

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()
        times = {
            clock: measure.interleaved(
                {"work": lambda: pool.submit(work).result()},
                lambda _: None,
                CPU,
                rounds=1,
                clock=clock,
            )["work"].median
            for clock in ("cpu", "busiest")
        }
    assert times["cpu"] < 0.02 <= times["busiest"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--optimizer", "LBFGS"], "LBFGS"),
        (["--repeats", "0"], "more than 0"),
        (["--device", "meta"], "choose cpu or cuda"),
        (["--device", "gpu"], "choose cpu or cuda"),
        (["--json", "no/such/folder.json"], "there is no folder no/such: make it first"),
        (["--plot", "no/such/folder.png"], "there is no folder no/such: make it first"),
        (["--threads", "2", "--clock", "cpu"], "--threads 1"),
        (["--masters"], "--masters: master weights are of half precision; add --dtype bfloat16"),
        (["--contender", "fussed"], "--contender: fussed is not measured; choose from for-loop,"),
    ],
)
def test_bad_arguments_are_refused_by_name(threads, arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        run(*arguments)
    assert message in capsys.readouterr().err


def test_a_gpu_that_torch_does_not_find_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        bench.main(["--device", "cuda"])
    assert "torch finds no device for cuda; choose cpu" in capsys.readouterr().err


def test_a_missing_matplotlib_is_said_before_anything_is_measured(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match="2"):
        run("--plot", "figures.png")
    assert "needs matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("optimizer", [*contenders.optimizers(), *contenders.others()])
def test_contenders_do_the_same_work(optimizer, clip):
    shapes = ((3, 5), (7, 2)) if optimizer == "Muon" else ((3, 5), (7,), (300,))
    workload = workloads.Workload("some", shapes)
    reached = {}
    for name in contenders.names(CPU):
        params = workload.parameters(torch.float32, CPU)
        if optimizer == "LAMB":  # of which some hold norms below 10
            for p in params:
                p.detach().mul_(100.0)
        gradients = workloads.Gradients(params)
        start = [p.detach().clone() for p in params]
        try:
            contender = contenders.enter(name, optimizer, params)
        except NotImplementedError:
            assert name == "fused" or (optimizer == "Muon" and name != "ampopt")
            continue
        for _ in range(3):
            gradients.restore()
            (contender.clipped_step if clip else contender.step)()
        assert all((p != old).all() for p, old in zip(params, start, strict=True))
        reached[name] = params
    assert "ampopt" in reached
    for params in reached.values():
        torch.testing.assert_close(params, reached["ampopt"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("clip", [False, True])
def test_contenders_step_the_same_master_weights(clip, monkeypatch):
    """A fake stands for DeepSpeed's package: torch's optimizer under DeepSpeed's name."""
    assert "deepspeed" not in contenders.names(CPU)
    deepspeed = types.ModuleType("deepspeed.ops.adam")
    deepspeed.DeepSpeedCPUAdam = lambda params, adamw_mode, **options: (  # type: ignore[attr-defined]
        (torch.optim.AdamW if adamw_mode else torch.optim.Adam)(params, **options)
    )
    monkeypatch.setitem(sys.modules, "deepspeed.ops.adam", deepspeed)
    workload = workloads.Workload("some", ((3, 5), (7,), (300,)))
    reached = {}
    for name in (*contenders.TORCH, "deepspeed", "ampopt"):
        params = workload.parameters(torch.bfloat16, CPU)
        gradients = workloads.Gradients(params)
        start = [p.detach().clone() for p in params]
        contender = contenders.enter(name, "AdamW", params, masters=True)
        for _ in range(8):
            gradients.restore()
            (contender.clipped_step if clip else contender.step)()
        assert any((p != old).any() for p, old in zip(params, start, strict=True))
        reached[name] = torch.cat([p.detach().flatten() for p in params])
    for params in reached.values():
        assert (params != reached["ampopt"]).sum() <= 2  # those next to a tie of bfloat16


class OfOptimi(torch.optim.AdamW):
    def __init__(self, params, lr, triton):
        assert triton
        super().__init__(params, lr)


def test_an_optimizer_that_another_package_lacks_is_not_measured(monkeypatch):
    package = types.SimpleNamespace(AdamW=OfOptimi, adamw=lambda: None)
    monkeypatch.setitem(sys.modules, "optimi", package)
    params = workloads.Workload("some", ((5,),)).parameters(torch.float32, CPU)
    assert isinstance(contenders.enter("optimi", "AdamW", params).optimizer, OfOptimi)
    for absent in ("SGD", "adamw"):
        with pytest.raises(NotImplementedError, match=f"{absent} of optimi is not measured"):
            contenders.enter("optimi", absent, params)


def test_sizes_and_masters_are_rows_of_their_own(tiny, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(workloads, "powers_of_two", lambda: [workloads.of(32)])
    path = tmp_path / "figures.json"
    arguments = ("--optimizer", "AdamW", "--repeats", "1", "--json", str(path))
    stepped = set()
    restore = workloads.Gradients.restore

    def noted(gradients):
        restore(gradients)
        stepped.add(gradients._params[0].dtype)

    monkeypatch.setattr(workloads.Gradients, "restore", noted)
    run("--sizes", "--masters", "--dtype", "float16", *arguments)
    assert "/float32" in capsys.readouterr().out
    assert stepped == {torch.float16, torch.float32}
    figures = json.loads(path.read_text())
    assert figures["environment"]["masters"] == "float32"
    assert [row["workload"] for row in figures["rows"]] == ["32 elements"] * 2
    for row in figures["rows"]:
        least = {name: row["contenders"][name]["least"] for name in ("ampopt", "float32")}
        assert row["ratio_to_float32"] == least["ampopt"] / least["float32"]
        # torch's scaler refuses to unscale float16, but not float32 copies
        assert not any("missing" in there for there in row["contenders"].values())


def test_small_states_are_timed_and_counted_beside_those_of_32_bits(
    tiny, monkeypatch, tmp_path, capsys
):
    workload = workloads.Workload("two", ((8192,),) * 2)
    monkeypatch.setattr(workloads, "powers_of_two", lambda: [workload])
    path = tmp_path / "figures.json"
    asked = ("--sizes", "--masters", "--dtype", "bfloat16", "--repeats", "1")
    run("--optimizer", "AdamW", *asked, "--json", str(path))
    row, _ = json.loads(path.read_text())["rows"]
    each = {name: n / workload.elements for name, n in row["allocated"].items()}
    # Parameter, gradient, master weight and both states; of each parameter also a few scalars.
    expected = {"ampopt": 2 + 2 + 4 + 8, "ampopt:16": 2 + 2 + 4 + 4, "ampopt:8": 2 + 2 + 1 + 2.0625}
    assert {name: each[name] for name in expected} == pytest.approx(expected, abs=0.01)
    # torch's step float32 copies, whose gradients are float32 too.
    assert each["fused"] == pytest.approx(2 + 2 + 4 + 4 + 8, abs=0.01)
    ours, small = (row["contenders"][name]["median"] for name in ("ampopt", "ampopt:8"))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    printed = [line for line in lines if line[:1] == ["AdamW"]][2]
    assert f"{each['ampopt:8']:.2f}" in printed
    assert float(printed[-1]) == pytest.approx(small / ours, abs=0.006)


def test_in_each_step_of_changing_another_quarter_has_no_gradient(tiny, tmp_path):
    path = tmp_path / "figures.json"
    arguments = ("--optimizer", "AdamW", "--repeats", "1", "--json", str(path))
    run("--changing", "--workload", "small", *arguments)
    figures = json.loads(path.read_text())
    assert figures["environment"]["changing"] == 0.25
    params = workloads.Workload("some", ((3,),) * 8).parameters(torch.float32, CPU)
    gradients = workloads.Gradients(params, workloads.CHANGING)
    sets = set()
    for _ in range(6):
        gradients.restore()
        sets.add(tuple(p.grad is None for p in params))
    assert len(sets) > 1 and {sum(absent) for absent in sets} == {2}


@pytest.mark.parametrize("sizes", [(8,) * 8, (8, 16, 64, 128, 8, 16, 64, 256)])
def test_the_floor_of_changing_is_of_the_mean_share_of_gradients(sizes):
    workload = workloads.Workload("some", tuple((size,) for size in sizes))
    measured = [
        rows.measure(
            "AdamW",
            workload,
            dtype=torch.float32,
            device=CPU,
            rounds=1,
            seconds=0.0,
            changing=changing,
            only=["ampopt"],
        )[0]
        for changing in (False, True)
    ]
    assert [row.workload for row in measured] == ["some", "some, changing"]
    assert [row.bytes for row in measured] == [32 * sum(sizes), 24 * sum(sizes)]


def test_each_power_of_two_has_a_workload_of_at_most_16_mi_elements():
    sizes = workloads.powers_of_two()
    assert [workload.shapes[0] for workload in sizes] == [(1 << power,) for power in range(6, 25)]
    assert [len(workload.shapes) for workload in sizes[:2] + sizes[-2:]] == [300, 300, 2, 1]
    assert max(workload.elements for workload in sizes) == 1 << 24


def test_gradients_are_the_same_before_every_step_and_in_new_tensors():
    params = workloads.Workload("some", ((4, 4), (3,))).parameters(torch.float32, CPU)
    gradients = workloads.Gradients(params)
    gradients.restore()
    first = [p.grad for p in params if p.grad is not None]
    values = [g.clone() for g in first]
    for grad in first:
        grad.zero_()
    gradients.restore()
    second = [p.grad for p in params if p.grad is not None]
    assert len(first) == len(second) == 2
    assert all(new is not old for new, old in zip(second, first, strict=True))
    assert all(map(torch.equal, second, values))


def test_rounds_are_interleaved_and_begin_with_restored_gradients():
    happened = []
    times = measure.interleaved(
        {name: lambda name=name: happened.append(name) for name in "ab"},
        lambda name: happened.append(f"restore {name}"),
        CPU,
        rounds=3,
        seconds=0.0,
    )
    assert happened[1::2] == ["a", "b", "b", "a", "a", "b"]
    assert happened[::2] == [f"restore {name}" for name in happened[1::2]]
    assert len(times["a"].times) == 3


class PretendedGpu:
    """A fake GPU with a clock: kernels run one after another, each after it was launched."""

    def __init__(self, monkeypatch):
        self.now = self.busy_until = 0.0
        self.waits = 0
        for name, stand_in in {
            "device": lambda device: contextlib.nullcontext(),
            "synchronize": lambda device=None: self.wait(),
            "_sleep": lambda cycles: self.queue(cycles / 2e9),
            "Event": lambda enable_timing: self.Event(self),
        }.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)
        clock = types.SimpleNamespace(perf_counter=lambda: self.now)
        monkeypatch.setattr(measure, "time", clock)
        flush = torch.empty(1)
        monkeypatch.setattr(torch, "empty", lambda *_, **__: flush)

    def queue(self, seconds, host=0.0):
        self.now += host
        self.busy_until = max(self.now, self.busy_until) + seconds

    def wait(self):
        self.now = max(self.now, self.busy_until)

    class Event:
        def __init__(self, gpu):
            self.gpu = gpu

        def record(self):
            self.at = max(self.gpu.now, self.gpu.busy_until)

        def synchronize(self):
            self.gpu.wait()

        def elapsed_time(self, end):
            return (end.at - self.at) * 1e3


@pytest.mark.parametrize(("host", "device"), [(8e-3, 1e-3), (1e-3, 8e-3), (0.5, 0.25)])
def test_host_and_device_are_timed_apart(monkeypatch, host, device):
    gpu, restored = PretendedGpu(monkeypatch), []

    def step():
        for _ in range(4):
            gpu.queue(device / 4, host / 4)

    timed = measure._on_cuda(torch.device("cuda"))
    for _ in range(2):
        assert timed(step, lambda: restored.append(gpu.queue(0.125))) == pytest.approx(
            (device, host)
        )
    assert len(restored) == 2  # each time before the second step, outside of its time


def test_only_the_contenders_that_are_named_are_measured(tiny, tmp_path):
    path = tmp_path / "figures.json"
    arguments = ("--optimizer", "AdamW", "--repeats", "1", "--json", str(path))
    run("--workload", "small", "--contender", "fused", "--contender", "ampopt", *arguments)
    figures = json.loads(path.read_text())["rows"]
    assert [set(row["contenders"]) for row in figures] == [{"fused", "ampopt"}] * 2


def test_contenders_that_cannot_unscale_float16_are_left_out():
    workload = workloads.Workload("some", ((5,),))
    row, _ = rows.measure(
        "AdamW",
        workload,
        dtype=torch.float16,
        device=CPU,
        rounds=1,
        seconds=0.0,
    )
    assert "ampopt" in row.times
    assert "FP16" in row.missing["foreach"]


@pytest.mark.parametrize(
    ("make", "each"),
    [
        (lambda params: ampopt.AdamW(params), 32),
        (lambda params: ampopt.Adam(params, amsgrad=True), 40),
        (lambda params: ampopt.SGD(params), 16),
        (lambda params: ampopt.SGD(params, momentum=0.9), 24),
        (lambda params: ampopt.LAMB(params), 48),
        (lambda params: ampopt.NovoGrad(params), 28),
    ],
)
def test_bytes_follow_the_states_that_the_rule_has(make, each):
    params = workloads.Workload("some", ((5, 2),)).parameters(torch.float32, CPU)
    workloads.Gradients(params).restore()
    optimizer = make(params)
    optimizer.unscale_and_step(grads_scaled_by=2.0)
    assert sum(bytes_by_kernel(optimizer).values()) == 10 * each


def test_a_floor_is_the_fastest_stream_of_the_same_rounds():
    streams = memory_bandwidth.Streams({"a": int, "b": int}, {"a": 2, "b": 3})
    times = {k: measure.Times([v], [v]) for k, v in {"a": 1.0, "b": 2.0, "c": 9.0}.items()}
    assert streams.bandwidth(times) == 2.0


def test_a_row_names_the_best_of_torchs_alone():
    seconds = {"ampopt": 1.0, "foreach": 3.0, "fused": 2.0, "apex": 0.1}
    times = {name: measure.Times([s], [s]) for name, s in seconds.items()}
    row = rows.BenchRow("AdamW", "large", False, "cpu", 1, 1, 100, 100.0, times, {})
    assert row.best == "fused"
    assert row.ratio == 0.5


def test_tables_show_the_figures_of_a_row():
    times = {
        "foreach": measure.Times([0.015, 0.026, 0.027], [1e-3]),
        "fused": measure.Times([0.010, 0.030, 0.020], [2e-3]),
        "ampopt": measure.Times([0.006, 0.005, 0.016], [1e-4, 3e-4]),
    }
    costs = {"ampopt": DeviceCost(3, 1, 2_500_000)}
    row = rows.BenchRow("AdamW", "large", True, "cuda", 1, 1, 6_000_000, 2e9, times, costs=costs)
    other = replace(row, clip=False, bandwidth=None, times={"foreach": times["foreach"]})
    assert report.table([row, other]).splitlines() == [
        "optimizer  workload  clip      foreach        fused        ampopt  /best  fastest  /floor",
        "AdamW      large     yes   26.00 ±3.00  20.00 ±5.00  6.000 ±2.750   0.30     0.50    2.00",
        "AdamW      large     no    26.00 ±3.00            -             -      -        -       -",
    ]
    assert [line.split() for line in report.costs([row]).splitlines()[2:]] == [
        ["AdamW", "large", "yes", "fused", "-", "-", "2000", "-", "-", "-"],
        ["AdamW", "large", "yes", "ampopt", "1.0", "0.50", "200", "3", "1", "2.5"],
    ]


@pytest.mark.parametrize(
    ("dtype", "master_weights", "detect", "update"),
    [
        (torch.float32, False, 4, 28),
        (torch.bfloat16, False, 2, 14),
        (torch.bfloat16, True, 2, 28),
    ],
)
def test_bytes_are_counted_kernel_by_kernel(dtype, master_weights, detect, update):
    params = workloads.Workload("some", ((5, 2),)).parameters(dtype, CPU)
    workloads.Gradients(params).restore()
    optimizer = ampopt.AdamW(params, master_weights=master_weights)
    optimizer.unscale_and_step(grads_scaled_by=2.0)
    found = bytes_by_kernel(optimizer)
    assert found == {
        "detect_kernel": 10 * detect,
        "control_kernel": 0,
        "update_kernel": 10 * update,
    }
