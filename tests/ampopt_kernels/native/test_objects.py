"""Checks on hundreds of objects, in C++ and in Python."""

import threading
from typing import Any

import pytest
import torch
from support.object_loops import need_object_loops

from ampopt_kernels.native import objects
from ampopt_kernels.native.build import Library
from ampopt_kernels.native.objects import (
    EMPTY,
    IdentityGuard,
    LayoutGuard,
    Loops,
    addresses,
    bump_versions,
    loops,
)

pytestmark = pytest.mark.usefixtures("implementation")


CHANGES = {
    "an entry more": lambda a, b: a.update(z=1),
    "an entry less": lambda a, b: a.pop("x"),
    "an equal value": lambda a, b: b.update(x=torch.ones(2)),
    "another order": lambda a, b: a.update(x=a.pop("x")),
    "exchanged values": lambda a, b: a.update(x=a["y"], y=a["x"]),
    "exchanged keys": lambda a, b: a.update(y=a.pop("x"), x=a.pop("y")),
    "all gone": lambda a, b: b.clear(),
    "from one to the next": lambda a, b: b.update(y=a.pop("y")),
}
LISTS = {
    "an item more": lambda a, b: a.append(1.0),
    "an item less": lambda a, b: b.pop(),
    "an equal item": lambda a, b: a.__setitem__(0, torch.ones(2)),
    "another order": lambda a, b: a.reverse(),
    "all gone": lambda a, b: b.clear(),
    "the end of one at the beginning of the next": lambda a, b: b.insert(0, a.pop()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_of_contents_is_seen(change):
    a, b = {"x": torch.ones(2), "y": torch.ones(2)}, {"x": torch.ones(2)}
    guard = IdentityGuard([], [(a, None), ({}, None), (b, None)])
    assert guard.unchanged()
    a["x"].add_(1)
    assert guard.unchanged()
    CHANGES[change](a, b)
    assert not guard.unchanged()


@pytest.mark.parametrize("change", CHANGES)
def test_of_entries_that_are_given_every_change_is_seen_and_of_others_none(change):
    a: dict[str, Any] = {"mine": 1, "x": torch.ones(2), "y": torch.ones(2)}
    b: dict[str, Any] = {"x": torch.ones(2)}
    guard = IdentityGuard([], [(a, ("x", "y")), ({}, ()), (b, {"x"})])
    b["mine"] = b["his"] = 2
    a["mine"] = a.pop("y"), a.pop("x")
    a["y"], a["x"] = a["mine"]
    assert guard.unchanged() and guard.changed() == []
    CHANGES[change](a, b)
    assert guard.unchanged() == (change in ("an entry more", "another order"))


@pytest.mark.parametrize("change", LISTS)
def test_every_change_of_lists_is_seen(change):
    a, b = [torch.ones(2), 1.5], [torch.ones(2), "b"]
    guard = IdentityGuard([a, [], b], [])
    a[0].add_(1)
    assert guard.unchanged()
    LISTS[change](a, b)
    assert not guard.unchanged()


def test_a_tuple_is_compared_like_a_list_and_what_follows_too():
    """Torch steps with ``group["params"] = tuple(...)``."""
    entries = {"x": torch.ones(2)}
    guard = IdentityGuard([(torch.ones(2), 1.5), [entries]], [(entries, None)])
    assert guard.unchanged() and guard.changed() == []
    entries["x"] = torch.ones(2)
    assert guard.changed() == [entries]


def test_contents_are_those_of_any_kind_of_dict():
    class Kind(dict):
        pass

    values = Kind(x=1.5)
    guard = IdentityGuard([], [(values, None)])
    assert guard.unchanged()
    values["x"] = 2.5
    assert not guard.unchanged()


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
    assert addresses(tensors).tolist() == [t.data_ptr() if t.numel() else EMPTY for t in tensors]
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


def example():
    return [torch.zeros(2, 3), torch.zeros(()), torch.zeros(4, dtype=torch.float64)]


def freed(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


CHANGED = {
    "freed": freed(torch.zeros(2, 3)),
    "a freed part": freed(torch.zeros(7)[1:].view(2, 3)),
    "shape": torch.zeros(3, 2),
    "rank": torch.zeros(6),
    "strides": torch.zeros(3, 2).t(),
    "dtype": torch.zeros(2, 3, dtype=torch.float16),
    "device": torch.zeros(2, 3, device="meta"),
    "layout": torch.zeros(2, 3).to_sparse(),
    "negation": torch._neg_view(torch.zeros(2, 3)),  # pyright: ignore[reportPrivateImportUsage]
}


def fits(guard: LayoutGuard, tensors: list[Any], **options: Any) -> list[int]:
    """What the guard finds of each tensor; its address is checked."""
    found, bytes_of_each = guard.read(tensors, **options)
    read = [t.grad for t in tensors] if options else tensors
    assert found.tolist() == [
        addresses([t])[0] if fit == 1 else 0 for t, fit in zip(read, bytes_of_each, strict=True)
    ]
    return list(bytes_of_each)


def test_others_laid_out_the_same_are_alike():
    guard = LayoutGuard(example())
    with torch.no_grad():
        others = [torch.ones(100)[7:13].view(2, 3), torch.ones(9)[3], *example()[2:]]
        assert fits(guard, others) == [1, 1, 1]
    assert fits(guard, others) == [1, 1, 1]


@pytest.mark.parametrize("what", CHANGED)
def test_what_a_flat_kernel_would_misread_is_not_alike(what):
    assert fits(LayoutGuard(example()), [CHANGED[what], *example()[1:]]) == [2, 1, 1]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(3, 2).t(), torch.zeros(2, 3)),
        (torch.zeros(2, dtype=torch.complex64), torch.zeros(2, dtype=torch.complex64).conj()),
    ],
    ids=["transposed", "conjugated"],
)
def test_what_is_not_contiguous_or_not_real_is_told_apart_too(one, other):
    same = one.clone(memory_format=torch.preserve_format)
    assert fits(LayoutGuard([one]), [same]) == [1]
    assert fits(LayoutGuard([one]), [other]) == [2]


def test_hundreds_of_layouts_are_told_apart():
    tensors = [torch.zeros(n) for n in range(1, 301)]
    guard = LayoutGuard(tensors)
    assert fits(guard, tensors) == [1] * 300
    assert fits(guard, tensors[::-1]) == [2] * 300
    assert fits(guard, [*tensors[:299], tensors[0]]) == [1] * 299 + [2]


@pytest.mark.parametrize("what", CHANGED)
def test_none_fits_and_the_others_are_compared(what):
    first, *others = example()
    guard = LayoutGuard(example())
    assert fits(guard, [None, *others]) == [0, 1, 1]
    assert fits(guard, [None, None, None]) == [0, 0, 0]
    assert fits(guard, [first, None, others[1]]) == [1, 0, 1]
    assert fits(guard, [CHANGED[what], None, others[1]]) == [2, 0, 1]
    assert fits(guard, [None, CHANGED[what], CHANGED[what]]) == [0, 2, 2]
    assert fits(guard, example()) == [1, 1, 1]


def test_the_gradients_of_tensors_are_read_in_their_place():
    params: list[Any] = [torch.nn.Parameter(tensor) for tensor in example()]
    params.append(torch.zeros(0))
    params[0].grad, params[3].grad = torch.ones(2, 3), torch.ones(0)
    guard = LayoutGuard([torch.zeros(2, 3), *example()[1:], torch.zeros(0)])
    assert fits(guard, params, of_gradients=True) == [1, 0, 0, 1]
    params[2].grad = torch.ones(4, dtype=torch.float64)
    params[0].grad = None
    assert fits(guard, params, of_gradients=True) == [0, 0, 1, 1]
    params[1].data = torch.ones((), dtype=torch.float64)
    params[1].grad = torch.ones((), dtype=torch.float64)
    assert fits(guard, params, of_gradients=True) == [0, 2, 1, 1]


def test_a_gradient_that_a_backward_pass_leaves_is_read():
    param = torch.nn.Parameter(torch.ones(3))
    guard = LayoutGuard([torch.ones(3)])
    assert fits(guard, [param], of_gradients=True) == [0]
    for _ in range(2):
        (param * 2).sum().backward()
        assert fits(guard, [param], of_gradients=True) == [1]
    param.grad = None
    assert fits(guard, [param], of_gradients=True) == [0]


def test_the_address_of_a_tensor_without_elements_is_not_that_of_none():
    assert addresses([torch.zeros(0), None]).tolist() == [EMPTY, 0]


def test_the_address_of_none_is_0():
    tensor = torch.ones(2)
    assert addresses([None, tensor]).tolist() == [0, tensor.data_ptr()]


@pytest.mark.parametrize("at", [(), (0,), (1,), (2,), (3,), (0, 2, 3)])
def test_the_containers_that_have_changed_are_found(at):
    containers: list[Any] = [[1, 2], [None], {"a": 3}, {}]
    guard = IdentityGuard(containers[:2], [(container, None) for container in containers[2:]])
    for container in map(containers.__getitem__, at):
        container.append(4) if isinstance(container, list) else container.update(a=5)
    assert list(map(id, guard.changed())) == [id(containers[i]) for i in at]


@pytest.mark.parametrize("what", CHANGED)
@pytest.mark.parametrize("first", [0, 1], ids=["all there", "one absent"])
def test_loops_that_are_compiled_later_know_what_was_there_before(what, first, monkeypatch):
    need_object_loops()
    with monkeypatch.context() as patch:
        patch.setattr(objects, "loops", Loops())
        guard = LayoutGuard(example())
    others = [CHANGED[what], *example()[1:]]
    assert fits(guard, others) == [2, 1, 1]
    monkeypatch.setattr(objects, "loops", loops)
    assert fits(guard, [None] * first + example()[first:]) == [1 - first, 1, 1]
    monkeypatch.delattr(objects, "_layout")  # Python compares nothing any more
    assert fits(guard, example()) == [1, 1, 1]
    assert fits(guard, others) == [2, 1, 1]


class Compiler:
    """A fake library that records how it was loaded."""

    def __init__(self, compiled=False, fails=False):
        self.compiled, self.fails, self.loads = compiled, fails, []

    def is_compiled(self):
        return self.compiled

    def load(self, niceness):
        self.loads.append(niceness)
        if self.fails:
            raise RuntimeError("no header")
        return objects._library().load()


def loops_from(monkeypatch, compiler):
    monkeypatch.setattr(objects, "_library", lambda: compiler)
    loops = Loops()
    assert loops.loaded is None
    loops.want()
    monkeypatch.setattr(objects, "loops", loops)
    return loops


def test_the_compiler_is_started_once_loops_over_objects_pay_and_not_waited_for(monkeypatch):
    compiler = Compiler(fails=True)
    loops_from(monkeypatch, compiler)
    guard = IdentityGuard([[compiler]], [])
    for _ in range(objects.CHECKS - 1):
        assert guard.unchanged()
    assert not compiler.loads
    before = set(threading.enumerate())
    for _ in range(3):
        assert guard.unchanged()
    for thread in set(threading.enumerate()) - before:
        thread.join()
    assert compiler.loads == [19]


def test_checks_before_the_loops_are_wanted_do_not_count(monkeypatch):
    """As in a program whose first optimizer is stepped by eager operations."""
    compiler = Compiler(fails=True)
    monkeypatch.setattr(objects, "loops", Loops())
    guard = IdentityGuard([[compiler]], [])
    for _ in range(objects.CHECKS):
        assert guard.unchanged()
    monkeypatch.setattr(objects, "_library", lambda: compiler)
    objects.loops.want()
    before = set(threading.enumerate())
    for _ in range(objects.CHECKS):
        assert guard.unchanged()
    for thread in set(threading.enumerate()) - before:
        thread.join()
    assert compiler.loads == [19]


def test_loops_over_objects_that_are_compiled_are_taken_up_at_once(monkeypatch):
    need_object_loops()
    library = objects._library()
    loops = loops_from(monkeypatch, library)
    assert isinstance(library, Library)
    assert loops.loaded is not None


def test_if_the_loops_cannot_be_compiled_python_does_the_checks(monkeypatch):
    compiler = Compiler(compiled=True, fails=True)
    loops = loops_from(monkeypatch, compiler)
    for _ in range(3):
        assert loops.loaded is None
        loops.want()
    assert compiler.loads == [0]  # once
    assert addresses([tensor := torch.zeros(3)]).tolist() == [tensor.data_ptr()]
