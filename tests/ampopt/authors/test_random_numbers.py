"""Random numbers of rules: their distribution, and that skipped steps consume none."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.langevin import Langevin, Shaken
from support.shards import same_as_whole
from torch.nn import Parameter

import ampopt
from ampopt_kernels import rand, randn, torch_language
from ampopt_kernels.eager import Eager
from ampopt_kernels.language import HAS_TRITON
from ampopt_kernels.native.build import cpp_compiler
from ampopt_kernels.random_numbers import PLACE_STRIDE

BACKENDS = ["eager", *["compiled"] * bool(cpp_compiler()), *["triton"] * HAS_TRITON]
N = 1 << 16


def drawn(function: Any, seed: float = 0, step: float = 1, start: int = 0) -> torch.Tensor:
    like = torch.zeros(N, dtype=torch.float64)
    return torch_language.bind(function)(seed, step, (torch.arange(start, start + N), like))


def test_random_numbers_have_the_documented_distributions():
    """Moments and shares of intervals are within four standard deviations."""
    for start, step in ((0, 1), (10**10, 12345), (7 * PLACE_STRIDE, 2.0**24)):
        u, z = drawn(rand, 3, step, start), drawn(randn, 3, step, start)
        assert u.min() >= 0
        assert u.max() < 1
        assert torch.equal(u * 2**24, (u * 2**24).floor())
        shares = torch.histc(u, 16, 0, 1) / N
        assert (shares - 1 / 16).abs().max() < 4 * (15 / 256 / N) ** 0.5
        assert abs(z.mean()) < 4 / N**0.5
        assert abs((z * z).mean() - 1) < 4 * (2 / N) ** 0.5
        assert abs((z**4).mean() - 3) < 4 * (96 / N) ** 0.5


def test_random_numbers_are_uncorrelated():
    first = drawn(rand)
    for other in (
        drawn(rand, step=2),
        drawn(rand, step=-1),
        drawn(rand, seed=1),
        drawn(rand, start=1),
        drawn(rand, start=PLACE_STRIDE),
    ):
        assert abs(torch.corrcoef(torch.stack([first, other]))[0, 1]) < 4 / N**0.5


def trained(backend: str, cls: Callable[..., Any] = Shaken, skips: bool = False) -> Any:
    ampopt.set_backend(backend)
    sizes = [(5,), (3, 4), (0,), (70_000,) if backend != "triton" else (5000,), (6, 2), ()]
    dtypes = [torch.float32, torch.float64, torch.float32, torch.float32, torch.bfloat16]
    dtypes.append(torch.complex64)
    params = [Parameter(torch.zeros(s, dtype=d)) for s, d in zip(sizes, dtypes, strict=True)]
    params[1] = Parameter(params[1].detach().t())
    by_chance = {"params": [Parameter(torch.ones(9).bfloat16())], "param_rounding": "stochastic"}
    optimizer = cls([{"params": params, "master_weights": True}, by_chance])
    params += by_chance["params"]
    for i in range(3):
        for spoilt in (True, False) if skips else (False,):
            for p in params:
                p.grad = torch.full_like(p, float("nan") if spoilt else float(i))
            optimizer.unscale_and_step(grads_scaled_by=1.0)
    return [t for p in params for t in (p.detach(), *optimizer.state[p].values())]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_skipped_step_consumes_no_random_numbers(backend):
    once, again = trained(backend), trained(backend, skips=True)
    assert all(map(torch.equal, once, again))


@pytest.mark.parametrize("backend", ["eager", *BACKENDS[1:]])
def test_backends_draw_the_same(backend, monkeypatch):
    """Uniform numbers are bitwise the same; normal ones agree within rounding."""
    uniform, normal = trained("eager"), trained("eager", Langevin)
    if backend == "eager":  # as on a device
        monkeypatch.setattr("ampopt.backend._cpu_backend", lambda _: Eager())
    for a, b in zip(uniform, trained(backend), strict=True):
        torch.testing.assert_close(a[: len(b)] if a.ndim == 1 else a, b, rtol=0, atol=0)
    for a, b in zip(normal, trained(backend, Langevin), strict=True):
        torch.testing.assert_close(a[: len(b)] if a.ndim == 1 else a, b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_random_number_depends_on_seed_step_parameter_and_element(backend):
    """The gradients of other parameters make no difference."""
    ampopt.set_backend(backend)

    def chances(seed: int, first_has_gradient: bool, steps: int = 1) -> torch.Tensor:
        params = [Parameter(torch.zeros(4)), Parameter(torch.zeros(4))]
        optimizer = Shaken(params, seed=seed)
        for _ in range(steps):
            params[0].grad = torch.zeros(4) if first_has_gradient else None
            params[1].grad = torch.zeros(4)
            optimizer.step()
        return torch.cat([optimizer.state[p]["chance"] for p in params[not first_has_gradient :]])

    both = chances(0, True)
    assert len(both.unique()) == 8
    assert torch.equal(chances(0, False), both[4:])
    assert not torch.isin(chances(1, True), both).any()
    assert not torch.isin(chances(0, True, steps=2), both).any()


def test_langevin_dynamics_samples_its_distribution():
    """For the loss p * p / 2: a normal distribution, with half a step size more variance than 1."""
    ampopt.set_backend("eager")
    p = Parameter(torch.zeros(4000))
    optimizer = Langevin([p], lr=0.1, temperature=1.0)
    for _ in range(60):
        p.grad = p.detach().clone()
        optimizer.unscale_and_step(grads_scaled_by=1.0)
    exact = 1 / (1 - 0.1 / 2)
    assert abs(p.mean().item()) < 4 * (exact / 4000) ** 0.5
    assert abs(p.square().mean().item() - exact) < 4 * exact * (2 / 4000) ** 0.5


def test_random_numbers_of_triton_are_refused():
    for name in ("rand", "randn"):
        with pytest.raises(AttributeError, match=f"from ampopt_kernels import {name}"):
            getattr(torch_language, name)


def on_shards() -> list[str]:
    values = [torch.zeros(7, 3, dtype=dtype) for dtype in (torch.float32, torch.complex64)]
    step = lambda optimizer: optimizer.unscale_and_step(grads_scaled_by=1.0)  # noqa: E731
    return same_as_whole(Shaken, values, 1.0, step, BACKENDS)


def test_ranks_draw_what_one_process_would(four_ranks):
    assert four_ranks.run(on_shards) == [[]] * 4
