"""Tables on the device are sent again only when they have changed."""

import weakref
from array import array

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from ampopt_kernels.uploads import Uploads

CPU = torch.device("cpu")
META = torch.device("meta")


@given(tables=st.lists(st.lists(st.integers(-(2**62), 2**62), max_size=4), max_size=8))
def test_sends_only_what_changed(tables):
    uploads, last, last_table = Uploads(), None, None
    for values in tables:
        table = uploads.get("rows", list(values), torch.int64, CPU)
        assert table.tolist() == values
        assert (table is last_table) == (values == last)
        last, last_table = values, table


@given(
    values=st.lists(st.integers(-100, 100), max_size=4),
    kind=st.sampled_from(
        [("i", torch.int32), ("q", torch.int64), ("f", torch.float32), ("d", torch.float64)]
    ),
)
def test_an_array_is_sent_as_a_list_is(values, kind):
    """The array is copied: the table does not change when the array does."""
    code, dtype = kind
    numbers = array(code, values)
    table = Uploads().get("rows", numbers, dtype, CPU)
    for place in range(len(numbers)):
        numbers[place] += 1
    assert table.dtype == dtype and table.tolist() == values
    assert torch.equal(table, Uploads().get("rows", values, dtype, CPU))


def test_tables_of_different_names_are_independent():
    uploads = Uploads()
    first = uploads.get("a", [1.0], torch.float64, CPU)
    second = uploads.get("b", [2.0], torch.float64, CPU)
    assert uploads.get("a", [1.0], torch.float64, CPU) is first
    assert uploads.get("b", [2.0], torch.float64, CPU) is second


def test_queued_work_keeps_the_table_it_was_given():
    uploads = Uploads()
    old = uploads.get("hyper", [1.0, 2.0], torch.float64, CPU)
    uploads.get("hyper", [3.0, 4.0], torch.float64, CPU)
    assert old.tolist() == [1.0, 2.0]


def test_in_place_the_table_stays_where_it_is():
    uploads = Uploads()
    table = uploads.get("hyper", [1.0, 2.0], torch.float64, CPU, in_place=True)
    assert uploads.get("hyper", [3.0, 4.0], torch.float64, CPU, in_place=True) is table
    assert table.tolist() == [3.0, 4.0]
    assert uploads.get("hyper", [3.0, 4.0, 5.0], torch.float64, CPU, in_place=True) is not table
    assert uploads.get("hyper", [3.0], torch.float64, META, in_place=True).device == META


def test_nothing_is_sent_while_a_graph_is_captured(monkeypatch):
    uploads = Uploads()
    table = uploads.get("rows", [1, 2], torch.int64, CPU)
    monkeypatch.setattr("ampopt_kernels.devices.captures", lambda device: True)
    assert uploads.get("rows", [1, 2], torch.int64, CPU) is table
    with pytest.raises(RuntimeError, match="zero_grad.set_to_none=False"):
        uploads.get("rows", [1, 3], torch.int64, CPU)


def test_what_a_graph_was_given_is_kept_when_other_tables_take_its_place(monkeypatch):
    uploads = Uploads()
    dropped = weakref.ref(uploads.get("rows", [1, 2], torch.int64, CPU))
    uploads.get("rows", [3, 4], torch.int64, CPU)
    rows, other = weakref.ref(uploads.get("rows", [3, 4], torch.int64, CPU)), torch.ones(1)
    monkeypatch.setattr("ampopt_kernels.devices.captures", lambda device: True)
    for _ in range(2):
        uploads.keep_while_captured(CPU, [other])
    monkeypatch.undo()
    last = weakref.ref(uploads.get("rows", [5], torch.int64, CPU))
    uploads.keep_while_captured(CPU)
    uploads.get("rows", [6], torch.int64, CPU)
    other = weakref.ref(other)
    assert [ref() is not None for ref in (dropped, rows, other, last)] == [False, True, True, False]
    del uploads
    assert rows() is other() is None


def test_another_device_gets_its_own():
    uploads = Uploads()
    uploads.get("rows", [1], torch.int64, CPU)
    assert uploads.get("rows", [1], torch.int64, META).device == META
    assert uploads.get("rows", [1], torch.int64, CPU).tolist() == [1]


def test_whole_numbers_are_exact():
    addresses = [2**63 - 1, 2**53 + 1]
    assert Uploads().get("rows", addresses, torch.int64, CPU).tolist() == addresses


def test_numbers_are_not_rounded():
    assert Uploads().get("hyper", [0.1], torch.float64, CPU).item() == 0.1
