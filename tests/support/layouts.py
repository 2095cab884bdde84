"""Tensors of many memory layouts, for Hypothesis, and where their elements are."""

import math

import hypothesis.strategies as st
import torch


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
