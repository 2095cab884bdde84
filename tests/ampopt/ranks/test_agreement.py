"""Ranks with different arguments raise errors that name them, and the loss is the ranks' mean."""

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.local_ranks import mesh_of
from support.optimizers import Plain
from torch.nn import Parameter

import ampopt
from ampopt._step import ranks
from ampopt._synchronization import watching
from ampopt.testing import as_on_a_device
from ampopt_kernels.gradient_reports import named_ranks

NAN = float("nan")


def world() -> Any:
    return torch.distributed.group.WORLD


def made(**options: Any) -> tuple[Any, Any]:
    param = Parameter(torch.ones(2))
    return ampopt.AdamW([("weight", param)], lr=0.5, process_group=world(), **options), param


DIFFERENT: dict[str, list[str]] = {
    "scale": ["the scale of the gradients differs", "rank 0: 4.0; rank 1: 8.0"],
    "no scale": ["the scale of the gradients differs", "rank 0: 4.0; rank 1: None"],
    "max_norm": ["max_norm differs", "rank 0: 1.0; rank 1: 2.0"],
    "no max_norm": ["max_norm differs", "rank 0: 1.0; rank 1: None"],
    "norm": ["skip_when differs between ranks (rank 0 against rank 1); this rank has "],
    "loss": ["skip_when differs between ranks (rank 0 against rank 1); this rank has "],
    "warmup": ["skip_when differs between ranks (rank 0 against rank 1); this rank has "],
    "drop": ["drop_overflow_update of the scale differs", "rank 0: True; rank 1: False"],
    "micro_batch": ['make different calls (rank 0: unscale, ', 'rank 1: accumulate(drop="micro'],
    "window": ["make different calls (rank 0: unscale, ", 'rank 1: accumulate(drop="window")'],
}  # fmt: skip


def differing(what: str) -> str:
    """The error on this rank, if the two ranks make calls that differ in ``what``."""
    rank = torch.distributed.get_rank()
    optimizer, param = made()
    scale: Any = 4.0
    clips, loss = 1.0, None
    if what == "scale":
        scale = ampopt.DynamicLossScale(init_scale=8.0 if rank else 4.0)
    elif what == "no scale":
        scale = None if rank else 4.0
    elif what == "drop":
        scale = ampopt.StaticLossScale(4.0, drop_overflow_update=not rank)
    elif what == "max_norm":
        clips = 1.0 + rank
    elif what == "no max_norm":
        clips = None if rank else 1.0
    elif what == "norm" and rank == 0:
        ampopt.skip_when(optimizer, norm=5.0)
    elif what == "loss":
        ampopt.skip_when(optimizer, loss=7.0 if rank else 5.0)
        loss = 1.0
    elif what == "warmup":
        ampopt.skip_when(optimizer, norm_deviations=5.0, warmup=10 + rank)
    param.grad = torch.ones(2)
    try:
        if rank and what in ("micro_batch", "window"):
            optimizer.accumulate(grads_scaled_by=4.0, drop=what)
        optimizer.unscale_and_step(grads_scaled_by=scale, max_norm=clips, loss=loss)
    except RuntimeError as error:
        assert param.tolist() == [1.0, 1.0]
        return str(error)
    return ""


OWN = {
    "norm": ["has skip_when(norm=5.0, warmup=100): call", "has none: call"],
    "loss": ["has skip_when(loss=5.0, warmup=100): call", "has skip_when(loss=7.0, warmup=100): "],
    "warmup": ["has skip_when(norm_deviations=5.0, warmup=10): ", "warmup=11): call"],
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_each_rank_raises_and_names_what_differs(two_ranks, what):
    texts = two_ranks.run(differing, what, timeout=10)
    for text, own in zip(texts, OWN.get(what, ["", ""]), strict=True):
        assert all(part in text for part in [*DIFFERENT[what], own]), text
        assert text.endswith("nothing has been stepped")


IN_A_LIST = "have copies of its parameters, but that list, shapes or dtypes, the options, or"
SETTINGS: dict[str, list[str]] = {
    "lr": ["options of the optimizer differ", "this rank has lr=0.5, betas=", "same metric"],
    "lr of a shard": ["options of the optimizer differ", "(rank 0 against rank 1)"],
    "lr of a stage's shard": [],  # with a process group, it may be of a part of this rank alone
    "loaded": ["options of the optimizer differ", "this rank has lr=0.5, betas="],
    "lr on the host": ["options of the optimizer differ", "this rank has lr='tensor(0.5)', betas="],
    "decay": ["options of the optimizer differ", "weight_decay=0.01"],
    "bits": ["options of the optimizer differ", "state_bits=32"],
    "class": ["different classes or rules (rank 0 against rank 1)"],
    "gradient": ["copies of a parameter, and only some of them have its gradient"],
    "gradient of a DTensor": ["copies of a parameter, and only some of them have its gradient"],
    "plain gradient beside a shard": ["copies of a parameter, and only some of them have its"],
    "a part of its own beside a shard": [],
    "plain lr beside a shard": ["options of the optimizer differ", "this rank has lr=0.5, betas="],
    "gradient of a shard": [],  # a mesh's dimension of one rank makes no copies
    "call": ["some ranks have left out a call", "(rank 0: 0 times; rank 1: 1 times)"],
    "lr in a list": [IN_A_LIST, "has lr=0.5, betas="],
    "lr on the host in a list": [IN_A_LIST, "has lr='tensor(0.5)', betas="],
    "gradient in a list": [IN_A_LIST, "or which parameters have gradients differ", "zeros if"],
    "the list in a list": [IN_A_LIST],
    "nothing in a list": [],
    "betas in place": ["options of the optimizer differ", "betas=[0.5, 0.999]"],
    "replicated in place": [IN_A_LIST],
    "max_replays": ["max_replays differs between ranks (rank 0: 3; rank 1: 5)"],
    "may differ": [],
}


def with_other_settings(what: str) -> str:
    """The error on this rank, if the two ranks set ``what`` differently."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    rank = torch.distributed.get_rank()
    part = torch.ones(2)
    if what.endswith(("shard", "DTensor")):
        placement = Shard(0) if what.endswith("shard") else Replicate()
        part = DTensor.from_local(part, mesh_of(1, 2), [Replicate(), placement])
    param = Parameter(part)
    options: dict[str, Any] = {"lr": 0.5}
    if what.startswith("lr") and rank:
        options["lr"] = 0.25
    if what.startswith("lr on the host"):
        options["lr"] = torch.tensor(options["lr"])
    group: Any = {"params": [("weight", param)], "replicated": not isinstance(part, DTensor)}
    if what.endswith("in a list") or what == "replicated in place":
        group["replicated"] = [1, 0] if rank else [0, 1]
    if what.startswith("the list") and rank:
        group["replicated"] = [1]
    cls: Any = ampopt.Adagrad if what == "class" and rank else ampopt.AdamW
    if what == "may differ":  # of parts that are not copies; and what the user keeps in a group
        group |= {"replicated": False, "lr": 0.5 + rank, "kept by the user": rank}
    groups = [group]
    if what.endswith("beside a shard"):
        is_part, lacks = what.startswith("a part"), what.startswith("plain gradient")
        beside = Parameter(torch.ones(2 + rank * is_part))
        beside.grad = None if rank and lacks else torch.ones_like(beside)
        its = {"params": [("beside", beside)], "lr": 0.5 + rank * (not lacks)}
        groups.append({**its, "replicated": [rank]} if is_part else its)
    optimizer = cls(groups, **options)
    if not isinstance(part, DTensor) or "stage" in what:
        optimizer.process_group = torch.distributed.new_group()  # which has counted no calls
    if what == "betas in place":
        optimizer.param_groups[0]["betas"] = [0.9, 0.999]
    if what == "decay":
        optimizer.param_groups[0]["weight_decay"] = 0.01 + rank
    if what == "bits":
        optimizer.param_groups[0]["state_bits"] = 8 if rank else 32
    if not (what.startswith("gradient") and rank):
        param.grad = torch.ones_like(param)
    try:
        if what == "max_replays":
            optimizer.unscale_and_step(lambda scale: 1.0, 2.0, max_replays=3 + 2 * rank)
        for step in range(3):
            if what == "loaded" and step:  # which replaces the param groups
                state = optimizer.state_dict()
                state["param_groups"][0]["lr"] = 0.5 - rank / 4
                optimizer.load_state_dict(state)
            if step and what == "betas in place":
                optimizer.param_groups[0]["betas"][0] = 0.5 + rank / 4
            if step and rank and what == "replicated in place":
                optimizer.param_groups[0]["replicated"].remove(0)
            if what != "call" or (step, rank) != (0, 1):
                optimizer.unscale_and_step(grads_scaled_by=2.0)
            optimizer.zero_grad()
            param.grad = torch.ones_like(param)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("what", SETTINGS)
def test_each_rank_raises_for_settings_that_have_to_be_alike(two_ranks, what):
    first, second = two_ranks.run(with_other_settings, what, timeout=10)
    assert all(part in first for part in SETTINGS[what]), first
    assert bool(second) == bool(SETTINGS[what])


def differing_later(what: str) -> tuple[int, str, int]:
    """How ranks that differ in one later step learn of it on a device.

    Returns the number of steps until this rank raises, the message, and how often the host read a
    tensor before.
    """
    looks: list[str] = []
    with as_on_a_device():
        optimizer, param = made()
        optimizer.process_group = torch.distributed.new_group()  # of which nothing is known yet
        scale, clips = torch.tensor([4.0]), 1.0
        for step in range(40):
            if step == 5 and torch.distributed.get_rank():
                scale = scale * 2 if "scale" in what else scale
                clips = {"max_norm": 2.0, "no max_norm": None}.get(what, 1.0)
                if "loaded" in what:  # new param groups, on this rank alone
                    optimizer.load_state_dict(optimizer.state_dict())
            if step == 6:  # and as before again: the one step is not overlooked
                scale, clips = torch.tensor([4.0]), 1.0
            param.grad = torch.ones(2)
            try:
                # Before the rows of eight steps are there, nobody looks.
                with watching(looks.append) if 0 < step < 8 else nullcontext():
                    optimizer.unscale_and_step(grads_scaled_by=scale, max_norm=clips)
            except RuntimeError as error:
                return step - 5, str(error), len(looks)
    return -1, "", len(looks)


@pytest.mark.parametrize("what", ["scale", "scale, loaded", "max_norm", "no max_norm"])
def test_on_a_device_ranks_raise_within_20_steps_without_waiting(two_ranks, what):
    for steps, text, looks in two_ranks.run(differing_later, what, timeout=10):
        assert 0 < steps <= 20
        assert f"{'the scale of the gradients' if 'scale' in what else 'max_norm'} differs" in text
        assert "found some steps later" in text
        assert looks == 0


def judged_by_loss(form: str) -> list[Any]:
    """For each step, whether its loss skipped it; the parameter; and the state of ``skip_when``."""
    from torch.distributed.tensor import Shard, distribute_tensor

    rank, loss_of, start = torch.distributed.get_rank(), {}, torch.ones(2)
    options: dict[str, Any] = {"process_group": world()}
    if form == "DTensor":
        start, options = distribute_tensor(start, mesh_of(2), [Shard(0)]), {}
    param = Parameter(start)
    group = {"params": [("weight", param)], "replicated": True}
    optimizer: Any = ampopt.SGD([group], lr=0.5, **options)
    watch = ampopt.Watch(optimizer)
    handle = ampopt.skip_when(optimizer, loss=3.0, loss_deviations=50.0, warmup=2)
    step = ampopt.TrainStep(
        lambda x: (param.sum() * 0.0 + 1.0) * x.mean(),
        lambda loss: loss,
        optimizer,
        ampopt.StaticLossScale(2.0),
        autocast=None,
    )
    skipped, scale, calls = [], ampopt.StaticLossScale(2.0), []
    all_reduce = torch.distributed.all_reduce

    def counted(*args: Any) -> Any:
        calls.append(args)
        return all_reduce(*args)

    for mine, theirs in ((1.0, 4.0), (1.0, 6.0), (NAN, 1.0), (1.0, NAN), (2.0, 2.0)):
        loss_of = theirs if rank else mine
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.distributed, "all_reduce", counted)
            if form == "TrainStep":
                result = step(torch.tensor([loss_of]))
            else:
                param.grad = torch.ones_like(param)
                given = None if form == "one rank" and rank == 0 else loss_of
                result = optimizer.unscale_and_step(grads_scaled_by=scale, loss=given)
        skipped.append(result.skipped)
    assert len(calls) == 5  # one for each step
    whole = getattr(param.detach(), "full_tensor", param.detach)()
    return [skipped, whole.tolist(), handle.state_dict(), watch.read()["skipped_by"]]


@pytest.mark.parametrize("form", ["plain", "TrainStep", "DTensor", "one rank"])
def test_the_loss_is_the_mean_over_the_ranks_that_have_one(two_ranks, form):
    first, second = two_ranks.run(judged_by_loss, form, timeout=20)
    assert repr(first) == repr(second)
    skipped, _, learned, by_cause = first
    overflows = 2 if form == "TrainStep" else 0  # where NaN goes through a backward pass
    assert by_cause == {"overflow": overflows, "norm": 0, "loss": sum(skipped) - overflows}
    # Of the mean, but where rank 1 alone has a loss, as the last stage of a pipeline has.
    means = [False, True, True, True, False]
    assert skipped == ([True, True, False, True, False] if form == "one rank" else means)
    taken = [1.0, 2.0] if form == "one rank" else [2.5, 2.0]
    assert learned["loss"][:2] == [2.0, sum(taken) / 2]


def without_process_group(loss: bool) -> str:
    """The error on this rank, if a loss is checked and no process group is named."""
    param = Parameter(torch.ones(2))
    optimizer = ampopt.SGD([param], lr=0.5)
    if not loss:  # of a group that is named none gives one
        optimizer.process_group = world()
    ampopt.skip_when(optimizer, loss=3.0)
    param.grad = torch.ones(2)
    try:
        optimizer.unscale_and_step(grads_scaled_by=2.0, loss=1.0 if loss else None)
    except RuntimeError as error:
        assert param.tolist() == [1.0, 1.0]
        return str(error)
    return ""


def test_a_loss_without_a_process_group_raises_and_names_the_fix(two_ranks):
    for text in two_ranks.run(without_process_group, True, timeout=10):
        assert "process_group=torch.distributed.group.WORLD" in text
        assert "replicated=True" in text
    for text in two_ranks.run(without_process_group, False, timeout=10):
        assert "no rank has given one" in text


def overflowing(bad: list[int], form: str) -> list[str]:
    """What each of four ranks reports of a step whose gradients overflow on the ranks ``bad``."""
    rank = torch.distributed.get_rank()
    optimizer, param = made()
    grad = torch.full((2,), float("inf") if rank in bad else 1.0)
    param.grad = grad.clone()
    if form != "own":
        optimizer.accumulate(grads_scaled_by=2.0, drop=form)
        param.grad = torch.ones(2)
    if form == "window" and rank == 3:
        param.grad = None
    return optimizer.unscale_and_step(grads_scaled_by=2.0).overflowed


@pytest.mark.parametrize("form", ["own", "window", "micro_batch"])
def test_each_rank_knows_which_others_overflowed(four_ranks, form):
    assert four_ranks.run(overflowing, [1], form) == [
        ["rank 1"],
        ["weight"],
        ["rank 1"],
        ["rank 1"],
    ]
    assert four_ranks.run(overflowing, [0, 1, 3], form) == [
        ["weight", "ranks 1, 3"],
        ["weight", "ranks 0, 3"],
        ["ranks 0-1, 3"],
        ["weight", "ranks 0-1"],
    ]
    assert four_ranks.run(overflowing, [], form) == [[]] * 4


def made_before_fully_shard(cls: str) -> int:
    """How many of three steps warn, if the model no longer has the parameters of the optimizer."""
    from torch.distributed.fsdp import fully_shard

    model: Any = torch.nn.Linear(2, 1)
    optimizer: Any = {"AdamW": ampopt.AdamW, "Plain": Plain}[cls](model.parameters(), lr=0.5)
    fully_shard(model, mesh=mesh_of(2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for split in (False, True, False):
            model(torch.ones(1, 2)).sum().backward()
            if split:
                optimizer.unscale(grads_scaled_by=1.0)
                optimizer.step_after_unscale()
            else:
                optimizer.unscale_and_step(grads_scaled_by=1.0)
    return sum("make the optimizer after fully_shard" in str(w.message) for w in caught)


@pytest.mark.parametrize("cls", ["AdamW", "Plain"])
def test_an_optimizer_made_before_fully_shard_is_warned_of_once(two_ranks, cls):
    assert two_ranks.run(made_before_fully_shard, cls) == [1, 1]


def test_ranks_are_named_in_runs():
    assert named_ranks([3]) == "rank 3"
    assert named_ranks([0, 1, 2, 5, 7, 8]) == "ranks 0-2, 5, 7-8"


@pytest.mark.parametrize("cls", [ampopt.SGD, ampopt.extend(torch.optim.SGD)])
def test_replicated_is_a_bool(cls):
    param = Parameter(torch.ones(2))
    with pytest.raises(TypeError, match="replicated of a param group must be True or False"):
        cls([{"params": [param], "replicated": "yes"}], lr=0.5)
    optimizer = cls([param], lr=0.5)
    optimizer.param_groups[0]["replicated"] = 1
    param.grad = torch.ones(2)
    with pytest.raises(TypeError, match="must be True or False, got 1"):
        ranks.agreement([optimizer])


ONE_RANK_CALLS: dict[str, Any] = {
    "joined": lambda optimizer: optimizer.unscale_and_step(grads_scaled_by=2.0, max_norm=1.0),
    "split": lambda optimizer: (optimizer.unscale(2.0), optimizer.step_after_unscale()),
    "plain": lambda optimizer: optimizer.step(),
    "window": lambda optimizer: (
        optimizer.accumulate(2.0),
        optimizer.unscale_and_step(grads_scaled_by=2.0),
    ),
    "micro_batch": lambda optimizer: (
        optimizer.accumulate(2.0, drop="micro_batch"),
        optimizer.unscale_and_step(grads_scaled_by=2.0),
    ),
    "closure": lambda optimizer: optimizer.unscale_and_step(
        lambda scale: torch.ones(()), grads_scaled_by=2.0
    ),
    "several": lambda optimizer: ampopt.unscale_and_step([optimizer], 2.0),
    "reading": lambda optimizer: optimizer._ampopt.observers.watch.gather(),
}
"""The methods of an optimizer that all-reduce, and the collective that reads a watch."""


@pytest.mark.parametrize("name", ["AdamW", "Adafactor", "Muon", "LAMB"])
@pytest.mark.parametrize("form", ["process_group", "Shard", "Partial"])
def test_a_group_of_one_rank_makes_no_collective(process_group, form, name):
    from torch.distributed import tensor
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.debug import CommDebugMode

    mesh = init_device_mesh("cpu", (1,))

    def placed(placement: Any) -> Any:
        whole = torch.ones(4, 3)
        if form == "process_group":
            return whole
        return tensor.DTensor.from_local(whole, mesh, [placement], run_check=False)

    p = Parameter(placed(tensor.Shard(0)))
    optimizer = getattr(ampopt, name)([p], lr=0.25)
    if form == "process_group":
        optimizer.process_group = torch.distributed.group.WORLD
    ampopt.Watch(optimizer)
    collectives = {}
    for call, function in ONE_RANK_CALLS.items():
        p.grad = placed(tensor.Partial() if form == "Partial" else tensor.Shard(0))
        with CommDebugMode() as mode:
            function(optimizer)
        collectives[call] = mode.get_total_counts()
    assert collectives == dict.fromkeys(ONE_RANK_CALLS, 0)
