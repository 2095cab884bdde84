"""The choice of a backend: names, errors, and when the CPU backend compiles."""

import os
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.object_loops import unavailable_loops
from support.optimizers import Signed
from torch.nn import Parameter

import ampopt
from ampopt import backend as backends
from ampopt.testing.bits import bits, everything, state_of
from ampopt_kernels.cpu import gradients, table
from ampopt_kernels.cpu.compiled import Compiled
from ampopt_kernels.eager import Eager
from ampopt_kernels.language import HAS_TRITON
from ampopt_kernels.native import objects
from ampopt_kernels.native.build import Library, cpp_compiler
from ampopt_kernels.native.cache import CacheError, place
from ampopt_kernels.step import Backend
from ampopt_kernels.triton import backend as triton_backend

NAMES = "auto, triton, compiled, eager"
needs_compiler = pytest.mark.skipif(cpp_compiler() is None, reason="there is no C++ compiler here")
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="Triton cannot be imported here")


@pytest.fixture(autouse=True)
def untouched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start each test without a chosen backend, and without cached ones."""
    monkeypatch.setattr(backends, "_chosen", None)
    monkeypatch.delenv("AMPOPT_BACKEND", raising=False)
    caches = (backends._compiled, backends._has_compiler, table._library, gradients._functions)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


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
    backends._of_environment.cache_clear()
    with pytest.raises(ValueError, match=f"^AMPOPT_BACKEND: unknown backend {name!r}.*{NAMES}"):
        ampopt.get_backend()
    _, optimizer = made()
    before = everything(optimizer)["parameters"]
    with pytest.raises(ValueError, match="^AMPOPT_BACKEND"):
        optimizer.step()
    assert everything(optimizer)["parameters"] == before


def test_set_backend_takes_precedence_over_the_environment(monkeypatch):
    monkeypatch.setenv("AMPOPT_BACKEND", "eager")
    assert ampopt.get_backend() == "eager"
    monkeypatch.delenv("AMPOPT_BACKEND")  # which is read once
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
        ("eager", "cpu", Eager),
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
    assert type(backend) is (triton_backend.Triton if kind == "triton" else kind)


# --- when auto compiles --------------------------------------------------------------------------


class Compiler:
    """Fakes the libraries of rules: records them, or fails."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.fails: Exception | None = None

    def library(self, source: str, options: Any = ()) -> Any:
        self.started.append(source)
        if self.fails is not None:
            raise self.fails
        return Library(source, options)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """A fake compiler of rules; what reads gradients is compiled by the real one."""
    faked = Compiler()
    monkeypatch.setattr(table, "Library", faked.library)
    return faked


@needs_compiler
def test_auto_is_compiled_from_the_first_step_on(compiler):
    ampopt.set_backend("auto")
    results = [trained(steps) for steps in (1, 5)]
    assert len(compiler.started) == 1
    ampopt.set_backend("compiled")
    assert results == [trained(steps) for steps in (1, 5)]


@pytest.mark.filterwarnings("ignore:`torch.jit.trace", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("trace", ["make_fx", "jit"])
def test_a_step_that_is_traced_is_in_the_trace(trace):
    """It runs torch operations then, because a trace lacks what compiled code does."""
    saved = made(momentum=0.5, cls=ampopt.SGD)[1]
    saved.step()

    def step(param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        optimizer = ampopt.SGD([param], lr=0.125, momentum=0.5)
        optimizer.load_state_dict(saved.state_dict())
        param.grad = grad
        optimizer.step()
        return param + 0

    first, later = ([torch.ones(3) * x, torch.arange(3.0)] for x in (1, 5))
    if trace == "make_fx":
        from torch.fx.experimental.proxy_tensor import make_fx  # takes seconds to import

        traced: Any = make_fx(step)(*first)
    else:
        traced = torch.jit.trace(step, first, check_trace=False)
    assert traced(*(t.clone() for t in later)).tolist() == step(*later).tolist()


@needs_compiler
def test_compiled_compiles_at_the_first_use_of_each_kind(compiler):
    ampopt.set_backend("compiled")
    for dtype in (torch.float32, torch.float32, torch.float64):
        param = Parameter(torch.ones(3, dtype=dtype))
        optimizer = ampopt.AdamW([param])
        for _ in range(2):
            param.grad = torch.ones_like(param)
            optimizer.step()
    assert len(compiler.started) == 2


@needs_compiler
def test_a_compiler_that_fails_leaves_auto_eager_with_one_warning(compiler):
    ampopt.set_backend("eager")
    expected = trained(4)
    compiler.fails = RuntimeError("no header")
    ampopt.set_backend("auto")
    with pytest.warns(RuntimeWarning, match="no header.*staying on the eager") as seen:
        assert trained(4) == expected
        trained(4)
        _, other = made(ampopt.SGD, momentum=0.5)
        for _ in range(3):
            other.step()
    assert len(seen) == len(compiler.started) == 1
    assert seen[0].filename == __file__  # and not a file of the backend


def _clip(optimizer: Any) -> None:
    optimizer.unscale_and_step(grads_scaled_by=2.0, max_norm=0.5)


def _watch(optimizer: Any) -> None:
    ampopt.Watch(optimizer)
    optimizer.unscale_and_step(grads_scaled_by=2.0)


def _overflow(optimizer: Any) -> None:
    """Under a GradScaler, which finds the gradients unscaled after a step that was skipped."""
    optimizer.param_groups[0]["params"][0].grad[1] = float("inf")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)


@needs_compiler
@pytest.mark.parametrize(
    "step", [lambda optimizer: optimizer.unscale(grads_scaled_by=2.0), _clip, _watch, _overflow]
)
def test_a_compiler_that_fails_in_a_later_step_leaves_auto_eager(step, compiler, monkeypatch):
    """As on a disk that a checkpoint has filled."""
    ampopt.set_backend("eager")
    expected, optimizer = made()
    step(optimizer)
    ampopt.set_backend("auto")
    trained(1)
    monkeypatch.setattr(gradients, "Library", compiler.library)
    compiler.fails = RuntimeError("no header")
    param, optimizer = made()
    with pytest.warns(RuntimeWarning, match="no header.*staying on the eager"):
        step(optimizer)
    assert (bits(param), bits(param.grad)) == (bits(expected), bits(expected.grad))


@needs_compiler
def test_a_compiler_that_fails_is_an_error_under_compiled(compiler):
    compiler.fails = RuntimeError("no header")
    ampopt.set_backend("compiled")
    param, optimizer = made()
    before = bits(param)
    message = r"needs a working C\+\+ compiler.*no header.*choose 'auto' or 'eager'"
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()
    assert bits(param) == before
    assert not any(value.any() for value in optimizer.state[param].values())
    ampopt.set_backend("eager")
    optimizer.step()
    assert (bits(param), state_of(optimizer)) == trained(1)


@pytest.fixture
def shared(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A cache folder of the user that others may write to; temporary files are in another one."""
    if os.name != "posix":
        pytest.skip("files here have no owner and no mode")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "shared"))
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    # Loops stay with the folder they are sought in.
    monkeypatch.setattr(objects, "loops", unavailable_loops())
    place.cache_clear()
    yield tmp_path / "shared"
    place.cache_clear()


@needs_compiler
def test_compiled_refuses_a_cache_that_others_can_write_and_auto_takes_another(shared, monkeypatch):
    message = (
        rf"safe from other users: .*{shared} \(mode 0777, of .*chmod go-w.*XDG_CACHE_HOME.*'auto'"
    )
    with pytest.raises(RuntimeError, match=message):
        ampopt.set_backend("compiled")
    monkeypatch.setenv("AMPOPT_BACKEND", "compiled")
    param, optimizer = made()
    before = bits(param)
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()
    assert bits(param) == before
    ampopt.set_backend("eager")
    expected = trained(4)
    ampopt.set_backend("auto")
    assert trained(4) == expected
    assert not any(shared.iterdir()) and any(shared.parent.glob("ampopt-*/*"))


@needs_compiler
def test_without_a_place_for_what_is_compiled_auto_is_eager(shared, monkeypatch):
    ampopt.set_backend("eager")
    expected = trained(4)
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    ampopt.set_backend("auto")
    with pytest.warns(RuntimeWarning, match="Set XDG_CACHE_HOME.*staying on the eager") as seen:
        assert trained(4) == trained(4) == expected
    assert len(seen) == 1
    with pytest.raises(RuntimeError, match="compiled backend cannot run: .*Set XDG_CACHE_HOME"):
        ampopt.set_backend("compiled")


@needs_compiler
def test_a_full_disk_is_reported_as_such(compiler):
    compiler.fails = CacheError("a folder cannot be used: No space left on device")
    ampopt.set_backend("compiled")
    _, optimizer = made()
    message = "needs a place on disk: a folder.*No space left on device, or choose 'auto'"
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()


def test_without_a_compiler_auto_is_eager_with_the_same_results(monkeypatch):
    ampopt.set_backend("eager")
    expected = trained(3)
    monkeypatch.setattr("shutil.which", lambda _: None)
    ampopt.set_backend("auto")
    assert type(backends.backend_for(torch.device("cpu"))) is Eager
    assert trained(3) == expected


# --- nothing is compiled twice -------------------------------------------------------------------


def change_everything(optimizer: Any, param: Parameter) -> None:
    """Take steps that differ in all that needs no other kernel."""
    group = optimizer.param_groups[0]
    scale = ampopt.DynamicLossScale(init_scale=2.0**8, growth_interval=1)
    for step in range(1, 5):
        group["lr"] = 0.5 / step if step % 2 else torch.tensor(0.5 / step)
        group["betas"] = (0.5 + step / 16, 0.75)
        group["eps"] = 2.0**-step
        group["weight_decay"] = step / 16
        param.grad = torch.full_like(param, step * scale.item())
        scale = optimizer.unscale_and_step(grads_scaled_by=scale, max_norm=1.0 / step).scale


@needs_compiler
def test_a_learning_rate_that_changes_every_step_recompiles_no_c(compiler):
    ampopt.set_backend("compiled")
    param, optimizer = made()
    change_everything(optimizer, param)
    assert len(compiler.started) == 1


@needs_triton
def test_a_learning_rate_that_changes_every_step_recompiles_no_kernel(monkeypatch):
    """All launches have the constants and types of the first one."""
    launches: list[Any] = []

    def record(device: Any, variant: Any, programs: int, arguments: dict[str, Any]) -> None:
        kinds = {
            name: value if isinstance(value, int) else (type(value), getattr(value, "dtype", None))
            for name, value in arguments.items()
        }
        launches.append(str((variant.constants, kinds)))
        triton_backend.launch(device, variant, programs, arguments)

    monkeypatch.setattr(backends, "_triton_backend", lambda: triton_backend.Triton(record))
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
    """Optimizers may be on different streams, which do not wait for each other."""
    read: list[set[int]] = []

    def record(device: Any, variant: Any, programs: int, arguments: dict[str, Any]) -> None:
        read[-1] |= {id(t) for t in arguments.values() if isinstance(t, torch.Tensor)}
        kept.extend(arguments.values())  # so that no one else has its identity
        triton_backend.launch(device, variant, programs, arguments)

    kept: list[Any] = []
    monkeypatch.setattr(backends, "_triton_backend", lambda: triton_backend.Triton(record))
    ampopt.set_backend("triton")
    for _ in range(2):
        read.append(set())
        _, optimizer = made()
        optimizer.unscale_and_step(grads_scaled_by=scale, max_norm=1.0)
    given = set() if isinstance(scale, float) else {id(scale.value), id(scale._counters)}
    assert read[0] & read[1] == given


@pytest.mark.parametrize(
    "backend", ["eager", "eager on a device", "compiled", "triton"], indirect=True
)
def test_numbers_that_a_rule_chooses_between_are_as_wide_as_its_parameter(backend):
    param = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    param.grad = torch.ones_like(param)
    Signed([param], lr=0.1).step()
    assert param.data.tolist() == [-0.1] * 3
