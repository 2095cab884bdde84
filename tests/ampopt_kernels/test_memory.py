"""Memory that tensors share, or lack, in C++ and in Python."""

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from support.layouts import places, tensors

from ampopt_kernels.memory import (
    address_range,
    all_have_memory,
    may_overlap,
    overlaps_itself,
    share_memory,
    turns_of,
)


@st.composite
def strided(draw):
    """Tensors of any shape and strides over a few elements, made by ``as_strided``."""
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    strides = draw(st.lists(st.integers(0, 4), min_size=len(shape), max_size=len(shape)))
    return torch.arange(32.0).as_strided(shape, strides, draw(st.integers(0, 4)))


@hypothesis.settings(max_examples=100)
@given(tensor=strided() | tensors())
def test_overlaps_itself_by_the_definition(tensor):
    assert overlaps_itself(tensor) == (len(set(places(tensor))) < tensor.numel())


def test_overlap_of_tensors_of_any_size_is_found_without_a_list_of_their_elements():
    assert overlaps_itself(torch.ones(1, device="meta").expand(1 << 50))
    assert not overlaps_itself(torch.ones(1 << 25, 1 << 25, device="meta").T)


@hypothesis.settings(max_examples=100)
@given(one=strided(), other=strided(), half=st.booleans())
def test_shared_memory_by_the_definition(one, other, half):
    """Two tensors in one storage; elements of the second may be half as large."""
    storage = torch.arange(64.0)
    one, other = (
        (storage.view(torch.bfloat16) if narrow else storage).as_strided(
            t.shape, t.stride(), t.storage_offset()
        )
        for t, narrow in ((one, False), (other, half))
    )
    bytes_of = []
    for tensor in (one, other):
        size = tensor.element_size()
        first = tensor.data_ptr() if tensor.numel() else 0
        addresses = {first + p * size + i for p in places(tensor) for i in range(size)}
        addresses = addresses if tensor.numel() else set()
        assert address_range(tensor) == (
            (min(addresses), max(addresses) + 1) if addresses else (0, 0)
        )
        bytes_of.append(addresses)
    if all(bytes_of):
        assert share_memory(one, other) == bool(bytes_of[0] & bytes_of[1])


@pytest.mark.usefixtures("implementation")
class TestOfSeveral:
    """What is asked of all tensors of a step at once."""

    @hypothesis.settings(
        max_examples=100,
        suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
    )
    @given(parts=st.lists(st.tuples(strided(), st.integers(0, 40)), max_size=4))
    def test_ranges_overlap_by_the_definition(self, parts):
        storage = torch.arange(64.0)
        several = [storage.as_strided(t.shape, t.stride(), at) for t, at in parts]
        touched = [range(*address_range(t)) for t in several if t.numel()]
        bytes_of_all = [byte for each in touched for byte in each]
        assert may_overlap(several) == (len(set(bytes_of_all)) < len(bytes_of_all))
        # Each is one turn after the last of those before it that it shares an element with.
        elements, turns = [{at + place for place in places(t)} for t, at in parts], []
        for own in elements:
            shared = [turn for turn, other in zip(turns, elements, strict=False) if own & other]
            turns.append(max(shared, default=-1) + 1)
        assert turns_of(several) == turns

    @hypothesis.settings(
        max_examples=100,
        suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
    )
    @given(part=strided(), at=st.integers(0, 20), n=st.integers(0, 30))
    def test_memory_is_there_by_the_definition(self, part, at, n):
        storage = torch.arange(64.0)
        tensor = storage.as_strided(part.shape, part.stride(), at)
        last = at + max(places(tensor), default=0)
        storage.untyped_storage().resize_(4 * n)
        has_memory = not tensor.numel() or last < n
        assert all_have_memory([torch.ones(2), tensor]) == has_memory
        assert all_have_memory([tensor, torch.ones(2)]) == has_memory

    def test_tensors_without_elements_or_memory_overlap_with_none(self):
        whole = torch.ones(8)
        assert not may_overlap([whole, whole[3:3], torch.ones(8, device="meta")])
        assert not may_overlap([torch.ones(8, device="meta")] * 2)
        assert may_overlap([whole[:5], torch.ones(3), whole[4:]])
        assert not may_overlap([whole[:4], torch.ones(3), whole[4:]])
        assert all_have_memory([torch.ones(8, device="meta"), whole[8:]])
