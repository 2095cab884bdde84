"""Rules that sum terms over parameters: trust ratios, norms, and sums over all parameters."""

from typing import Any

import pytest
import torch
from support.scripted_steps import assert_a_skip_changes_no_bit, gradient, params_of, step
from support.summing_rule import Ratio
from torch.nn import Parameter

import ampopt
from ampopt_kernels import Rule, jit
from ampopt_kernels.cpu.cpp import BLOCK, PART
from ampopt_kernels.language import HAS_TRITON
from ampopt_kernels.native.build import cpp_compiler

BACKENDS = ["eager", *["compiled"] * bool(cpp_compiler()), *["triton"] * HAS_TRITON]


SIZES = [(3,), (2, 5), (0,), (70, 61), ()]
STEPS = 3


def groups_of(params: list[Any]) -> list[dict[str, Any]]:
    return [{"params": params[:2], "squared": True}, {"params": params[2:]}]


def reference(dtype: torch.dtype, max_norm: float | None) -> list[dict[str, Any]]:
    """The same steps in float64, one parameter after another."""
    result = [
        {"p": p.detach().double(), "average": torch.zeros_like(p).double(), "total": 0.0}
        for p in params_of(SIZES, dtype)
    ]
    for i in range(STEPS):
        grads = [gradient(r["p"], i).to(dtype).double() for r in result]
        norm = torch.cat([g.flatten() for g in grads]).norm()
        clip = 1.0 if max_norm is None else min(1.0, max_norm / (norm.item() + 1e-6))
        sizes, lengths, directions = [], [], []
        for k, (r, g) in enumerate(zip(result, grads, strict=True)):
            r["average"] = r["average"] + 0.5 * (g * clip - r["average"])
            direction = r["average"] / (i + 1) + 0.25 * r["p"]
            directions.append(direction)
            sizes.append(r["p"].square().sum().item())
            lengths.append((direction.square() if k < 2 else direction.abs()).sum().item())
        for r, size, length, direction in zip(result, sizes, lengths, directions, strict=True):
            ratio = size**0.5 / length if length > 0 else 1.0
            r["p"] = r["p"] - 0.125 * ratio * direction
            r["total"] += sum(lengths) / (sum(sizes) + 1)
    return result


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("max_norm", [None, 2.0])
@pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.float32, {}), (torch.float64, {}), (torch.bfloat16, {"master_weights": True})],
    ids=str,
)
def test_sums_are_those_of_unscaled_and_clipped_gradients(backend, max_norm, dtype, options):
    """For parameters that are bundled, large, empty and 0-d, and with different flags."""
    ampopt.set_backend(backend)
    params = params_of(SIZES, dtype)
    optimizer = Ratio(groups_of(params), **options)
    for i in range(STEPS):
        step(optimizer, params, i, max_norm=max_norm)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for p, expected in zip(params, reference(dtype, max_norm), strict=True):
        state = optimizer.state[p]
        exact = state.get("master_param", p.detach()).double()
        torch.testing.assert_close(exact, expected["p"], rtol=tolerance, atol=tolerance)
        assert state["total"].item() == pytest.approx(expected["total"], rel=tolerance)
        assert state["step"] == STEPS


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_skip_changes_no_bit_and_a_run_repeats_itself(backend):
    ampopt.set_backend(backend)
    assert_a_skip_changes_no_bit(lambda params: Ratio(groups_of(params)), SIZES)


@pytest.mark.skipif("compiled" not in BACKENDS, reason="there is no C++ compiler here")
def test_compiled_sums_are_those_of_the_eager_backend_but_for_rounding():
    ends = []
    for backend in ("eager", "compiled"):
        ampopt.set_backend(backend)
        sizes = [1, 3, BLOCK, BLOCK + 1, PART, PART + 1, 100_003]
        others = [Parameter(torch.linspace(-3, 1, size)) for size in sizes]
        params = [*params_of(SIZES, torch.float32), *others]
        optimizer = Ratio(groups_of(params))
        for i in range(2):
            step(optimizer, params, i)
        ends.append([t for p in params for t in (p.detach(), *optimizer.state[p].values())])
    torch.testing.assert_close(*ends)


def test_plain_and_split_steps_are_the_joined_one():
    ampopt.set_backend("eager")
    ends = []
    for how in range(3):
        params = params_of(SIZES, torch.float32)
        optimizer = Ratio(groups_of(params))
        for i in range(2):
            for p in params:
                p.grad = gradient(p, i).float() * (1.0 if how == 2 else 4.0)
            if how == 0:
                optimizer.unscale_and_step(grads_scaled_by=4.0)
            elif how == 1:
                optimizer.unscale(grads_scaled_by=4.0)
                optimizer.step_after_unscale()
            else:
                optimizer.step()
        ends.append([p.detach() for p in params])
    assert all(map(torch.equal, ends[0], ends[1])) and all(map(torch.equal, ends[0], ends[2]))


def test_wrong_declarations_are_refused():
    with pytest.raises(TypeError, match=r"reduce needs scalars, .* scalars\(s, h, flags, sums\)"):
        Rule(update=Ratio.rule.update, reduce=Ratio.rule.reduce, hyper=("lr",))
    with pytest.raises(TypeError, match="no reduce to sum anything up"):
        Rule(update=_plain, scalars=Ratio.rule.scalars, hyper=("lr",))
    with pytest.raises(TypeError, match="before_reduce is for reduce"):
        Rule(update=_plain, before_reduce=Ratio.rule.before_reduce, hyper=("lr",))
    with pytest.raises(TypeError, match="reduce must be a function marked"):
        Rule(update=_plain, reduce=lambda p, g, state, h, flags: (p,), hyper=("lr",))  # type: ignore[arg-type]


@jit
def _summed_already(p, g, state, h, flags):
    return (p.sum(), g)


@jit
def _alone(p, g, state, h, flags):
    return g


@jit
def _nothing(p, g, state, h, flags):
    return ()


@jit
def _passed(s, h, flags, sums):
    return s, h


@jit
def _plain(p, g, state, h, flags):
    return p - h[0] * g, ()


@pytest.mark.parametrize(
    ("reduce", "message"),
    [
        (_summed_already, "is elementwise"),
        (_alone, "return a tuple of terms"),
        (_nothing, "a tuple of 0: return a tuple of terms"),
    ],
)
def test_a_reduce_that_is_not_as_declared_is_refused_before_the_first_step(reduce, message):
    class Wrong(ampopt.ElementwiseOptimizer):
        rule = Rule(update=_plain, reduce=reduce, scalars=_passed, hyper=("lr",))

    p = Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    with pytest.raises(ValueError, match=f"reduce of Wrong's rule.*{message}"):
        Wrong([p], {"lr": 0.5}).step()
    assert p.tolist() == [1.0, 1.0, 1.0]
