"""Fixtures of tests of compiled functions."""

import pytest
import torch
from support.requirements import skip_unless_it_runs


@pytest.fixture
def fresh_dynamo(request):
    """Remove all compiled code, so that a test does not depend on earlier ones."""
    if "inductor" in request.node.name:
        skip_unless_it_runs("compiled")
    torch._dynamo.reset()
