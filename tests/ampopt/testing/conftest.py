"""The backend that a contract is about, and an option that has the table of bugs written."""

import pytest
from support.requirements import skip_unless_it_runs

import ampopt


def pytest_addoption(parser):
    parser.addoption("--write-table", action="store_true", help="write the table of planted bugs")


@pytest.fixture(autouse=True, scope="class")
def backend_of_the_contract(request):
    """That which a contract names, if it names one."""
    name = getattr(request.cls, "backend", None)
    if name is None:
        yield
        return
    skip_unless_it_runs(name)
    ampopt.set_backend(name)
    yield
    ampopt.set_backend("auto")
