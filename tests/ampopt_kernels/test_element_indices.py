"""Random numbers of a row that is a shard depend on the indices of its elements."""

from typing import Any

import pytest
import torch
from support.langevin import Shaken

from ampopt_kernels import torch_language
from ampopt_kernels.cpu.compiled import Compiled
from ampopt_kernels.eager import Eager
from ampopt_kernels.element_indices import ElementIndices, Jump
from ampopt_kernels.language import HAS_TRITON
from ampopt_kernels.native.build import cpp_compiler
from ampopt_kernels.random_numbers import rand
from ampopt_kernels.step import run
from ampopt_kernels.step_data import Request
from ampopt_kernels.step_tensors import ParamRow, Work
from ampopt_kernels.stochastic import stochastically

CPU = torch.device("cpu")
NEAR = (Jump(1, 0, 2), Jump(7, 3, 5), Jump(70, 69, -1))
FAR = (Jump(3000, 2900, 10**9), Jump(9000, 900, 2**33), Jump(2**35, 2**35 - 5, 3))
ROWS = [
    (ElementIndices(2**40), 9),
    (ElementIndices(5, NEAR), 300),
    (ElementIndices(5, FAR), 9300),
    (ElementIndices(1, FAR), 40),
]
"""Indices and sizes of rows: one chunk or several, with gaps in each block, chunk or row."""


def backends() -> list[Any]:
    classes: list[Any] = [Eager, *[Compiled] * bool(cpp_compiler())]
    if HAS_TRITON:
        from ampopt_kernels.triton.backend import Triton

        classes.append(Triton)
    return classes


@pytest.mark.parametrize("make", backends(), ids=lambda cls: cls.__name__)
def test_random_numbers_and_chances_follow_from_the_indices(make):
    rows, backend = [], make()
    for places, n in ROWS:
        p, chance, step = torch.ones(n).bfloat16(), torch.zeros(n), torch.zeros(())
        random_key = torch.tensor(2**33, dtype=torch.int64)
        row = ParamRow(p.dtype, p, (chance,), scalars=(step,), random_key=random_key, rounds=True)
        row.indices = places
        rows.append(row)
    grads = [torch.full((n,), 0.3).bfloat16() for _, n in ROWS]
    lr, temperature, seed = 2.0**-7, 0.5, 3.0
    work = Work(CPU, rows, grads, Shaken.rule, [[lr, temperature, seed]])
    run(lambda device: backend, [work], Request(check=False))
    draw = torch_language.bind(rand)
    for row, grad, (places, n) in zip(rows, grads, ROWS, strict=True):
        position = places.of(n, CPU)
        chance = draw(seed, 1.0, (position, torch.zeros(n)))
        assert torch.equal(row.state[0], chance)
        size = torch.tensor(2 * lr * temperature, dtype=torch.float64).sqrt().float()
        new = torch.ones(n) - lr * grad.float() + size * (chance - 0.5)
        assert torch.equal(row.param, stochastically(new, position, 2**33 + 1))
