"""Every rule on shards: results are those of one process, with one decision for all ranks.

This process trains the whole model, on ordinary tensors, to compare with. Gradients are sums of
powers of two, so that clipping by a norm, summed in whatever order, is exact too.
"""

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.averaging_rules import Damped
from support.local_ranks import mesh_of
from support.optimizers import EVERY_RULE, Plain, Signed
from support.requirements import skip_unless_it_runs
from support.shards import layouts, spread
from torch.nn import Parameter

import ampopt
from ampopt._step.rank_agreement import Agreement
from ampopt._step.sharding import dtensor
from ampopt._synchronization import watching
from ampopt.testing import as_on_a_device
from ampopt.testing.bits import bits

SHAPES: dict[str, list[tuple[int, ...]]] = {
    "fsdp": [(8, 3), (3,), (2,)],
    "hsdp": [(8, 3), (5,)],
    "tp": [(4, 2), (3, 5), (3,)],
    "submeshes": [(4, 2), (3, 5)],
    "2-D": [(5, 6), (7,), (3, 2), (2,), (2,)],
    "strided": [(8, 3), (7, 2), (6,), (4, 3)],
}
"""The shapes of the parameters, for each layout."""
ORDINARY: tuple[Any, list[Any]] = (None, [])


def meshes(layout: str) -> list[tuple[Any, list[Any]]]:
    """Mesh and placements of each parameter; an ordinary one has no mesh."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    rows, columns, whole = Shard(0), Shard(1), Replicate()
    n = torch.distributed.get_world_size()
    if layout == "fsdp":
        flat = mesh_of(n)
        return [(flat, [rows]), (flat, [rows]), ORDINARY]
    names = ("replicas", "shards") if layout == "hsdp" else ("dp", "tp")
    mesh = mesh_of(2, n // 2, names=names)
    if layout == "hsdp":
        return [(mesh, [whole, rows]), (mesh, [whole, rows])]
    if layout == "tp":
        flat = mesh["tp"]
        return [(flat, [rows]), (flat, [columns]), (flat, [whole])]
    if layout == "submeshes":  # which only the mesh that they were sliced from contains
        return [(mesh["dp"], [rows]), (mesh["tp"], [columns])]
    if layout == "strided":  # of fully_shard after ColwiseParallel, and RowwiseParallel
        strided = _StridedShard(0, split_factor=2)
        return [(mesh, [strided, rows])] * 3 + [(mesh, [rows, columns])]
    return [
        (mesh, [rows, columns]),
        (mesh, [rows, rows]),
        (mesh["dp"], [rows]),
        (mesh["tp"], [whole]),
        ORDINARY,
    ]


def placed(value: torch.Tensor, mesh: Any, placements: list[Any]) -> Any:
    return value.clone() if mesh is None else spread(value, mesh, placements)


def whole(tensor: Any) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def numbers(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2.0 ** torch.randint(-3, 4, shape, generator=generator)


def named(name: str) -> Any:
    own = {"Signed": Signed, "Plain": Plain, "Damped": Damped}
    return own.get(name) or getattr(ampopt, name)


def trained(
    layout: str,
    backend: str,
    name: str,
    dtype: torch.dtype,
    options: dict,
    steps: list[dict],
    by_parts: bool,
) -> list[Any]:
    """The result of each step, and the gathered bits of parameters and states in the end."""
    ampopt.set_backend(backend)
    shapes = SHAPES[layout]
    places = meshes(layout) if by_parts else [ORDINARY] * len(shapes)
    params: Any = [
        Parameter(placed(numbers(shape, i).to(dtype), *places[i])) for i, shape in enumerate(shapes)
    ]
    optimizer: Any = named(name)([{"params": params, **options}], lr=0.25)
    scale: Any = ampopt.DynamicLossScale(init_scale=4.0, growth_interval=2)
    told, held = [], []

    def give(seed: int, bad: float | None, where: int, absent: set[int]) -> None:
        for i, (p, shape) in enumerate(zip(params, shapes, strict=True)):
            p.grad = None
            if i in absent:
                continue
            grad = (numbers(shape, seed + i) * 4.0).to(dtype)
            if bad is not None and where % len(params) == i:
                grad.view(-1)[-1] = bad
            p.grad = placed(grad, *places[i])

    for number, step in enumerate(steps):
        give(100 * number, step["bad"], step["where"], step["absent"])
        if step["drop"] is not None:
            optimizer.accumulate(grads_scaled_by=scale, drop=step["drop"])
            give(100 * number + 50, None, 0, step["absent"])
        if step["split"] and dtype == torch.float32:
            optimizer.unscale(grads_scaled_by=scale)
            _, found_inf, scale = optimizer.step_after_unscale()
        else:
            _, found_inf, scale = optimizer.unscale_and_step(
                grads_scaled_by=scale, max_norm=step["max_norm"]
            )
        norm = None if optimizer.grad_norm is None else repr(float(optimizer.grad_norm))
        held = [{"param": p, **optimizer.state.get(p, {})} for p in params]
        for p, kept in zip(params, held, strict=True):
            for key, value in kept.items():
                alike = dtensor.is_dtensor(value) == dtensor.is_dtensor(p)
                assert value.shape != p.shape or alike, f"{key} is {type(value)}"
        told.append((found_inf.item(), scale.item(), norm))
    ampopt.set_backend("auto")
    return [*told, *({key: bits(whole(value)) for key, value in kept.items()} for kept in held)]


STEP = st.fixed_dictionaries(
    {
        "bad": st.sampled_from([None, None, float("inf"), float("nan")]),
        "where": st.integers(0, 4),
        "max_norm": st.sampled_from([None, 1.0, float("inf")]),
        "split": st.booleans(),
        "drop": st.sampled_from([None, "window", "micro_batch"]),
        "absent": st.sets(st.integers(0, 4), max_size=3),
    }
)
STEPS = st.lists(STEP, min_size=1, max_size=4)
FORMS = (
    (torch.float32, {}),
    (torch.float16, {}),
    (torch.bfloat16, {"master_weights": True}),
)


def check(pool: Any, *case: Any) -> None:
    expected = trained(*case, by_parts=False)
    for told in pool.run(trained, *case, True, timeout=60):
        assert told == expected


def plain_step(**changes: Any) -> dict[str, Any]:
    step = {"bad": None, "where": 1, "max_norm": None, "split": False, "drop": None}
    return {**step, "absent": set(), **changes}


STORY = [
    plain_step(max_norm=1.0, absent={1}),
    plain_step(bad=float("inf")),
    plain_step(split=True, absent={0, 3}),
    plain_step(bad=float("inf"), drop="window", max_norm=1.0),
    plain_step(bad=float("inf"), drop="micro_batch", max_norm=1.0),
]


@pytest.mark.parametrize(
    "backend, layout",
    [*(("eager", layout) for layout in SHAPES), ("triton", "2-D"), ("triton", "strided")],
    indirect=["backend"],
)
@settings(max_examples=2)
@given(data=st.data())
def test_parts_are_stepped_as_the_whole(four_ranks, layout, backend, data):
    name = data.draw(st.sampled_from(["AdamW", "SGD", "RAdam", "Signed"]))
    form, steps = data.draw(st.sampled_from(FORMS)), data.draw(STEPS)
    check(four_ranks, layout, backend, name, *form, steps)


@pytest.mark.parametrize("name", ["AdamW", "Adafactor"])
def test_the_compiled_backend_steps_shards_too(two_ranks, name):
    skip_unless_it_runs("compiled")
    check(two_ranks, "fsdp", "compiled", name, *FORMS[0], STORY)


def averaged_from_sharded_means(is_sharded: bool) -> list[bytes]:
    """The bits of a parameter and its states after two steps.

    Args:
        is_sharded: whether to shard the means of rows after the first step.
    """
    from torch.distributed.tensor import Shard

    place = meshes("fsdp")[0]
    p: Any = Parameter(placed(numbers((8, 3), 0), *place))
    optimizer = ampopt.Adafactor([p], lr=0.25)
    for seed in (1, 2):
        p.grad = placed(numbers((8, 3), seed), *place)
        optimizer.unscale_and_step(grads_scaled_by=4.0)
        if is_sharded and seed == 1:
            state = optimizer.state[p]
            state["row_var"] = state["row_var"].redistribute(placements=[Shard(0)])
    return [bits(whole(value)) for value in (p, *optimizer.state[p].values())]


def test_sharded_means_of_rows_are_replicated_before_a_step(two_ranks):
    expected = two_ranks.run(averaged_from_sharded_means, False)
    assert two_ranks.run(averaged_from_sharded_means, True) == expected


def with_24_bit_masters(by_parts: bool) -> list[bytes]:
    """The bits of a large parameter and its states after two steps of the compiled Adafactor."""
    ampopt.set_backend("compiled")
    place = meshes("fsdp")[0] if by_parts else ORDINARY
    p: Any = Parameter(placed(numbers((128, 64), 0).bfloat16(), *place))
    optimizer = ampopt.Adafactor([p], lr=0.25, master_weights=True, master_bits=24)
    for seed in (1, 2):
        p.grad = placed(numbers((128, 64), seed).bfloat16(), *place)
        optimizer.unscale_and_step(grads_scaled_by=4.0)
    ampopt.set_backend("auto")
    return [bits(whole(value)) for value in (p, *optimizer.state[p].values())]


def test_rows_and_columns_are_averaged_beside_24_bit_masters(two_ranks):
    skip_unless_it_runs("compiled")
    assert two_ranks.run(with_24_bit_masters, True) == [with_24_bit_masters(False)] * 2


@pytest.mark.parametrize("cls", EVERY_RULE)
def test_every_rule_is_stepped_by_parts(two_ranks, cls):
    check(two_ranks, "fsdp", "eager", cls.__name__, *FORMS[0], STORY)


@pytest.mark.parametrize("layout", ["hsdp", "tp", "submeshes", "2-D", "strided"])
def test_rows_and_columns_are_averaged_over_all_ranks(four_ranks, layout):
    check(four_ranks, layout, "eager", "Adafactor", torch.float32, {}, STORY)


@pytest.mark.parametrize("backend", ["triton"], indirect=True)
def test_kernels_average_rows_and_columns_over_all_ranks(four_ranks, backend):
    for name in ("Adafactor", "Damped"):
        check(four_ranks, "strided", backend, name, torch.float32, {}, STORY[:3])


def counted(layout: str) -> list[int]:
    """The number of collectives of a step: in one call, clipped, split, plain, and accumulated."""
    from torch.distributed.tensor.debug import CommDebugMode

    spread, counts = list(zip(SHAPES[layout], meshes(layout), strict=True)), []
    params: Any = [Parameter(placed(torch.ones(shape), *place)) for shape, place in spread]
    optimizer = ampopt.AdamW(params)

    def split() -> None:
        optimizer.unscale(grads_scaled_by=2.0)
        optimizer.step_after_unscale()

    def accumulates() -> None:
        optimizer.accumulate(grads_scaled_by=2.0)
        optimizer.accumulate(grads_scaled_by=2.0)
        optimizer.unscale_and_step(grads_scaled_by=2.0)

    for step in (
        lambda: optimizer.unscale_and_step(grads_scaled_by=2.0),
        lambda: optimizer.unscale_and_step(grads_scaled_by=2.0),
        lambda: optimizer.unscale_and_step(grads_scaled_by=2.0, max_norm=1.0),
        split,
        optimizer.step,
        accumulates,
    ):
        for p, (shape, place) in zip(params, spread, strict=True):
            p.grad = placed(torch.ones(shape), *place)
        with CommDebugMode() as mode:
            step()
        counts.append(mode.get_total_counts())
    return counts


@pytest.mark.parametrize("layout", SHAPES)
def test_a_step_makes_one_all_reduce(four_ranks, layout):
    assert four_ranks.run(counted, layout) == [[1, 1, 1, 1, 0, 3]] * 4


def changing(layout: str) -> tuple[list[int], int, dict[str, int]]:
    """Steps in which other parameters have gradients.

    Returns:
        The collectives of each step; how many gradients had their placements compared with those of
        their parameters in steps that made no plan; and the reasons for plans.
    """
    from torch.distributed.tensor.debug import CommDebugMode

    spread, counts = list(zip(SHAPES[layout], meshes(layout), strict=True)), []
    params: Any = [Parameter(placed(torch.ones(shape), *place)) for shape, place in spread]
    optimizer, compared, name = ampopt.AdamW(params), 0, "redistribute_gradient"
    for absent in ({1}, set(), {0}, {1}, {0, 2, 3, 4}, set()):
        for i, (p, (shape, place)) in enumerate(zip(params, spread, strict=True)):
            p.grad = None if i in absent else placed(torch.ones(shape), *place)
        plan = optimizer._ampopt.runner.plan
        with (
            CommDebugMode() as mode,
            mock.patch.object(dtensor, name, wraps=getattr(dtensor, name)) as spy,
        ):
            optimizer.unscale_and_step(grads_scaled_by=2.0, max_norm=1.0)
        counts.append(mode.get_total_counts())
        compared += spy.call_count * (plan is optimizer._ampopt.runner.plan)
    runner = optimizer._ampopt.runner
    return counts, compared, dict(runner.reasons)


@pytest.mark.parametrize("layout", SHAPES)
def test_sets_of_gradients_that_change_cost_neither_plans_nor_collectives(four_ranks, layout):
    appeared = "group 0, parameter 1 has a gradient for the first time"
    for counts, compared, reasons in four_ranks.run(changing, layout):
        assert (counts, compared) == ([1] * 6, 0)
        assert reasons == {"the first step": 1, appeared: 1}


MATRICES = [(5, 4), (3, 8)]


def collectives_of(name: str) -> list[Any]:
    """Collectives of steps on sharded matrices and on local ones, and the largest error."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.debug import CommDebugMode

    ampopt.set_backend("eager")
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    alone = mesh_of(4, 1, names=("all", "one"))["one"]
    together = [(at, places) for at, places in layouts() if at is not alone]
    counts, far = [], 0.0
    for places in (together, [(alone, [Shard(0)])], [(mesh, [Replicate(), Shard(1)])]):
        values = [numbers(shape, i) for i, shape in enumerate(MATRICES) for _ in places]
        at = places * len(MATRICES)
        parts = [Parameter(spread(v, *where)) for v, where in zip(values, at, strict=True)]
        wholes = [Parameter(value.clone()) for value in values]
        both = [named(name)(params, lr=0.25) for params in (parts, wholes)]
        mode = CommDebugMode()
        for step in range(2):  # the second of which has states
            for i, (part, p, where) in enumerate(zip(parts, wholes, at, strict=True)):
                p.grad = numbers(tuple(p.shape), 100 * step + i)
                part.grad = spread(p.grad, *where)
            both[1].unscale_and_step(grads_scaled_by=2.0, max_norm=1.0)
            with mode:
                both[0].unscale_and_step(grads_scaled_by=2.0, max_norm=1.0)
        counts.append(mode.get_total_counts())
        for part, p, where in zip(parts, wholes, at, strict=True):
            apart = dtensor.local(part.detach()) - spread(p.detach(), *where).to_local()
            far = max(far, *apart.abs().flatten().tolist(), 0.0)
    ampopt.set_backend("auto")
    return [counts, far]


@pytest.mark.parametrize("name, few", [("Adafactor", 3), ("Damped", 2), ("Muon", 4)])
def test_all_matrices_take_a_few_collectives(four_ranks, name, few):
    for counts, far in four_ranks.run(collectives_of, name, timeout=60):
        assert counts == [few, 0, few]
        assert far == 0.0


def with_some_gradients() -> list[bool]:
    """Whether Muon steps shards as whole matrices: one is frozen and one lacks its gradient."""
    from torch.distributed.tensor import Shard

    place: Any = mesh_of(4), [Shard(0)]
    wholes = [Parameter(numbers(shape, i)) for i, shape in enumerate((*MATRICES, (4, 4)))]
    parts: Any = [Parameter(spread(p.detach(), *place)) for p in wholes]
    for params in (wholes, parts):
        params[0].requires_grad_(False)  # its gradient is used nevertheless, as torch does
    optimizers: Any = ampopt.Muon(wholes), ampopt.Muon(parts)
    for step in range(4):
        for i, (p, part) in enumerate(zip(wholes, parts, strict=True)):
            p.grad = None if i == step else numbers(tuple(p.shape), 10 * step + i)
            part.grad = None if p.grad is None else spread(p.grad, *place)
        for optimizer in optimizers:
            optimizer.unscale_and_step(grads_scaled_by=2.0)
    return [torch.equal(whole(part), p) for p, part in zip(wholes, parts, strict=True)]


def test_muon_steps_the_shards_that_have_gradients(four_ranks):
    assert four_ranks.run(with_some_gradients) == [[True] * 3] * 4


def momenta_in_bfloat16() -> list[bool]:
    """Whether the momentum is right: of a plain matrix, of one on a mesh of one rank, of shards."""
    from torch.distributed.tensor import Shard

    alone, grad = mesh_of(4, 1, names=("all", "one"))["one"], numbers((5, 4), 1).bfloat16()
    places = [ORDINARY, (alone, [Shard(0)]), (mesh_of(4), [Shard(0)])]
    params: Any = [Parameter(placed(torch.zeros_like(grad), *place)) for place in places]
    optimizer = ampopt.Muon(params, nesterov=False)
    for param, place in zip(params, places, strict=True):
        param.grad = placed(grad, *place)
    optimizer.step()
    momentum = torch.zeros_like(grad).lerp_(grad, 0.05)
    return [torch.equal(whole(optimizer.state[p]["momentum_buffer"]), momentum) for p in params]


def test_muon_does_not_divide_the_momentum_that_it_orthogonalizes(four_ranks):
    """As torch's step does to a bfloat16 momentum before pytorch/pytorch#194664."""
    assert four_ranks.run(momenta_in_bfloat16) == [[True] * 3] * 4


def steady(form: str) -> int:
    """How many times four steps find out anew which ranks all-reduce together."""
    made: list[None] = []
    p: Any = Parameter(placed(torch.ones(4), *meshes("fsdp")[0]))
    optimizer = ampopt.AdamW([p])
    with pytest.MonkeyPatch.context() as patch:
        init = Agreement.__init__
        patch.setattr(Agreement, "__init__", lambda *a, **k: made.append(init(*a, **k)))
        for _ in range(4):
            p.grad = placed(torch.ones(4), p.device_mesh, p.placements)
            if form == "joined":
                optimizer.unscale_and_step(grads_scaled_by=2.0)
            else:
                optimizer.unscale(grads_scaled_by=2.0)
                optimizer.step_after_unscale()
    return len(made)


def test_the_deciding_ranks_are_found_once(two_ranks):
    assert two_ranks.run(steady, "joined") == [1] * 2
    assert two_ranks.run(steady, "split") == [1] * 2


def arriving(is_sharded: bool) -> list[bool]:
    """For each step, whether it waited for a gradient whose collective was still running."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    p: Any = Parameter(placed(torch.ones(4), *meshes("fsdp")[0]))
    if not is_sharded:
        p = Parameter(torch.ones(4))
    optimizer, right = ampopt.SGD([p], lr=0.25), []
    for step in range(3):
        if is_sharded:
            p.grad = placed(torch.ones(4), p.device_mesh, p.placements)
            p.grad._local_tensor = AsyncCollectiveTensor(p.grad._local_tensor)
        else:
            p.grad = AsyncCollectiveTensor(torch.ones(4))
        optimizer.unscale_and_step(grads_scaled_by=1.0)
        right.append(whole(p).tolist() == [0.75 - 0.25 * step] * 4)
    return right


@pytest.mark.parametrize("is_sharded", [True, False])
def test_pending_collectives_of_a_gradient_are_waited_for(two_ranks, is_sharded):
    assert two_ranks.run(arriving, is_sharded) == [[True] * 3] * 2


def without_gradients(name: str, max_norm: float | None, form: str) -> list[Any]:
    """Scales, flags and norms of steps with gradients on both ranks, on rank 0, and on no rank."""
    from torch.distributed.tensor import DTensor

    cls, rank = named(name), torch.distributed.get_rank()
    p: Any = Parameter(placed(torch.ones(4), *meshes("fsdp")[0]))
    optimizer = cls([p], lr=0.25)
    scale: Any = ampopt.DynamicLossScale(init_scale=4.0, growth_interval=1)
    told = []
    for has, value in ((True, 1.0), (rank == 0, 1.0), (False, 1.0), (rank == 0, float("inf"))):
        part = torch.full((2,), value)
        grad = DTensor.from_local(part, p.device_mesh, p.placements) if has else None
        before = bits(dtensor.local(p))
        if form == "closure":

            def closure(scale, grad=grad):
                p.grad = None if grad is None else grad.mul(scale.item())
                return torch.ones(())

            if value == 1.0:
                scale = optimizer.unscale_and_step(closure, scale, max_norm=max_norm).scale
        else:
            p.grad = grad
            if form == "several":
                found = ampopt.unscale_and_step([optimizer], scale, max_norm=max_norm)
            else:
                found = optimizer.unscale_and_step(grads_scaled_by=scale, max_norm=max_norm)
            scale = found.scale
            told.append(found.found_inf.item())
        stepped = bits(dtensor.local(p)) != before
        assert stepped == (has and (value == 1.0))
        norm = optimizer.grad_norm
        told += [scale.item(), None if norm is None else (norm.dtype, norm.item())]
    return told


@pytest.mark.parametrize("name", ["SGD", "Plain"])
@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("form", ["joined", "several", "closure"])
def test_a_rank_without_gradients_takes_part(two_ranks, name, max_norm, form):
    first, second = two_ranks.run(without_gradients, name, max_norm, form)
    assert first == second
    scales = [x for x in first if isinstance(x, float) and x > 1]
    assert scales[:3] == [8.0, 16.0, 16.0]  # where nobody has gradients, it learns nothing


def statistics_of_no_gradients(name: str) -> Any:
    """What is known of norm and loss after steps without gradients on any rank, and after one."""
    p: Any = Parameter(placed(torch.ones(4), *meshes("fsdp")[0]))
    optimizer = named(name)([p], lr=0.5)
    handle = ampopt.skip_when(optimizer, norm_deviations=6.0, loss_deviations=6.0, warmup=2)
    for _ in range(3):
        optimizer.unscale_and_step(grads_scaled_by=2.0, loss=1.0)
    before = handle.state_dict()
    if torch.distributed.get_rank():
        p.grad = torch.ones_like(p)
    found_inf = optimizer.unscale_and_step(grads_scaled_by=2.0, loss=1.0).found_inf
    return before, handle.state_dict(), found_inf.item()


@pytest.mark.parametrize("name", ["SGD", "Plain"])
def test_skip_when_counts_no_step_in_which_no_rank_has_gradients(two_ranks, name):
    for before, after, found_inf in two_ranks.run(statistics_of_no_gradients, name):
        assert before == {"norm": [0.0] * 3, "loss": [0.0] * 3}
        assert after["loss"] == [1.0, 1.0, 0.0]
        assert after["norm"][0] == 1.0
        assert found_inf == 0.0


def skipped_without_gradients(name: str, on_device: bool) -> Any:
    """The skips of steps of which no rank has a gradient, as told at once and by a watch."""
    with as_on_a_device() if on_device else nullcontext():
        p: Any = Parameter(placed(torch.ones(4), *meshes("fsdp")[0]))
        optimizer = named(name)([p], lr=0.5)
        watch, handle = ampopt.Watch(optimizer), ampopt.skip_when(optimizer, loss=3.0)
        skipped = [optimizer.unscale_and_step(grads_scaled_by=2.0, loss=5.0).skipped]
        handle.remove()
        no_scale = torch.tensor([float("nan")])
        skipped.append(optimizer.unscale_and_step(grads_scaled_by=no_scale).skipped)
        p.grad = torch.ones_like(p) if torch.distributed.get_rank() else None
        skipped.append(optimizer.unscale_and_step(grads_scaled_by=no_scale).skipped)
    return skipped, watch.read()["skipped_by"]


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("name", ["SGD", "Plain"])
def test_a_step_in_which_no_rank_has_gradients_is_no_skip(two_ranks, name, on_device):
    for skipped, by in two_ranks.run(skipped_without_gradients, name, on_device):
        assert skipped == [False, False, True]
        assert by == {"overflow": 1, "norm": 0, "loss": 0}


def with_gradients_of(which: int, name: str, plain: bool) -> str:
    """The error of a step on whole matrices, if only some ranks have gradients."""
    p: Any = Parameter(placed(torch.ones(4, 2), *meshes("fsdp")[0]))
    optimizer = named(name)([p])
    if which in (2, torch.distributed.get_rank()):
        p.grad = placed(torch.ones(4, 2), p.device_mesh, p.placements) if which == 2 else p * 1.0
    before = bits(dtensor.local(p))
    try:
        optimizer.step() if plain else optimizer.unscale_and_step(grads_scaled_by=2.0)
    except RuntimeError as error:
        assert bits(dtensor.local(p)) == before
        return str(error)
    assert (bits(dtensor.local(p)) != before) == (which == 2)
    return ""


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("name", ["Adafactor", "Damped", "Muon"])
def test_gradients_of_some_ranks_only_are_refused_where_all_have_to_step(two_ranks, name, plain):
    texts = two_ranks.run(with_gradients_of, 1, name, plain, timeout=10)
    lacking = "some ranks have gradients that others lack (group 0, parameter 0: 1 of 2 ranks)"
    assert all(lacking in text for text in texts)
    for which in (2, 3):
        assert two_ranks.run(with_gradients_of, which, name, plain) == ["", ""]


def apart_on_a_device(name: str) -> tuple[int, str]:
    """How often the host reads while ranks have gradients of other parameters; and the error."""
    looks: list[str] = []
    with as_on_a_device():
        params: Any = [Parameter(placed(torch.ones(4, 2), *meshes("fsdp")[0])) for _ in range(2)]
        optimizer = named(name)(params)
        for step in range(24):
            for number, p in enumerate(params):
                here = step == 0 or number == (step + torch.distributed.get_rank()) % 2
                p.grad = torch.ones_like(p) if here else None
            try:
                with watching(looks.append) if 0 < step < 8 else nullcontext():
                    optimizer.step()
            except RuntimeError as error:
                return len(looks), str(error)
    return len(looks), ""


@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
def test_ranks_with_other_gradients_on_a_device_learn_of_it_without_waiting(two_ranks, name):
    for looks, text in two_ranks.run(apart_on_a_device, name, timeout=10):
        assert looks == 0
        assert "(group 0, parameter 0: 1 of 2 ranks; group 0, parameter 1: 1 of 2 ranks)" in text
        assert "found some steps later" in text


def stages(name: str) -> list[float]:
    """How far two stages of a pipeline, with matrices on a mesh each, end from a whole model."""
    from torch.distributed.tensor import Shard

    rows = [Shard(0)]
    mesh = mesh_of(2, 2, names=("dp", "tp"))["tp"]
    stage = torch.distributed.get_rank() // 2
    whole: list[Any] = [Parameter(numbers((4, 3), seed)) for seed in range(3)]
    own = whole[:1] if stage == 0 else whole[1:]
    params: list[Any] = [Parameter(spread(p.detach(), mesh, rows)) for p in own]
    group = torch.distributed.group.WORLD
    optimizers: Any = named(name)(params, process_group=group), named(name)(whole)
    for seed in (10, 20):
        for index, p in enumerate(whole):
            p.grad = numbers((4, 3), seed + index)
        for p, q in zip(params, own, strict=True):
            p.grad = spread(q.grad, mesh, rows)
        for optimizer in optimizers:
            optimizer.unscale_and_step(grads_scaled_by=2.0)
    pairs = zip(params, own, strict=True)
    return [(p.detach().full_tensor() - q.detach()).abs().max().item() for p, q in pairs]


@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
def test_stages_of_a_pipeline_may_have_unequal_numbers_of_matrices(four_ranks, name):
    for apart in four_ranks.run(stages, name):
        assert all(far < 1e-6 for far in apart)


def evaluated(nan_on: int) -> tuple[str, str]:
    """The result of a closure whose loss is NaN on one rank."""
    p: Any = Parameter(placed(torch.ones(4), *meshes("fsdp")[0]))
    optimizer = ampopt.AdamW([p])

    def closure(scale: float) -> torch.Tensor:
        p.grad = torch.ones_like(p)
        return torch.tensor(float("nan") if torch.distributed.get_rank() == nan_on else 1.0)

    try:
        optimizer.unscale_and_step(closure, grads_scaled_by=2.0)
    except ampopt.NonFiniteGradientError as error:
        return error.reason, str(error)
    return "none", ""


def test_a_loss_that_is_not_finite_on_one_rank_raises_on_both(two_ranks):
    (reason, text), (other_reason, other_text) = two_ranks.run(evaluated, 1)
    assert reason == other_reason == "loss"
    assert "the loss of another rank is not finite" in text
    assert "the loss is nan" in other_text


def on_two_meshes(shape: tuple[int, ...] = (4,)) -> list[Any]:
    """Parameters on two meshes, neither of which covers the other."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard

    rows = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("a", "b"))["b"]
    columns = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("c", "d"))["d"]
    params = [Parameter(placed(torch.ones(shape), mesh, [Shard(0)])) for mesh in (rows, columns)]
    for p in params:
        p.grad = torch.ones_like(p)
    return params


def apart(stepped_before: bool) -> str:
    """The error for meshes that do not show which ranks all-reduce together."""
    params = on_two_meshes()
    optimizer = ampopt.AdamW(params)
    if stepped_before:
        optimizer.step()  # as torch's does
        assert all((dtensor.local(p) < 1).all() for p in params)
    before = bits([dtensor.local(p) for p in params]), len(optimizer.state)
    try:
        optimizer.unscale_and_step(grads_scaled_by=2.0)
    except RuntimeError as error:
        assert before == (bits([dtensor.local(p) for p in params]), len(optimizer.state))
        return str(error)
    return ""


@pytest.mark.parametrize("stepped_before", [False, True])
def test_meshes_that_do_not_cover_each_other_are_refused(four_ranks, stepped_before):
    for text in four_ranks.run(apart, stepped_before):
        assert "no mesh with names for its dimensions covers" in text


def summed_apart() -> list[str]:
    """The errors of rules that sum over parameters on two meshes."""
    errors = []
    for cls in (ampopt.LAMB, ampopt.Adafactor):
        group = torch.distributed.group.WORLD
        optimizer: Any = cls(on_two_meshes((4, 4)), process_group=group)
        try:
            optimizer.unscale_and_step(grads_scaled_by=2.0)
        except RuntimeError as error:
            errors.append(str(error))
    return errors


def test_sums_over_parameters_on_several_meshes_are_refused(four_ranks):
    for errors in four_ranks.run(summed_apart):
        assert len(errors) == 2
        assert all("make an optimizer for each mesh" in error for error in errors)


def on_some_ranks() -> tuple[float, float, list[str], list[str]] | None:
    """On a mesh of ranks 0 and 1 without names: norm, flag, ranks, and errors."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard

    mesh, rank = DeviceMesh("cpu", [[0, 1]]), torch.distributed.get_rank()
    pair = torch.distributed.new_group([0, 1])
    if rank > 1:
        return None
    param = Parameter(placed(torch.ones(4), mesh, [Shard(0), Shard(0)]))
    copied = Parameter(torch.ones(5))
    copies = {"params": [copied], "replicated": True}
    optimizer: Any = ampopt.SGD([{"params": [param]}, copies], lr=0.25)
    errors = []
    param.grad = torch.ones_like(param)
    try:
        ampopt.LAMB([param]).step()  # sums over whole parameters
    except RuntimeError as error:
        errors.append(str(error))
    for group in (None, pair):
        optimizer.process_group = group
        param.grad, copied.grad = torch.ones_like(param), torch.ones(5)
        optimizer.step()
        try:
            optimizer.unscale_and_step(grads_scaled_by=1.0, max_norm=float("inf"))
        except RuntimeError as error:
            errors.append(str(error))
    param.grad = torch.full_like(param, float("inf") if rank else 1.0)
    result = optimizer.unscale_and_step(grads_scaled_by=1.0)
    try:
        optimizer.unscale_and_step(grads_scaled_by=1.0 + rank)
    except RuntimeError as error:
        errors.append(str(error))
    return optimizer.grad_norm.item(), result.found_inf.item(), result.overflowed, errors


def test_a_mesh_of_some_ranks_whose_dimensions_have_no_names(four_ranks):
    of_ranks = four_ranks.run(on_some_ranks)
    for rank, (norm, found_inf, overflowed, errors) in enumerate(of_ranks[:2]):
        assert (norm, found_inf) == (3.0, 1.0)
        assert overflowed == (["group 0, parameter 0"] if rank else ["rank 1"])
        of_sums, without_group, of_scales = errors
        assert "no mesh with names for its dimensions covers" in without_group == of_sums
        assert "rank 0: 1.0; rank 1: 2.0" in of_scales


def on_a_part_of_the_ranks() -> list[tuple[float, float]]:
    """Flag and norm of steps on a mesh of two dimensions that has two of the four ranks."""
    from torch.distributed.tensor import Shard

    mesh = mesh_of(2, 2, 1, names=("pp", "dp", "tp"))
    stage, steps = mesh.get_local_rank("pp"), []
    placements = [Shard(0), Shard(1)]
    params: Any = [
        Parameter(placed(torch.ones(4, 4), mesh["dp", "tp"], placements)),
        Parameter(placed(torch.ones(4), mesh["dp"], placements[:1])),
    ]
    optimizer = ampopt.SGD(params, lr=0.25)
    for value in (1.0, float("inf")):
        whole_grad = torch.ones(4, 4)
        whole_grad[-1, -1] = 1.0 if stage else value
        params[0].grad = placed(whole_grad, mesh["dp", "tp"], placements)
        params[1].grad = torch.ones_like(params[1])
        result = optimizer.unscale_and_step(grads_scaled_by=1.0, max_norm=float("inf"))
        assert optimizer.grad_norm is not None
        steps.append((result.found_inf.item(), optimizer.grad_norm.item()))
    return steps


def test_ranks_of_a_submesh_of_two_dimensions_decide_together(four_ranks):
    norm = 20.0**0.5
    first = [(0.0, pytest.approx(norm)), (1.0, float("inf"))]
    second = [(0.0, pytest.approx(norm))] * 2
    assert four_ranks.run(on_a_part_of_the_ranks) == [first, first, second, second]


def outside_of_the_mesh(name: str, bits_: int, is_told: bool) -> tuple[Any, ...]:
    """Parameter and states on this rank, after a step of what the mesh of rank 0 alone has."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard

    mesh, rank = DeviceMesh("cpu", [0]), torch.distributed.get_rank()
    param: Any = Parameter(placed(torch.ones(64, 128), mesh, [Shard(0)]))
    group = torch.distributed.group.WORLD if is_told else None
    optimizer: Any = named(name)([param], lr=0.25, state_bits=bits_, process_group=group)
    optimizer.initialize_states()
    if rank == 0:
        param.grad = torch.ones_like(param)
    result = optimizer.unscale_and_step(grads_scaled_by=1.0)
    states = [dtensor.local(state).numel() for state in optimizer.state[param].values()]
    return result.skipped, dtensor.local(param.detach()).flatten()[:1].tolist(), states


@pytest.mark.parametrize("is_told", [False, True])
@pytest.mark.parametrize("name, bits_", [("AdamW", 32), ("AdamW", 8), ("Adafactor", 32)])
def test_a_rank_outside_of_the_mesh_has_nothing_to_step(two_ranks, name, bits_, is_told):
    (skipped, values, states), outside = two_ranks.run(outside_of_the_mesh, name, bits_, is_told)
    assert not skipped and values[0] < 1.0 and min(states) > 0
    assert outside[:2] == (False, []) and max(outside[2]) <= 1  # the step count, and a key


def clipped(bits_of_master: int) -> tuple[list[float], list[float]]:
    """The masters' values after a step whose unscaled gradients were clipped; and as expected."""
    from torch.distributed.tensor import Shard

    param = Parameter(spread(torch.ones(2, 2).bfloat16(), mesh_of(2), [Shard(0)]))
    options = {"master_weights": True, "master_bits": bits_of_master}
    optimizer = ampopt.SGD([param], lr=0.25, **options)
    param.grad = torch.full_like(param, 8.0)
    optimizer.unscale(grads_scaled_by=4.0)
    torch.nn.utils.clip_grad_norm_(optimizer.master_params(), 1.0)  # of four elements of 2.0
    optimizer.step_after_unscale()
    (master,) = optimizer.master_params()
    return whole(master).flatten().tolist(), [1.0 - 0.25 * 2.0 / 4.0] * 4


@pytest.mark.parametrize("bits_of_master", [24, 32])
def test_clipping_of_sharded_masters_reaches_the_step(two_ranks, bits_of_master):
    for found, expected in two_ranks.run(clipped, bits_of_master):
        assert found == pytest.approx(expected, rel=1e-5)


def edited_shards() -> tuple[str, list[float]]:
    """The error after an edit of a gradient's shard; and a 24-bit master, its shard written to."""
    param: Any = Parameter(placed(torch.ones(128, 64).bfloat16(), *meshes("fsdp")[0]))
    optimizer: Any = ampopt.SGD([param], lr=0.25, master_weights=True, master_bits=24)
    grad: Any = torch.ones_like(param)
    param.grad = grad
    optimizer.unscale(grads_scaled_by=4.0)
    error = ""
    try:
        with torch.no_grad():
            grad.to_local().zero_()
        optimizer.step_after_unscale()
    except RuntimeError as raised:
        error = str(raised)
    optimizer.zero_grad()
    with torch.no_grad():
        for _, master in optimizer.params_and_masters():
            master.to_local().fill_(3.0)
    (master,) = optimizer.master_params()
    return error, whole(master).unique().tolist()


def test_writes_to_shards_are_noticed(two_ranks):
    for error, values in two_ranks.run(edited_shards):
        assert "was changed after unscale()" in error
        assert values == [3.0]
