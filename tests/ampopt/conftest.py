"""A parameter with a gradient, as many tests of the control points begin with."""

import pytest
import torch
from torch.nn import Parameter


@pytest.fixture
def param() -> Parameter:
    p = Parameter(torch.tensor([1.0, -2.0, 3.0]))
    p.grad = torch.tensor([0.5, 1.0, -4.0])
    return p
