"""The folder on disk in which compiled libraries outlive the program: which it is, what is in it.

A file of it is loaded only if nobody else can have written it (see ``trust``) and if it is whole:
behind each library stands a digest of it. What is neither is removed and compiled again.
"""

import contextlib
import errno
import functools
import hashlib
import os
import platform
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ampopt_kernels.native.trust import distrusted

__all__ = [
    "CLAIM",
    "LIMIT",
    "CacheError",
    "Place",
    "claim",
    "full_disk",
    "is_whole",
    "keep",
    "place",
    "said",
    "sweep",
    "work_folder",
]

CLAIM = 60.0
"""Seconds for which other processes leave a library to the one that has begun to compile it."""
LIMIT = 64 << 20
"""Bytes that libraries may take on disk. Beyond it, those that were used last are kept."""
_REMAINS = 3600.0
"""Seconds after which nobody works in a folder any more, or is about to load a library."""

_MARK = b"ampopt library 1"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class CacheError(RuntimeError):
    """There is no place on disk for what is compiled; the message says why, and what to do."""


class Place(NamedTuple):
    """Where libraries are kept.

    Attributes:
        folder: of this user, and of mode 0700 if it was made here.
        instead: why it is not the user's cache, as a sentence without its end; ``None`` if it is.
        distrusts: whether that is because other users may write there.
    """

    folder: Path
    instead: str | None = None
    distrusts: bool = False


@functools.cache
def place() -> Place:
    """Where libraries are kept: in the user's cache, else in a folder for temporary files.

    The user's cache is ``ampopt`` in ``XDG_CACHE_HOME``, if that is absolute, or in ``~/.cache``.
    Where there is no home, or it cannot be written, or other users can write there, it is
    ``ampopt-UID`` in the folder for temporary files. What is missing is made, for this user alone.

    Raises:
        CacheError: neither can be used.
    """
    users = _users_cache()
    instead, distrusts = "there is no home directory", False
    if users is not None:
        instead, distrusts = _why_not(users)
        if instead is None:
            return Place(users)
    user = os.getuid() if hasattr(os, "getuid") else "user"
    try:
        folder = Path(tempfile.gettempdir()).absolute() / f"ampopt-{user}"
        why, _ = _why_not(folder)
    except OSError as error:  # there is no folder for temporary files
        raise CacheError(f"{instead}; {error}. {_FIX}") from error
    if why is not None:
        raise CacheError(f"{instead}; {why}. {_FIX}")
    return Place(folder, instead, distrusts)


_FIX = "Set XDG_CACHE_HOME to a folder that you, and nobody else, may write to"


def _users_cache() -> Path | None:
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if named.is_absolute():  # else it is to be ignored, says the XDG Base Directory Specification
        return named / "ampopt"
    try:
        home = Path.home()
    except RuntimeError:  # of a user that the system does not know
        return None
    return home / ".cache" / "ampopt" if home.is_absolute() else None


def _why_not(folder: Path) -> tuple[str | None, bool]:
    """Make ``folder``; why it is not to be used, and whether that is because of other users."""
    try:
        why = _prepared(folder)
    except OSError as error:
        return f"{folder} cannot be written: {error.strerror}", False
    return (None, False) if why is None else (f"{folder} is not used: {why}", True)


def _prepared(folder: Path) -> str | None:
    """Make ``folder``; why it is not to be used, ``None`` if it is.

    Raises:
        OSError: it cannot be made, or not be written.
    """
    missing = [folder, *folder.parents]
    missing = missing[: next(i for i, x in enumerate(missing) if os.path.lexists(x))]
    # Nothing is made where others could exchange it.
    if missing and (why := distrusted(missing[-1].parent, on_the_way=True)):
        return why
    for made in reversed(missing):
        with contextlib.suppress(FileExistsError):  # another process has been faster
            made.mkdir(mode=0o700)
            made.chmod(0o700)  # whatever the umask has taken away
    why = distrusted(folder)
    if why is None and not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    return why


@contextlib.contextmanager
def said(folder: Path) -> Iterator[None]:
    """Turn what the system says of ``folder`` into a :class:`CacheError`."""
    try:
        yield
    except OSError as error:
        raise _unusable(folder, error.strerror or str(error)) from error


def full_disk(folder: Path, lines: list[str]) -> CacheError | None:
    """What to raise where ``lines`` of a compiler that failed say so; else ``None``."""
    causes = [os.strerror(number) for number in _FULL]
    full = next((cause for cause in causes for line in lines if cause in line), None)
    return None if full is None else _unusable(folder, full)


def _unusable(folder: Path, why: str) -> CacheError:
    return CacheError(
        f"{folder}, where compiled libraries are kept, cannot be used: {why}. Make room there, or "
        "set XDG_CACHE_HOME to another folder"
    )


def keep(made: Path, path: Path) -> None:
    """Give the library ``made`` the name ``path``, on the same disk, whole or not at all.

    Raises:
        OSError: there is no room.
    """
    made.chmod(0o700)
    with open(made, "r+b") as file:
        digest = hashlib.sha256(file.read()).digest()
        file.write(_MARK + digest)
        file.flush()
        os.fsync(file.fileno())  # else a machine that stops may have the name without the content
    os.replace(made, path)


def is_whole(path: Path) -> bool:
    """Whether a library is there and may be loaded. One that may not be is removed.

    Raises:
        OSError: it cannot be read, or not be removed.
    """
    try:
        if stat.S_ISREG(path.lstat().st_mode) and distrusted(path) is None:
            content = path.read_bytes()
            end = len(content) - len(_MARK) - hashlib.sha256().digest_size
            whole = memoryview(content)[: max(end, 0)]
            if content[max(end, 0) :] == _MARK + hashlib.sha256(whole).digest():
                with contextlib.suppress(OSError):
                    os.utime(path)  # so that `sweep` knows when it was used last
                return True
    except FileNotFoundError:
        return False
    path.unlink(missing_ok=True)
    return False


def work_folder(path: Path) -> Path:
    """A new folder for a compiler that makes ``path``, and for its temporary files.

    Raises:
        OSError: it cannot be made.
    """
    return Path(tempfile.mkdtemp(".part", f"{path.stem}-{_process()}-", path.parent))


def claim(path: Path) -> bool:
    """Whether this process is to compile what ``path`` claims, and no other has begun to.

    A claim that is older than :data:`CLAIM` seconds, or of a process that has ended, is none.

    Raises:
        OSError: there is no room.
    """
    try:
        with open(path, "x") as file:
            file.write(_process())
        return True
    except FileExistsError:
        with contextlib.suppress(FileNotFoundError):  # what it claims is done
            if _age(path) > CLAIM or _has_ended(path.read_text()):
                os.utime(path)
                return True
        return False


def sweep(folder: Path) -> None:
    """Remove what processes have left that have ended, and what was not used for longest.

    Libraries are removed until the rest takes no more than :data:`LIMIT` bytes, but none that was
    used within the last hour, which a process may be about to load. Who has loaded a library keeps
    it. Whatever cannot be removed stays.
    """
    libraries = []
    for entry in folder.iterdir():
        with contextlib.suppress(OSError, ValueError):  # of a name that is not ours
            if entry.suffix == ".part":
                _, process, _ = entry.stem.rsplit("-", 2)
                if _has_ended(process) or _age(entry) > _REMAINS:
                    shutil.rmtree(entry)
            elif entry.suffix == ".claim":
                if _age(entry) > CLAIM or _has_ended(entry.read_text()):
                    entry.unlink()
            elif entry.suffix == ".so":
                status = entry.lstat()
                libraries.append((status.st_mtime, status.st_size, entry))
    left = sum(size for _, size, _ in libraries)
    for used, size, path in sorted(libraries):
        if left <= LIMIT or time.time() - used < _REMAINS:
            break
        with contextlib.suppress(OSError):
            path.unlink()
            left -= size


def _age(path: Path) -> float:
    """Seconds since it was changed."""
    return time.time() - path.stat().st_mtime


def _process() -> str:
    """This process, as no other is called on any machine that shares the folder."""
    return f"{_numbering()}.{os.getpid()}"


def _has_ended(process: str) -> bool:
    """Whether a process that gave its :func:`_process` has surely ended."""
    numbering, _, pid = process.rpartition(".")
    if numbering != _numbering() or not pid.isdecimal() or os.name != "posix":
        return False  # of another machine or container, or from before its name was written
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


@functools.cache
def _numbering() -> str:
    """What numbers processes here: two containers of a machine may both have a process 7."""
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        namespace = 0
    return hashlib.sha256(f"{platform.node()} {namespace}".encode()).hexdigest()[:12]
