"""``process_group=``: ranks that hold different ordinary tensors of one model."""

import copy
import pickle
import random
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
from support.langevin import Langevin
from support.local_ranks import mesh_of
from support.optimizers import Plain
from support.shards import spread
from torch.nn import Parameter

import ampopt
from ampopt._step import rank_settings, ranks

START = (torch.tensor([1.0, -2.0, 0.5]), torch.tensor([4.0, 0.25]))
STEPS = ((None, 2.0), ("nan", 1.0), (None, 4.0))
FORMS = (
    "own", "split", "several", "scaler", "scaler, unscaled", "scaler's group", "others'",
    "window", "micro_batch", "window, judged", "several, window, judged", "several, micro_batch",
    "split, step", "window, step", "micro_batch, step",
)  # fmt: skip


def world() -> Any:
    return torch.distributed.group.WORLD


def gradient(part: int, bad: Any, factor: float) -> torch.Tensor:
    grad = factor * START[part].flip(0)
    if bad and part == 1:
        grad[0] = float(bad)
    return grad


def trained(form: str, name: str, group: Any, parts: tuple[int, ...]) -> dict[str, Any]:
    """States and parameters after three steps of some parts of the model; the second overflows."""
    params = [Parameter(START[part].clone()) for part in parts]
    cls: Any = {"Plain": Plain}.get(name) or getattr(ampopt, name)
    if form == "others'":
        cls = getattr(torch.optim, name)
    optimizer = cls(params, lr=0.25)
    if form not in ("scaler's group", "others'"):
        optimizer.process_group = group
    if form.endswith("judged"):  # the last is skipped, for a norm that no part has by itself
        ampopt.skip_when(optimizer, norm=40.0)
    scaler = ampopt.GradScaler("cpu", init_scale=4.0, process_group=group)
    scaler.scale(torch.ones(()))
    scale: Any = ampopt.DynamicLossScale(init_scale=4.0)
    told: dict[str, Any] = {"scales": [], "norms": []}
    for bad, factor in STEPS:
        for param, part in zip(params, parts, strict=True):
            param.grad = gradient(part, bad, 4.0 * factor)
        if form == "own":
            scale = optimizer.unscale_and_step(grads_scaled_by=scale, max_norm=1.0).scale
        elif form == "split":
            scale = optimizer.unscale(grads_scaled_by=scale).scale
            optimizer.step_after_unscale()
        elif form == "split, step":
            scale = optimizer.unscale(grads_scaled_by=scale).scale
            optimizer.step()
        elif form.endswith(", step"):
            scale = optimizer.accumulate(grads_scaled_by=scale, drop=form.split(",")[0]).scale
            for param, part in zip(params, parts, strict=True):
                param.grad = gradient(part, None, 0.5)
            optimizer.step()
        elif "window" in form or "micro_batch" in form:
            drop = "window" if "window" in form else "micro_batch"
            optimizer.accumulate(grads_scaled_by=scale, drop=drop)
            for param, part in zip(params, parts, strict=True):
                param.grad = gradient(part, None, 2.0)
            if form.startswith("several"):
                scale = ampopt.unscale_and_step([optimizer], scale, max_norm=1.0).scale
            else:
                scale = optimizer.unscale_and_step(grads_scaled_by=scale, max_norm=1.0).scale
        elif form == "several":
            scale = ampopt.unscale_and_step([optimizer], scale, max_norm=1.0).scale
        else:
            if form == "scaler, unscaled":
                scaler.unscale_(optimizer)
            scaler.step(optimizer, **({"max_norm": 1.0} if form == "scaler" else {}))
            scaler.update()
        told["scales"] += [scale.item(), scaler.get_scale()]  # of which one stays
        if getattr(optimizer, "grad_norm", None) is not None:
            told["norms"].append(repr(optimizer.grad_norm.item()))
    told["params"] = {part: p.tolist() for part, p in zip(parts, params, strict=True)}
    return told


def trained_by_parts(form: str, name: str) -> Any:
    return trained(form, name, world(), (torch.distributed.get_rank(),))


@pytest.mark.parametrize("name", ["SGD", "Plain"])
@pytest.mark.parametrize("form", FORMS)
def test_ranks_with_different_parts_skip_and_clip_as_one_model(two_ranks, form, name):
    if form == "others'" and name == "Plain":
        name = "Adagrad"
    whole = trained(form, name, None, (0, 1))
    first, second = two_ranks.run(trained_by_parts, form, name)
    assert first.pop("params") | second.pop("params") == whole.pop("params")
    assert first == second == whole


def routed(name: str, ranks: tuple[int, ...], group: Any) -> dict[tuple[int, int], list[float]]:
    """The experts of ``ranks`` after steps in which drawn ones have gradients, by rank and number.

    In some steps a rank has no gradients; in some, one gradient of any rank is inf.
    """
    draw = random.Random(0)
    experts = {(rank, i): Parameter(torch.ones(2) * (i + 1)) for rank in (0, 1) for i in range(3)}
    own = [expert for (rank, _), expert in experts.items() if rank in ranks]
    optimizer: Any = (Plain if name == "Plain" else getattr(ampopt, name))(own, lr=0.25)
    optimizer.process_group = group
    scale: Any = ampopt.DynamicLossScale(init_scale=4.0, growth_interval=2)
    for _ in range(12):
        busy = draw.choice([(0,), (1,), (0, 1), (0, 1)])
        for rank, i in experts:
            grad = torch.full((2,), scale.item() * 2.0 ** draw.randint(-2, 2))
            grad[0] *= draw.choice([1.0] * 19 + [float("inf")])
            has_grad = draw.random() < 0.7 and rank in busy
            experts[rank, i].grad = grad if has_grad else None
        scale = optimizer.unscale_and_step(grads_scaled_by=scale, max_norm=2.0).scale
    return {key: p.tolist() for key, p in experts.items() if key[0] in ranks}


def routed_on_a_rank(name: str) -> Any:
    return routed(name, (torch.distributed.get_rank(),), world())


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Plain"])
def test_ranks_whose_experts_get_gradients_now_and_then_end_as_one_process(two_ranks, name):
    first, second = two_ranks.run(routed_on_a_rank, name)
    assert first | second == routed(name, (0, 1), None)


def replicated(name: str) -> list[float]:
    """Squared norms with and without ``process_group`` and ``replicated``; each rank has norm 1."""
    p = Parameter(torch.ones(1))
    optimizer: Any = (Plain if name == "Plain" else getattr(ampopt, name))([p], lr=0.5)
    norms = []
    for group, alike in ((None, False), (world(), False), (world(), True), (None, True)):
        optimizer.process_group = group
        optimizer.param_groups[0]["replicated"] = alike
        p.grad = torch.ones(1)
        optimizer.unscale_and_step(max_norm=10.0)
        norms.append(round(float(optimizer.grad_norm) ** 2, 6))
    return norms


@pytest.mark.parametrize("name", ["SGD", "Plain", "Adafactor"])
def test_changed_attributes_of_ranks_take_effect_at_the_next_step(two_ranks, name):
    assert two_ranks.run(replicated, name) == [[1.0, 2.0, 1.0, 1.0]] * 2


def grown(sharded: bool) -> str:
    """The error in the second step, if one rank has added parameters."""
    from torch.distributed.tensor import Shard

    p, q = (Parameter(torch.ones(2)) for _ in range(2))
    optimizer: Any = Plain([{"params": [p], "replicated": True}], lr=0.5)
    optimizer.process_group = world()
    if sharded:
        p, q = (Parameter(spread(p.detach(), mesh_of(2), [Shard(0)])) for _ in range(2))
        optimizer = ampopt.SGD([p], lr=0.5)
    try:
        for _ in range(2):
            p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
            optimizer.unscale_and_step(grads_scaled_by=2.0)
            if torch.distributed.get_rank():
                optimizer.param_groups[0]["params"].append(q)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("sharded", [False, True])
def test_parameters_that_one_rank_adds_are_noticed(two_ranks, sharded):
    texts = two_ranks.run(grown, sharded, timeout=10)
    assert all("have different parameters" in text for text in texts)


def refused(what: str) -> str:
    """The error on this rank, if the two ranks make calls that differ in ``what``."""
    rank = torch.distributed.get_rank()
    p = Parameter(torch.ones(2 + (what == "parameters" and rank)))
    replicated = [0, 1] if "list" in what else what == "parameters"
    group = [{"params": [p], "replicated": replicated}]
    optimizer = ampopt.SGD(group, lr=0.5, process_group=world())
    p.grad = torch.ones_like(p)
    before = p.tolist()
    closure = (lambda scale: 1.0) if what == "closure" and rank else None

    try:
        if what == "raises":
            optimizer.unscale_and_step(raising, 2.0)
        elif what.startswith("expanded"):
            if rank == 0:
                p.data = torch.ones(1).expand(2)
            if what == "expanded":
                optimizer.unscale_and_step(lambda scale: 1.0, 2.0)
            else:
                optimizer.step_after_unscale(lambda scale: (1.0, *optimizer.unscale(scale)), 2.0)
        elif what.startswith("raises, unscaled"):
            optimizer.step_after_unscale(raising_unscaled(optimizer), 2.0)
        else:
            clip = 1.0 if what == "max_norm" and rank else None
            optimizer.unscale_and_step(closure, 2.0, max_norm=clip)
    except (RuntimeError, ZeroDivisionError) as error:
        assert p.tolist() == before
        return f"{type(error).__name__}: {error}"
    return ""


def raising(scale: Any) -> float:
    return 1.0 / torch.distributed.get_rank()


def raising_unscaled(optimizer: Any) -> Any:
    def closure(scale: Any) -> Any:
        return raising(scale), *optimizer.unscale(scale)

    return closure


@pytest.mark.parametrize("what", ["max_norm", "parameters", "closure"])
def test_ranks_that_make_different_calls_raise_on_each_of_them(two_ranks, what):
    texts = two_ranks.run(refused, what, timeout=10)
    expected = {"max_norm": "max_norm differs between ranks (rank 0: None; rank 1: 1.0)"}
    expected |= {"parameters": "have different parameters", "closure": "a step with a closure)"}
    assert all(text.startswith("RuntimeError") and expected[what] in text for text in texts)


class Evaluating(Plain):
    """Evaluates the closure once more on rank 1 than on rank 0."""

    def step(self, closure: Any = None) -> Any:
        for _ in range(1 + torch.distributed.get_rank()):
            closure()
        return super().step()


def evaluated_apart() -> list[str]:
    """The errors of two steps whose closures the ranks evaluate different numbers of times."""
    p, texts = Parameter(torch.ones(1)), []
    optimizer = Evaluating([p], lr=0.5)
    optimizer.process_group = world()

    def closure(scale: Any) -> float:
        p.grad = torch.ones(1)
        return 1.0

    for _ in range(2 - torch.distributed.get_rank()):
        try:
            optimizer.unscale_and_step(closure, 1.0)
        except RuntimeError as error:
            texts.append(str(error))
    return texts


def test_ranks_that_evaluate_a_closure_more_often_raise(two_ranks):
    for texts in two_ranks.run(evaluated_apart, timeout=10):
        assert len(texts) == 1
        assert "(rank 0: evaluation 1; rank 1: evaluation 2)" in texts[0]


def digested(digests: list[int]) -> str:
    """The error on this rank, if the digests of the ranks' parameters are ``digests``."""
    p = Parameter(torch.ones(1))
    group = {"params": [p], "replicated": True}
    optimizer = ampopt.SGD([group], lr=0.5, process_group=world())
    p.grad = torch.ones(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_settings, "_layout", lambda _: digests[torch.distributed.get_rank()])
        try:
            optimizer.unscale_and_step(grads_scaled_by=2.0)
        except RuntimeError as error:
            return str(error)
    return ""


def test_a_rank_whose_count_of_parameters_is_the_mean_of_others_raises_too(four_ranks):
    texts = four_ranks.run(digested, [1, 2, 3, 2], timeout=10)
    assert all("have different parameters" in text for text in texts)
    assert four_ranks.run(digested, [2, 2, 2, 2]) == [""] * 4


def waiting() -> str:
    """The error on rank 0, if rank 1 does not make the call."""
    group = torch.distributed.new_group([0, 1], timeout=timedelta(seconds=1))
    p = Parameter(torch.ones(1))
    optimizer = ampopt.SGD([p], lr=0.5, process_group=group)
    p.grad = torch.ones(1)
    if torch.distributed.get_rank() == 0:
        try:
            optimizer.unscale_and_step(grads_scaled_by=2.0)
        except RuntimeError as error:
            assert p.item() == 1.0
            return str(error)
    return ""


def test_a_timeout_names_the_ranks_that_must_make_the_call(two_ranks):
    first, _ = two_ranks.run(waiting, timeout=10)
    assert "an all-reduce over 2 ranks has failed" in first
    assert "every rank has to make every call" in first
    assert "accumulate" in first
    assert "grads_scaled_by=None" in first


@pytest.mark.parametrize("what", ["raises", "raises, unscaled", "raises, unscaled, in a list"])
def test_a_closure_that_raises_on_one_rank_ends_all(two_ranks, what):
    first, second = two_ranks.run(refused, what, timeout=10)
    assert first.startswith("ZeroDivisionError")
    assert "the closure has raised on another rank" in second


@pytest.mark.parametrize("what", ["expanded", "expanded, unscaled"])
def test_a_parameter_that_one_rank_cannot_step_with_after_a_closure_raises_on_both(two_ranks, what):
    first, second = two_ranks.run(refused, what, timeout=10)
    assert "is expanded" in first
    assert "the closure has raised on another rank" in second


def stepped_after(what: str) -> list[float]:
    """The values after what one rank alone did, and a step of both ranks with a scale."""
    p, rank = Parameter(torch.ones(1)), torch.distributed.get_rank()
    group = torch.distributed.new_group()  # which has counted no calls
    optimizer = ampopt.SGD([p], lr=0.5, process_group=group)
    if what == "cleared again":
        optimizer.unscale_and_step(grads_scaled_by=2.0)
        optimizer.zero_grad()
        if rank == 0:
            optimizer.zero_grad()
    else:
        p.grad = None if rank else torch.ones(1)
        if what == "stepped":
            optimizer.step()
        optimizer.zero_grad()
    p.grad = torch.ones(1)
    optimizer.unscale_and_step(grads_scaled_by=2.0)
    return p.tolist()


@pytest.mark.parametrize("what", ["stepped", "dropped", "cleared again"])
def test_what_one_rank_does_without_gradients_counts_as_no_call_left_out(two_ranks, what):
    values = [[0.25], [0.75]] if what == "stepped" else [[0.75]] * 2
    assert two_ranks.run(stepped_after, what, timeout=10) == values


def without_parameters() -> str:
    group: dict[str, Any] = {"params": []}
    optimizer = ampopt.SGD([group], lr=0.5, process_group=world())
    try:
        optimizer.unscale_and_step(grads_scaled_by=2.0)
    except ValueError as error:
        return str(error)
    return ""


def test_a_rank_without_parameters_is_refused(two_ranks):
    for text in two_ranks.run(without_parameters, timeout=10):
        assert "no parameters on this rank" in text


def outside() -> str:
    group = torch.distributed.new_group([0])
    try:
        ampopt.AdamW([Parameter(torch.ones(2))], process_group=group)
    except ValueError as error:
        return str(error)
    return ""


def test_a_group_without_this_rank_is_refused(two_ranks):
    first, second = two_ranks.run(outside)
    assert not first
    assert "does not contain this rank, 1" in second
    with pytest.raises(TypeError, match="process_group must be a torch.distributed.ProcessGroup"):
        ampopt.LBFGS([Parameter(torch.ones(2))], process_group="world")  # pyright: ignore


def destroyed() -> str:
    group: Any = torch.distributed.new_group([0, 1])
    torch.distributed.barrier()  # the other rank may still be connecting to this one
    torch.distributed.destroy_process_group(group)
    try:
        ampopt.AdamW([Parameter(torch.ones(2))], process_group=group)
    except ValueError as error:
        return str(error)
    return ""


def test_a_group_that_was_destroyed_is_refused_in_torchs_words(two_ranks):
    for text in two_ranks.run(destroyed):
        assert "is not registered" in text


def copies() -> list[Any]:
    p = Parameter(torch.ones(2))
    optimizers = ampopt.AdamW([p], process_group=world()), Plain([p], lr=0.5)
    scaler = ampopt.GradScaler("cpu", process_group=world())
    optimizers[1].process_group = world()
    told: list[Any] = [copy.deepcopy(o).process_group is world() for o in (*optimizers, scaler)]
    for one in (*optimizers, scaler):
        try:
            pickle.dumps(one)
        except TypeError as error:
            told.append("cannot be pickled" in str(error))
    (group,) = optimizers[0].param_groups
    group["replicated"] = True
    saved = optimizers[0].state_dict()
    optimizers[0].load_state_dict(torch.optim.AdamW([p]).state_dict())
    (group,) = optimizers[0].param_groups
    return [*told, "replicated" not in saved["param_groups"][0], group["replicated"]]


def test_copies_are_of_the_same_group_and_checkpoints_of_none(two_ranks):
    assert two_ranks.run(copies) == [[True] * 8] * 2


def with_data_parallel(nan_on: int) -> Any:
    """Take a step with a closure whose loss is NaN on one of two ranks with the same parameters.

    Rank 0 is in a group more. The step makes a group for closures, whose name torch takes from the
    ranks and from how many groups the rank is in.
    """
    torch.distributed.new_group([0])
    whole = torch.distributed.new_group()  # for which no group for closures has been made
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    group = {"params": list(model.parameters()), "replicated": True}
    optimizer: Any = ampopt.SGD([group], lr=0.5, process_group=whole)
    rank = torch.distributed.get_rank()

    def closure(scale: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).sum()
        ampopt.scale_outputs(loss, scale).backward()
        return loss * (float("nan") if rank == nan_on else 1.0)

    try:
        optimizer.unscale_and_step(closure, 4.0, max_norm=100.0)
    except ampopt.NonFiniteGradientError as error:
        return error.reason
    return round(float(optimizer.grad_norm), 5)


def test_closures_under_ddp(two_ranks):
    assert two_ranks.run(with_data_parallel, 1) == ["loss"] * 2
    first, second = two_ranks.run(with_data_parallel, 2)
    assert first == second == round(3**0.5, 5)


def flattened(whose: str, name: str, form: str, orig: bool) -> list[Any]:
    """Losses, scales and parameters of a model under FSDP1, whose gradients overflow once."""
    import warnings

    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    torch.manual_seed(0)
    layers = torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = FullyShardedDataParallel(
            torch.nn.Sequential(*layers), device_id=torch.device("cpu"), use_orig_params=orig
        )
    cls = getattr(torch.optim if whose == "torch" else ampopt, name)
    optimizer, rank = cls(model.parameters(), lr=0.25), torch.distributed.get_rank()
    scaler = ShardedGradScaler("cpu", init_scale=4.0)
    scale: Any = ampopt.DynamicLossScale(init_scale=4.0)
    told = []
    for step in range(3):
        optimizer.zero_grad()
        loss = model(torch.full((2, 3), 1.0 + rank + step)).square().mean()
        if form == "own":
            ampopt.scale_outputs(loss, scale).backward()
        else:
            scaler.scale(loss).backward()
        present: list[Any] = [
            p for p in model.parameters() if p.grad is not None and p.grad.numel()
        ]
        if step == 1 and rank == 1:
            present[-1].grad.view(-1)[-1] = float("inf")  # in the part of this rank alone
        if form == "own":
            scale = optimizer.unscale_and_step(grads_scaled_by=scale).scale
        else:
            if form == "unscaled":
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        told += [loss.item(), scale.item() if form == "own" else scaler.get_scale()]
    return [told, [p.tolist() for p in model.parameters()]]


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
@pytest.mark.parametrize("orig", [False, True])
def test_fsdp1_ends_where_torchs_optimizer_ends(two_ranks, name, orig):
    expected = two_ranks.run(flattened, "torch", name, "scaled", orig)
    for form in ("scaled", "unscaled", "own"):
        results = two_ranks.run(flattened, "ampopt", name, form, orig)
        for (told, params), (their_told, theirs) in zip(results, expected, strict=True):
            assert told[1::2] == their_told[1::2] == [4.0, 2.0, 2.0]
            assert told[::2] == pytest.approx(their_told[::2], rel=1e-5)
            for a, b in zip(params, theirs, strict=True):
                torch.testing.assert_close(torch.tensor(a), torch.tensor(b))


def with_another_lr_under_fsdp1() -> str:
    import warnings

    from torch.distributed.fsdp import FullyShardedDataParallel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = FullyShardedDataParallel(torch.nn.Linear(3, 4), device_id=torch.device("cpu"))
    optimizer = ampopt.SGD(model.parameters(), lr=0.5 + torch.distributed.get_rank())
    model(torch.ones(2, 3)).sum().backward()
    try:
        optimizer.unscale_and_step(grads_scaled_by=1.0)
    except RuntimeError as error:
        return str(error)
    return ""


def test_options_are_compared_under_fsdp1(two_ranks):
    for text in two_ranks.run(with_another_lr_under_fsdp1, timeout=10):
        assert "options of the optimizer differ" in text


def test_optimizers_of_several_groups_need_one_that_decides(two_ranks):
    assert all("2 different process groups" in text for text in two_ranks.run(several_groups))


def several_groups() -> str:
    pair = torch.distributed.new_group([0, 1])
    optimizers = [
        ampopt.SGD([Parameter(torch.ones(1))], lr=0.5, process_group=group)
        for group in (world(), pair)
    ]
    for optimizer in optimizers:
        optimizer.param_groups[0]["params"][0].grad = torch.ones(1)
    assert float(ampopt.unscale_and_step(optimizers, 2.0, process_group=pair).found_inf) == 0
    try:
        ampopt.unscale_and_step(optimizers, 2.0)
    except ValueError as error:
        return str(error)
    return ""


def test_the_ranks_of_several_optimizers_are_found_once_and_again_after_a_change(two_ranks):
    for lookups, skipped, params in two_ranks.run(several_that_change):
        assert skipped == [False, False, False, True, True, False]
        before, again, after_a_change, *same, of_another_group = lookups
        assert before == again < after_a_change < of_another_group
        assert set(same) == {after_a_change}
        assert params == [[-3.0], [-3.0], [-1.0]]


def several_that_change() -> tuple[list[int], list[bool], list[list[float]]]:
    """Two optimizers, of which one gets another parameter, whose gradient overflows on rank 1."""
    params = [Parameter(torch.ones(1)) for _ in range(3)]
    optimizers = [ampopt.SGD([param], lr=1.0, process_group=world()) for param in params[:2]]
    lookups, skipped, pair = [], [], torch.distributed.new_group([0, 1])
    with mock.patch.object(ranks, "agreement", wraps=ranks.agreement) as agreement:
        for number in range(6):
            if number == 2:
                optimizers[1].add_param_group({"params": [params[2]]})
            for param in params:
                param.grad = torch.ones(1)
            if torch.distributed.get_rank() == 1 and number in (3, 4):
                params[2].grad = torch.full((1,), float("inf"))
            group = pair if number == 5 else None
            result = ampopt.unscale_and_step(optimizers, 1.0, process_group=group)
            skipped.append(result.skipped)
            lookups.append(agreement.call_count)
    return lookups, skipped, [param.tolist() for param in params]


def norms_under_fsdp1(strategy: str, orig: bool) -> list[float]:
    """The norm of all gradients, as the optimizer computes it under FSDP1, and as expected."""
    import warnings

    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    data = torch.full((2, 3), 2.0)
    model(data).square().mean().backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()  # type: ignore
    model.zero_grad()
    options: Any = {"device_id": torch.device("cpu"), "use_orig_params": orig}
    kind, mesh = ShardingStrategy[strategy], mesh_of(2, 2, names=("replicas", "shards"))
    if strategy == "HYBRID_SHARD":
        options["device_mesh"] = mesh
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = FullyShardedDataParallel(model, sharding_strategy=kind, **options)
    optimizer: Any = ampopt.SGD(model.parameters(), lr=0.5)
    model(data).square().mean().backward()
    optimizer.unscale_and_step(max_norm=1.0)
    norm = float(optimizer.grad_norm)
    for p in model.parameters():  # on one rank of one replica, after the reduction
        if torch.distributed.get_rank() == 3 and p.grad is not None and p.grad.numel():
            p.grad.view(-1)[0] = float("inf")
    assert optimizer.unscale_and_step(grads_scaled_by=2.0).skipped
    if strategy == "HYBRID_SHARD":
        optimizer.process_group = mesh.get_group("shards")
        with pytest.raises(ValueError, match="have shards or copies of parameters of this rank"):
            optimizer.unscale_and_step(grads_scaled_by=2.0)
    return [norm, float(expected)]


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "HYBRID_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("orig", [False, True])
def test_fsdp1_has_the_norm_of_the_model_once(four_ranks, strategy, orig):
    for norm, expected in four_ranks.run(norms_under_fsdp1, strategy, orig):
        assert norm == pytest.approx(expected, rel=1e-5)


def in_replicas() -> tuple[float, bool]:
    """The norm of four ranks, of which two and two hold the same part; and whether all skip."""
    rank = torch.distributed.get_rank()
    p = Parameter(torch.ones(1))
    group = {"params": [p], "replicated": [rank % 2, rank % 2 + 2]}
    optimizer: Any = ampopt.SGD([group], lr=0.5, process_group=world())
    p.grad = torch.tensor([3.0 + rank % 2])
    optimizer.unscale_and_step(max_norm=10.0)
    p.grad = torch.tensor([float("inf" if rank == 3 else 1.0)])
    return float(optimizer.grad_norm), optimizer.unscale_and_step(grads_scaled_by=2.0).skipped


def test_ordinary_tensors_may_be_replicated_on_some_ranks(four_ranks):
    assert four_ranks.run(in_replicas) == [(5.0, True)] * 4
    optimizer = ampopt.SGD([Parameter(torch.ones(1))], lr=0.5)
    with pytest.raises(TypeError, match="must be a list of ranks, got"):
        optimizer.add_param_group({"params": [Parameter(torch.ones(1))], "replicated": ["a"]})


def held_by_two_submeshes(name: str) -> list[tuple[float, float]]:
    """Errors of norm and parameter, where two and two of four ranks hold shards of one matrix."""
    from torch.distributed.tensor import Shard, distribute_tensor

    rank, whole = torch.distributed.get_rank(), torch.arange(1.0, 13.0).view(4, 3)
    mesh = mesh_of(2, 2, names=("dp", "tp"))["tp"]
    alone = Parameter(whole.clone())
    alone.grad = whole.flip(0)
    reference = getattr(ampopt, name)([alone], lr=0.1)
    reference.unscale_and_step(grads_scaled_by=1.0, max_norm=1.0)
    errors = []
    for replicated in (True, [rank % 2, rank % 2 + 2]):
        part: Any = Parameter(distribute_tensor(whole.clone(), mesh, [Shard(0)]))
        part.grad = distribute_tensor(whole.flip(0), mesh, [Shard(0)])
        group = {"params": [part], "replicated": replicated}
        optimizer = getattr(ampopt, name)([group], lr=0.1, process_group=world())
        optimizer.unscale_and_step(grads_scaled_by=1.0, max_norm=1.0)
        far = (part.detach().full_tensor() - alone.detach()).abs().max()
        errors.append((float(optimizer.grad_norm - reference.grad_norm), float(far)))
    return errors


@pytest.mark.parametrize("name", ["AdamW", "LAMB", "NovoGrad", "Adafactor"])
def test_shards_that_ranks_of_another_mesh_hold_alike_count_once(four_ranks, name):
    """In the norm once among all ranks; in the sums of a rule once in each mesh."""
    for errors in four_ranks.run(held_by_two_submeshes, name):
        assert errors == [(pytest.approx(0, abs=1e-5),) * 2] * 2


def in_lists_of_three(changes: str) -> str:
    """The error of a rank, where ranks 0 to 2 hold copies and the last one differs in ``changes``.

    Rank 3 holds a part of its own, with another learning rate.
    """
    rank = torch.distributed.get_rank()
    p = Parameter(torch.ones(3 if rank == 3 else 2))
    lr = 0.2 if rank == 3 or (rank == 2 and changes == "lr") else 0.1
    options: Any = {"lr": torch.tensor(lr, dtype=torch.float64), "eps": rank if rank == 3 else 0.0}
    group = {"params": [p], "replicated": [3] if rank == 3 else [0, 1, 2]}
    optimizer: Any = ampopt.AdamW([group], **options, process_group=world())
    if not (rank == 2 and changes == "gradient"):
        p.grad = torch.ones_like(p)
    try:
        optimizer.unscale_and_step(grads_scaled_by=2.0)
    except RuntimeError as error:
        return str(error)
    return ""


def test_copies_on_some_ranks_are_compared(four_ranks):
    assert four_ranks.run(in_lists_of_three, "") == [""] * 4
    for changes in ("lr", "gradient"):
        for text in four_ranks.run(in_lists_of_three, changes):
            assert "gradients differ between some of ranks 0-2; this rank has lr='tensor(0." in text


NEED_WHOLE: dict[str, tuple[str, dict[str, Any]]] = {
    "LAMB": ("sums over whole parameters", {}),
    "LARS": ("sums over whole parameters", {"lr": 0.1}),
    "NovoGrad": ("sums over whole parameters", {}),
    "Adafactor": ("sums over whole parameters", {}),
    "Langevin": ("the index of each element in its parameter, for random", {"lr": 0.1}),
    "8 bits": ("the index of each element in its parameter, for random", {"state_bits": 8}),
    "stochastic": ("for random", {"param_rounding": "stochastic"}),
    "24 bits": ("to round master weights", {"master_weights": True, "master_bits": 24}),
}


def needing_whole_parameters(name: str) -> str:
    """The error of a step under FSDP1 that needs to know parameters as the model has them."""
    import warnings

    from torch.distributed.fsdp import FullyShardedDataParallel

    dtype = torch.bfloat16 if name in ("stochastic", "24 bits") else torch.float32
    model: Any = torch.nn.Linear(256, 128, dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    cls: Any = Langevin if name == "Langevin" else getattr(ampopt, name, ampopt.AdamW)
    optimizer: Any = cls(model.parameters(), **NEED_WHOLE[name][1])
    model(torch.ones(2, 256, dtype=dtype)).square().mean().backward()
    try:
        optimizer.unscale_and_step(grads_scaled_by=1.0)
    except RuntimeError as error:
        assert not any(map(len, optimizer.state.values()))
        return str(error)
    return ""


@pytest.mark.parametrize("name", NEED_WHOLE)
def test_fsdp1_refuses_steps_that_need_whole_parameters(two_ranks, name):
    for text in two_ranks.run(needing_whole_parameters, name):
        assert NEED_WHOLE[name][0] in text and "fully_shard (FSDP2)" in text


def test_ranks_are_considered_once_torch_distributed_is_initialized(monkeypatch):
    asked: list[Any] = []
    monkeypatch.setattr(ranks, "agreement", lambda *args: asked.append(args))
    p = Parameter(torch.ones(1))
    optimizer = Plain([p], lr=0.5)

    def step() -> int:
        p.grad = torch.ones(1)
        optimizer.unscale_and_step(grads_scaled_by=1.0)
        return len(asked)

    assert step() == 0
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert step() == 1
    assert step() == 1


class Counting(Plain):
    """Counts on the host how often its step is called."""

    called = 0

    def update(self) -> None:
        super().update()
        self.called += 1


def calls_of_step(form: str) -> int:
    """How often a rank calls a hand-written step, if rank 1 has no gradient."""
    param = Parameter(torch.ones(2))
    optimizer = Counting([param])
    optimizer.process_group = world()
    for bad in (1.0, float("inf"), 1.0):
        if torch.distributed.get_rank() == 0:
            param.grad = torch.full((2,), bad)
        if form == "joined":
            optimizer.unscale_and_step(grads_scaled_by=1.0)
        elif form == "accumulated":
            optimizer.accumulate(grads_scaled_by=1.0)
            optimizer.unscale_and_step(grads_scaled_by=1.0)
        else:
            optimizer.unscale(grads_scaled_by=1.0)
            optimizer.step_after_unscale() if form == "split" else optimizer.step()
    return optimizer.called


@pytest.mark.parametrize("form", ["joined", "split", "plain step", "accumulated"])
def test_a_hand_written_step_is_called_on_ranks_without_gradients_too(two_ranks, form):
    """It may make collectives, or count."""
    assert two_ranks.run(calls_of_step, form) == [2, 2]
