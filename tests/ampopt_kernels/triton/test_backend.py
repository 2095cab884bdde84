"""The tables and launches of the triton backend, recorded and not run."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.counted_operations import counted
from support.kernel_rows import CHUNK, CPU, Placed, RowPlan, WorkPlan, works
from support.object_loops import need_object_loops, unavailable_loops
from torch.utils._python_dispatch import TorchDispatchMode

from ampopt_kernels import rules
from ampopt_kernels.native import objects
from ampopt_kernels.next_scale import PolicyConstants
from ampopt_kernels.step import run
from ampopt_kernels.step_data import Request
from ampopt_kernels.step_tensors import ParamRow, Work
from ampopt_kernels.triton import backend as triton_backend
from ampopt_kernels.triton import passes as triton_passes
from ampopt_kernels.triton import table
from ampopt_kernels.triton.backend import Triton

OFF = (False,) * 5
HYPER = (0.1, 0.0, 0.0, 0.0)


def launched(work, request=None):
    """Name, number of programs, and arguments of each launch of one step."""
    launches = []
    backend = Triton(
        lambda device, variant, programs, arguments: launches.append(
            (variant.name, programs, {**arguments, **variant.constants})
        )
    )
    run(lambda _: backend, [work], Request() if request is None else request)
    return launches


def row(n=3, dtype=torch.float32, shift=0, **kwargs):
    return RowPlan((n,), dtype, shift, (1.0,), flags=kwargs.pop("flags", OFF), **kwargs)


def is_aligned(row, grad):
    """Whether every address allows 16-byte accesses."""
    return all(t.data_ptr() % 16 == 0 for t in (grad, *row.outputs))


@given(
    sizes=st.lists(st.integers(1, 3 * CHUNK), min_size=1, max_size=20),
    request=st.sampled_from([Request(), Request(scale=torch.ones(())), Request(max_norm=1.0)]),
)
def test_three_launches_however_many_tensors_and_groups(sizes, request):
    rows = tuple(row(n, variant=i % 2) for i, n in enumerate(sizes))
    launches = launched(WorkPlan(rows, rules.sgd, (HYPER, HYPER)).build().work, request)
    assert [launch[0] for launch in launches] == [
        "detect_kernel",
        "control_kernel",
        "update_kernel",
    ]
    chunks = sum(-(-n // CHUNK) for n in sizes)
    assert [launch[1] for launch in launches] == [chunks, 1, chunks]


@given(plan=works(max_rows=6))
def test_one_more_detect_and_update_for_each_further_kind(plan):
    work = plan.build().work
    kinds = {
        (row.kind, is_aligned(row, grad))
        for row, grad in zip(work.rows, work.grads, strict=True)
        if grad.numel()
    }
    kernels = [launch[0] for launch in launched(work)]
    assert kernels.count("detect_kernel") == kernels.count("update_kernel") == len(kinds)
    assert kernels.count("control_kernel") == 1


@given(plan=works(max_rows=6))
def test_every_chunk_once(plan):
    """The launches of a pass cover each chunk of each row once, and nothing else."""
    work = plan.build().work
    covered = []
    for kernel, programs, arguments in launched(work):
        if kernel != "update_kernel":
            continue
        first = arguments["first"]
        for index, chunk in arguments["chunks"].view(-1, 2)[first : first + programs].tolist():
            covered.append((index, chunk))
            assert arguments["ROW"].flags == work.rows[index].flags
            of, grad = work.rows[index], work.grads[index]
            assert len(arguments["ROW"].dtypes) == len(of.dtypes)
            assert is_aligned(of, grad) or max(arguments["ROW"].aligns) == 1
    assert sorted(covered) == [
        (i, chunk) for i, g in enumerate(work.grads) for chunk in range(-(-g.numel() // CHUNK))
    ]


@given(
    st.lists(st.integers(1, 1 << 33), min_size=1, max_size=20),
    st.sampled_from([torch.float16, torch.float32, torch.float64]),
)
def test_programs_are_many_but_bounded_whatever_the_sizes(sizes, dtype):
    grads = [torch.empty(1, dtype=dtype).expand(n) for n in sizes]
    work = Work(CPU, [ParamRow(dtype) for _ in grads], grads)
    recorded = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table, "CHUNK", 1 << 12)
        patch.setattr(table, "BLOCK", 1 << 10)
        patch.setattr(triton_passes, "AHEAD", 1 << 6)
        Triton(lambda device, *launch: recorded.append(launch)).detect(work, Request())
    ((variant, programs, arguments),) = recorded
    chunk = arguments["chunk"]
    assert programs == sum(-(-n // chunk) for n in sizes)
    assert chunk % (variant.constants["BLOCK"] * variant.constants["AHEAD"]) == 0
    assert programs <= table.PROGRAMS + len(sizes)
    assert chunk == 1 << 12 or programs > table.PROGRAMS // 2


def test_detect_is_not_launched_without_a_check():
    work = WorkPlan((row(),), rules.sgd, (HYPER,)).build().work
    kernels = [launch[0] for launch in launched(work, Request(check=False))]
    assert kernels == ["control_kernel", "update_kernel"]


@pytest.mark.parametrize(
    ("kernel", "write"),
    [("update_kernel", False), ("control_kernel", True), ("detect_kernel", True)],
)
def test_a_kernel_that_cannot_be_compiled_fails_before_anything_changes(kernel, write, monkeypatch):
    """Else control would have counted the step, or detect have stored unscaled gradients."""
    launches = []

    def launch(device, variant, programs, arguments):
        if variant.name == kernel:
            raise RuntimeError("the compiler failed")
        launches.append(programs)

    monkeypatch.setattr(triton_backend, "launch", launch)
    work = WorkPlan((row(),), rules.sgd, (HYPER,)).build().work
    with pytest.raises(RuntimeError, match="the compiler failed"):
        run(lambda _: Triton(), [work], Request(scale=torch.ones(()), write=write))
    assert not any(launches)
    assert write or not launches  # a step that writes early has compiled update, by 0 programs


def test_update_is_compiled_beforehand_once_for_each_kind(monkeypatch):
    updates = []

    def launch(device, variant, programs, arguments):
        if variant.name == "update_kernel":
            kind = variant, arguments["h_table"].dtype, arguments["coefficients"].dtype
            updates.append((programs, kind))

    monkeypatch.setattr(triton_backend, "launch", launch)
    backend = Triton()
    work = WorkPlan((row(), row(dtype=torch.float64)), rules.sgd, (HYPER,)).build().work
    for _ in range(2):
        run(lambda _: backend, [work], Request())
        work.refresh(list(work.grads), work.hyper)
    assert [programs for programs, _ in updates] == [0, 0, 1, 1, 1, 1]
    assert updates[0][1] == updates[2][1] == updates[4][1]


def test_kernels_for_gradients_alone_are_compiled_beforehand_once(monkeypatch):
    """Some calls make such rows anew each time: ``accumulate`` of shards, for one."""
    compiled = []
    monkeypatch.setattr(triton_backend, "launch", lambda _, variant, *__: compiled.append(variant))
    backend = Triton()
    for _ in range(2):
        work = Work(CPU, [ParamRow(torch.float32)], [torch.ones(4)])
        backend.prepare(work, Request(write=True), decides=True)
    assert [variant.name for variant in compiled] == ["detect_kernel", "control_kernel"]


def test_tables_are_sent_when_an_address_changed():
    built = WorkPlan((row(), row()), rules.sgd, (HYPER,)).build()
    work = built.work

    def tables(grads):
        again = Work(CPU, work.rows, grads, work.rule, work.hyper, work.uploads)
        arguments = launched(again)[-1][2]
        return arguments["table"], arguments["chunks"]

    first = tables(work.grads)
    same = tables(work.grads)
    assert all(a is b for a, b in zip(first, same, strict=True))
    moved = [work.grads[0], work.grads[1].clone()]
    table, chunks = tables(moved)
    assert table is not first[0]
    assert table.view(2, -1)[1, 0] == moved[1].data_ptr()
    assert chunks is first[1]


def test_gradients_that_become_less_aligned_are_read_without_alignment():
    """A GPU fails if it reads 16 bytes at once at another address."""

    def updates(work):
        launches = [arguments for name, _, arguments in launched(work) if name == "update_kernel"]
        return [max(arguments["ROW"].aligns) for arguments in launches]

    work = WorkPlan((row(), row()), rules.sgd, (HYPER,)).build().work
    assert updates(work) == [16]
    work.refresh([work.grads[0], Placed.of(work.grads[1], shift=1).tensor], work.hyper)
    assert sorted(updates(work)) == [1, 16]


@pytest.mark.parametrize("in_cpp", [False, True])
def test_gradients_that_moved_are_asked_for_their_addresses_once(monkeypatch, in_cpp):
    """One call of C++ reads all addresses; without C++, ``data_ptr`` of each tensor does.

    No tensor is made of a list of Python numbers: for 300 parameters that took longer than the rest
    of the step.
    """
    if in_cpp:
        need_object_loops()
    else:
        monkeypatch.setattr(objects, "loops", unavailable_loops())
    work = WorkPlan((row(),) * 5, rules.sgd, (HYPER,)).build().work
    launched(work, Request(max_norm=1.0, scale=torch.ones(())))
    tensors, data_ptr = [], torch.Tensor.data_ptr
    grads = [grad.clone() for grad in work.grads]
    work.refresh(grads, work.hyper)

    def asked_for(tensor):
        tensors.append(tensor)
        return data_ptr(tensor)

    monkeypatch.setattr(torch.Tensor, "data_ptr", asked_for)
    monkeypatch.setattr(torch, "tensor", None)  # to be called by nobody
    table = launched(work, Request(max_norm=1.0, scale=torch.ones(())))[-1][2]["table"]
    assert len(tensors) == (0 if in_cpp else len(grads))
    assert table.view(5, -1)[:, 0].tolist() == list(map(data_ptr, grads))


def test_a_steady_step_runs_no_operation_besides_its_launches():
    """Except those that make tensors for its results, which take about a microsecond each."""
    work = WorkPlan((row(),) * 5, rules.adam, ((0.1, 0.9, 0.99, 1e-8, 0.0),)).build().work
    scale, counters = torch.ones(()), torch.zeros(2, dtype=torch.int32)
    policy = PolicyConstants(*[1.0] * len(PolicyConstants._fields))
    request = Request(scale=scale, policy=policy, counters=counters)
    launched(work, request)
    operations = []

    class Made(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            operations.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with Made():
        launched(work, request)
    # Flags of detect; flag, factors, scale, counters and numbers for update.
    assert sorted(operations) == ["empty"] * 5 + ["empty_like", "view"]


def test_masters_are_read_as_many_elements_at_a_time():
    """A thread reads 16 bytes of float32 and 8 bytes of float16: the same elements of both."""
    half = row(dtype=torch.float16, master=True)
    arguments = launched(WorkPlan((half,), rules.sgd, (HYPER,)).build().work)[-1][2]
    assert arguments["ROW"].aligns == (8, 16, 8)
    assert arguments["ROW"].has_copy


def test_loops_over_objects_are_wanted_where_kernels_are_launched(monkeypatch):
    """A step that launches kernels reads hundreds of addresses at a time."""
    calls = []
    monkeypatch.setattr(objects.loops, "want", lambda: calls.append(True))
    monkeypatch.setattr(triton_backend, "INTERPRETED", False)
    launched(WorkPlan((row(),), rules.sgd, (HYPER,)).build().work)
    assert not calls
    Triton()
    assert calls


def test_a_zero_in_place_of_a_hyperparameter_on_the_device_is_sent():
    device = torch.device("meta")
    work = Work(device, [], [], rules.sgd, [[torch.ones((), device=device), 0.5]])
    table.hyper_table(work)
    assert counted(lambda: table.hyper_table(work)) == {"copy": 1}  # of the tensor
    work.refresh([], [[0.0, 0.5]])
    assert counted(lambda: table.hyper_table(work))["copy"]
    assert not counted(lambda: table.hyper_table(work))
