"""The report of ``python -m ampopt``, also where compilers, caches or devices are missing."""

import os
import platform
import tempfile
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.preloaded import python_path

import ampopt
from ampopt import backend as backends
from ampopt import environment
from ampopt.bench import report as bench_report
from ampopt_kernels.native import build, cache


@pytest.fixture(autouse=True)
def untouched(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Any:
    """Start each test without a chosen backend, and with empty caches of its own."""
    monkeypatch.setattr(backends, "_chosen", None)
    monkeypatch.delenv("AMPOPT_BACKEND", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for cached in (backends._compiled, backends._has_compiler, cache.place):
        cached.cache_clear()
    monkeypatch.setattr(environment, "_triton_cache", lambda: "elsewhere")  # it may be large
    yield
    for cached in (backends._compiled, backends._has_compiler, cache.place):
        cached.cache_clear()


def line(beginning: str) -> str:
    """The rest of the report's line that begins with ``beginning``."""
    (found,) = [
        line.strip().removeprefix(beginning)
        for line in environment.report().splitlines()
        if line.strip().startswith(beginning)
    ]
    return found.strip()


def test_the_command_prints_the_report_and_heeds_the_environment(with_torch, tmp_path):
    chosen = {"AMPOPT_BACKEND": "eager", "TRITON_CACHE_DIR": str(tmp_path / "none")}
    environment = {**os.environ, **chosen, "PYTHONPATH": python_path()}
    done = with_torch.run("-m", "ampopt", environment=environment)
    assert done.returncode == 0, done.stderr
    assert f"python {platform.python_version()} on {platform.system()}" in done.stdout
    assert "backend: eager, by AMPOPT_BACKEND\n  cpu: eager, as chosen" in done.stdout


def test_versions():
    assert line("ampopt ").startswith(f"{ampopt.__version__} in ")
    assert line("torch ") == torch.__version__


@pytest.mark.skipif(not backends.HAS_TRITON, reason="Triton cannot be imported here")
def test_the_version_of_a_triton_whose_package_has_another_name(monkeypatch):
    monkeypatch.setattr(environment, "version_of", lambda package: None)
    triton = pytest.importorskip("triton")
    assert f"\ntriton {triton.__version__}" in environment.report()
    assert bench_report.environment(torch.device("cpu"))["triton"] == triton.__version__


def test_a_triton_that_cannot_be_imported(monkeypatch):
    monkeypatch.setattr(environment, "HAS_TRITON", False)
    monkeypatch.setattr(environment, "version_of", lambda package: "3.9.0")
    assert "\ntriton 3.9.0, which cannot be imported\n" in environment.report()


def test_without_triton(monkeypatch):
    for module in (backends, environment):
        monkeypatch.setattr(module, "HAS_TRITON", False)
    monkeypatch.setattr(environment, "version_of", lambda package: None)
    assert "\ntriton not installed\n" in environment.report()
    assert line("triton cannot run here:").startswith("the triton backend needs Triton")
    assert "cache of Triton" not in environment.report()


def test_the_report_says_what_chose_the_backend(monkeypatch):
    assert line("backend:").startswith("auto, as neither AMPOPT_BACKEND nor ampopt.set_backend")
    monkeypatch.setenv("AMPOPT_BACKEND", "eager")
    backends._of_environment.cache_clear()
    assert line("backend:") == "eager, by AMPOPT_BACKEND"
    ampopt.set_backend("auto")
    assert line("backend:") == "auto, by ampopt.set_backend"


def test_a_backend_that_cannot_run_is_shown_with_the_reason(monkeypatch):
    monkeypatch.setenv("AMPOPT_BACKEND", "tritn")
    assert line("backend:").startswith("none, since AMPOPT_BACKEND: unknown backend 'tritn'")
    assert line("cpu:").startswith("none, AMPOPT_BACKEND: unknown backend 'tritn'")


@pytest.mark.skipif(build.cpp_compiler() is None, reason="there is no C++ compiler here")
def test_a_compiler_that_works():
    assert line("cpu:").startswith("compiled, as there is a C++ compiler")
    assert line("compiled can") == "run here"
    assert line("C++ compiler:").startswith(f"{build.cpp_compiler()}, which works: ")


@pytest.mark.skipif(build.cpp_compiler() is None, reason="there is no C++ compiler here")
def test_a_compiler_with_flags(monkeypatch):
    monkeypatch.setenv("CXX", f"{build.cpp_compiler()} -O2 '-DNAME=a b'")
    said = line("C++ compiler:")
    assert said.startswith(f"{build.cpp_compiler()} -O2 '-DNAME=a b', which works: ")


def test_a_compiler_that_does_not_work(with_torch, tmp_path):
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho 'error: no headers' >&2; exit 1\n")
    compiler.chmod(0o755)
    chosen = {"CXX": str(compiler), "TRITON_CACHE_DIR": str(tmp_path / "none")}
    environment = {**os.environ, **chosen, "PYTHONPATH": python_path()}
    said = with_torch.run("-m", "ampopt", environment=environment).stdout
    assert "\n  cpu: eager, as no C++ can be compiled here: see below (" in said
    why = "which does not work: the compiler failed: error: no headers"
    assert f"\nC++ compiler: {compiler}, {why}\n" in said


def test_no_compiler(monkeypatch):
    monkeypatch.setattr(backends, "cpp_compiler", lambda: None)
    monkeypatch.setattr(environment, "cpp_command", lambda: None)
    assert line("cpu:").startswith("eager, as no C++ can be compiled here: see below")
    assert line("compiled cannot run here:").startswith("the compiled backend needs a C++ compiler")
    assert line("C++ compiler:") == "none, as neither CXX nor g++ nor clang++ names one"


def test_a_quotation_without_its_end(monkeypatch):
    monkeypatch.setenv("CXX", "g++ -DNAME='a b")
    said = "CXX: No closing quotation"
    assert line("C++ compiler:").startswith(f"none, since {said}")
    assert line("compiled cannot run here:").startswith(f"the compiled backend cannot run: {said}")
    assert line("cpu:").startswith(f"none, {said}")


def test_the_cache_and_what_is_in_it(monkeypatch, tmp_path):
    folder = cache.place().folder
    (folder / "a.so").write_bytes(b"0" * 200_000)
    monkeypatch.setattr(environment, "cpp_command", lambda: None)  # which would add to it
    assert line("cache of C++:") == f"{folder}, 1 files, 0.2 MB"


def test_a_cache_that_cannot_be_written_or_that_others_can_write(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    cache.place.cache_clear()
    said = line("cache of C++:")
    assert f"ampopt-{os.getuid()}, 1 files" in said
    assert f", as {tmp_path / 'file' / 'ampopt'} cannot be written: Not a directory" in said
    assert line("compiled can") == "run here"
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "shared"))
    cache.place.cache_clear()
    said = f"other users may write to {tmp_path / 'shared'} (mode 0777, of "
    assert said in line("cache of C++:")
    assert said in line("compiled cannot run here:")
    assert line("cpu:").startswith("compiled, as there is")


def test_no_cache_at_all(monkeypatch, tmp_path):
    for name in ("file", "other"):
        (tmp_path / name).touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "other"))
    cache.place.cache_clear()
    assert line("cache of C++:").startswith(f"none: {tmp_path / 'file' / 'ampopt'} cannot be")
    assert "not tested, as there is no folder for its output" in line("C++ compiler:")


@pytest.mark.parametrize(
    ("has_triton", "expected"),
    [(True, "triton, as Triton compiles for it"), (False, "eager, as Triton cannot be imported")],
)
def test_a_device(has_triton, expected, monkeypatch):
    if has_triton and not backends.HAS_TRITON:
        pytest.skip("Triton cannot be imported here")
    monkeypatch.setattr(backends, "HAS_TRITON", has_triton)
    monkeypatch.setattr(environment, "_devices", lambda: [torch.device("cuda", 1)])
    card = SimpleNamespace(name="a card", total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    assert line("cuda:1:") == f"{expected} (a card, 80 GiB)"


@pytest.mark.skipif(build.cpp_compiler() is None, reason="there is no C++ compiler here")
def test_a_chosen_backend_that_cannot_run_on_a_device():
    ampopt.set_backend("compiled")
    assert environment._of_device(torch.device("meta")).startswith(
        "none, the compiled backend cannot run on meta"
    )
