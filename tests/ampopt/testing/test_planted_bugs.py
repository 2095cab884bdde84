"""Each planted bug is caught by the invariant meant for it; some are shrunk.

To shrink an example takes several times as long as to find it, so with the table only are all of
them shrunk. The table of them in ``ampopt/testing/README.md`` is written by ``python -m pytest
tests/ampopt/testing/test_planted_bugs.py --write-table``.
"""

import re
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from support.authored_optimizers import CORRECT, contract_of
from support.contracts import OF_ONE_RULE, Small
from support.planted_bugs import BUGS, Bug
from support.strategies import fewer

import ampopt.testing

README = Path(ampopt.testing.__file__).with_name("README.md")
TABLE = re.compile(r"(?<=\|---\|---\|---\|\n)(?:\|.*\n)+")
# The same examples each time, so that the table is that of this very run.
HUNT = hypothesis.settings(
    derandomize=True,
    database=None,
    max_examples=5000,  # as many as it takes
    phases=[hypothesis.Phase.generate],
    report_multiple_bugs=False,
)
SHRUNK = hypothesis.settings(
    HUNT,
    phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
    stateful_step_count=12,  # short runs, as they shrink sooner
)
OF_EACH_KIND = ("FlagOfGroup", "ClosureUnchecked", "Normalizes", "Unedited", "CoarseCorrection")
"""Bugs that are shrunk in every run: of histories, closures, and both sequences of calls."""


def caught(bug: Bug, settings: hypothesis.settings) -> tuple[Any, str]:
    """The failure that shows the bug, and the size of its example as text."""
    contract: Any = contract_of(bug.cls, {**bug.claims, "settings": settings}, (Small,))()
    with pytest.raises((Exception, pytest.fail.Exception)) as found:
        getattr(contract, f"test_{bug.caught_by}")()
    if bug.caught_by == "its_rule_compiles_for_gpus":
        assert "g**2" in str(found.value)
        return found.value, "its line"
    return found.value, contract.failure.size


def row(bug: Bug, size: str) -> str:
    return f"| {bug.what} | `{bug.caught_by}` | {size} |"


@pytest.fixture(scope="module")
def table(request):
    """The rows of the documentation. With ``--write-table``, those of this run replace them."""
    text = README.read_text(encoding="utf-8")
    found = TABLE.search(text)
    assert found is not None
    rows: list[str] = []
    yield found[0].splitlines(), rows
    if request.config.getoption("--write-table", False):
        assert len(rows) == len(BUGS), "run all of the bugs to write the table"
        lines = "".join(f"{line}\n" for line in rows)
        README.write_text(TABLE.sub(lambda _: lines, text), encoding="utf-8")


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.cls.__name__)
def test_bug_is_caught_and_in_the_table(bug, table, request):
    documented, rows = table
    writes = request.config.getoption("--write-table", False)
    shrinks = writes or bug.cls.__name__ in OF_EACH_KIND
    error, size = caught(bug, SHRUNK if shrinks else HUNT)
    rows.append(row(bug, size))
    if shrinks:
        numbers = [int(n) for n in re.findall(r"\d+", size)]
        assert max(numbers, default=0) <= 8, f"{size} is no small example of {error}"
    if not writes:
        # Without the size: another version of Hypothesis may draw, and so shrink, otherwise.
        assert any(line.startswith(row(bug, "").removesuffix("  |")) for line in documented)


def test_the_table_has_a_row_for_each_bug(table, request):
    documented, rows = table
    shown = rows if request.config.getoption("--write-table", False) else documented
    assert len(shown) == len(BUGS) >= 20
    assert {bug.cls.__name__ for bug in BUGS} >= set(OF_EACH_KIND)


OTHER_UPDATES = ("Ratio", "Looking", "Rounded", "Coded")
"""Optimizers that differ from another correct one only by their update."""
for _name, (_cls, _claims) in CORRECT.items():
    _others = OF_ONE_RULE if _name in OTHER_UPDATES else {}
    _contract = contract_of(_cls, {"settings": fewer(0.1), **_others, **_claims})
    _contract.__module__ = __name__
    globals()[_contract.__name__] = _contract
