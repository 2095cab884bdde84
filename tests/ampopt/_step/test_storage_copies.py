"""Copies of storages restore every byte, where a flag on the device says so."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.gpus import ON_A_GPU

from ampopt._step.storage_copies import StorageCopies
from ampopt.testing.bits import bits


@pytest.fixture(params=[False, True], ids=["", "captured"])
def captured(request, monkeypatch):
    """Whether the steps are captured into a CUDA graph, in which nothing can be sent."""
    if request.param:
        monkeypatch.setattr("ampopt._step.storage_copies.captures", lambda device: True)


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize(
    "backend", ["eager on a device", "triton", "compiled", ON_A_GPU], indirect=True
)
@given(st.lists(st.binary(max_size=40), max_size=4), st.integers(0, 4), st.booleans())
def test_every_byte_of_a_storage_is_restored(backend, memory, start, skip):
    """Bytes are any numbers: signaling NaNs and subnormal numbers, too."""
    storages = [torch.tensor([*data], dtype=torch.uint8) for data in memory]
    copies = StorageCopies([storage[start:] for storage in storages])
    before = bits(storages)
    for _ in range(2):
        copies.make()
        for storage in storages:
            storage.add_(1)
        changed = bits(storages)
        copies.restore_where(torch.tensor(skip))
        assert bits(storages) == (before if skip else changed)
        copies.restore()
        copies.drop()
        assert bits(storages) == before


@given(st.integers(0, 9), st.integers(0, 9))
def test_a_storage_that_was_resized_gets_its_size_and_bytes_back(before, size):
    tensor = torch.arange(float(before))
    copies = StorageCopies([tensor])
    copies.make()
    tensor.untyped_storage().resize_(size)
    copies.restore()
    assert tensor.untyped_storage().nbytes() == 4 * before
    assert tensor.tolist() == [*range(before)]


def test_tensors_that_share_a_storage_are_copied_once():
    storage = torch.arange(6.0)
    copies = StorageCopies([storage[:3], storage[2:], storage])
    copies.make()
    storage.zero_()
    copies.restore_where(torch.tensor(True))
    assert storage.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


@pytest.mark.usefixtures("as_on_a_device")
def test_storages_on_the_cpu_are_compared():
    """A flag on a device would have to be copied to the CPU, and nothing waits for the copy."""
    counts, there = torch.zeros(2), torch.ones(3, device="meta")  # which has no values
    copies = StorageCopies([counts, there])
    copies.make()
    there.add_(1)
    copies.restore_where(torch.ones((), dtype=torch.bool, device="meta"))
    assert not copies.differ_on_cpu()
    counts[1] = -0.0
    assert copies.differ_on_cpu()
