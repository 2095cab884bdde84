"""torchao's optimizers with states in 8 bits, under ``extend``: compiled steps, and subclasses."""

# The extra may not be installed.
# pyright: reportMissingImports=false

from typing import Any

import pytest
import torch
from support.requirements import needs

import ampopt
from ampopt._step.tensor_subclasses import memory_of
from ampopt.testing.bits import bits
from ampopt_kernels.eager import Eager

torchao = needs("torchao")
optim: Any = pytest.importorskip("torchao.optim")

# What Inductor and torchao are warned of.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


def parameters() -> list[Any]:
    """One parameter, just large enough for 8-bit states."""
    return [torch.nn.Parameter(torch.linspace(-1.0, 1.0, 4096).reshape(64, 64))]


def set_gradients(params: list[Any], seed: int, bad: bool = False) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)
    if bad:
        params[0].grad[0, 0] = float("inf")


def seen(optimizer: Any) -> Any:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    states = [value for p in params for value in optimizer.state[p].values()]
    return bits([part for tensor in (*params, *states) for part in memory_of(tensor)])


@pytest.mark.parametrize("skip_by", ["host", "auto", "transaction"])
def test_skips_are_exact_and_finite_steps_are_theirs(skip_by, monkeypatch):
    """As on a GPU, ``"auto"`` undoes what compiled code has written."""
    monkeypatch.setattr("ampopt._step.step_rollback.backend_for", lambda device: Eager())
    theirs = parameters()
    reference = optim.AdamW8bit(theirs, lr=1e-2)
    ours = parameters()
    optimizer = ampopt.extend(optim.AdamW8bit)(ours, lr=1e-2)
    optimizer.skip_by = skip_by
    for seed, bad in enumerate((False, True, False, False, True, False)):
        set_gradients(ours, seed, bad)
        before = seen(optimizer)
        assert optimizer.unscale_and_step(grads_scaled_by=1.0).skipped is bad
        assert (seen(optimizer) == before) is bad
        if not bad:
            set_gradients(theirs, seed)
            reference.step()  # so torch.compile works after a step of ours, too
    assert optimizer._ampopt.skip_policy.mode == ("host" if skip_by == "host" else "transaction")
    assert seen(optimizer) == seen(reference)


@pytest.mark.parametrize("name", ["AdamW4bit", "AdamWFp8"])
def test_other_formats(name):
    """A skip is exact, and a state is loaded. Uncompiled, as compiling takes long."""
    cls = ampopt.extend(getattr(optim, name))
    optimizer, resumed = cls(parameters()), cls(parameters())
    optimizer.skip_by = "transaction"
    for bad in (False, True):
        set_gradients(_params(optimizer), 0, bad)
        before = seen(optimizer)
        assert optimizer.unscale_and_step(grads_scaled_by=1.0).skipped is bad
        assert (seen(optimizer) == before) is bad
    with torch.no_grad():
        _params(resumed)[0].copy_(_params(optimizer)[0])
    resumed.load_state_dict(optimizer.state_dict())
    assert seen(resumed) == seen(optimizer)


def test_checkpoints(tmp_path):
    """State dicts of torchao's class load into ampopt's and back, also from a file."""
    optimizers = [cls(parameters(), lr=1e-2) for cls in (optim.AdamW8bit, _ours())]
    for saved, cls in zip(optimizers, (_ours(), _ours()), strict=True):
        set_gradients(saved.param_groups[0]["params"], 0)
        saved.step()
        torch.save(saved.state_dict(), tmp_path / "optimizer.pt")
        for state_dict in (saved.state_dict(), torch.load(tmp_path / "optimizer.pt")):
            resumed = cls(parameters(), lr=1e-2)
            with torch.no_grad():
                for new, old in zip(*map(_params, (resumed, saved)), strict=True):
                    new.copy_(old)
            resumed.load_state_dict(state_dict)
            assert seen(resumed) == seen(saved)
            before = seen(saved)
            set_gradients(_params(resumed), 1)
            resumed.unscale_and_step(grads_scaled_by=1.0)
            assert seen(saved) == before != seen(resumed)
    optim.AdamW8bit(parameters()).load_state_dict(optimizers[1].state_dict())


def _ours() -> Any:
    return ampopt.extend(optim.AdamW8bit)


def _params(optimizer: Any) -> list[Any]:
    return optimizer.param_groups[0]["params"]


def test_states_are_handed_on_to_ours():
    """By the lines of the guide "Less memory"."""
    params = [torch.nn.Parameter(torch.ones(64, 256)), torch.nn.Parameter(torch.ones(3))]
    exact, theirs = torch.optim.AdamW(params, lr=0.0), optim.AdamW8bit(params, lr=0.0)
    with torch.compiler.set_stance("force_eager"):
        for seed in range(3):
            set_gradients(params, seed)
            exact.step()
            theirs.step()
    state_dict = theirs.state_dict()
    for state in state_dict["state"].values():
        for name in ("exp_avg", "exp_avg_sq"):
            if hasattr(state[name], "dequantize"):
                state[name] = state[name].dequantize()
    ours = ampopt.AdamW(params, state_bits=8)
    ours.load_state_dict(state_dict)
    assert ours.state[params[0]]["exp_avg"].dtype == torch.int8
    assert_near(ours, exact)


def assert_near(ours: Any, exact: Any) -> None:
    """Compare the averages of two optimizers of the same parameters."""
    found = ampopt.full_state_dict(ours)["state"]
    for key, state in exact.state_dict()["state"].items():
        assert found[key]["step"] == state["step"]
        for name in ("exp_avg", "exp_avg_sq"):
            assert (found[key][name] - state[name]).norm() <= 0.05 * state[name].norm()
