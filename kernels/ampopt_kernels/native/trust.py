"""Tests whether another user can have written or replaced a file that this program loads.

A loaded library can do whatever this program can. So its file must belong to this user or to root,
and no other user may write to it. The same holds for every folder of its path: a user who may write
to a folder can replace the files and folders in it.
"""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

__all__ = ["changed_by_others", "distrusted"]

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def distrusted(path: Path, *, on_the_way: bool = False) -> str | None:
    """Return why another user can change what is at ``path``; ``None`` if none but root can.

    Symbolic links are followed, and the folders that they lead through are examined too. In a
    folder with the sticky bit, as ``/tmp`` is, nobody can replace what belongs to others, so such a
    folder is trusted on the way, but not as ``path`` itself. Windows has neither owners nor modes
    of this kind, and everything is trusted there.

    Args:
        path: an absolute path that exists.
        on_the_way: whether ``path`` is only a parent of the folder in question, which is to be
            created in it.

    Raises:
        OSError: ``path`` does not exist or cannot be examined.
    """
    last = path.resolve(strict=True)  # raises where links lead in a circle
    for entry in (*_entries(path), last):
        is_last = entry == last and not on_the_way
        if why := changed_by_others(entry, os.lstat(entry), is_last=is_last):
            return why
    return None


def _entries(path: Path) -> Iterator[Path]:
    """Yield every folder and symbolic link from the root to ``path``, and ``path``."""
    for entry in (*reversed(path.parents), path):
        yield entry
        if entry.is_symlink():
            yield from _entries(entry.parent / os.readlink(entry))


def changed_by_others(entry: Path, status: os.stat_result, *, is_last: bool = True) -> str | None:
    """Return why another user can change ``entry``, whose folder is trusted; ``None`` if none can.

    Args:
        entry: a file, folder or symbolic link.
        status: what ``lstat`` returned of it.
        is_last: false for a folder on the way to the one in question.
    """
    if os.name != "posix":
        return None
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
    """Return whether the owner of ``entry`` is the only member of its group.

    Many systems have a group of the same name for each user, with permission to write to what the
    user creates. With an access control list, which may name other users, the group bits of the
    mode are the mask of that list.
    """
    import grp
    import pwd

    if status.st_gid == 0:
        return False
    try:
        owner, group = pwd.getpwuid(status.st_uid), grp.getgrgid(status.st_gid)
        # The list of a group's members lacks the users whose primary group it is.
        members = {*group.gr_mem, *(x.pw_name for x in pwd.getpwall() if x.pw_gid == group.gr_gid)}
        lists = os.listxattr(entry) if hasattr(os, "listxattr") else []
    except (KeyError, OSError):
        return False
    return (
        owner.pw_gid == group.gr_gid
        and owner.pw_name == group.gr_name
        and members <= {owner.pw_name}
        and "system.posix_acl_access" not in lists
    )


def _user(uid: int) -> str:
    """The name and number of a user."""
    import pwd

    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"
