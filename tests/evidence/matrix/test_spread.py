"""The ways in which the matrix distributes a model over ranks."""

import weakref

import torch

from evidence.matrix.spread import ddp


def test_a_group_outlives_its_model():
    """DDP's reducer may wait forever if it holds the last reference to its group."""

    def trained():
        with ddp() as spread:
            return weakref.ref(spread(torch.nn.Linear(1, 1)).process_group)

    assert trained()() is not None
