"""The folder of compiled libraries: which files are loaded, made again and removed."""

import errno
import os
import platform
import stat
import time
from pathlib import Path

import pytest

from ampopt_kernels.native import build, cache
from ampopt_kernels.native.build import Library, cpp_command
from ampopt_kernels.native.cache import LIMIT, CacheError

SOURCE = 'extern "C" int answer() { return 42; }'
needs_posix = pytest.mark.skipif(os.name != "posix", reason="files here have no owner and no mode")


def answer() -> int:
    return Library(SOURCE).load().answer()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# --- which folder --------------------------------------------------------------------------------


@needs_posix
@pytest.mark.parametrize("umask", [0, 0o777])
def test_every_folder_that_is_made_is_for_this_user_alone(own_cache, umask):
    before = os.umask(umask)
    try:
        assert cache.place() == (own_cache, None, False)
    finally:
        os.umask(before)
    for folder in (own_cache, own_cache.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@needs_posix
@pytest.mark.parametrize("shared", ["cache", "cache/ampopt"])
def test_a_library_in_a_folder_that_others_may_write_is_not_loaded(own_cache, starts, shared):
    assert answer() == 42
    folder = own_cache.parents[1] / shared
    folder.chmod(0o777)
    cache.place.cache_clear()
    place = cache.place()
    assert place.distrusts and f"write to {folder} (mode 0777" in (place.instead or "")
    assert place.folder == own_cache.parents[1] / "temporary" / f"ampopt-{os.getuid()}"
    assert answer() == 42 and len(starts()) == 2
    assert len(names(place.folder)) == len(names(own_cache)) == 1


@needs_posix
def test_nothing_is_made_in_a_folder_that_others_may_write(own_cache, monkeypatch):
    own_cache.parent.mkdir()
    own_cache.parent.chmod(0o777)
    assert cache.place().distrusts and not own_cache.exists()


@needs_posix
def test_without_any_folder_that_is_ours_alone_nothing_is_kept(own_cache, starts):
    for folder in (own_cache.parent, own_cache.parents[1] / "temporary"):
        folder.mkdir(exist_ok=True)
        folder.chmod(0o777)
    with pytest.raises(CacheError, match=r"/cache .*/temporary .*Set XDG_CACHE_HOME to a folder"):
        Library(SOURCE).load()
    assert not starts()


@needs_posix
@pytest.mark.skipif(os.name != "posix" or os.getuid() != 0, reason="only root can give files away")
def test_a_library_that_belongs_to_another_user_is_made_again(own_cache, starts):
    assert answer() == 42
    (library,) = own_cache.iterdir()
    os.chown(library, 54321, -1)
    assert answer() == 42 and len(starts()) == 2
    assert library.stat().st_uid == 0


@needs_posix
def test_a_library_that_others_may_write_or_a_link_is_made_again(own_cache, starts):
    assert answer() == 42
    (library,) = own_cache.iterdir()
    library.chmod(0o777)
    assert answer() == 42 and len(starts()) == 2
    assert stat.S_IMODE(library.stat().st_mode) == 0o700
    library.rename(own_cache.parent / "elsewhere")
    library.symlink_to(own_cache.parent / "elsewhere")
    assert answer() == 42 and len(starts()) == 3
    assert not library.is_symlink()


def test_without_a_home_libraries_are_kept_among_temporary_files(own_cache, monkeypatch):
    pwd = pytest.importorskip("pwd")

    def unknown(uid):
        raise KeyError(uid)

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    folder, instead, distrusts = cache.place()
    assert folder.parent == own_cache.parents[1] / "temporary"
    assert (instead, distrusts) == ("there is no home directory", False)


@pytest.mark.parametrize("relative", ["", "relative", "./cache"])
def test_a_relative_folder_is_ignored(own_cache, relative, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", relative)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache.place().folder == tmp_path / "home" / ".cache" / "ampopt"
    if relative:
        monkeypatch.setenv("HOME", relative)
        cache.place.cache_clear()
        assert cache.place().folder.parent == tmp_path / "temporary"


def test_where_the_cache_cannot_be_made_libraries_are_kept_among_temporary_files(own_cache):
    own_cache.parent.write_text("a file")
    folder, instead, distrusts = cache.place()
    assert folder.parent == own_cache.parents[1] / "temporary" and not distrusts
    assert instead == f"{own_cache} cannot be written: {os.strerror(errno.ENOTDIR)}"


# --- what is loaded ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:1],
        lambda content: content[: len(content) // 2],
        lambda content: content[:-1],
        lambda content: content[:-48],  # as compilers make them
        lambda content: content + b"0",
        lambda content: content[:1000] + bytes([content[1000] ^ 1]) + content[1001:],
    ],
)
def test_a_library_that_is_not_whole_is_made_again(own_cache, starts, damage):
    assert answer() == 42
    (library,) = own_cache.iterdir()
    content = library.read_bytes()
    library.unlink()  # this process has mapped it
    library.write_bytes(damage(content))
    library.chmod(0o700)
    again = Library(SOURCE)
    assert not again.is_compiled()
    assert again.load().answer() == 42 and len(starts()) == 2
    assert Library(SOURCE).is_compiled()


@pytest.mark.parametrize("call", ["os.fsync", "os.replace"])
def test_a_program_that_ends_as_it_keeps_a_library_leaves_no_half(
    own_cache, starts, call, monkeypatch
):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(call, full)
        with pytest.raises(CacheError, match=f"{own_cache}.*No space left.*Make room there, or"):
            answer()
    assert not names(own_cache)
    assert answer() == 42


@pytest.mark.parametrize(
    "printed",
    [
        "/usr/bin/ld: final link failed: No space left on device",
        "<stdin>:1:1: fatal error: error writing to x.s: No space left on device",
        "/usr/bin/ld: x.so: Disk quota exceeded",
    ],
)
def test_a_compiler_without_disk_space_is_reported_as_a_full_disk(own_cache, starts, printed):
    compiler = Path(os.environ["CXX"])
    others = f"echo '{printed}' >&2; echo 'collect2: error: ld returned 1 exit status' >&2; exit 1"
    compiler.write_text(f"#!/bin/sh\n{others}\n")
    with pytest.raises(CacheError, match=f"{own_cache}.*{printed.split(': ')[-1]}"):
        answer()


def test_machines_that_differ_have_libraries_of_their_own(own_cache, starts, monkeypatch):
    here = Library(SOURCE)
    assert build._processor() and build._c_library() != ""
    for part in ("_processor", "_c_library"):
        with monkeypatch.context() as patch:
            patch.setattr(build, part, lambda: ("another",))
            assert Library(SOURCE)._path != here._path
    assert Library(SOURCE)._path == here._path


def test_processors_of_one_name_with_other_features_are_told_apart(tmp_path):
    """Code for AVX-512 would crash in a virtual machine that lacks the instructions."""
    files = []
    for features in ("avx2 f16c", "avx2 f16c avx512f"):
        files.append(tmp_path / features)
        text = f"processor : 0\nmodel name : EPYC\ncpu MHz : 2400\nflags : {features}\n"
        files[-1].write_text(text)
    machines = [build._processor.__wrapped__(file) for file in files]
    assert machines[0] != machines[1]
    assert not any("MHz" in line for machine in machines for line in machine)


def test_machines_that_hide_their_processors_are_told_apart_by_name(tmp_path):
    (tmp_path / "empty").touch()
    for file in (tmp_path / "empty", tmp_path / "absent"):
        assert build._processor.__wrapped__(file) == (platform.node(),)


# --- CXX -----------------------------------------------------------------------------------------


def test_cxx_is_split_as_a_shell_does_and_other_flags_make_another_library(
    own_cache, starts, monkeypatch
):
    compiler = os.environ["CXX"]
    flags = ["", " -O2", " -O2 -DNAME='a b'", " -march=x86-64"]
    for done, words in enumerate(flags, 1):
        monkeypatch.setenv("CXX", compiler + words)
        assert answer() == answer() == 42
        assert len(starts()) == len(names(own_cache)) == done
    plain, o2, defining, march = (f" {arguments} " for arguments in starts())
    assert " -O3 " in plain and " -march=native " in plain
    assert "-O3" not in o2 and o2.startswith(" -O2 ") and " -march=native " in o2
    assert " -DNAME=a b " in defining
    assert "native" not in march and " -O3 " in march


def test_a_compiler_may_be_called_through_another_program(own_cache, starts, monkeypatch):
    monkeypatch.setenv("CXX", f"env LANG=C {os.environ['CXX']}")
    assert answer() == 42 and len(starts()) == 1


def test_a_quotation_without_its_end_is_an_error(monkeypatch):
    monkeypatch.setenv("CXX", "g++ '-O2")
    with pytest.raises(ValueError, match="CXX: No closing quotation in .*; quote it"):
        cpp_command()


# --- what is removed -----------------------------------------------------------------------------


def test_what_compilers_that_were_ended_have_left_is_removed(own_cache):
    cache.place()
    old, new = (cache.work_folder(own_cache / f"{digit * 32}.so") for digit in "01")
    for folder in (old, new):
        (folder / "some").touch()
    (own_cache / "notes").touch()
    then = time.time() - 7200
    for path in (old, own_cache / "notes"):
        os.utime(path, (then, then))
    cache.sweep(own_cache)
    assert names(own_cache) == {new.name, "notes"}


def test_libraries_that_were_used_last_are_kept_and_no_more_than_the_limit(own_cache, starts):
    assert answer() == 42
    (library,) = own_cache.iterdir()
    then = time.time() - 10 * 86400
    os.utime(library, (then, then))
    for number in range(5):
        other = own_cache / f"{number}.so"
        with open(other, "wb") as file:
            file.truncate(LIMIT // 4)
        os.utime(other, (then, then + 86400 * (number + 1)))
    assert answer() == 42 and len(starts()) == 1  # which uses it
    cache.sweep(own_cache)
    assert names(own_cache) == {library.name, "2.so", "3.so", "4.so"}
    for path in own_cache.iterdir():
        os.utime(path)
    (own_cache / "5.so").write_bytes(bytes(LIMIT // 4))
    (own_cache / "6.so").write_bytes(bytes(LIMIT // 4))
    cache.sweep(own_cache)
    assert len(names(own_cache)) == 6  # all were used a moment ago
