"""Whether kernels are compiled or interpreted, by the marks that pytest's command line selects."""

import pytest

from support.selected_marks import command_line, selects_only


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["-m", "gpu"], True),
        (["-mgpu"], True),
        (["-x", "-m", "gpu and slow", "tests"], True),
        (["-m", "(slow or not slow) and gpu", "--maxfail=1"], True),
        (["-m", "slow", "-m", "gpu and not slow"], True),
        ([], False),
        (["-k", "gpu"], False),
        (["-m", "not gpu"], False),
        (["-m", "gpu or slow"], False),
        (["-m", "gpu and not gpu"], False),
        (["-m", "gpu", "-m", "slow"], False),
        (["-m", "gpu and"], False),
        (["-m", ""], False),
    ],
)
def test_an_expression_selects_what_it_says(arguments, expected):
    assert selects_only("gpu", arguments) == expected


def test_options_of_the_environment_come_first(monkeypatch):
    monkeypatch.setenv("PYTEST_ADDOPTS", "-x -m 'gpu and not slow'")
    assert selects_only("gpu", command_line(["tests"]))
    assert not selects_only("gpu", command_line(["-m", "not gpu"]))
