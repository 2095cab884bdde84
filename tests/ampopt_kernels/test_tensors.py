"""Flat views of tensors of any layout, memory that tensors share, and arithmetic dtypes."""

import math

import hypothesis
import hypothesis.strategies as st
import torch
from hypothesis import given

from ampopt_kernels.tensors import (
    address_range,
    arithmetic,
    dense_like,
    flat,
    is_dense,
    overlaps_itself,
    real,
    share_memory,
    widest,
)


@st.composite
def tensors(draw, shape=None):
    """Contiguous, permuted, strided and expanded tensors; elements differ if their memory does."""
    if shape is None:
        shape = tuple(draw(st.lists(st.integers(0, 3), max_size=4)))
    order = draw(st.permutations(range(len(shape))))
    stretch = [draw(st.sampled_from([1, 1, 1, 2])) for _ in shape]
    base = [shape[axis] * stretch[axis] for axis in order]
    memory = torch.arange(float(math.prod(base))).reshape(base)
    back = [order.index(axis) for axis in range(len(shape))]
    tensor = memory.permute(back)
    for axis, step in enumerate(stretch):
        tensor = tensor[(slice(None),) * axis + (slice(None, None, step),)]
    expanded = draw(st.sampled_from([None, None, *range(len(shape))]))
    if expanded is not None and shape[expanded] > 1:
        tensor = tensor.narrow(expanded, 0, 1).expand(shape)
    assert tensor.shape == shape
    return tensor


def places(tensor):
    """The offset of each element from the first one, in memory."""
    where = [0]
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        where = [at + i * stride for at in where for i in range(size)]
    return sorted(where)


@given(tensor=tensors())
def test_is_dense_by_the_definition(tensor):
    assert is_dense(tensor) == (places(tensor) == list(range(tensor.numel())))


@st.composite
def strided(draw):
    """Tensors of any shape and strides over a few elements, made by ``as_strided``."""
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    strides = draw(st.lists(st.integers(0, 4), min_size=len(shape), max_size=len(shape)))
    return torch.arange(32.0).as_strided(shape, strides, draw(st.integers(0, 4)))


@hypothesis.settings(max_examples=100)
@given(tensor=strided() | tensors())
def test_overlaps_itself_by_the_definition(tensor):
    assert overlaps_itself(tensor) == (len(set(places(tensor))) < tensor.numel())


@hypothesis.settings(max_examples=100)
@given(one=strided(), other=strided(), half=st.booleans())
def test_shared_memory_by_the_definition(one, other, half):
    """Two tensors in one storage; elements of the second may be half as large."""
    storage = torch.arange(64.0)
    one, other = (
        (storage.view(torch.bfloat16) if narrow else storage).as_strided(
            t.shape, t.stride(), t.storage_offset()
        )
        for t, narrow in ((one, False), (other, half))
    )
    bytes_of = []
    for tensor in (one, other):
        size = tensor.element_size()
        first = tensor.data_ptr() if tensor.numel() else 0
        addresses = {first + p * size + i for p in places(tensor) for i in range(size)}
        addresses = addresses if tensor.numel() else set()
        assert address_range(tensor) == (
            (min(addresses), max(addresses) + 1) if addresses else (0, 0)
        )
        bytes_of.append(addresses)
    if all(bytes_of):
        assert share_memory(one, other) == bool(bytes_of[0] & bytes_of[1])


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
