"""Which files and folders another user can have changed."""

import os
from types import SimpleNamespace

import pytest

from ampopt_kernels.native import trust
from ampopt_kernels.native.trust import distrusted

pytestmark = pytest.mark.skipif(os.name != "posix", reason="files here have no owner and no mode")

OTHER = 54321
"""The id of a user who is neither this one nor root."""


@pytest.fixture
def file(tmp_path):
    """A file in two folders of this user; all three are trusted."""
    path = tmp_path / "outer" / "inner" / "file"
    path.parent.mkdir(parents=True)
    path.touch()
    for entry in (path.parents[1], path.parent, path):
        entry.chmod(0o755)
    assert distrusted(path) is None
    return path


@pytest.fixture
def give_away(monkeypatch):
    """A function that makes ``os.lstat`` report another user as the owner of a path."""
    paths, lstat = set(), os.lstat

    def owned(path):
        status = lstat(path)
        if os.fspath(path) in paths:
            return SimpleNamespace(st_mode=status.st_mode, st_uid=OTHER, st_gid=OTHER)
        return status

    monkeypatch.setattr(os, "lstat", owned)
    return lambda path: paths.add(os.fspath(path))


@pytest.mark.parametrize("mode", [0o777, 0o757, 0o775, 0o772])
@pytest.mark.parametrize("depth", range(3))
def test_what_others_may_write_is_not_trusted_wherever_it_is_on_the_way(
    file, depth, mode, monkeypatch
):
    entry = (file, *file.parents)[depth]
    monkeypatch.setattr(trust, "_is_private_group", lambda *_: False)  # which is another test's
    entry.chmod(mode)
    assert f"other users may write to {entry} (mode {mode:04o}" in (distrusted(file) or "")


@pytest.mark.parametrize("depth", range(3))
def test_what_belongs_to_another_user_is_not_trusted(file, depth, give_away):
    entry = (file, *file.parents)[depth]
    give_away(entry)
    assert distrusted(file) == f"{entry} belongs to uid {OTHER}"


@pytest.mark.skipif(os.name != "posix" or os.getuid() != 0, reason="only root can give files away")
def test_what_root_gives_away_is_not_trusted_any_more(file):
    os.chown(file.parent, OTHER, -1)
    assert distrusted(file) == f"{file.parent} belongs to uid {OTHER}"


@pytest.mark.skipif(os.name != "posix" or os.getuid() != 0, reason="nothing here is root's")
def test_what_belongs_to_root_is_trusted_by_everybody(file, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: OTHER)
    assert distrusted(file) is None


def test_a_sticky_folder_is_trusted_on_the_way_alone(file):
    file.parent.chmod(0o1777)
    assert distrusted(file) is None
    assert "mode 1777" in (distrusted(file.parent) or "")
    assert distrusted(file.parent, on_the_way=True) is None


def test_links_are_followed_through_folders_that_are_trusted(file, tmp_path):
    link, shared = tmp_path / "link", tmp_path / "shared"
    link.symlink_to("outer/inner")
    assert distrusted(link / "file") is None and distrusted(link) is None
    shared.mkdir()
    file.parent.rename(shared / "inner")
    file.parent.symlink_to(shared / "inner")
    assert distrusted(link / "file") is None
    shared.chmod(0o777)
    for path in (link, link / "file", file):
        assert f"write to {shared} " in (distrusted(path) or "")


def test_a_link_of_another_user_is_not_followed(file, tmp_path, give_away):
    link = tmp_path / "link"
    link.symlink_to(file.parent)
    give_away(link)
    assert distrusted(link / "file") == f"{link} belongs to uid {OTHER}"


def test_links_that_lead_in_a_circle_and_what_is_not_there_are_errors(file, tmp_path):
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    for path in (tmp_path / "one", tmp_path / "one" / "file", tmp_path / "none"):
        with pytest.raises((OSError, RuntimeError)):
            distrusted(path)


@pytest.mark.parametrize(
    ("name", "members", "users", "lists", "trusted"),
    [
        ("me", [], {"me": OTHER, "you": OTHER + 1}, [], True),
        ("me", ["me"], {"me": OTHER}, [], True),
        ("me", ["me", "you"], {"me": OTHER}, [], False),
        ("me", [], {"me": OTHER, "you": OTHER}, [], False),  # the primary group of both
        ("me", [], {"me": OTHER + 1}, [], False),
        ("staff", [], {"me": OTHER}, [], False),
        ("me", [], {"me": OTHER}, ["system.posix_acl_access"], False),
    ],
)
def test_a_group_with_its_owner_alone_may_write(
    file, name, members, users, lists, trusted, monkeypatch
):
    import grp
    import pwd

    def status(path):
        result = status_of(path)
        return SimpleNamespace(st_mode=result.st_mode, st_uid=result.st_uid, st_gid=OTHER)

    status_of = os.lstat
    everybody = [SimpleNamespace(pw_name=user, pw_gid=gid) for user, gid in users.items()]
    group = SimpleNamespace(gr_name=name, gr_gid=OTHER, gr_mem=members)
    monkeypatch.setattr(os, "lstat", status)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: everybody[0])
    monkeypatch.setattr(pwd, "getpwall", lambda: everybody)
    monkeypatch.setattr(grp, "getgrgid", lambda gid: group)
    monkeypatch.setattr(os, "listxattr", lambda path: lists, raising=False)
    file.parent.chmod(0o775)
    assert (distrusted(file) is None) == trusted
    file.parent.chmod(0o777)
    assert distrusted(file) is not None
