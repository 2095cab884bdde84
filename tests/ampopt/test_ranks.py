"""Parameters spread over ranks: all of them skip, or none, wherever the overflow is.

Trap T4 (see test_traps): torch's scaler looks at how the first gradient is placed, and if that is
on every rank, asks no other rank about the rest. With an overflow in a part that one rank has, that
rank alone skips, and halves its scale. Here are two processes that have met.
"""

from typing import Any

import pytest
import torch
from optimizers import Signed
from torch.nn import Parameter
from two_ranks import CLASSES, FORMS, ORDERS, SPOILED, work

import ampopt
from ampopt import ranks
from ampopt.testing.bits import bits


@pytest.fixture(scope="module")
def of_both(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What either rank has seen, by case."""
    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        pytest.skip("this build of torch has no gloo")
    folder = tmp_path_factory.mktemp("ranks")
    multiprocessing: Any = torch.multiprocessing
    both = multiprocessing.spawn(work, args=(str(folder),), nprocs=2, join=False)
    try:
        both.join(timeout=60)
        both.join(timeout=60)  # the first returns when one of them ends
    finally:
        still = [process for process in both.processes if process.is_alive()]
        for process in still:  # ranks that do not agree wait for each other
            process.kill()
    assert not still
    return [dict(torch.load(folder / f"{rank}.pt")) for rank in (0, 1)]


def nan_is_nan(case: Any) -> Any:
    """``case`` as it was before it was saved: a NaN equals itself only if it is the same object."""
    return tuple(repr(x) if isinstance(x, float) else x for x in case)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("bad", SPOILED)
def test_t4_ranks_agree(of_both, name, form, order, bad):
    first, second = (
        {nan_is_nan(case): outcome for case, outcome in rank.items()} for rank in of_both
    )
    case = nan_is_nan((name, form, order, bad))
    (scale, params), (other_scale, other_params) = first[case], second[case]
    alone_scale, alone = first[nan_is_nan((name, form, "not spread", bad))]
    for a, b, c in zip(params, other_params, alone, strict=True):
        assert torch.equal(a, b)
        if bad is None:
            torch.testing.assert_close(a, c)
        else:
            assert torch.equal(a, c)  # nothing has changed
    if form != "torch":  # whose scale is not ours to mend
        assert scale == other_scale == alone_scale == (4.0 if bad is None else 2.0)


def test_an_ordinary_tensor_asks_no_one():
    assert ranks.agreement([torch.ones(2), None]) is None
    tensor = torch.ones(2)
    assert ranks.local(tensor) is tensor


def spread(tensor: Any) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    return distribute_tensor(tensor, init_device_mesh("cpu", (1,)), [Replicate()])


def made(cls: Any, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    p = Parameter(spread(torch.ones(2, dtype=dtype)))
    p.grad = spread(torch.ones(2, dtype=dtype))
    return cls([p], **options), p


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: made(Signed), "Signed cannot step, being a rule alone.*ampopt.Optimizer"),
        (
            lambda: made(ampopt.AdamW, torch.bfloat16, master_weights=True),
            "leave master_weights=True out",
        ),
    ],
)
def test_what_is_not_done_with_spread_parameters_is_refused(make, match, process_group):
    optimizer, p = make()
    before = bits(p.to_local())
    for call in (
        optimizer.step,
        lambda: optimizer.unscale_and_step(grads_scaled_by=2.0),
        lambda: optimizer.unscale(grads_scaled_by=2.0),
    ):
        with pytest.raises(RuntimeError, match=match):
            call()
        assert bits(p.to_local()) == before


def test_a_norm_of_spread_gradients_is_refused_with_the_way_to_clip(process_group):
    optimizer, p = made(ampopt.AdamW)
    with pytest.raises(RuntimeError, match=r"unscale\(\), torch.nn.utils.clip_grad_norm_\(\) and"):
        optimizer.unscale_and_step(grads_scaled_by=2.0, max_norm=1.0)
    assert bits(p.to_local()) == bits(torch.ones(2))


def stepped_with_sums(name: str, scaled: bool) -> list[Any]:
    """Parameters after a step with gradients that are sums still to be taken, and with the sums."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh, rank = init_device_mesh("cpu", (2,)), torch.distributed.get_rank()
    grad, results = torch.tensor([1.0, -2.0, 4.0, 0.5]) * (4.0 if scaled else 1.0), []
    for summed in (True, False):
        placements = ([Replicate()], [Shard(0)])
        params: list[Any] = [
            Parameter(distribute_tensor(torch.ones(4), mesh, p)) for p in placements
        ]
        for p in params:
            part = DTensor.from_local(grad * (0.25 if rank else 0.75), mesh, [Partial()])
            p.grad = part if summed else distribute_tensor(grad, mesh, p.placements)
        optimizer = getattr(ampopt, name)(params, lr=0.5)
        if scaled:
            optimizer.unscale_and_step(grads_scaled_by=4.0)
        else:
            optimizer.step()
        results.append([p.detach().full_tensor() for p in params])
    return results


@pytest.mark.parametrize("name", ["SGD", "Adagrad", "Adafactor"])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_gradient_that_is_yet_to_be_summed_is_summed_first(two_ranks, name, scaled):
    alone = Parameter(torch.ones(4))
    alone.grad = torch.tensor([1.0, -2.0, 4.0, 0.5])
    getattr(torch.optim, name)([alone], lr=0.5).step()
    for summed, whole in two_ranks.run(stepped_with_sums, name, scaled):
        for a, b in zip(summed, whole, strict=True):
            assert torch.equal(a, b)
            torch.testing.assert_close(a, alone.detach())
