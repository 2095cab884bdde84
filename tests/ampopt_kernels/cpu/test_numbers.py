"""The C++ loops that are no rules, compared with torch's operations."""

import platform

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given
from support.kernel_rows import edge_numbers, fingerprint

from ampopt_kernels.cpu import numbers
from ampopt_kernels.cpu.backend import Cpu
from ampopt_kernels.cpu.bundles import TorchCopies
from ampopt_kernels.cpu.dtypes import DTYPES
from ampopt_kernels.cpu.numbers import (
    PART,
    NativeCopies,
    all_finite,
    common,
    measures,
    sums_of_squares,
)
from ampopt_kernels.cpu.watch import found_in
from ampopt_kernels.native.build import cpp_compiler
from ampopt_kernels.step import reciprocal
from ampopt_kernels.work import ParamRow, Work

pytestmark = pytest.mark.skipif(cpp_compiler() is None, reason="there is no C++ compiler here")

shapes = st.lists(
    st.one_of(st.tuples(st.integers(1, 5)), st.tuples(st.integers(1, 3), st.integers(1, 40))),
    min_size=1,
    max_size=5,
)
dtypes = st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64])


def filled(shape, dtype, values):
    size = torch.Size(shape).numel()
    repeated = (values * size)[:size]
    return torch.tensor(repeated, dtype=torch.float64).to(dtype).view(shape)


@pytest.mark.parametrize("copies", [TorchCopies, NativeCopies])
@given(shapes, dtypes, dtypes, edge_numbers(torch.float16))
def test_copies_move_every_bit_to_its_place(copies, shapes, dtype, grad_dtype, values):
    params = [filled(shape, dtype, values) for shape in shapes]
    grads = [filled(shape, grad_dtype, values[::-1]) for shape in shapes]
    size = sum(p.numel() for p in params)
    scratch, grad_scratch = torch.empty(size, dtype=dtype), torch.empty(size, dtype=grad_dtype)
    copied = copies(params, scratch)

    copied.load()
    assert fingerprint(scratch) == fingerprint(torch.cat([p.reshape(-1) for p in params]))
    copied.gather(grads, grad_scratch)
    assert fingerprint(grad_scratch) == fingerprint(torch.cat([g.reshape(-1) for g in grads]))

    scratch.mul_(-1)
    expected = [fingerprint(-p) for p in params]
    copied.store()
    assert [fingerprint(p) for p in params] == expected


sizes = st.sampled_from([0, 1, 31, 32, 33, 255, 257, PART - 1, PART, 2 * PART + 5])


@given(
    dtypes,
    sizes.filter(bool) | st.integers(1, 3 * PART),
    st.lists(st.floats(-(2.0**60), 2.0**60, width=32), min_size=1, max_size=40),
)
def test_sums_of_squares_have_the_bits_of_the_eager_backend(dtype, size, values):
    tensor = filled((size,), dtype, values)  # of which half precision makes infinities
    assert sums_of_squares([tensor]) == Cpu()._sums_of_squares([tensor])


@given(
    st.lists(st.tuples(st.sampled_from([torch.float32, torch.float64]), sizes), max_size=4),
    st.booleans(),
    st.lists(st.floats(-(2.0**60), 2.0**60, width=32), min_size=1, max_size=40),
)
def test_sums_of_squares_are_those_of_float64_with_any_number_of_threads(kinds, large, values):
    kinds = [*kinds, (torch.float32, (1 << 18) + 1)] if large else kinds  # worth several threads
    tensors = [
        torch.tensor(values, dtype=dtype).repeat(size // len(values) + 1)[:size].clone()
        for dtype, size in kinds
    ]
    expected = [tensor.double().square().sum().item() for tensor in tensors]
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(sums_of_squares(tensors))
    finally:
        torch.set_num_threads(before)
    assert results[0] == pytest.approx(expected, rel=1e-12)
    assert results == results[:1] * 3
    assert results[0] == [sums_of_squares([tensor])[0] for tensor in tensors]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="asks for vectors of x86")
def test_measures_have_the_same_bits_from_vectors_of_any_width(monkeypatch):
    tensors = [
        torch.linspace(-3.0, 5e4, size).to(dtype)
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
        for size in (1, 33, 600, PART, PART + 1)
    ]
    tensors[1][7] = float("nan")
    bounds = [(1, 0x3000, DTYPES[tensor.dtype].infinity, 0) for tensor in tensors]
    flags, expected = measures(tensors, bounds, 0.5)
    narrow = numbers.library("-mno-avx2").load()
    narrow.measure.argtypes = numbers.loops().measure.argtypes
    monkeypatch.setattr(numbers, "loaded", narrow)
    narrow_flags, columns = measures(tensors, bounds, 0.5)
    assert narrow_flags == flags
    assert fingerprint(columns) == fingerprint(expected)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("at", [0, 31, 32, 40])
@given(dtype=dtypes)
def test_a_sum_of_squares_is_not_finite_where_an_element_is_not(value, at, dtype):
    tensors = [torch.zeros(41, dtype=dtype), torch.ones(2, dtype=dtype)]
    tensors[0][at] = value
    first, second = sums_of_squares(tensors)
    assert repr(first) == repr(abs(value))
    assert second == 2


@given(
    st.lists(st.tuples(dtypes, sizes), min_size=1, max_size=4),
    edge_numbers(torch.float16),
    st.sampled_from([1.0, 3.0, 2.0**-16, 2.0**20, 0.0, 2.0**-140]),
)
@example([(torch.float16, 1)], (0.0,), 0.0)
def test_gradients_are_measured_as_torchs_operations_would(kinds, values, scale):
    work = Work(
        torch.device("cpu"),
        rows=[ParamRow(dtype) for dtype, _ in kinds],
        grads=[filled((size,), dtype, values) for dtype, size in kinds],
    )
    inverse = reciprocal(scale)
    loops, (report, squares) = numbers.loops(), found_in(work, inverse)
    numbers.loaded = None
    try:
        expected, expected_squares = found_in(work, inverse)
    finally:
        numbers.loaded = loops
    assert (report.flags, report.rows) == (expected.flags, expected.rows)
    assert repr(squares) == repr(expected_squares)
    if report.measures is not None and expected.measures is not None:
        assert torch.equal(report.measures[:, :3], expected.measures[:, :3])
        finite = ~torch.tensor(expected.flags)
        assert torch.equal(report.measures[finite], expected.measures[finite])


@given(
    st.lists(st.tuples(dtypes, st.one_of(sizes, st.integers(1, 600))), min_size=1, max_size=4),
    edge_numbers(torch.float16),
    st.booleans(),
    st.data(),
)
def test_all_finite_sees_every_element_of_every_tensor(kinds, values, large, data):
    kinds = [*kinds, (torch.float32, (1 << 18) + 1)] if large else kinds
    tensors = [filled((size,), dtype, values) for dtype, size in kinds]
    assert all_finite(tensors) == all(bool(tensor.isfinite().all()) for tensor in tensors)
    for tensor in tensors:
        tensor.fill_(-torch.finfo(tensor.dtype).max)
        tensor[: tensor.numel() // 2] *= -1
    assert all_finite(tensors)
    tensor = data.draw(st.sampled_from([t for t in tensors if t.numel()] or [torch.zeros(1)]))
    at = data.draw(st.integers(0, tensor.numel() - 1))
    for value in (float("inf"), float("-inf"), float("nan")):
        tensor[at] = value
        assert not all_finite([*tensors, tensor])


@given(st.floats(-(2.0**60), 2.0**60, width=32), st.integers(2, 70), st.data())
def test_common_is_what_all_elements_are(value, size, data):
    tensor = torch.full((size,), value)
    assert common(tensor) == value
    at = data.draw(st.integers(0, size - 1))
    for other in (value + 1 if abs(value) < 2**20 else -value, float("nan")):
        tensor[at] = other
        assert common(tensor) is None
    assert common(torch.full((size,), float("nan"))) is None
