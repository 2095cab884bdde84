"""Every rule, on tensors of every layout, size and dtype, gives torch's results."""

import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.optimizers import Signed
from support.torch_options import (
    RICH,
    ULPS,
    Distance,
    OptionSet,
    named,
    params_of,
)
from torch import Tensor
from torch.nn import Parameter

import ampopt
from ampopt.testing.bits import bits, everything, state_of
from ampopt_kernels import rules
from ampopt_kernels.eager import CHUNK
from ampopt_kernels.step import run
from ampopt_kernels.step_data import Request
from ampopt_kernels.step_tensors import ParamRow, Work

pytestmark = pytest.mark.usefixtures("backend")

WAYS = ("eager", "eager on a device", "triton")
every_way = pytest.mark.parametrize("backend", WAYS, indirect=True)

OF_EACH_KIND = ("SGD", "AdamW", "NAdam", "Adafactor")
"""Rules with one state, with several, with scalars, and with row statistics."""
BY_RULE = [*(options for options in RICH if options.name in OF_EACH_KIND), named("SGD")]
each_rule = pytest.mark.parametrize(
    ("options", "backend"),
    [pytest.param(options, way, id=f"{options}-{way}") for way in WAYS for options in BY_RULE],
    indirect=["backend"],
)
INF = float("inf")
CPU = torch.device("cpu")


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Multiples of 1 / 256 between -1 and 1, with few repeats."""
    n = torch.Size(shape).numel()
    return (((torch.arange(n) + seed) * 37) % 513 - 256).reshape(shape) / 256.0


def strided(plain: Tensor) -> Tensor:
    memory = torch.full((*plain.shape[:-1], 3 * plain.shape[-1] + 1), 7.0, dtype=plain.dtype)
    view = memory[..., 1::3]
    return view.copy_(plain)


def offset(plain: Tensor) -> Tensor:
    """A copy of ``plain`` in the middle of a buffer, at an address that is not aligned."""
    memory = torch.full((plain.numel() + 2,), 7.0, dtype=plain.dtype)
    return memory[1:-1].view(plain.shape).copy_(plain)


LAYOUTS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "plain": ((3, 5), lambda t: t),
    "0-d": ((), lambda t: t),
    "one": ((1,), lambda t: t),
    "odd": ((7,), lambda t: t),
    "empty": ((0, 3), lambda t: t),
    "transposed": ((4, 3), lambda t: t.mT.contiguous().mT),
    "permuted": ((2, 3, 4), lambda t: t.permute(2, 0, 1).contiguous().permute(1, 2, 0)),
    "strided": ((3, 4), strided),
    "offset": ((5,), offset),
    "channels last": ((2, 3, 2, 2), lambda t: t.to(memory_format=torch.channels_last)),
    "channels last, 3-d": ((1, 2, 2, 3, 2), lambda t: t.to(memory_format=torch.channels_last_3d)),
    "ones": ((1, 3, 1, 1), lambda t: t.to(memory_format=torch.channels_last)),
}


BY_ZERO = ("Adafactor", "empty")
"""For this rule and layout, torch divides by the number of elements: 0."""


def memory_of(tensors: list[Tensor]) -> Any:
    """The bytes of the storages of ``tensors``, also of elements that no tensor has."""
    storages = [t.untyped_storage() for t in tensors]
    return bits([torch.empty(0).set_(s) for s in storages if s.nbytes()])  # type: ignore[arg-type]


def compare(options: OptionSet, params: list[Tensor], steps: list[list[Tensor | None]]) -> Any:
    """Train ``params``, with an overflow before each step, and torch's optimizer on plain copies.

    Gradients are given as they are; the memory of neither may be written elsewhere.
    """
    ours = options.ours([Parameter(p) for p in params])
    plain = [p.detach().clone(memory_format=torch.contiguous_format) for p in params]
    torchs = options.torchs(plain)
    apart = Distance(torchs)
    strides = [p.stride() for p in params]
    for grads in steps:
        before = everything(ours), memory_of(params)
        for p, grad in zip(params_of(ours), grads, strict=True):
            p.grad = None if grad is None else torch.full_like(grad, INF)
        overflows = any(grad is not None and grad.numel() for grad in grads)
        assert ours.unscale_and_step(grads_scaled_by=2.0).skipped == overflows
        assert (everything(ours)["parameters"], memory_of(params)) == (
            before[0]["parameters"],
            before[1],
        )
        for old, new in zip(before[0]["state"], state_of(ours), strict=True):
            assert not old or new == old
        for p, q, grad in zip(params_of(ours), plain, grads, strict=True):
            p.grad = grad
            q.grad = None if grad is None else grad.clone(memory_format=torch.contiguous_format)
        ours.step()
        torchs.step()
        assert max(apart.of_optimizers(ours, torchs).values()) <= ULPS
        for tensor in (*params_of(ours), *plain):  # which a kept copy would not show
            tensor.detach().mul_(0.5 if tensor.grad is not None else 1.0)
    assert [p.stride() for p in params_of(ours)] == strides
    return ours


@each_rule
def test_layouts_of_all_kinds_side_by_side(options):
    """Gradients have the parameter's layout, a contiguous one, and that of another parameter."""
    layouts = [layout for name, layout in LAYOUTS.items() if (options.name, name) != BY_ZERO]
    params = [place(numbers(*shape)) for shape, place in layouts]
    around = [(p.untyped_storage().nbytes() // 4 - p.numel()) for p in params]
    steps = []
    for seed in range(3):
        grads: list[Tensor | None] = []
        for shape, place in layouts:
            plain = numbers(*shape, seed=seed + 1)
            turned = plain.mT.contiguous().mT if plain.ndim > 1 else plain
            grads.append([place(plain), plain, turned][seed])
        steps.append(grads)
    compare(options, params, steps)
    for p, strangers in zip(params, around, strict=True):
        if p.untyped_storage().nbytes():
            memory = torch.empty(0).set_(p.untyped_storage())  # type: ignore[arg-type]
            assert memory.eq(7.0).sum() == strangers


@every_way
@pytest.mark.parametrize("n", [CHUNK - 1, CHUNK + 3])
@pytest.mark.parametrize("options", [o for o in BY_RULE if o.name == "Adam"], ids=str)
def test_sizes_around_those_at_which_the_work_is_cut(options, n):
    params = [numbers(3), numbers(n)]
    compare(options, params, [[numbers(p.numel(), seed=1) for p in params]])


@each_rule
def test_an_expanded_gradient_is_what_it_stands_for(options):
    params = [numbers(3, 4), numbers(5)]
    steps = [[torch.full((1, 4), x).expand(3, 4), torch.tensor(x).expand(5)] for x in (2.5, -3.0)]
    compare(options, params, steps)  # type: ignore[arg-type]


@every_way
def test_an_expanded_parameter_is_refused(backend):
    param = torch.ones(1).expand(3).requires_grad_()
    optimizer = ampopt.AdamW([("weight", param)])
    param.grad = torch.ones(3)
    with pytest.raises(RuntimeError, match=r"weight is expanded.*expanded\.clone\(\)"):
        optimizer.step()
    assert not any(state_of(optimizer))
    assert param.tolist() == [1.0] * 3


def unscaled_first(optimizer: Any) -> None:
    optimizer.unscale(grads_scaled_by=8.0)
    optimizer.step_after_unscale()


def by_a_scaler(scaler_class: Any, optimizer: Any) -> None:
    scaler = scaler_class("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)


STEPS: dict[str, Callable[[Any], Any]] = {
    "joined": lambda optimizer: optimizer.unscale_and_step(grads_scaled_by=8.0),
    "split": unscaled_first,
    "torch's scaler": functools.partial(by_a_scaler, torch.amp.GradScaler),
    "our scaler": functools.partial(by_a_scaler, ampopt.GradScaler),
}


@every_way
@pytest.mark.parametrize("size", [3, 9])
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_a_gradient_that_two_parameters_have_is_divided_once(step, size, backend):
    params = [Parameter(torch.ones(size)) for _ in range(3)]
    optimizer = ampopt.SGD(params, lr=0.125)
    for _ in range(2):
        params[0].grad = params[2].grad = torch.full((size,), 8.0)
        params[1].grad = torch.full((size,), 16.0)
        step(optimizer)
        left = [0.0 if p.grad is None else float(p.grad[0]) for p in params]
        assert left == ([8.0, 16.0, 8.0] if step is STEPS["joined"] else [1.0, 2.0, 1.0])
    assert [p.unique().tolist() for p in params] == [[0.75], [0.5], [0.75]]


@every_way
@pytest.mark.parametrize("size", [3, 9])
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_parameter_that_is_in_a_group_twice_is_stepped_once(step, size, backend):
    param = Parameter(torch.ones(size))
    optimizer = ampopt.SGD([param, Parameter(torch.ones(2)), param], lr=0.125, momentum=0.5)
    for expected in (0.875, 0.6875):
        param.grad = torch.full((size,), 8.0)
        step(optimizer)
        assert param.unique().tolist() == [expected]
    result = optimizer.unscale_and_step(grads_scaled_by=1.0, max_norm=INF)
    assert not result.skipped and optimizer.grad_norm == param.grad.norm()


@each_rule
def test_parameters_that_share_storage_without_sharing_elements(options):
    """Adjacent, interleaved, and a column of a matrix with the other columns."""
    line, matrix = numbers(10), numbers(4, 4)
    params = [line[:3], line[3:6], line[6::2], line[7::2], matrix[:, 1], matrix[:, 2:]]
    compare(options, params, [[numbers(*p.shape, seed=s) for p in params] for s in (1, 2, 3)])


def overlapping(n: int) -> tuple[Tensor, list[Tensor]]:
    """A line of ``3 * n`` elements; and its first two thirds, the last two, and all, with grads."""
    line = numbers(3 * n)
    params: list[Tensor] = [Parameter(line[: 2 * n]), Parameter(line[n:]), Parameter(line)]
    for seed, param in enumerate(params):
        param.grad = numbers(*param.shape, seed=seed)
    return line, params


@each_rule
def test_parameters_that_share_elements_are_stepped_one_after_another(options):
    if options.name == "Adafactor":
        pytest.skip("reads the sizes of all parameters before it updates the first")
    line, params = overlapping(3)
    expected, torchs = overlapping(3)
    ours, theirs = options.ours(params), options.torchs(torchs)
    for scale, absent in ((1.0, None), (4.0, None), (1.0, 0), (1.0, 1), (4.0, 2), (1.0, 0)):
        for place, (param, other) in enumerate(zip(params, torchs, strict=True)):
            other.grad = None if place == absent else numbers(*other.shape, seed=place)
            param.grad = None if other.grad is None else other.grad * scale
        ours.unscale_and_step(grads_scaled_by=scale)
        theirs.step()
        torch.testing.assert_close(line, expected, rtol=1e-5, atol=1e-6)
    before = everything(ours), bits(line)
    params[1].grad = torch.full((6,), INF)
    assert ours.unscale_and_step(grads_scaled_by=1.0).skipped
    assert (everything(ours), bits(line)) == before


@pytest.mark.parametrize("backend", ["eager", "compiled"], indirect=True)
def test_threads_do_not_update_shared_elements_at_the_same_time(backend):
    before = torch.get_num_threads()
    results = []
    try:
        for torch_threads in (1, 2):
            torch.set_num_threads(torch_threads)
            line, params = overlapping(1 << 17)
            optimizer = ampopt.AdamW(params, lr=0.1)
            for _ in range(3):
                optimizer.unscale_and_step(grads_scaled_by=1.0)
            results.append(bits(line))
    finally:
        torch.set_num_threads(before)
    assert results[0] == results[1]


def test_a_parameter_that_is_stepped_as_a_copy_may_not_share_elements_with_another():
    matrix = numbers(4, 4)
    params = [Parameter(matrix[:, 1:]), Parameter(matrix[:, 0]), Parameter(matrix)]
    optimizer = ampopt.SGD(params, lr=0.5)
    for param in params[:2]:
        param.grad = torch.ones_like(param)
    expected = matrix - 0.5
    optimizer.step()
    assert torch.equal(matrix, expected)
    params[2].grad = torch.ones(4, 4)
    with pytest.raises(ValueError, match="group 0, parameter . shares memory with .* use one"):
        optimizer.step()
    assert torch.equal(matrix, expected)


@each_rule
def test_each_dtype_is_stepped_as_if_alone(options, backend):
    def train(masters: bool, *dtypes: torch.dtype) -> list[Any]:
        params = [Parameter(numbers(3, 2).to(dtype)) for dtype in dtypes]
        optimizer = options.ours(params, master_weights=masters)
        for seed in (1, 2):
            for p in params:
                p.grad = numbers(3, 2, seed=seed).to(p.dtype)
            optimizer.unscale_and_step(grads_scaled_by=1.0)
        return [(bits(p), bits(dict(optimizer.state[p]))) for p in params]

    some = (torch.float32, torch.float16, *[torch.complex64] * options.complex)
    others = (torch.float64, torch.bfloat16)
    for masters in (True,) if backend == "triton" else (False, True):
        assert train(masters, *some, *others) == train(masters, *some) + train(masters, *others)


PRESENT = ["1011", "0011", "1010", "0110", "0000", "1101", "1111", "1011"]
"""For each step, which of the four parameters have a gradient."""


def coming_and_going(params: list[Tensor]) -> list[list[Tensor | None]]:
    return [
        [
            numbers(*p.shape, seed=seed) if here == "1" else None
            for p, here in zip(params, row, strict=True)
        ]
        for seed, row in enumerate(PRESENT, 1)
    ]


@each_rule
def test_gradients_come_and_go(options):
    """Shapes are equal, so that parameters could be confused."""
    params = [numbers(4, seed=seed) for seed in range(4)]
    compare(options, params, coming_and_going(params))


@every_way
def test_gradients_come_and_go_where_nothing_is_counted(backend):
    """The rule has no step count, so only states show which parameters stepped together."""
    together, alone = ([numbers(4, seed=seed) for seed in range(4)] for _ in range(2))
    optimizer, each = Signed(together), [Signed([p]) for p in alone]
    for grads in coming_and_going(together):
        for p, q, grad in zip(together, alone, grads, strict=True):
            p.grad = q.grad = grad
        for o in (optimizer, *each):
            o.step()
    assert bits(together) == bits(alone)
    assert state_of(optimizer) == [state for o in each for state in state_of(o)]


@each_rule
def test_frozen_parameters_stay_and_have_no_state(options):
    params = [numbers(3), numbers(2, 2)]
    ours = compare(options, params, [[numbers(3, seed=1), None], [numbers(3, seed=2), None]])
    frozen = params_of(ours)[1]
    assert frozen not in ours.state or options.name == "Adagrad"  # torch's constructor makes it
    assert bits(frozen) == bits(Parameter(numbers(2, 2)))


@every_way
def test_a_sparse_parameter_without_a_gradient_is_left_alone(backend):
    param, sparse = Parameter(torch.ones(2)), Parameter(torch.eye(2).to_sparse())
    param.grad = torch.ones(2)
    ampopt.SGD([param, sparse], lr=1.0).step()
    assert not param.any() and sparse.to_dense().equal(torch.eye(2))


@pytest.mark.parametrize("backend", ["triton"], indirect=True)  # elsewhere torch addresses
def test_kernels_address_more_than_2_to_the_31_elements(tmp_path, backend):
    """Runs the last program of each launch, on sparse files.

    A 32-bit index would be negative, or write to an element that the test checks.
    """
    from ampopt_kernels.triton import backend as triton
    from ampopt_kernels.triton.table import BLOCK

    n = 2**31 + 3 * BLOCK + 5

    def tensor(name: str) -> Tensor:
        path = tmp_path / name
        path.touch()
        os.truncate(path, 2 * n)
        return torch.from_file(str(path), shared=True, size=n, dtype=torch.float16)

    def last(device: torch.device, variant: Any, programs: int, arguments: dict[str, Any]) -> None:
        if "first" in arguments:
            arguments = {**arguments, "first": arguments["first"] + programs - 1}
        triton.launch(device, variant, 1, arguments)

    grad = tensor("grad")
    row = ParamRow(
        grad.dtype,
        param=tensor("param"),
        state=(tensor("exp_avg"), tensor("exp_avg_sq")),
        scalars=(torch.zeros(()),),
        flags=(False,) * 4,
    )
    assert row.param is not None
    tail = slice(2**31, None)
    grad[tail] = 2.0
    row.param[tail] = 1.0
    work = Work(CPU, [row], [grad], rules.adam, [[0.5, 0.5, 0.5, 0.0, 0.0]])
    engine = triton.Triton(last)
    assert engine.detect(work, Request()).flags[-1] == 0
    chunk = work.backend_rows.chunk
    run(lambda _: engine, [work], Request(check=False))
    expected = [2.0, 0.5, 1.0, 2.0]
    for stream, value in zip((grad, *row.outputs), expected, strict=True):
        assert stream[tail].eq(value).all()
        for start in (0, 3 * BLOCK, 2**30, 2**31 - 2 * chunk):
            assert not stream[start : start + chunk].any()
    grad[-1] = INF
    assert engine.detect(work, Request()).flags[-1] == 1
