"""The compiled backend: half precision, and sizes as arguments.

That it gives torch's results, for every option set, is in test_torch_parity.py.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.torch_options import (
    ELEMENTWISE,
    RICH,
    Distance,
    assert_train_alike,
    give,
    gradients,
    initial,
    named,
    params_of,
)

import ampopt
from ampopt.testing.bits import bits

pytestmark = pytest.mark.parametrize("backend", ["compiled"], indirect=True)

MARGIN = 1 << 6
"""The number of elements around a tensor in its buffer, which no step may write."""
RICHEST = [options for options in RICH if options.name in ELEMENTWISE]


@pytest.mark.parametrize(
    ("dtype", "masters"),
    [
        (torch.float16, True),
        (torch.bfloat16, True),
        (torch.float16, False),
        (torch.bfloat16, False),
    ],
    ids=str,
)
def test_half_precision_is_that_of_the_eager_backend(dtype, masters, backend):
    options = named("Adam", "amsgrad")

    def train() -> Any:
        optimizer = options.ours(initial(options, dtype), master_weights=masters)
        source = gradients(options, dtype)
        for _ in range(3):
            give(optimizer, source())
            optimizer.unscale_and_step(grads_scaled_by=1.0)
        return optimizer

    compiled = train()
    ampopt.set_backend("eager")
    try:
        eager = train()
    finally:
        ampopt.set_backend("compiled")
    eps = torch.finfo(dtype).eps
    for p, q in zip(params_of(compiled), params_of(eager), strict=True):
        torch.testing.assert_close(p, q, rtol=2 * eps, atol=2 * eps)
        for name, value in eager.state[q].items():
            wide = value.dtype == torch.float32
            rtol, atol = (1e-5, 1e-7) if wide else (2 * eps, 2 * eps)
            torch.testing.assert_close(compiled.state[p][name], value, rtol=rtol, atol=atol)
    if masters:
        for p, master in zip(params_of(compiled), compiled.master_params(), strict=True):
            assert bits(p) == bits(master.to(dtype))


def test_complex_and_absent_gradients_and_many_sizes(backend):
    """Sizes are arguments, so two compilations are enough: one of them for large sizes."""
    options = named("Adam", "amsgrad")
    shapes = [(3,), (2, 5), (), (0,), (1,), (70000,)]
    params = [torch.linspace(-1.0, 1.0, torch.Size(s).numel()).reshape(s) for s in shapes]
    params.append(torch.tensor([1 + 2j, -0.5 + 1j]))
    ours = options.ours([p.clone() for p in params])
    torchs = options.torchs([p.clone() for p in params])
    apart = Distance(torchs)
    for step in range(4):
        grads = [None if (step + i) % 3 == 0 else (p + step) / 4 for i, p in enumerate(params)]
        assert_train_alike(ours, torchs, lambda: grads, range(1), apart=apart)  # noqa: B023


@pytest.mark.parametrize("options", RICHEST, ids=str)
def test_a_parameter_trains_to_the_same_bits_when_others_have_no_gradients(options, backend):
    """Step counts differ in one case."""
    shapes, steps = [(23,), (40,), (1,)], 4
    source = np.random.default_rng(0)
    grads = [
        [torch.tensor(source.standard_normal(s)).float() for s in shapes] for _ in range(steps)
    ]

    def train(chosen: Sequence[int]) -> list[Any]:
        optimizer = options.ours([torch.ones(shapes[i]) for i in chosen])
        for step in range(steps):
            give(optimizer, [None if step == i > 0 else grads[step][i] for i in chosen])
            optimizer.step()
        return bits([(p, dict(optimizer.state[p])) for p in params_of(optimizer)])

    assert train(range(3)) == [train([i])[0] for i in range(3)]


def test_tensors_of_all_sizes_get_the_eager_bits(backend):
    sizes = (3075, 1, 70, 6144, (1 << 14) + 9)

    def train() -> Any:
        optimizer = ampopt.AdamW([torch.ones(n).requires_grad_() for n in sizes])
        for step in range(3):
            source = torch.Generator().manual_seed(step)
            grads = [torch.randn(n, generator=source) for n in sizes]
            give(optimizer, [None if step == i == 1 else g for i, g in enumerate(grads)])
            optimizer.unscale_and_step(grads_scaled_by=4.0)
        return bits([(p, optimizer.state[p]) for p in params_of(optimizer)])

    ours = train()
    ampopt.set_backend("eager")
    assert ours == train()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_masters_get_the_eager_bits_and_so_do_their_parameters(dtype, backend):
    sizes = [6144] * 3

    def train() -> Any:
        optimizer = ampopt.AdamW(
            [torch.ones(n, dtype=dtype).requires_grad_() for n in sizes], master_weights=True
        )
        for step in range(3):
            source = torch.Generator().manual_seed(step)
            give(optimizer, [torch.randn(n, generator=source).to(dtype) for n in sizes])
            optimizer.unscale_and_step(grads_scaled_by=4.0)
        return bits([(p, optimizer.state[p]) for p in params_of(optimizer)])

    ours = train()
    ampopt.set_backend("eager")
    assert ours == train()


def with_margins(values: torch.Tensor, buffers: list[torch.Tensor]) -> torch.Tensor:
    """Copy ``values`` to the middle of a new buffer of ones."""
    buffers.append(torch.ones(len(values) + 2 * MARGIN, dtype=values.dtype))
    middle = buffers[-1][MARGIN:-MARGIN]
    return middle.copy_(values)


@given(
    sizes=st.lists(st.integers(1, (1 << 14) + 9), min_size=2, max_size=5),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    absent=st.integers(0, 9),
    loss_scale=st.sampled_from([0.5, 4.0]),
)
@settings(max_examples=12)
def test_masters_train_as_each_does_alone(backend, sizes, dtype, absent, loss_scale):
    """No margin is written.

    The parameter ``absent`` has no gradient in one step.
    """
    source = torch.Generator().manual_seed(len(sizes))
    values = [[torch.randn(n, generator=source).to(dtype) for n in sizes] for _ in range(3)]

    def train(chosen: Sequence[int]) -> list[Any]:
        buffers: list[torch.Tensor] = []
        weights = [with_margins(values[0][i], buffers).requires_grad_() for i in chosen]
        optimizer = ampopt.AdamW(weights, master_weights=True)
        for step in range(2):
            grads = [with_margins(values[1 + step][i], buffers) for i in chosen]
            give(
                optimizer,
                [
                    None if step == 1 and i == absent else g
                    for i, g in zip(chosen, grads, strict=True)
                ],
            )
            optimizer.unscale_and_step(grads_scaled_by=loss_scale)
            assert all(
                bits(g) == bits(values[1 + step][i]) for i, g in zip(chosen, grads, strict=True)
            )
        margins = [m for buffer in buffers for m in (buffer[:MARGIN], buffer[-MARGIN:])]
        assert all(bool((margin == 1).all()) for margin in margins)
        masters = optimizer.master_params()
        return [bits((p, m, optimizer.state[p])) for p, m in zip(weights, masters, strict=True)]

    together = train(range(len(sizes)))
    assert together == [train([i])[0] for i in range(len(sizes))]


def test_gradients_of_optimizers_without_a_rule_are_measured(backend):
    weights = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = ampopt.LBFGS([weights])
    weights.grad = torch.full((3, 2), 8.0)
    optimizer.unscale(grads_scaled_by=4.0)
    assert weights.grad.unique().tolist() == [2.0]
