"""A cache of compiled libraries for each test, and a compiler whose runs are counted."""

import os
import tempfile

import pytest

from ampopt_kernels.native import build, cache


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """The folder that becomes the user's cache; temporary files get a folder of the test, too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    cache.place.cache_clear()
    yield tmp_path / "cache" / "ampopt"
    cache.place.cache_clear()


@pytest.fixture
def starts(own_cache, tmp_path, monkeypatch):
    """The arguments of each start of the compiler, beginning with an empty cache."""
    real = build.cpp_compiler()
    if real is None or os.name != "posix":
        pytest.skip("there is no compiler, or no shell to count its starts")
    compiler, counted = tmp_path / "compiler", tmp_path / "starts"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {counted}\nexec {real} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setitem(build.SPEED, "-O", "-O3")
    return lambda: counted.read_text().splitlines() if counted.exists() else []
