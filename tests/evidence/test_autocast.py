"""The host's time of an operator is measured in each context."""

import re

from evidence import autocast


def test_autocast_is_measured_around_each_kind_of_operator():
    head, *found = autocast.table(autocast.measure(seconds=1e-3)).splitlines()
    assert re.split(r"\s{2,}", head)[1:] == [
        "none", "torch.autocast", "without lists", "ampopt.autocast",
    ]  # fmt: skip
    assert [line[:12].strip() for line in found] == ["not listed", "in Python", "listed"]
    assert all(float(number) > 0 for line in found for number in line[12:].split())
