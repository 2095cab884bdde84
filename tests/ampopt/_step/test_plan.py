"""A plan is reused by later steps, unless something that it depends on has changed."""

import copy
import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.short_rules import signum
from torch.multiprocessing.reductions import StorageWeakRef

import ampopt
from ampopt_kernels import rules
from ampopt_kernels.native.build import cpp_compiler


@pytest.mark.parametrize("rate", [float, torch.tensor])
def test_a_plan_that_is_kept_takes_the_hyperparameters_of_each_step(rate):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = ampopt.SGD([weight], lr=rate(0.5))
    plans = set()
    for lr, expected in ((0.5, 0.5), (0.25, 0.25), (0.125, 0.125), (2.0, -1.875)):
        optimizer.param_groups[0]["lr"] = rate(lr)
        weight.grad = torch.ones(3)
        optimizer.unscale_and_step(grads_scaled_by=1.0)
        assert weight.tolist() == [expected] * 3
        plans.add(optimizer._ampopt.runner.plan)
    assert len(plans) == 1


def test_a_list_of_hyperparameters_that_is_written_to_is_read_at_each_step():
    betas: Any = [0.9, 0.999]
    weights = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    optimizers = ampopt.AdamW([weights[0]]), torch.optim.AdamW([weights[1]])
    for optimizer in optimizers:
        optimizer.param_groups[0]["betas"] = betas
    for turn in range(6):
        if turn == 4:
            betas[0] = 0.2
        for optimizer, weight in zip(optimizers, weights, strict=True):
            weight.grad = torch.tensor([1.0, -2.0, 3.0]) * (turn + 1)
            optimizer.step()
    torch.testing.assert_close(*weights)


def test_a_learning_rate_that_is_no_longer_one_number_is_refused():
    weight, rate = torch.nn.Parameter(torch.ones(3)), torch.tensor(0.5)
    optimizer = ampopt.SGD([weight], lr=rate)
    for _ in range(4):
        weight.grad = torch.ones(3)
        optimizer.step()
    rate.data = torch.tensor([0.5, 0.25])
    with pytest.raises(ValueError, match="Tensor lr of group 0 must be 1-element"):
        optimizer.step()
    assert weight.tolist() == [-1.0] * 3


def test_entries_of_a_rule_read_the_group_at_each_step():
    def rates(group, ndim, dtype):
        return {"lr": group["rates"][ndim]}

    class Divided(ampopt.ElementwiseOptimizer):
        rule = replace(signum, entries=rates)

    by_ndim = {1: 0.5}
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = Divided([weight], {"lr": 0.0, "momentum": 0.0, "rates": by_ndim})
    for _ in range(4):
        weight.grad = torch.ones(3)
        optimizer.step()
    by_ndim[1] = 0.25
    optimizer.step()
    assert weight.tolist() == [1 - 4 * 0.5 - 0.25] * 3


def twisted(tensor):
    """A tensor with the values of ``tensor``, stored column by column."""
    return tensor.detach().t().contiguous().t()


def in_other_memory(tensor):
    return torch.cat((tensor.detach().reshape(-1), torch.zeros(3)))[:-3].view(tensor.shape)


@torch.no_grad()
def set_(model):
    model.weight.set_(in_other_memory(model.weight))


def grown(model):
    """Move the weight of ``model`` to other memory, and keep its values."""
    model.weight.untyped_storage().resize_(1 << 20)


def other_state(model, optimizer):
    state = optimizer.state[model.weight]
    state["momentum_buffer"] = state["momentum_buffer"] * 3


def offloaded(model, optimizer):
    """Replace the memory of all states, as offloading to the CPU and back does."""
    for state in optimizer.state.values():
        for value in state.values():
            value.data = in_other_memory(value) * 3


def removed(model, optimizer):
    del optimizer.param_groups[0]["params"][0]


def exchanged(optimizer, group):
    """Exchange the last parameter of a group for another, which has a gradient."""
    new = torch.nn.Parameter(torch.full_like(optimizer.param_groups[group]["params"][-1], 0.5))
    new.grad = torch.ones_like(new)
    optimizer.param_groups[group]["params"][-1] = new


def regrouped(optimizer):
    """Move the last parameter of the first group to the front of the second."""
    first, second = (group["params"] for group in optimizer.param_groups)
    second.insert(0, first.pop())


CHANGES = {
    "data in other memory": lambda m, o: setattr(m.weight, "data", in_other_memory(m.weight)),
    "data laid out otherwise": lambda m, o: setattr(m.weight, "data", twisted(m.weight)),
    "data seen otherwise": lambda m, o: setattr(m.weight, "data", m.weight.data.view(4, 3).t()),
    "set_": lambda m, o: set_(m),
    "storage resized": lambda m, o: grown(m),
    "frozen": lambda m, o: m.weight.requires_grad_(False),
    "gradient in other memory": lambda m, o: setattr(
        m.weight, "grad", in_other_memory(m.weight.grad)
    ),
    "gradient laid out otherwise": lambda m, o: setattr(m.weight, "grad", twisted(m.weight.grad)),
    "gradient expanded": lambda m, o: setattr(m.weight, "grad", torch.ones(()).expand(3, 4)),
    "gradient lazily negated": lambda m, o: setattr(
        m.weight,
        "grad",
        torch._neg_view(m.weight.grad),  # pyright: ignore[reportPrivateImportUsage]
    ),
    "gradient with a graph": lambda m, o: setattr(
        m.weight, "grad", m.weight.grad.clone().requires_grad_() * 2
    ),
    "gradient sparse": lambda m, o: setattr(m.weight, "grad", torch.eye(3, 4).to_sparse()),
    "no gradient": lambda m, o: setattr(m.weight, "grad", None),
    "other state": other_state,
    "state in other memory": offloaded,
    "state gone": lambda m, o: o.state.clear(),
    "state of one gone": lambda m, o: o.state.pop(m.weight),
    "another dict": lambda m, o: o.state.update({m.weight: dict(o.state[m.weight])}),
    "loaded": lambda m, o: o.load_state_dict(copy.deepcopy(o.state_dict())),
    "parameter removed": removed,
    "last of the first group exchanged": lambda m, o: exchanged(o, 0),
    "last of all exchanged": lambda m, o: exchanged(o, 1),
    "parameter in another group": lambda m, o: regrouped(o),
    "parameters in another order": lambda m, o: o.param_groups[0]["params"].reverse(),
    "other hyperparameters": lambda m, o: o.param_groups[0].update(weight_decay=0.1, lr=0.3),
    "other momentum": lambda m, o: o.param_groups[0].update(momentum=0.0),
    "other flag": lambda m, o: o.param_groups[0].update(nesterov=True),
    "another group in its place": lambda m, o: o.param_groups.__setitem__(
        1, {**o.param_groups[1], "lr": 0.2}
    ),
    "other groups": lambda m, o: setattr(
        o, "param_groups", [{**group, "lr": 0.3} for group in o.param_groups]
    ),
    "another list of other parameters": lambda m, o: (
        o.param_groups[1].update(params=list(o.param_groups[1]["params"])),
        exchanged(o, 1),
    ),
    "group removed": lambda m, o: o.param_groups.pop(),
    "group added": lambda m, o: o.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]}),
}


@pytest.mark.parametrize(
    "backend, implementation", [("eager", "python"), ("compiled", "native")], indirect=True
)
@pytest.mark.parametrize("change", CHANGES)
def test_changes_between_two_steps_have_the_same_effect_as_in_torch(
    change, backend, implementation
):
    ours, torchs = (
        stepped_with_a_change(kind, CHANGES[change]) for kind in (ampopt.SGD, torch.optim.SGD)
    )
    torch.testing.assert_close(ours, torchs)


def stepped_with_a_change(kind, change):
    """The parameters after each of four steps; ``change`` is made before the third."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    extra = torch.nn.Parameter(torch.ones(2))
    groups = [{"params": model.parameters()}, {"params": [extra], "lr": 0.7}]
    optimizer = kind(groups, lr=0.1, momentum=0.9)
    after = []
    for turn in range(4):
        optimizer.zero_grad()
        model(torch.arange(20.0).view(5, 4)).square().mean().backward()
        extra.square().sum().backward()
        if turn == 2:
            change(model, optimizer)
        optimizer.step()
        after += [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
    return after


@pytest.mark.parametrize("backend", ["eager", "compiled", "triton"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_gradients_of_a_group_that_is_added_may_have_another_dtype(dtype, backend):
    params: list[Any] = [torch.nn.Parameter(torch.ones(3))]
    optimizer: Any = ampopt.SGD(params, lr=0.25)
    for turn in range(4):
        if turn == 2:
            params.append(torch.nn.Parameter(torch.ones(5, dtype=dtype)))
            optimizer.add_param_group({"params": params[1:], "lr": 0.5})
        for p in params:
            p.grad = torch.full_like(p, 8.0)
        optimizer.unscale_and_step(grads_scaled_by=8.0, max_norm=float("inf"))
        norm = sum(p.numel() for p in params) ** 0.5
        torch.testing.assert_close(float(optimizer.grad_norm), norm)
    for bad in range(5):
        for p in params:
            p.grad = torch.full_like(p, 8.0)
        params[1].grad[bad] = float("inf")
        result = optimizer.unscale_and_step(grads_scaled_by=8.0)
        assert result.overflowed == ["group 1, parameter 0"]
    assert [p.tolist() for p in params] == [[0.0] * 3, [0.0] * 5]


@pytest.mark.parametrize("backend", ["eager", "compiled", "triton"], indirect=True)
@pytest.mark.parametrize("name", ["exp_avg", "step", "master_param"])
def test_a_replaced_state_tensor_is_used_by_the_next_step(name, backend):
    written, exchanged = (stepped_with_other_values(name, how) for how in ("copy_", "set_"))
    assert written == exchanged


def stepped_with_other_values(name, how):
    params = [torch.nn.Parameter(torch.ones(n, dtype=torch.bfloat16)) for n in (3, 5)]
    optimizer = ampopt.AdamW(params, lr=0.1, master_weights=True)
    for turn in range(3):
        for p in params:
            p.grad = torch.ones_like(p)
            if turn == 2:
                stored = optimizer.state[p][name]
                getattr(stored, how)(torch.full_like(stored, 3.0))
        optimizer.step()
    return [p.tolist() for p in params]


@pytest.mark.parametrize("order", [["eager", "compiled"], ["compiled", "eager", "triton"]])
def test_one_plan_serves_every_backend(order):
    if cpp_compiler() is None:
        pytest.skip("there is no C++ compiler here")
    model, twin = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
    twin.load_state_dict(model.state_dict())
    ours = ampopt.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torchs = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    plans = []
    for backend in order * 2:
        ampopt.set_backend(backend)
        for m, optimizer in ((model, ours), (twin, torchs)):
            optimizer.zero_grad()
            m(torch.arange(20.0).view(5, 4)).square().mean().backward()
            optimizer.step()
        assert ours._ampopt.runner.plan is not None
        plans.append(ours._ampopt.runner.plan)
        torch.testing.assert_close(list(model.parameters()), list(twin.parameters()))
    assert all(plan is plans[0] for plan in plans)


@pytest.mark.parametrize("backend", ["eager", "compiled", "triton"], indirect=True)
@pytest.mark.parametrize("on", ["instance", "class"])
def test_a_rule_that_is_exchanged_between_steps_is_the_rule_of_the_next(on, backend):
    class Exchanged(ampopt.SGD):
        pass

    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = Exchanged([weight], lr=0.5, momentum=0.5)
    owner: Any = optimizer if on == "instance" else Exchanged
    for rule, expected in ((rules.sgd, 5.0), (signum, 4.5)):
        owner.rule = rule
        weight.grad = torch.full((3,), -8.0 if rule is rules.sgd else 32.0)
        optimizer.unscale_and_step(grads_scaled_by=1.0)
        assert weight.tolist() == [expected] * 3


@pytest.mark.parametrize("backend", ["eager", "compiled", "triton"], indirect=True)
def test_a_step_keeps_no_gradient_alive(backend):
    model = torch.nn.Linear(4, 3)
    optimizer = ampopt.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        model(torch.ones(5, 4)).sum().backward()
        grads = [p.grad for p in model.parameters()]
        storages = [StorageWeakRef(g.untyped_storage()) for g in grads if g is not None]
        del grads
        optimizer.step()
        optimizer.zero_grad()
        assert len(storages) == 2 and all(storage.expired() for storage in storages)


def test_masters_may_be_turned_off_while_a_parameter_with_wide_gradients_has_none():
    params = [torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = ampopt.SGD(params, lr=0.25, master_weights=True)
    for step in range(6):
        if step == 2:
            optimizer.param_groups[0]["master_weights"] = False
        for param in params:
            param.grad_dtype = None
            param.grad = torch.ones(3)
        if step in (2, 3):
            params[1].grad = None
        if step == 4:
            params[1].grad = torch.ones_like(params[1])  # bfloat16
        optimizer.unscale_and_step(grads_scaled_by=1.0)
    assert params[0].tolist() == [-0.5] * 3 and params[1].tolist() == [0.0] * 3


@pytest.mark.parametrize("backend", ["eager", "compiled"], indirect=True)
def test_after_unscale_a_plan_that_is_kept_reads_the_gradients_of_masters(backend):
    param = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    optimizer = ampopt.SGD([param], lr=1.0, master_weights=True)
    for scale in (None, None, 3.0):
        param.grad = torch.ones_like(param)
        if scale is not None:
            optimizer.unscale(grads_scaled_by=scale)
        optimizer.step()
    (master,) = optimizer.master_params()
    torch.testing.assert_close(master.detach(), torch.full((3,), -2 - 1 / 3))


@pytest.mark.parametrize("before", [None, "accumulate", "unscale"])
def test_a_removed_parameter_does_not_live_as_long_as_its_optimizer(before):
    optimizer = ampopt.AdamW([torch.nn.Parameter(torch.ones(2)) for _ in range(2)])

    def step() -> None:
        for param in optimizer.param_groups[0]["params"]:
            param.grad = torch.ones(2)
        if before == "accumulate":
            optimizer.accumulate()
        optimizer.step()

    step()
    if before == "unscale":
        optimizer.unscale(1.0)
        optimizer.step()
    param = optimizer.param_groups[0]["params"].pop()
    del optimizer.state[param]
    removed = weakref.ref(param)
    del param
    step()
    gc.collect()
    assert removed() is None
