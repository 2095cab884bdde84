"""Sums over rows and columns, whose number of operations does not depend on that of matrices."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given
from support.averaging_rules import Centered
from support.counted_operations import counted, silent_launches
from support.kernel_rows import CPU

import ampopt
from ampopt_kernels import rules
from ampopt_kernels.row_column_means import RowColumnMeans, add_sums
from ampopt_kernels.step_data import Decision, Request
from ampopt_kernels.step_tensors import ParamRow, Work
from ampopt_kernels.triton import backend as triton_backend
from ampopt_kernels.triton.backend import Triton

MATRIX = (False, False)
LENGTHS = st.one_of(st.integers(0, 9), st.sampled_from([16, 48, 70, 300]))
SHAPES = st.tuples(st.integers(1, 2), LENGTHS, LENGTHS).filter(lambda s: s[0] * s[1] * s[2] < 9000)


def matrix(shape, dtype, shift):
    """A row of Adafactor and its gradient, of whole numbers, so that sums are exact."""
    n = torch.Size(shape).numel()
    whole = (torch.arange(n + shift) * 7 % 11 - 5).to(dtype)[shift:].view(shape)
    own = RowColumnMeans(rules.adafactor.averages_for(MATRIX), (), shape)
    return ParamRow(dtype, param=whole.clone(), flags=MATRIX, row_column_means=own), whole


@given(
    shapes=st.lists(SHAPES, min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    shift=st.integers(0, 1),
)
@example(shapes=[(1, 300, 16), (1, 16, 300), (1, 300, 16)], dtype=torch.float32, shift=0)
def test_every_line_is_summed_up(shapes, dtype, shift):
    pairs = [matrix(shape, dtype, shift) for shape in shapes]
    rows, grads = [row for row, _ in pairs], [grad for _, grad in pairs]
    hyper = [[0.5] * 6]
    work = Work(CPU, rows, grads, rules.adafactor, hyper)
    factors = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)
    h = torch.ones((len(rows), rules.adafactor.widths(6).reduce), dtype=torch.float64)
    decision = Decision(torch.zeros(()), factors, h=h)
    for stack in work.line_stacks:
        for sums in stack.sums:
            sums.fill_(torch.nan)
    Triton().sum_lines(work, decision)
    found = [sums.clone() for stack in work.line_stacks for sums in stack.sums]
    work.clear_line_sums()
    for index in range(len(rows)):
        add_sums(work, index, (0.5, 1.0, *[1.0] * h.shape[1]))
    expected = [sums for stack in work.line_stacks for sums in stack.sums]
    assert all(map(torch.equal, found, expected))


def adafactor(shapes):
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    for param in params:
        param.grad = torch.ones_like(param)
    return ampopt.Adafactor(params)


def operations_of(optimizer):
    """The operations of a third step, which sends no tables."""
    for _ in range(2):
        optimizer.unscale_and_step(grads_scaled_by=2.0)
    return counted(lambda: optimizer.unscale_and_step(grads_scaled_by=2.0))


def test_a_step_of_adafactor_runs_as_many_operations_for_any_number_of_matrices(monkeypatch):
    ampopt.set_backend("triton")
    with silent_launches(monkeypatch) as launches:
        few = operations_of(adafactor([(8, 8)] * 2))
        launches.clear()
        many = operations_of(adafactor([(8, 8)] * 12))
        assert many == few
        assert many.total() <= 22
        assert launches["line_kernel"] == 3 * 2  # steps, and terms
        of_each_shape = operations_of(adafactor([(8, 8), (8, 16), (4, 8)] * 4)).total()
        assert of_each_shape <= 22 * 3


def test_a_rule_that_averages_and_sums_nothing_up_launches_no_sums(monkeypatch):
    ampopt.set_backend("triton")
    param = torch.nn.Parameter(torch.ones(4, 8))
    param.grad = torch.ones_like(param)
    optimizer = Centered([param])
    with silent_launches(monkeypatch) as launches:
        optimizer.unscale_and_step(grads_scaled_by=2.0)
    assert launches == dict.fromkeys(
        ("detect_kernel", "control_kernel", "line_kernel", "update_kernel"), 1
    )


def test_each_stack_gets_the_numbers_of_its_own_rows():
    """A vector, or a matrix of another shape, lies between the matrices of a stack."""
    torch.manual_seed(0)
    shapes = [(4, 6), (5,), (3, 2), (4, 6), (3, 2)]
    values = [torch.randn(shape) for shape in shapes]
    results = []
    for backend in ("triton", "eager"):
        ampopt.set_backend(backend)
        params = [torch.nn.Parameter(x.clone()) for x in values]
        groups = [{"params": params[:3], "lr": 0.1}, {"params": params[3:], "lr": 0.01}]
        optimizer = ampopt.Adafactor(groups)
        for step in range(3):
            for place, param in enumerate(params):
                # One that joins late has another step count, and so another weight of averages.
                param.grad = None if place == 3 and step < 2 else values[place] * (step + 1)
            optimizer.unscale_and_step(grads_scaled_by=1.0)
        results.append([p.detach() for p in params])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_lines_are_compiled_before_anything_is_launched(monkeypatch):
    launches = []

    def compiled(device, variant, programs, arguments):
        launches.append((variant.name, programs))

    monkeypatch.setattr(triton_backend, "launch", compiled)
    row, grad = matrix((1, 4, 4), torch.float32, 0)
    work = Work(CPU, [row], [grad], rules.adafactor, [[0.5] * 6])
    Triton().prepare(work, Request(), decides=True)
    assert [entry for entry in launches if entry[0] == "line_kernel"] == [("line_kernel", 0)] * 2


@pytest.fixture(autouse=True)
def _backend_as_before():
    before = ampopt.get_backend()
    yield
    ampopt.set_backend(before)
