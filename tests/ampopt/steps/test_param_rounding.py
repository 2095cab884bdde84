"""Stochastic rounding of bfloat16 parameters: unbiased, reproducible, not advanced by skips."""

import copy
from typing import Any

import pytest
import torch
from support.shards import same_as_whole
from torch.nn import Parameter

import ampopt
from ampopt.testing.bits import bits
from ampopt_kernels.language import HAS_TRITON
from ampopt_kernels.native.build import cpp_compiler
from ampopt_kernels.stochastic import KEY_STRIDE, stochastically

BACKENDS = [
    "eager",
    *["compiled"] * bool(cpp_compiler()),
    *["triton"] * HAS_TRITON,
]
BF16 = torch.bfloat16
ULP = 2.0**-7
"""The distance between bfloat16 numbers from 1 to 2."""


def sgd(params: Any, **options: Any) -> ampopt.SGD:
    options = {"lr": 1.0, "param_rounding": "stochastic", **options}
    return ampopt.SGD(params, **options)


def step(optimizer: Any, grads: list[Any], overflow: bool = False) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for p, g in zip(params, grads, strict=True):
        p.grad = torch.full_like(p, g) if isinstance(g, float) else g.to(p.dtype)
        if overflow:
            p.grad.fill_(float("inf"))
    optimizer.unscale_and_step(grads_scaled_by=1.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_steps_below_half_of_the_last_place_count_on_average(backend):
    """Rounded to nearest, such steps are lost. The mean may be off by four standard deviations."""
    ampopt.set_backend(backend)
    moved = []
    for rounding in ("stochastic", "nearest"):
        p = Parameter(torch.full((400,), 1.5, dtype=BF16))
        optimizer = sgd([p], param_rounding=rounding)
        for _ in range(20):
            step(optimizer, [0.25 * ULP])
        moved.append((1.5 - p.double().mean().item()) / ULP)
    deviation = (20 * 0.25 * 0.75 / 400) ** 0.5
    assert abs(moved[0] - 5.0) < 4 * deviation
    assert moved[1] == 0.0


def rounded(x: torch.Tensor, key: int, start: int = 0) -> torch.Tensor:
    return stochastically(x, torch.arange(start, start + x.numel()), key)


def test_rounding_is_unbiased_and_keeps_exact_numbers():
    """For 2**16 elements or steps, both signs, and probabilities of many sizes."""
    n = 1 << 16
    for share in (2.0**-10, 0.125, 0.3, 0.5, 0.999):
        for sign in (1.0, -1.0):
            x = torch.full((n,), sign * (1.0 + share * ULP), dtype=torch.float64).float()
            exact = (x[0].double().abs().item() - 1.0) / ULP
            deviation = (exact * (1 - exact) / n) ** 0.5
            for key in (0, 12345, 7 * KEY_STRIDE + 3):
                up = (rounded(x, key, start=10**10).abs() > 1.0).double().mean().item()
                assert abs(up - exact) < 4 * deviation + 2.0**-16
    of_steps = [rounded(x[:4], key).abs() > 1.0 for key in range(0, 4096)]
    assert abs(torch.stack(of_steps).double().mean(0) - exact).max() < 0.01
    edges = torch.tensor([0.0, -0.0, 1.5, -2.0, float("inf"), -float("inf"), 2.0**-133])
    assert torch.equal(rounded(edges, 1).float(), edges)
    assert rounded(torch.tensor([float("nan")]), 1).isnan().all()


def test_rounding_is_uncorrelated():
    x = torch.full((1 << 15,), 1.0 + 0.5 * ULP)
    first, later, other = ((rounded(x, key) > 1.0).double() for key in (5, 6, 5 + KEY_STRIDE))
    pairs = [(first, later), (first, other), (first[1:], first[:-1]), (first[:-1], later[1:])]
    for a, b in pairs:
        assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < 0.025


def trained(backend: str, skips: bool, resume: bool = False) -> list[torch.Tensor]:
    ampopt.set_backend(backend)
    sizes = [(5,), (3, 4), (0,), (70_000,) if backend != "triton" else (700,), (6, 2)]
    params = [
        Parameter(torch.linspace(0.5, 2, torch.Size(s).numel()).to(BF16).reshape(s)) for s in sizes
    ]
    params[4] = Parameter(params[4].detach().t())
    optimizer = ampopt.AdamW(params, lr=2.0**-9, param_rounding="stochastic")
    for i in range(4):
        if skips and i in (0, 2):
            before = copy.deepcopy(optimizer.state_dict()["state"])
            step(optimizer, [1.0] * 5, overflow=True)
            after = optimizer.state_dict()["state"]
            assert all(torch.equal(before[k][n], after[k][n]) for k in before for n in before[k])
        if resume and i == 2:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = ampopt.AdamW(params, lr=2.0**-9, param_rounding="stochastic")
            optimizer.load_state_dict(saved)
        step(optimizer, [torch.linspace(-1, i + 1.0, p.numel()).view(p.shape) for p in params])
    return [t for p in params for t in (p.detach(), *optimizer.state[p].values())]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_skip_consumes_no_random_bits_and_a_resumed_run_continues(backend):
    plain = trained(backend, skips=False)
    assert all(map(torch.equal, plain, trained(backend, skips=True)))
    assert all(map(torch.equal, plain, trained(backend, skips=False, resume=True)))


@pytest.mark.skipif("compiled" not in BACKENDS, reason="there is no C++ compiler here")
def test_the_compiled_backend_rounds_as_the_eager_one():
    assert all(map(torch.equal, trained("eager", True), trained("compiled", True)))


@pytest.mark.skipif("triton" not in BACKENDS, reason="Triton cannot be imported here")
def test_kernels_round_as_the_eager_backend():
    ends = []
    for backend in ("eager", "triton"):
        ampopt.set_backend(backend)
        params = [Parameter(torch.full((n,), 1.5, dtype=BF16)) for n in (5, 300)]
        optimizer = sgd(params)
        for _ in range(3):
            step(optimizer, [0.3 * ULP, -0.1 * ULP])
        ends.append([p.detach() for p in params])
    assert all(map(torch.equal, *ends))


def test_other_dtypes_are_rounded_to_nearest():
    """Also bfloat16 parameters with masters, and those of groups with ``"nearest"``."""
    ampopt.set_backend("eager")
    half, low = torch.ones(3, dtype=torch.float16), torch.full((3,), 1.5, dtype=BF16)
    params = [Parameter(half), Parameter(low.clone()), Parameter(low.clone())]
    groups = [
        {"params": params[:1]},
        {"params": params[1:2], "master_weights": True},
        {"params": params[2:], "param_rounding": "nearest"},
    ]
    optimizer = sgd(groups)
    for _ in range(5):
        step(optimizer, [2.0**-13, 0.25 * ULP, 0.25 * ULP])
    assert params[0].tolist() == [1.0] * 3
    assert params[1].tolist() == [1.5 - ULP] * 3
    assert params[2].tolist() == [1.5] * 3
    assert all("rounding_key" not in optimizer.state.get(p, {}) for p in params)


@pytest.mark.parametrize(
    "option, told_by",
    [("param_rounding", "rounding_key"), ("master_weights", "master_param")],
)
def test_an_option_that_a_group_gets_between_steps_counts_from_the_next(option, told_by):
    p = Parameter(torch.ones(4, dtype=BF16))
    optimizer = ampopt.SGD([p], lr=1.0)
    for _ in range(4):
        step(optimizer, [0.25 * ULP])
    assert told_by not in optimizer.state.get(p, {})
    optimizer.param_groups[0][option] = {"param_rounding": "stochastic"}.get(option, True)
    step(optimizer, [0.25 * ULP])
    assert told_by in optimizer.state[p]


def test_wrong_values_are_refused():
    p = Parameter(torch.ones(2, dtype=BF16))
    for make in (
        lambda: ampopt.AdamW([p], param_rounding="random"),
        lambda: ampopt.Lion([p], param_rounding=None),  # type: ignore[arg-type]
        lambda: ampopt.SGD([{"params": [p], "param_rounding": "up"}]),
    ):
        with pytest.raises(ValueError, match="param_rounding must be 'nearest' or 'stochastic'"):
            make()
    for steps in (0, 1):
        optimizer = sgd([p])
        for _ in range(steps):
            step(optimizer, [0.5])
        optimizer.param_groups[0]["param_rounding"] = "up"
        before = p.detach().clone()
        with pytest.raises(ValueError, match="param_rounding must be .* got 'up'"):
            step(optimizer, [0.5])
        assert torch.equal(p, before)
    with pytest.raises(ValueError, match="cannot be combined with differentiable=True"):
        ampopt.AdamW([p], param_rounding="stochastic", differentiable=True)
    p.grad = torch.ones(2).to(BF16).to_sparse()
    with pytest.raises(RuntimeError, match="param_rounding='stochastic' does not support sparse"):
        sgd([p]).step()


def on_shards() -> list[str]:
    values = [torch.full((5, 3, 6), 1.5, dtype=BF16), torch.full((6, 9), 1.5, dtype=BF16).t()]
    return same_as_whole(sgd, values, 0.3 * ULP, lambda o: o.step(), ["eager"])


def test_ranks_round_as_one_process_would(four_ranks):
    assert four_ranks.run(on_shards) == [[]] * 4


def test_a_key_that_is_none_is_made_as_other_states_are():
    keys = []
    for given in ({}, {"rounding_key": None}):
        params = [Parameter(torch.ones(4, dtype=BF16)) for _ in range(2)]
        optimizer = sgd(params)
        optimizer.state[params[1]].update(given)
        step(optimizer, [ULP, ULP])
        keys.append([bits(optimizer.state[p]["rounding_key"]) for p in params])
    assert keys[0] == keys[1]


@pytest.mark.parametrize("key", [0, 2**53 + 1, 2**62 + 12345])
def test_every_bit_of_a_key_counts_on_every_backend(key):
    """A float64 number holds keys up to 2**53 alone."""
    after = []
    for backend in BACKENDS:
        ampopt.set_backend(backend)
        p = Parameter(torch.linspace(1, 2, 300).to(BF16))
        optimizer = sgd([p])
        optimizer.state[p]["rounding_key"] = torch.tensor(key)
        step(optimizer, [0.3 * ULP])
        after.append(p.detach())
    assert all(torch.equal(after[0], other) for other in after)
