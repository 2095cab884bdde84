"""Whether another user can have put a file, or can put one, where this program looks for it.

A library that is loaded can do whatever this program can do. So its file has to belong to this
user or to root, nobody else may write to it, and the same holds for every folder on the way to it:
who may write to a folder may put another file, or another folder, in place of one.
"""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

__all__ = ["distrusted"]

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def distrusted(path: Path, *, on_the_way: bool = False) -> str | None:
    """Why another user can change what is at ``path``; ``None`` if only this one and root can.

    Symbolic links are followed, and the folders that they lead through are examined too. In a
    folder with the sticky bit, as ``/tmp`` is, nobody can replace what belongs to others, so such a
    folder is trusted on the way, but not as ``path`` itself. Windows has neither owners nor modes
    of this kind, and everything is trusted there.

    Args:
        path: absolute; exists.
        on_the_way: to a folder that is to be made in ``path``.

    Raises:
        OSError: it does not exist, or cannot be examined.
    """
    if os.name != "posix":
        return None
    last = path.resolve(strict=True)  # raises where links lead in a circle
    for entry in (*_entries(path), last):
        is_last = entry == last and not on_the_way
        if why := _changed_by_others(entry, os.lstat(entry), is_last=is_last):
            return why
    return None


def _entries(path: Path) -> Iterator[Path]:
    """Every folder and link that the system passes from the root to ``path``, and ``path``."""
    for entry in (*reversed(path.parents), path):
        yield entry
        if entry.is_symlink():
            yield from _entries(entry.parent / os.readlink(entry))


def _changed_by_others(entry: Path, status: os.stat_result, *, is_last: bool) -> str | None:
    if status.st_uid not in (0, os.geteuid()):
        return f"{entry} belongs to {_user(status.st_uid)}"
    if stat.S_ISLNK(status.st_mode) or not status.st_mode & _OTHERS_WRITE:
        return None
    if stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX and not is_last:
        return None
    if not status.st_mode & stat.S_IWOTH and _is_private_group(entry, status):
        return None
    mode = stat.S_IMODE(status.st_mode)
    return f"other users may write to {entry} (mode {mode:04o}, of {_user(status.st_uid)})"


def _is_private_group(entry: Path, status: os.stat_result) -> bool:
    """Whether the group of ``entry`` has its owner as its only member.

    Many systems give each user a group of the same name and let it write to what the user makes.
    An access control list may name others, which the bits of the group then stand for.
    """
    import grp
    import pwd

    if status.st_gid == 0:
        return False
    try:
        owner, group = pwd.getpwuid(status.st_uid), grp.getgrgid(status.st_gid)
        lists = os.listxattr(entry) if hasattr(os, "listxattr") else []
    except (KeyError, OSError):
        return False
    return (
        owner.pw_gid == group.gr_gid
        and owner.pw_name == group.gr_name
        and set(group.gr_mem) <= {owner.pw_name}
        and "system.posix_acl_access" not in lists
    )


def _user(uid: int) -> str:
    import pwd

    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"
