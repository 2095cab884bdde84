"""The backend of a contract, and the option that writes the table of planted bugs."""

import pytest
from support.requirements import skip_unless_it_runs


def pytest_addoption(parser):
    parser.addoption("--write-table", action="store_true", help="write the table of planted bugs")


@pytest.fixture(autouse=True, scope="class")
def backend_of_the_contract(request):
    """Set the backend that the contract names, if it names one."""
    with pytest.MonkeyPatch.context() as patch:
        if (name := getattr(request.cls, "backend", None)) is not None:
            skip_unless_it_runs(name)
            patch.setattr("ampopt.backend._chosen", name)
        yield
