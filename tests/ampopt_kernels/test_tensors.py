"""Flat views of tensors of any layout, and arithmetic dtypes."""

import hypothesis.strategies as st
import torch
from hypothesis import given
from support.layouts import places, tensors

from ampopt_kernels.tensors import (
    arithmetic,
    dense_like,
    flat,
    is_dense,
    real,
    widest,
)


@given(tensor=tensors())
def test_is_dense_by_the_definition(tensor):
    assert is_dense(tensor) == (places(tensor) == list(range(tensor.numel())))


@given(tensor=tensors())
def test_flat_is_the_memory_of_a_dense_tensor(tensor):
    if not is_dense(tensor):
        return
    view = flat(tensor)
    assert view.data_ptr() == tensor.data_ptr()
    assert view.shape == (tensor.numel(),)
    assert sorted(view.tolist()) == sorted(tensor.reshape(-1).tolist())
    view.add_(1000)
    assert all(x >= 1000 for x in tensor.reshape(-1).tolist())


@given(data=st.data(), like=tensors())
def test_dense_like_lines_elements_up(data, like):
    tensor = data.draw(tensors(like.shape))
    laid_out = dense_like(tensor, like)
    assert torch.equal(laid_out, tensor)
    assert is_dense(laid_out)
    model = torch.empty_like(like)
    if is_dense(like):
        # Sizes of 1 and of 0 have strides that mean nothing.
        for size, a, b in zip(like.shape, laid_out.stride(), like.stride(), strict=True):
            assert size <= 1 or like.numel() == 0 or a == b
    else:
        assert laid_out.numel() == 0 or places(laid_out) == places(model)
        assert flat(laid_out).tolist() == flat(model.copy_(tensor)).tolist()


@given(tensor=tensors())
def test_dense_like_itself_copies_nothing(tensor):
    if is_dense(tensor):
        assert dense_like(tensor, tensor) is tensor


def test_complex_numbers_are_pairs():
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    assert real(tensor).tolist() == [[1.0, 2.0], [3.0, -4.0]]
    assert real(tensor).data_ptr() == tensor.data_ptr()
    plain = torch.ones(2)
    assert real(plain) is plain


LOW = (torch.float16, torch.bfloat16, torch.float32)


def test_arithmetic_is_float64_for_float64_only():
    assert {arithmetic(dtype) for dtype in LOW} == {torch.float32}
    assert arithmetic(torch.float64) == torch.float64


def test_widest_is_float64_where_there_is_one():
    assert [widest(torch.device(name)) for name in ("cpu", "cuda", "xpu")] == [torch.float64] * 3
    assert widest(torch.device("mps")) == torch.float32
