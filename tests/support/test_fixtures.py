"""The fixture of the backend: named by the test, or by the environment."""

import pytest
import torch

import ampopt
from ampopt import backend as backends
from ampopt.testing.no_sync import assert_no_sync
from support.optimizers import sgd

names_none = pytest.mark.parametrize("turn", range(2))


@pytest.mark.parametrize("backend", ["eager", "triton"], indirect=True)
def test_the_one_that_it_names(backend):
    assert ampopt.get_backend() == backend


@names_none
def test_the_environments_after_others_have_named_theirs(turn, monkeypatch):
    assert backends._chosen is None
    monkeypatch.setenv(backends.ENVIRONMENT, "eager")
    assert ampopt.get_backend() == "eager"


@names_none
def test_the_environments_after_others_have_chosen_theirs(turn):
    assert backends._chosen is None
    ampopt.set_backend("eager")


def looks() -> bool:
    """Whether the host looks at CPU tensors."""
    optimizer = sgd(torch.nn.Parameter(torch.ones(3)))
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3)
    try:
        with assert_no_sync():
            optimizer.unscale_and_step(grads_scaled_by=torch.tensor(2.0))
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("backend", ["eager on a device"], indirect=True)
def test_the_host_may_not_look_where_that_is_named(backend):
    assert not looks()


@names_none
def test_the_host_may_look_where_nothing_is_named(turn, monkeypatch):
    monkeypatch.delenv(backends.ENVIRONMENT, raising=False)
    assert looks()
