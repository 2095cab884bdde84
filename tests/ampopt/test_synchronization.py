"""Each read of a tensor's values is reported once, and no patch stays behind."""

import pytest
import torch
from torch import Tensor

from ampopt._synchronization import watching

X = torch.ones(2)


@pytest.mark.parametrize(
    ("look", "names"),
    [
        (lambda: X.sum().item(), ["Tensor.item"]),
        (lambda: X.tolist(), ["Tensor.tolist"]),
        (lambda: X.cpu().numpy(), ["Tensor.cpu", "Tensor.numpy"]),
        (lambda: bool(X.sum()), ["aten._local_scalar_dense.default"]),
        (lambda: X[X > 0], ["aten.index.Tensor"]),
        (lambda: X.clone().index_put_((X > 0,), X), ["aten.index_put_.default"]),
        (lambda: X[torch.tensor([0])], []),
        (lambda: X.add(1).mul_(2), []),
    ],
)
def test_each_read_is_reported_once(look, names):
    seen = []
    with watching(seen.append):
        look()
    assert seen == names


def test_a_read_within_two_contexts_is_reported_to_both():
    outer, inner = [], []
    with watching(outer.append), watching(inner.append):
        X.tolist()
    assert outer == inner == ["Tensor.tolist"]


def test_nothing_stays_patched():
    before = [getattr(Tensor, name) for name in ("item", "tolist", "numpy", "cpu", "__array__")]
    own = set(vars(Tensor))
    with pytest.raises(ZeroDivisionError), watching(lambda look: None):
        _ = 1 / 0
    after = [getattr(Tensor, name) for name in ("item", "tolist", "numpy", "cpu", "__array__")]
    assert after == before
    assert set(vars(Tensor)) == own
