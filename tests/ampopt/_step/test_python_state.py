"""The snapshot of an optimizer's Python state detects and restores every change."""

import contextlib
import random
import sys
import types
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.tensor_only_optimizers import Foreach, made
from torch import Tensor

from ampopt._step.python_state import PythonState
from ampopt.testing.bits import bits

leaves = st.one_of(
    st.integers(), st.floats(), st.text(max_size=2), st.booleans(), st.none(),
    st.builds(lambda n: torch.full((2,), n), st.floats(-1, 1, width=32)),
    st.builds(lambda n: np.full(2, n), st.floats(-1, 1)),
)  # fmt: skip


def array_of(objects: list[Any]) -> np.ndarray:
    array = np.empty(len(objects), object)
    for index, value in enumerate(objects):
        array[index] = value
    return array


def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.lists(children, max_size=3).map(deque),
        st.lists(children, max_size=3).map(array_of),
        st.dictionaries(st.text(max_size=2), children, max_size=3),
        st.builds(lambda x: types.SimpleNamespace(x=x), children),
    )


def changes(value: Any) -> list[Callable[[], Any]]:
    """Every small change that can be made to ``value`` in place."""
    found: list[Callable[[], Any]] = []
    if isinstance(value, (list, deque)):
        found.append(lambda: value.append(0))
        if value:
            found.append(lambda: value.pop())
            found.append(lambda: value.__setitem__(0, object()))
    if isinstance(value, dict):
        found.append(lambda: value.update({"new": 1}))
        if value:
            found.append(lambda: value.popitem())
    if isinstance(value, types.SimpleNamespace):
        found.append(lambda: setattr(value, "x", object()))
        found.append(lambda: delattr(value, "x"))
        found.append(lambda: setattr(value, "y", None))
    if isinstance(value, np.ndarray) and value.size:
        found.append(lambda: value.__setitem__(0, 7.0))
    if isinstance(value, Tensor):
        found.append(lambda: setattr(value, "data", torch.zeros(2)))
        found.append(lambda: setattr(value, "data", value.data[:1]))
        found.append(lambda: setattr(value, "note", 1))
    items: Any = ()
    if isinstance(value, (list, tuple, deque, np.ndarray)):
        items = value
    elif isinstance(value, dict):
        items = value.values()
    elif isinstance(value, types.SimpleNamespace):
        items = vars(value).values()
    for item in items:
        found += changes(item)
    return found


def exactly(value: Any) -> Any:
    """``value`` as nested tuples to compare, types and attributes of tensors included."""
    if isinstance(value, Tensor):
        return bits(value), dict(vars(value))
    if isinstance(value, np.ndarray):
        return [exactly(item) for item in value] if value.dtype == object else value.tobytes()
    if isinstance(value, types.SimpleNamespace):
        return "namespace", exactly(vars(value))
    if isinstance(value, dict):
        return [(key, exactly(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return type(value), [exactly(item) for item in value]
    return repr(value)


@given(st.recursive(leaves, containers, max_leaves=8), st.data())
def test_any_change_to_the_host_state_is_noticed_and_restored(value, data):
    optimizer, _ = made(Foreach)
    optimizer.held = [value]
    before = exactly(value)
    host = PythonState(optimizer)
    assert host.changed_object() is None and host.only_grew() and host.hidden_object is None
    possible = changes(optimizer.held)
    data.draw(st.sampled_from(possible))()
    assert host.changed_object() is not None
    with contextlib.suppress(AttributeError, IndexError, KeyError):  # the first was there before
        data.draw(st.sampled_from(possible))()
    host.restore()
    assert exactly(optimizer.held) == exactly([value])
    assert exactly(value) == before
    assert host.changed_object() is None


@given(st.recursive(leaves, containers, max_leaves=8), st.data())
def test_a_snapshot_that_is_taken_again_is_as_good_as_a_new_one(value, data):
    optimizer, _ = made(Foreach)
    optimizer.held = [value]
    host = PythonState(optimizer)
    assert host.retake()
    data.draw(st.sampled_from(changes(optimizer.held)))()
    if not host.retake():
        return
    before = exactly(optimizer.held)
    assert host.changed_object() is None
    data.draw(st.sampled_from(changes(optimizer.held)))()
    assert host.changed_object() is not None
    host.restore()
    assert exactly(optimizer.held) == before


def test_numbers_and_random_states_can_be_taken_again_and_other_objects_not():
    optimizer, params = made(Foreach)
    optimizer.held, optimizer.generator = {"numbers": [1, 2.0]}, torch.Generator()
    host = PythonState(optimizer)
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.held["numbers"][0] = "one"
    torch.rand(2, generator=optimizer.generator)
    _ = random.random(), np.random.rand(), torch.rand(2)
    assert host.changed_object() is not None
    assert host.retake() and host.changed_object() is None
    optimizer.param_groups[0]["betas"] = (0.5, 0.25)
    assert not host.retake()  # it has an entry more
    host = PythonState(optimizer)
    optimizer.param_groups[0]["betas"] = (0.25, 0.5)
    assert host.retake()
    optimizer.held["numbers"][0] = []
    assert not host.retake()


def test_an_equal_container_in_its_place_is_another():
    optimizer, _ = made(Foreach)
    optimizer.held = {"n": 1}
    host = PythonState(optimizer)
    optimizer.held = {"n": 1}
    assert not host.retake()
    host = PythonState(optimizer)
    optimizer.held["n"] = 2
    host.restore()
    assert optimizer.held == {"n": 1}


def test_a_generator_that_appears_later_is_found(monkeypatch):
    optimizer, _ = made(Foreach)
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "numpy")
        host = PythonState(optimizer)
        assert host.retake()
    assert not host.retake()


def test_new_memory_of_the_same_layout_is_a_change():
    optimizer, params = made(Foreach)
    host, old = PythonState(optimizer), params[0].data_ptr()
    params[0].data = params[0].detach().clone()
    assert host.changed_object() is not None and not host.retake()
    host.restore()
    assert params[0].data_ptr() == old and host.changed_object() is None


@pytest.mark.parametrize("n", [2, 0])
def test_another_shape_of_the_same_memory_is_a_change(n):
    optimizer, _ = made(Foreach)
    optimizer.held = torch.zeros(n)
    host = PythonState(optimizer)
    optimizer.held.data = optimizer.held.view(1, n)
    assert host.changed_object() is not None and not host.retake()
    host.restore()
    assert optimizer.held.shape == (n,) and host.changed_object() is None


def test_an_equal_tuple_in_a_list_is_no_change():
    optimizer, _ = made(Foreach)
    optimizer.bounds = [(0.0, 1.0)]
    host = PythonState(optimizer)
    optimizer.bounds[0] = (0.0, float(1))
    assert host.changed_object() is None


def test_a_change_is_named_by_its_entry():
    optimizer, _ = made(Foreach)
    optimizer.held = {"a": 1, "b": 2, 3: 4}
    for change, name in (
        ({"b": 5}, "Foreach.held['b']"),
        ({"new": 1}, "Foreach.held['new']"),
        ({3: 5}, "Foreach.held"),
    ):
        host = PythonState(optimizer)
        optimizer.held |= change
        assert host.changed_object() == name
        host.restore()


@pytest.mark.parametrize("holder", [dict, types.SimpleNamespace])
def test_the_order_of_a_mapping_is_part_of_its_state(holder):
    optimizer, _ = made(Foreach)
    optimizer.held = holder(a=1, b=2)
    entries = optimizer.held if holder is dict else vars(optimizer.held)
    host = PythonState(optimizer)
    entries["a"] = entries.pop("a")
    assert host.changed_object() == "Foreach.held" and not host.only_grew()
    host.restore()
    assert list(entries) == ["a", "b"] and host.changed_object() is None


def test_tensors_are_found_wherever_they_are():
    optimizer, params = made(Foreach)
    model = torch.nn.Linear(1, 1)
    inner = torch.optim.SGD([model.weight], momentum=0.5)
    inner.state[model.weight]["deep"] = deque([{"x": torch.ones(1)}])
    optimizer.model, optimizer.inner = model, inner
    params[0].noted = torch.zeros(1)  # pyright: ignore[reportAttributeAccessIssue]
    found = {id(t) for t in PythonState(optimizer).tensors}
    expected = [*params, params[0].noted, *model.parameters()]  # pyright: ignore[reportAttributeAccessIssue]
    expected.append(inner.state[model.weight]["deep"][0]["x"])
    assert {id(t) for t in expected} <= found


def test_objects_that_refer_to_each_other_are_visited_once():
    optimizer, _ = made(Foreach)
    optimizer.held = [optimizer]
    optimizer.held.append(optimizer.held)
    assert PythonState(optimizer).changed_object() is None


def test_a_tensor_on_the_meta_device_does_not_matter():
    optimizer, _ = made(Foreach)
    optimizer.held = torch.empty(2, device="meta")
    host = PythonState(optimizer)
    optimizer.held.add_(1)
    assert host.hidden_object is None and host.changed_object() is None and host.retake()
