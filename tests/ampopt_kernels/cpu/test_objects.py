"""Questions about many objects, in C++ and in Python."""

import pytest
import torch

from ampopt_kernels.cpu import native, objects
from ampopt_kernels.cpu.build import cpp_compiler
from ampopt_kernels.cpu.objects import Contents, addresses, bump_versions, same


@pytest.fixture(autouse=True, params=["native", "python"])
def implementation(request, monkeypatch):
    if request.param == "python":
        monkeypatch.setattr(objects, "object_loops", lambda: None)
    elif cpp_compiler() is None:
        pytest.skip("there is no C++ compiler here")
    else:
        native.loops()


def test_the_same_are_the_very_objects_and_as_many():
    a, b, c = [1.0], [1.0], [1.0]
    assert same([], [])
    assert same([a, b], [a, b])
    for other in ([a, c], [b, a], [a], [a, b, c], []):
        assert not same(other, [a, b])


def test_equal_tensors_are_not_the_same():
    tensor = torch.ones(())
    assert not same([torch.ones(())], [tensor])
    assert not same([torch.ones(3)], [torch.ones(3)])


CHANGES = {
    "an entry more": lambda a, b: a.update(z=1),
    "an entry less": lambda a, b: a.pop("x"),
    "an equal value": lambda a, b: b.update(x=torch.ones(2)),
    "exchanged values": lambda a, b: a.update(x=a["y"], y=a["x"]),
    "exchanged keys": lambda a, b: a.update(y=a.pop("x"), x=a.pop("y")),
    "another order": lambda a, b: a.update(x=a.pop("x")),
    "all gone": lambda a, b: b.clear(),
    "from one to the next": lambda a, b: b.update(y=a.pop("y")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_of_contents_is_seen(change):
    a, b = {"x": torch.ones(2), "y": torch.ones(2)}, {"x": torch.ones(2)}
    known = Contents([a, {}, b])
    assert known.unchanged()
    a["x"].add_(1)
    a["x"] = a["x"]
    assert known.unchanged()
    CHANGES[change](a, b)
    assert not known.unchanged()


def test_contents_are_those_of_any_kind_of_dict():
    class Kind(dict):
        pass

    kept = Kind(x=1.5)
    known = Contents([kept])
    assert known.unchanged()
    kept["x"] = 2.5
    assert not known.unchanged()


def test_addresses_are_those_of_first_elements():
    class Kind(torch.Tensor):
        pass

    tensors = [
        torch.nn.Parameter(torch.zeros(3)),
        torch.zeros(10)[4:],
        torch.zeros(2, 3).t(),
        torch.zeros(0),
        torch.zeros(3, dtype=torch.float16).as_subclass(Kind),
        torch.zeros(3, device="meta"),
    ]
    assert addresses(tensors).tolist() == [t.data_ptr() for t in tensors]
    assert addresses([]).tolist() == []


def test_addresses_follow_what_is_done_to_a_tensor():
    tensor, other = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(3))
    tensor.data = torch.zeros(3)
    assert addresses([tensor]).tolist() == [tensor.data_ptr()]
    with torch.no_grad():
        tensor.set_(torch.zeros(5)[1:4])  # pyright: ignore[reportArgumentType]
    assert addresses([tensor]).tolist() == [tensor.data_ptr()]
    before = addresses([tensor, other]).tolist()
    torch.utils.swap_tensors(tensor, other)
    assert addresses([tensor, other]).tolist() == before[::-1]


def test_where_objects_are_made_otherwise_each_tensor_is_asked(monkeypatch):
    monkeypatch.setattr(objects, "_tensors_follow_heads", lambda: False)
    tensor = torch.zeros(3)
    assert addresses([tensor]).tolist() == [tensor.data_ptr()]


@pytest.mark.parametrize("empty", [torch.zeros, lambda n, device: Unlike()])
def test_whether_objects_are_made_otherwise_is_found_out(monkeypatch, empty):
    monkeypatch.setattr(torch, "empty", empty)
    found = objects._tensors_follow_heads.__wrapped__()
    assert found is (empty is torch.zeros)


class Unlike:
    """Nothing is right behind its head, and it says nothing of where a tensor is."""

    __slots__ = ("tensor",)


def test_versions_are_those_after_a_write():
    tensors = [torch.ones(2), torch.ones(2).view(1, 2), torch.nn.Parameter(torch.ones(()))]
    before = [tensor._version for tensor in tensors]
    bump_versions(tensors)
    assert [tensor._version for tensor in tensors] == [version + 1 for version in before]
    bump_versions([])


def test_a_tensor_without_a_version_is_passed_over_as_by_torch():
    with torch.inference_mode():
        tensor = torch.ones(2)
    other = torch.ones(2)
    bump_versions([tensor, other])
    assert other._version == 1
