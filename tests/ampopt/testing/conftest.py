"""An option that has the documentation's table written."""


def pytest_addoption(parser):
    parser.addoption("--write-table", action="store_true", help="write the table of planted bugs")
