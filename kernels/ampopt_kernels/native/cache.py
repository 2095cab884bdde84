"""The cache: the folder on disk in which compiled libraries are kept for later programs.

A library is loaded only if no other user can have written it (see ``trust``) and if it is whole: a
digest of each library is appended to its file. Other files are removed, and compiled again.
"""

import contextlib
import errno
import functools
import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ampopt_kernels.native.trust import changed_by_others, distrusted

__all__ = [
    "LIMIT",
    "CacheError",
    "Place",
    "full_disk",
    "is_whole",
    "keep",
    "place",
    "as_cache_errors",
    "sweep",
    "work_folder",
]

LIMIT = 64 << 20
"""Bytes that libraries may take on disk. Beyond that, the least recently used are removed."""
_REMAINS = 3600.0
"""Seconds after which the folder of a compiler is abandoned, and a library that was not used in
that time may be removed."""

_MARK = b"ampopt library 1"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class CacheError(RuntimeError):
    """No folder can hold compiled libraries; the message has the reason and the fix."""


class Place(NamedTuple):
    """The folder in which libraries are kept.

    Attributes:
        folder: its path. It belongs to this user; if created here, its mode is 0700.
        instead: why the user's cache is not used, without a full stop; ``None`` if it is used.
        distrusts: whether the reason is that other users may write to the user's cache.
    """

    folder: Path
    instead: str | None = None
    distrusts: bool = False


@functools.cache
def place() -> Place:
    """Return the folder in which libraries are kept; create it if necessary, for this user alone.

    It is the user's cache: ``ampopt`` in ``XDG_CACHE_HOME``, if that is an absolute path, else in
    ``~/.cache``. If there is no home directory, or the cache cannot be written, or other users can
    write to it, the folder is ``ampopt-UID`` in the folder for temporary files.

    Raises:
        CacheError: neither folder can be used.
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
    """``ampopt`` in the user's cache folder; ``None`` if the system does not say where that is."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if folder.is_absolute():  # a relative path is to be ignored, says the XDG specification
        return folder / "ampopt"
    try:
        home = Path.home()
    except RuntimeError:  # the system does not know this user
        return None
    return home / ".cache" / "ampopt" if home.is_absolute() else None


def _why_not(folder: Path) -> tuple[str | None, bool]:
    """Create ``folder`` if necessary and check it.

    Returns:
        Why it cannot be used, or ``None``; and whether the reason is that other users may write.
    """
    try:
        why = _prepared(folder)
    except OSError as error:
        return f"{folder} cannot be written: {error.strerror}", False
    return (None, False) if why is None else (f"{folder} is not used: {why}", True)


def _prepared(folder: Path) -> str | None:
    """Create ``folder`` if necessary. Return why it must not be used; ``None`` if it may be.

    Raises:
        OSError: the folder cannot be created or written.
    """
    folders = [folder, *folder.parents]
    folders = folders[: next(i for i, x in enumerate(folders) if os.path.lexists(x))]
    # Create nothing in a folder where other users could replace it.
    if folders and (why := distrusted(folders[-1].parent, on_the_way=True)):
        return why
    for path in reversed(folders):
        with contextlib.suppress(FileExistsError):  # another process has created it
            path.mkdir(mode=0o700)
            path.chmod(0o700)  # in case the umask has removed permissions
    why = distrusted(folder)
    if why is None and not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    return why


@contextlib.contextmanager
def as_cache_errors(folder: Path) -> Iterator[None]:
    """Within this context, an ``OSError`` is raised as a :class:`CacheError` about ``folder``."""
    try:
        yield
    except OSError as error:
        raise _unusable(folder, error.strerror or str(error)) from error


def full_disk(folder: Path, lines: list[str]) -> CacheError | None:
    """Return the error to raise if the output of a failed compiler mentions a full disk.

    Args:
        folder: the cache.
        lines: the lines of the output.
    """
    causes = [os.strerror(number) for number in _FULL]
    full = next((cause for cause in causes for line in lines if cause in line), None)
    return None if full is None else _unusable(folder, full)


def _unusable(folder: Path, why: str) -> CacheError:
    """The error for a folder that cannot be used: ``why``, and the fix."""
    return CacheError(
        f"{folder}, where compiled libraries are kept, cannot be used: {why}. Make room there, or "
        "set XDG_CACHE_HOME to another folder"
    )


def keep(new_library: Path, path: Path) -> None:
    """Append the digest to the library ``new_library`` and move it to ``path``, atomically.

    Args:
        new_library: the file of the compiler, on the same file system as ``path``.
        path: the place in the cache.

    Raises:
        OSError: the disk is full.
    """
    new_library.chmod(0o700)
    with open(new_library, "r+b") as file:
        digest = hashlib.sha256(file.read()).digest()
        file.write(_MARK + digest)
        file.flush()
        # Without this, a crash of the machine may leave the file's name without its content.
        os.fsync(file.fileno())
    os.replace(new_library, path)


def is_whole(path: Path) -> bool:
    """Return whether there is a library at ``path`` that may be loaded; remove any other file.

    Raises:
        OSError: the file cannot be read or removed.
    """
    try:
        status = path.lstat()
        if stat.S_ISREG(status.st_mode) and changed_by_others(path, status) is None:
            content = path.read_bytes()
            end = len(content) - len(_MARK) - hashlib.sha256().digest_size
            whole = memoryview(content)[: max(end, 0)]
            if content[max(end, 0) :] == _MARK + hashlib.sha256(whole).digest():
                with contextlib.suppress(OSError):
                    os.utime(path)  # for `sweep`, this is the time of the last use
                return True
    except FileNotFoundError:
        return False
    path.unlink(missing_ok=True)
    return False


def work_folder(path: Path) -> Path:
    """Create a folder for the output and temporary files of the compiler of ``path``.

    Raises:
        OSError: the folder cannot be created.
    """
    return Path(tempfile.mkdtemp(".part", f"{path.stem}-", path.parent))


def sweep(folder: Path) -> None:
    """Remove folders of compilers that were ended, and the least recently used libraries.

    Libraries are removed until the others take at most :data:`LIMIT` bytes. What was made or used
    within the last hour stays: a process may be compiling, or about to load it. To remove a library
    does not affect a process that has loaded it. Files that cannot be removed stay.
    """
    libraries = []
    for entry in folder.iterdir():
        with contextlib.suppress(OSError):
            if entry.suffix == ".part" and _age(entry) > _REMAINS:
                shutil.rmtree(entry)
            elif entry.suffix == ".so":
                status = entry.lstat()
                libraries.append((status.st_mtime, status.st_size, entry))
    total = sum(size for _, size, _ in libraries)
    for last_use, size, path in sorted(libraries):
        if total <= LIMIT or time.time() - last_use < _REMAINS:
            break
        with contextlib.suppress(OSError):
            path.unlink()
            total -= size


def _age(path: Path) -> float:
    """Return the seconds since ``path`` was modified."""
    return time.time() - path.stat().st_mtime
