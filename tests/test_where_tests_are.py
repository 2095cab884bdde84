"""Tests are where ``tests/README.md`` says: a file of the same name, or a place in its tables."""

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parent
SOURCES = {
    path.relative_to(folder)
    for folder, package in (
        (ROOT, "ampopt"),
        (ROOT / "kernels", "ampopt_kernels"),
        (ROOT / "kernels", "evidence"),
    )
    for path in (folder / package).rglob("*.py")
    if not path.name.startswith("__")
}
"""The modules of the packages, as their imports have them."""

FILES = {path.relative_to(TESTS) for path in TESTS.rglob("test_*.py")}

pytestmark = pytest.mark.skipif(not SOURCES, reason="the packages are installed elsewhere")


def own_test(source):
    return source.with_name(f"test_{source.name.removeprefix('_')}")


def tables():
    """The rows of each table: the names in their first cell, and those in their second."""
    parts = (TESTS / "README.md").read_text(encoding="utf-8").split("|---|---|\n")[1:]
    rows = [[line.split("|")[1:3] for line in part.split("\n\n")[0].splitlines()] for part in parts]
    return [[[re.findall("`(.*?)`", cell) for cell in row] for row in table] for table in rows]


def matches(path, pattern):
    return path.parent == pattern.parent and fnmatch(path.name, pattern.name)


def test_every_module_has_a_test_file_of_its_name_or_a_row():
    rows = tables()[0]
    patterns = [Path(name) for names, _ in rows for name in names]
    without = {source for source in SOURCES if own_test(source) not in FILES}
    assert [path for path in without if not any(matches(path, p) for p in patterns)] == []
    assert [p for p in patterns if not any(matches(path, p) for path in without)] == []
    assert [place for _, places in rows for place in places if not (TESTS / place).exists()] == []


def test_every_test_file_has_a_module_of_its_name_or_a_topic():
    by_source, by_topic = tables()
    named = {Path(place) for _, places in by_source for place in places}
    topics = {Path(name) for names, _ in by_topic for name in names}
    placed = {own_test(source) for source in SOURCES} | named
    assert [path for path in FILES - placed if path.parent not in topics] == []
    assert [topic for topic in topics if not (TESTS / topic).is_dir()] == []
