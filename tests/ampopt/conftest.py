"""Fixtures of several files: a parameter, and CPU tensors treated as on a device."""

import pytest
import torch
from torch.nn import Parameter

from ampopt import testing


@pytest.fixture
def param() -> Parameter:
    p = Parameter(torch.tensor([1.0, -2.0, 3.0]))
    p.grad = torch.tensor([0.5, 1.0, -4.0])
    return p


@pytest.fixture
def as_on_a_device():
    """The host may not look at CPU tensors at no cost; else there would be no transactions."""
    with testing.as_on_a_device():
        yield
