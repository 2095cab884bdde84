"""Every example runs as its docstring says, without a warning, and ends with its result.

None is in a class: workers of xdist's share what is forked for a file, but for its classes.
"""

import contextlib
import os
import re
import runpy
import statistics
from pathlib import Path

import pytest
import torch
from support.preloaded import Preloaded

import ampopt

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
# What they import, torch's compiler with an optimizer, too.
IMPORTED = (
    *("ampopt.testing", "torch._dynamo", "sklearn.datasets", "matplotlib.pyplot", "tqdm"),
    *("hypothesis", "pytest"),
)


def settings():
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("TRITON_INTERPRET", "AMPOPT_BACKEND")
    }
    # With eager, no run waits for a compiler.
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    return {**kept, "PYTHONPATH": path, "AMPOPT_BACKEND": "eager"}


@pytest.fixture(scope="module")
def preloaded(with_torch):
    """A process that has imported what examples import, with Triton's interpreter on."""
    environment = settings() | {"TRITON_INTERPRET": "1"}
    with contextlib.closing(Preloaded(IMPORTED, environment, with_torch)) as server:
        yield server


@pytest.fixture
def run(preloaded, tmp_path):
    """Runs an example."""

    def run(example, *arguments, **environment):
        environment = settings() | environment
        return preloaded.run(EXAMPLES / example, *arguments, cwd=tmp_path, environment=environment)

    return run


def output(done):
    assert done.returncode == 0, done.stderr
    return done.stdout


def percentages(text):
    return [float(number) for number in re.findall(r"([\d.]+)%", text)]


def test_train_digits_float16_reaches_float32(run, tmp_path):
    picture = tmp_path / "picture.png"
    done = run("train_digits.py", "--epochs", "6", "--output", str(picture))
    *_, header, full, half, where, verdict = output(done).splitlines()
    assert header.split() == "test accuracy steps skipped final scale time".split()
    assert full.split()[0] == "float32" and half.split()[0] == "float16"
    accuracy32, accuracy16 = percentages(full) + percentages(half)
    assert accuracy32 > 94 and accuracy16 > accuracy32 - 1
    steps32, skipped32, scale32 = full.split()[2:5]
    steps16, skipped16, scale16 = half.split()[2:5]
    assert steps32 == steps16 == str(6 * 21)
    assert skipped32 == "0" and scale32 == "-"
    # From 2**30, at least ten halvings; later ones are those of a scale that has grown.
    assert 10 <= int(skipped16) <= 30
    assert 2**12 <= 2 ** int(scale16.removeprefix("2^")) <= 2**24
    assert where == f"picture: {picture}"
    assert verdict == "float16 reached float32's accuracy within 1 point"
    assert "float16: 100%" in done.stderr and "skipped=" in done.stderr  # the progress bar

    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = (int.from_bytes(content[at : at + 4], "big") for at in (16, 20))
    assert width > 600 and height > 400
    assert 20_000 < len(content) < 400_000


def test_train_digits_falling_short_is_a_failure(run, tmp_path):
    # In one epoch float16 skips half of the steps, so it cannot reach float32.
    done = run("train_digits.py", "--epochs", "1", "--state-bits", "8")
    assert done.returncode == 1
    largest = re.search(r"largest update with states in 8 bits: (\S+) lr\n$", done.stdout)
    assert largest is not None and 0.5 < float(largest[1]) < 10
    assert "percentage points behind float32, more than the 1 allowed" in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "train_digits.png").exists()


def test_train_digits_help(capsys):
    assert stopped("--help") == 0
    explained = capsys.readouterr().out
    for option in ("--epochs", "--seed", "--device", "--output", "--state-bits"):
        assert option in explained


@pytest.mark.parametrize(
    "arguments",
    [("--epochs", "0"), ("--device", "nowhere"), ("--output", "missing/picture.png")],
    ids=lambda arguments: arguments[0],
)
def test_train_digits_bad_arguments(arguments, capsys):
    assert stopped(*arguments) == 2
    assert f"error: {arguments[0]}" in capsys.readouterr().err


def stopped(*arguments, example="train_digits.py"):
    """The exit status of an example that stops because of its arguments."""
    main = runpy.run_path(str(EXAMPLES / example))["main"]
    with pytest.raises(SystemExit) as status:
        main(arguments)
    return status.value.code


def test_closure_replay(run):
    lines = output(run("closure_replay.py")).splitlines()
    # Five halvings here; the exact number is the processor's rounding.
    assert re.fullmatch(
        r"step 1, evaluation  1: loss 2\.3026, scale 2\^24 2\^23 2\^22 .*\d overflowed", lines[0]
    )
    assert sum(line.startswith("step") for line in lines) > 30
    half, full = lines[-2:]
    numbers = re.compile(r"(float\d\d): training loss ([\d.]+), test accuracy ([\d.]+)%")
    (name16, loss16, accuracy16), (name32, loss32, accuracy32) = numbers.findall(half + full)
    assert (name16, name32) == ("float16", "float32")
    assert float(loss16) == pytest.approx(float(loss32), rel=0.05)
    assert float(accuracy16) >= float(accuracy32) - 1 > 95


def test_find_the_layer(run, tmp_path):
    picture = tmp_path / "picture.png"
    done = run("find_the_layer.py", "--output", str(picture))
    totals, found, *_, verdict = output(done).splitlines()
    assert totals.startswith("120 steps, ")
    assert found.startswith("`blocks.2.layer.weight` overflowed ")
    assert re.fullmatch(
        r"blocks.2.layer.weight overflowed \d+ times; with blocks.2.layer in float32, 0 times",
        verdict,
    )
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_train_text_every_level_is_shown_beside_float32(run, tmp_path):
    picture = tmp_path / "picture.png"
    done = run(
        "train_text.py", "--size", "tiny", "--steps", "24", "--seeds", "2",
        "--output", str(picture), "--state-bits", "8", "--master-bits", "24",
    )  # fmt: skip
    lines = output(done).splitlines()
    header, rows, where, spread = lines[0], lines[1:11], lines[11], lines[12]
    o1, o2, o3, bfloat16, verdict, updates = lines[13:]
    columns = "held-out loss steps/second peak memory skipped largest update"
    assert header.split() == columns.split()
    table = {row[:18].strip(): row[18:].removesuffix(" lr").split() for row in rows}
    levels = ("O0", "O1", "O2", "O3", "bfloat16")
    assert list(table) == [f"{name}, seed {seed}" for name in levels for seed in (0, 1)]
    loss = {name: float(row[0]) for name, row in table.items()}
    apart = abs(loss["O0, seed 0"] - loss["O0, seed 1"])
    for name, it in loss.items():
        # Of log(256), which is 5.5. Each Python comes with another text.
        assert name.startswith("O3") or 2 < it < 4.5
    assert all(float(row[1]) > 0 for row in table.values())
    megabytes = {name: float(row[2]) for name, row in table.items()}
    assert megabytes["O3, seed 0"] < megabytes["O2, seed 0"] < megabytes["O0, seed 0"]
    skipped = {name: int(row[-2]) for name, row in table.items()}
    assert skipped["O0, seed 0"] == skipped["bfloat16, seed 0"] == 0 and max(skipped.values()) < 5
    assert where == f"picture: {picture}"
    assert spread.startswith("float32 over 2 seeds: mean loss ")
    assert abs(float(spread.split()[-1]) - apart) < 0.001  # losses of the table are rounded
    means = {
        name: statistics.fmean(loss[f"{name}, seed {seed}"] for seed in (0, 1)) for name in levels
    }
    for name, line in (("O1", o1), ("O2", o2), ("bfloat16", bfloat16)):
        above = re.fullmatch(rf"{name}: mean loss (\S+) from float32's", line)
        assert above is not None and abs(float(above[1]) - means[name] + means["O0"]) < 0.001
    assert o3.startswith("O3: mean loss ") and not float(o3.split()[3]) < 1
    assert verdict == "O1, O2, bfloat16: above that mean by no more than the spread"
    assert updates == "O1, O2, bfloat16: no update above 10 times the learning rate"
    largest = {name: float(row[-1]) for name, row in table.items()}
    assert all(0.5 < it < 10 for name, it in largest.items() if not name.startswith("O3"))
    assert "O2, seed 1: 100%" in done.stderr and "skipped=" in done.stderr  # the progress bars
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_train_text_a_level_that_falls_behind_is_a_failure(monkeypatch, tmp_path, capsys):
    module = runpy.run_path(str(EXAMPLES / "train_text.py"))
    fallen = {"O0": 2.0, "O1": 2.1, "O2": 2.4, "O3": 9.0, "bfloat16": float("nan")}

    def train(name, text, size, seed, precision, measures):
        assert not measures and precision == module["LEVELS"][name]
        held_out = fallen[name] + 0.2 * seed
        return module["Run"](name, [3.0], [False], held_out, 1.0, 1.0)

    monkeypatch.setitem(module["main"].__globals__, "train", train)
    with pytest.raises(SystemExit, match=r"spread over seeds: O2 by 0.4000, bfloat16 by nan"):
        module["main"](["--seeds", "2", "--output", str(tmp_path / "picture.png")])
    assert "largest update" not in capsys.readouterr().out


def test_train_text_an_update_that_is_too_long_is_a_failure(monkeypatch, tmp_path, capsys):
    module = runpy.run_path(str(EXAMPLES / "train_text.py"))
    bits = {"O0": (32, 32), "O1": (8, 32), "O2": (8, 24), "O3": (32, 32), "bfloat16": (8, 32)}

    def train(name, text, size, seed, precision, measures):
        assert measures and (precision.state_bits, precision.master_bits) == bits[name]
        largest = 11.0 if name == "O2" else 99.0 if name == "O3" else 1.0
        return module["Run"](name, [3.0], [False], 2.0 + 0.2 * seed, 1.0, 1.0, largest)

    monkeypatch.setitem(module["main"].__globals__, "train", train)
    options = ["--seeds", "2", "--state-bits", "8", "--master-bits", "24"]
    with pytest.raises(SystemExit, match=r"an update was 11.00 times the learning rate"):
        module["main"]([*options, "--output", str(tmp_path / "picture.png")])
    assert "11.00 lr" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [("--steps", "0"), ("--seeds", "0"), ("--device", "nowhere"), ("--size", "huge")],
    ids=lambda arguments: arguments[0],
)
def test_train_text_bad_arguments(arguments, capsys):
    assert stopped(*arguments, example="train_text.py") == 2
    assert f"{arguments[0]}" in capsys.readouterr().err


def test_train_sharded(run, tmp_path):
    picture = tmp_path / "picture.png"
    done = run("train_sharded.py", "--steps", "4", "--output", str(picture))
    *_, two, one, resumed, on_four, where, verdict = output(done).splitlines()
    for line, name, steps in (
        (two, "2 ranks", 4),
        (one, "1 process", 4),
        (resumed, "resumed on 1", 2),
        (on_four, "resumed on 4", 2),
    ):
        assert line.startswith(name)
        taken, skipped, equal, loss, difference = line.removeprefix(name).split()
        assert (int(taken), equal) == (steps, "yes")
        # From 2**24, and once more for the infinite gradient; the scale is saved, too.
        assert (int(skipped) > 5) == (steps == 4)
        assert 4 < float(loss) < 4.7 and percentages(difference)[0] < 2
    assert where == f"picture: {picture}" and picture.read_bytes().startswith(b"\x89PNG")
    assert verdict == "all runs have the same losses, and the ranks of each skipped the same steps"
    assert "UserWarning" not in done.stderr and "step/s" in done.stderr


def test_float16_rl(run, tmp_path):
    picture = tmp_path / "picture.png"
    done = run("float16_rl.py", "--steps", "4", "--seeds", "2", "--output", str(picture))
    header, half, other, where, verdict = output(done).splitlines()
    assert header.split()[:3] == ["reward", "mismatch", "skipped"]
    mismatches = []
    for line, name in ((half, "float16"), (other, "bfloat16")):
        assert line.startswith(name)
        reward, mismatch, skipped, *learned = line.removeprefix(name).split()
        assert learned == ["-,", "-"]
        assert percentages(reward)[0] > 10  # a guess is right in 6%
        assert int(skipped) == 0
        mismatches.append(float(mismatch))
    assert mismatches[1] / mismatches[0] == pytest.approx(8, rel=0.3)
    assert where == f"picture: {picture}" and picture.read_bytes().startswith(b"\x89PNG")
    found = re.fullmatch(
        r"by seed, the mismatch of bfloat16 is (\S+) to (\S+) times that of float16", verdict
    )
    assert found is not None and 4 < float(found[1]) <= float(found[2]) < 16


def test_two_optimizers(run):
    done = run("two_optimizers.py", "--epochs", "12")
    happened, *drawing, real, drawn = output(done).splitlines()
    skips = re.fullmatch(
        r"steps skipped: (\d+) by the critic, (\d+) by the generator; "
        r"the scale went from 2\^24 to 2\^(\d+)",
        happened,
    )
    assert skips is not None
    critic, generator, exponent = map(int, skips.groups())
    # Either halves the scale for both, and it has grown at most every hundred steps since.
    assert critic > 0 and generator > 0
    assert exponent < 24
    assert len(drawing) == 8 and all(len(line) == 10 * 8 + 9 * 2 for line in drawing)
    assert percentages(real)[0] > 95
    assert percentages(drawn)[0] > 30  # a guess is right in 10%


def test_custom_lion_trains_in_both_precisions_and_on_triton(run):
    pytest.importorskip("triton")
    done = run("custom_lion.py", "--steps", "200", TRITON_INTERPRET="1")
    full, half, backends = output(done).splitlines()
    assert full.startswith("Lion in float32") and full.endswith(" 0 of 200 steps skipped")
    assert half.startswith("Lion in float16") and not half.endswith(" 0 of 200 steps skipped")
    assert percentages(full)[0] > 90
    assert percentages(half)[0] > 90
    said, difference = backends.split(": ")
    assert said == "largest difference between the eager and triton backends"
    # Where rounding turns a sign, a parameter is 2e-3 off after a step; there are twelve.
    assert float(difference) <= 12 * 2e-3


@pytest.fixture
def custom_lion(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    return runpy.run_path(str(EXAMPLES / "custom_lion.py"))


def test_custom_lion_steps_as_ampopts(custom_lion):
    """Whose rule keeps the contract; see ``ampopt/testing/test_built_ins.py``."""
    ends = []
    for cls in (custom_lion["Lion"], ampopt.Lion):
        p = torch.nn.Parameter(torch.linspace(-2, 1, 8))
        optimizer = cls([p], lr=0.125, betas=(0.5, 0.75), weight_decay=0.25, master_weights=True)
        for grad in (torch.linspace(-1, 3, 8), torch.linspace(2, -2, 8)):
            p.grad = grad
            optimizer.unscale_and_step(grads_scaled_by=4.0)
        ends.append([p.detach(), optimizer.state[p]["exp_avg"]])
    torch.testing.assert_close(*ends)


def test_custom_lion_without_kernels_says_what_to_do(custom_lion, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["custom_lion.py", "--steps", "1"])
    main = custom_lion["main"]
    monkeypatch.setitem(main.__globals__, "INTERPRETED", False)
    monkeypatch.setattr("torch.set_num_threads", lambda n: None)
    main()
    *_, hint = capsys.readouterr().out.splitlines()
    assert hint == "set TRITON_INTERPRET=1 to run the rule as a Triton kernel too"


def test_own_kernel_both_ways_to_skip_agree(run):
    pytest.importorskip("triton")
    done = run("own_kernel.py", "--steps", "30", TRITON_INTERPRET="1")
    full, by_flag, controlled, verdict = output(done).splitlines()
    assert full.startswith("float32, plain step()") and full.endswith(" 0 of 30 steps skipped")
    assert by_flag.startswith("float16, RowNormalized")
    assert controlled.startswith("float16, Controlled")
    assert by_flag.split("accuracy")[1] == controlled.split("accuracy")[1]
    assert not by_flag.endswith(" 0 of 30 steps skipped")
    assert percentages(by_flag)[0] > 85
    assert verdict.startswith("both float16 runs ended with bitwise equal weights")


def test_own_kernel_without_a_gpu_it_says_what_to_do(run):
    pytest.importorskip("triton")
    done = run("own_kernel.py", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert done.stderr == "no GPU: run it with TRITON_INTERPRET=1, in Triton's interpreter\n"


def test_sam(run):
    sgd, full, half, verdict = output(run("sam.py", "--epochs", "10")).splitlines()
    assert sgd.startswith("SGD in float32") and full.startswith("SAM in float32")
    assert sgd.endswith(", 210 steps, 0 evaluations run again")
    assert full.endswith(", 210 steps, 0 evaluations run again")
    again = re.fullmatch(r"SAM in float16: .*, 210 steps, (\d+) evaluations run again", half)
    assert again is not None and int(again[1]) > 0
    assert min(percentages(full + half)) > 88
    assert verdict == "SAM in float16 reached float32's accuracy within 2 points"


def test_masters_on_the_host(run):
    said = output(run("masters_on_the_host.py"))
    assert said == "2 of 3 steps uploaded, scale 32768\n"


def test_sam_in_two_calls(run):
    said = output(run("sam_in_two_calls.py"))
    found = re.fullmatch(r"loss from (\S+) to (\S+), scale 2\^(\d+)\n", said)
    assert found is not None and float(found[2]) < float(found[1]) - 0.1
    assert int(found[3]) < 24  # the first scale: either gradient of a step may overflow


def test_property_test_your_optimizer(run):
    done = run("property_test_your_optimizer.py")
    lines = output(done).splitlines()
    assert re.fullmatch(r"Wrong fails \d invariants:", lines[0])
    assert "  test_training_goes_on_as_if_skipped_steps_had_never_been" in lines
    assert any(line.strip().startswith("TestWrong().replay(") for line in lines)
    assert re.fullmatch(r"Right passes \d\d invariants, and fails 0", lines[-1])


def test_every_example_is_run():
    text = Path(__file__).read_text(encoding="utf-8")
    for path in EXAMPLES.glob("*.py"):
        assert f'"{path.name}"' in text
