"""The choice of a backend: what it takes, what it refuses, and when the CPU compiles."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import ampopt
from ampopt import backend as backends
from ampopt.testing.bits import bits, everything, state_of
from ampopt_kernels import compiled, multi_tensor
from ampopt_kernels.compiled import Compiled, cpp_compiler
from ampopt_kernels.cpu import Cpu, apply_rule
from ampopt_kernels.eager import Eager
from ampopt_kernels.language import HAS_TRITON
from ampopt_kernels.work import Backend

NAMES = "auto, triton, compiled, eager"
needs_compiler = pytest.mark.skipif(cpp_compiler() is None, reason="there is no C++ compiler here")
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="Triton cannot be imported here")


@pytest.fixture(autouse=True)
def untouched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is chosen, and nothing known, before each test and after it."""
    monkeypatch.setattr(backends, "_chosen", None)
    monkeypatch.delenv("AMPOPT_BACKEND", raising=False)
    backends._cpu_backend.cache_clear()
    yield
    backends._cpu_backend.cache_clear()


def made(cls: Any = ampopt.AdamW, **options: Any) -> tuple[Parameter, Any]:
    param = Parameter(torch.tensor([1.0, -2.0, 3.0]))
    param.grad = torch.tensor([0.5, 0.25, -1.0])
    return param, cls([param], lr=0.125, **options)


def trained(steps: int) -> Any:
    param, optimizer = made()
    for _ in range(steps):
        optimizer.step()
    return bits(param), state_of(optimizer)


# --- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cuda", "", "Triton", "inductor"])
def test_an_unknown_name_is_refused_with_the_choices(name, monkeypatch):
    ampopt.set_backend("eager")
    with pytest.raises(ValueError, match=f"^set_backend: unknown backend {name!r}.*{NAMES}"):
        ampopt.set_backend(name)
    assert ampopt.get_backend() == "eager"
    monkeypatch.setattr(backends, "_chosen", None)
    monkeypatch.setenv("AMPOPT_BACKEND", name)
    with pytest.raises(ValueError, match=f"^AMPOPT_BACKEND: unknown backend {name!r}.*{NAMES}"):
        ampopt.get_backend()
    _, optimizer = made()
    before = everything(optimizer)["parameters"]
    with pytest.raises(ValueError, match="^AMPOPT_BACKEND"):
        optimizer.step()
    assert everything(optimizer)["parameters"] == before


def test_a_call_wins_over_the_environment(monkeypatch):
    assert ampopt.get_backend() == "auto"
    monkeypatch.setenv("AMPOPT_BACKEND", "eager")
    assert ampopt.get_backend() == "eager"
    ampopt.set_backend("auto")
    assert ampopt.get_backend() == "auto"


@pytest.mark.parametrize("source", ["set_backend", "AMPOPT_BACKEND"])
@pytest.mark.parametrize(
    ("name", "what", "lacks"),
    [
        ("triton", {"ampopt.backend.HAS_TRITON": False}, "needs Triton.*install the triton"),
        (
            "triton",
            {
                "ampopt.backend.HAS_TRITON": True,
                "ampopt.backend.INTERPRETED": False,
                "ampopt.backend._finds_accelerator": lambda: False,
            },
            "needs an accelerator.*TRITON_INTERPRET=1 before importing ampopt",
        ),
        ("compiled", {"shutil.which": lambda _: None}, r"needs a C\+\+ compiler.*install one"),
    ],
)
def test_a_backend_that_cannot_run_here_says_what_is_missing(
    source, name, what, lacks, monkeypatch
):
    for target, value in what.items():
        monkeypatch.setattr(target, value)
    if source == "set_backend":
        with pytest.raises(RuntimeError, match=f"^set_backend: the {name} backend {lacks}"):
            ampopt.set_backend(name)
        assert ampopt.get_backend() == "auto"
    else:
        monkeypatch.setenv("AMPOPT_BACKEND", name)
        param, optimizer = made()
        before = bits(param)
        with pytest.raises(RuntimeError, match=f"^AMPOPT_BACKEND: the {name} backend {lacks}"):
            optimizer.step()
        assert bits(param) == before


@needs_triton
def test_triton_without_its_interpreter_says_how_to_get_it(monkeypatch):
    ampopt.set_backend("triton")
    monkeypatch.setattr(backends, "INTERPRETED", False)
    param, optimizer = made()
    before = bits(param)
    with pytest.raises(RuntimeError, match="cannot run on cpu.*TRITON_INTERPRET=1 before"):
        optimizer.step()
    assert bits(param) == before


@pytest.mark.parametrize(
    ("name", "device", "kind"),
    [
        ("auto", "cpu", Compiled),
        ("compiled", "cpu", Compiled),
        ("eager", "cpu", Cpu),
        ("eager", "cuda", Eager),
        ("auto", "mps", Eager),
        ("auto", "cuda", "triton"),
        ("auto", "xpu", "triton"),
        ("triton", "cuda", "triton"),
        ("compiled", "cuda", RuntimeError),
        ("triton", "mps", RuntimeError),
    ],
)
@needs_compiler
@needs_triton
def test_each_device_has_its_backend(name, device, kind):
    ampopt.set_backend(name)
    if kind is RuntimeError:
        with pytest.raises(RuntimeError, match=rf"cannot run on {device}.*set_backend\('auto'\)"):
            backends.backend_for(torch.device(device))
        return
    backend: Backend = backends.backend_for(torch.device(device))
    assert type(backend) is (multi_tensor.Triton if kind == "triton" else kind)


# --- when auto compiles --------------------------------------------------------------------------


class Clock:
    """Shows a second more at each look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The rules that were to be compiled; what comes of it is the eager loop."""
    asked: list[Any] = []

    def compile_rule(rule: Any, flags: Any, dtypes: Any, *sizes: Any) -> Callable[..., Any]:
        asked.append((rule, flags, dtypes))

        def function(h: torch.Tensor, *tensors: torch.Tensor) -> None:
            apply_rule(rule, flags, tensors, tuple(h.tolist()))

        return function

    monkeypatch.setattr(compiled, "compile_rule", compile_rule)
    monkeypatch.setattr(compiled, "cpp_compiler", lambda: "c++")
    monkeypatch.setattr(backends, "cpp_compiler", lambda: "c++")
    return asked


def test_auto_compiles_once_the_time_in_a_rule_is_that_of_compiling(compilations, monkeypatch):
    """Each eager step takes a second here, by the clock of the backend."""
    monkeypatch.setattr(compiled.time, "perf_counter", Clock())
    _, optimizer = made()
    for step in range(1, 13):
        optimizer.step()
        assert len(compilations) == (step > compiled.PATIENCE)
    _, other = made(ampopt.SGD)  # has used up no time
    other.step()
    assert len(compilations) == 1
    assert "ten seconds" in (inspect.getdoc(ampopt.set_backend) or "")
    assert compiled.PATIENCE == 10.0


def test_a_short_script_never_compiles(compilations):
    trained(100)
    assert not compilations


def test_asked_for_it_compiles_at_the_first_use_of_each_kind(compilations):
    ampopt.set_backend("compiled")
    for dtype in (torch.float32, torch.float32, torch.float64):
        param = Parameter(torch.ones(3, dtype=dtype))
        optimizer = ampopt.AdamW([param])
        for _ in range(2):
            param.grad = torch.ones_like(param)
            optimizer.step()
    assert [dtypes[0] for _, _, dtypes in compilations] == [torch.float32, torch.float64]


def test_a_backend_that_is_chosen_again_runs_what_it_has_compiled(compilations, monkeypatch):
    ran: list[Any] = []
    monkeypatch.setattr(compiled, "compile_rule", lambda *_: lambda *given: ran.append(given))
    _, optimizer = made()
    for name, steps in (("compiled", 1), ("auto", 1), ("compiled", 2), ("eager", 2)):
        ampopt.set_backend(name)
        optimizer.step()
        assert len(ran) == steps


def test_a_compiler_that_fails_leaves_auto_eager_with_one_warning(compilations, monkeypatch):
    ampopt.set_backend("eager")
    expected = trained(4)

    def fails(*_: Any) -> Any:
        compilations.append(None)
        raise OSError("no space left on device")

    monkeypatch.setattr(compiled, "compile_rule", fails)
    monkeypatch.setattr(backends, "PATIENCE", 1e-9)
    ampopt.set_backend("auto")
    with pytest.warns(RuntimeWarning, match="OSError: no space left.*staying on the eager") as seen:
        assert trained(4) == expected
        trained(4)
        _, other = made(ampopt.SGD, momentum=0.5)
        for _ in range(3):
            other.step()
    assert len(seen) == len(compilations) == 1


def test_a_compiler_that_fails_is_an_error_where_it_was_asked_for(compilations, monkeypatch):
    def fails(*_: Any) -> Any:
        raise OSError("no space left on device")

    monkeypatch.setattr(compiled, "compile_rule", fails)
    ampopt.set_backend("compiled")
    param, optimizer = made()
    before = bits(param)
    message = r"needs a working C\+\+ compiler.*no space left.*choose 'auto' or 'eager'"
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()
    assert bits(param) == before
    assert not any(value.any() for value in optimizer.state[param].values())
    ampopt.set_backend("eager")
    optimizer.step()
    assert (bits(param), state_of(optimizer)) == trained(1)


def test_without_a_compiler_auto_is_eager_with_the_same_results(monkeypatch):
    ampopt.set_backend("eager")
    expected = trained(3)
    monkeypatch.setattr("shutil.which", lambda _: None)
    ampopt.set_backend("auto")
    assert type(backends.backend_for(torch.device("cpu"))) is Cpu
    assert trained(3) == expected


# --- nothing is compiled twice -------------------------------------------------------------------


def change_everything(optimizer: Any, param: Parameter) -> None:
    """Steps that differ in all that may differ without another kernel."""
    group = optimizer.param_groups[0]
    scale = ampopt.DynamicLossScale(init_scale=2.0**8, growth_interval=1)
    for step in range(1, 5):
        group["lr"] = 0.5 / step if step % 2 else torch.tensor(0.5 / step)
        group["betas"] = (0.5 + step / 16, 0.75)
        group["eps"] = 2.0**-step
        group["weight_decay"] = step / 16
        param.grad = torch.full_like(param, step * scale.item())
        scale = optimizer.unscale_and_step(grads_scaled_by=scale, max_norm=1.0 / step).scale


def test_a_learning_rate_that_changes_every_step_recompiles_no_c(compilations):
    ampopt.set_backend("compiled")
    param, optimizer = made()
    change_everything(optimizer, param)
    assert len(compilations) == 1


@needs_triton
def test_a_learning_rate_that_changes_every_step_recompiles_no_kernel(monkeypatch):
    """Every launch of a step is compiled for what the first one was: constants and types."""
    launches: list[Any] = []

    def record(device: Any, kernel: Any, programs: int, arguments: dict[str, Any]) -> None:
        kinds = {
            name: value
            if name.isupper() or isinstance(value, int)
            else (type(value), getattr(value, "dtype", None))
            for name, value in arguments.items()
        }
        launches.append((kernel.fn.__name__, str(kinds)))
        multi_tensor._launch(device, kernel, programs, arguments)

    monkeypatch.setattr(backends, "_triton_backend", lambda: multi_tensor.Triton(record))
    ampopt.set_backend("triton")
    param, optimizer = made()
    change_everything(optimizer, param)
    assert len(launches) == 4 * 3
    assert len(set(launches)) == 3


@needs_triton
@pytest.mark.parametrize(
    "scale", [2.0, ampopt.DynamicLossScale(init_scale=2.0)], ids=["number", "dynamic"]
)
def test_optimizers_read_nothing_that_another_one_has_sent(monkeypatch, scale):
    """Theirs may be on streams that do not wait for one another."""
    read: list[set[int]] = []

    def record(device: Any, kernel: Any, programs: int, arguments: dict[str, Any]) -> None:
        read[-1] |= {id(t) for t in arguments.values() if isinstance(t, torch.Tensor)}
        kept.extend(arguments.values())  # so that no one else has its identity
        multi_tensor._launch(device, kernel, programs, arguments)

    kept: list[Any] = []
    monkeypatch.setattr(backends, "_triton_backend", lambda: multi_tensor.Triton(record))
    ampopt.set_backend("triton")
    for _ in range(2):
        read.append(set())
        _, optimizer = made()
        optimizer.unscale_and_step(grads_scaled_by=scale, max_norm=1.0)
    given = set() if isinstance(scale, float) else {id(scale.value), id(scale._counters)}
    assert read[0] & read[1] == given
