"""The loops of C++ that the compiled backend runs besides rules, against torch's operations."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from passes import edge_numbers, fingerprint

from ampopt_kernels.compiled import cpp_compiler
from ampopt_kernels.copies import NativeCopies, TorchCopies
from ampopt_kernels.native import all_finite, common, sum_of_squares

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
    wanted = [fingerprint(-p) for p in params]
    copied.store()
    assert [fingerprint(p) for p in params] == wanted


@given(
    st.sampled_from([torch.float32, torch.float64]),
    st.sampled_from([0, 1, 31, 32, 33, (1 << 14) - 1, 1 << 14, (1 << 15) + 5, (1 << 18) + 1]),
    st.lists(st.floats(-(2.0**60), 2.0**60, width=32), min_size=1, max_size=40),
)
def test_sum_of_squares_is_that_of_float64_with_any_number_of_threads(dtype, size, values):
    tensor = torch.tensor(values, dtype=dtype).repeat(size // len(values) + 1)[:size].clone()
    wanted = tensor.double().square().sum().item()
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(sum_of_squares(tensor))
    finally:
        torch.set_num_threads(before)
    assert found[0] == pytest.approx(wanted, rel=1e-12)
    assert found == found[:1] * 3


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("at", [0, 31, 32, 40])
def test_sum_of_squares_is_not_finite_where_an_element_is_not(value, at):
    tensor = torch.zeros(41)
    tensor[at] = value
    assert not torch.tensor(sum_of_squares(tensor)).isfinite()


@given(dtypes, edge_numbers(torch.float16), st.integers(1, 70), st.data())
def test_all_finite_sees_every_element(dtype, values, size, data):
    tensor = filled((size,), dtype, values)
    assert all_finite(tensor) == bool(tensor.isfinite().all())
    at = data.draw(st.integers(0, size - 1))
    largest = torch.finfo(dtype).max
    tensor.fill_(-largest)[at] = largest
    assert all_finite(tensor)
    for value in (float("inf"), float("-inf"), float("nan")):
        tensor[at] = value
        assert not all_finite(tensor)


@given(st.floats(-(2.0**60), 2.0**60, width=32), st.integers(2, 70), st.data())
def test_common_is_what_all_elements_are(value, size, data):
    tensor = torch.full((size,), value)
    assert common(tensor) == value
    at = data.draw(st.integers(0, size - 1))
    for other in (value + 1 if abs(value) < 2**20 else -value, float("nan")):
        tensor[at] = other
        assert common(tensor) is None
    assert common(torch.full((size,), float("nan"))) is None
