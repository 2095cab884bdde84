"""Checkpoints and copies: training continues from each as without it.

Between torch and ampopt, results agree within rounding; between ampopt's optimizers bitwise,
however the checkpoint is stored.
"""

import copy
import io
import itertools
import pickle
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.fixtures import either_host
from support.torch_options import (
    ELEMENTWISE,
    OPTION_SETS,
    RICH,
    Distance,
    OptionSet,
    assert_train_alike,
    give,
    gradients,
    initial,
    named,
    params_of,
    spoiled,
)
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn import Parameter

import ampopt
from ampopt.testing.bits import bits, everything, state_of

each_optimizer = pytest.mark.parametrize("options", RICH, ids=str)
DAMPENED = named("SGD", "dampening")  # the one SGD that counts its steps
RICH_RULES = [s for s in RICH if s.name in ELEMENTWISE]
each_rule = pytest.mark.parametrize("options", RICH_RULES, ids=str)
backend = either_host
every_backend = pytest.mark.usefixtures("backend")


def through_a_file(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def train(optimizer: Any, steps: list[list[Tensor]]) -> None:
    for grads in steps:
        give(optimizer, grads)
        optimizer.step()


def copies(params: list[Tensor]) -> list[Tensor]:
    return [p.detach().clone() for p in params]


# --- torch's and back ----------------------------------------------------------------------------


def kinds(state: dict[str, Any]) -> dict[str, Any]:
    """For each entry of a state, its dtype and shape, or its type."""
    return {
        name: (value.dtype, value.shape) if isinstance(value, Tensor) else type(value)
        for name, value in state.items()
        if value is not None
    }


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
@each_optimizer
def test_a_checkpoint_of_torchs_continues_here_and_back(options, dtype):
    """The last parameter gets its first gradient late, and has no state until then."""
    if dtype.is_complex and not options.complex:
        pytest.skip("torch takes no complex parameters")
    makers = itertools.cycle([options.ours, options.torchs])
    relay = options.torchs(initial(options, dtype))
    steady = options.torchs(initial(options, dtype))
    source, apart = gradients(options, dtype), Distance(steady)
    for missing in (1, 0, 0):
        of_leg = lambda: source()[: 2 - missing] + [None] * missing  # noqa: B023, E731
        assert_train_alike(relay, steady, of_leg, range(2), apart=apart)
        saved, expected = through_a_file(relay), steady.state_dict()
        assert saved["state"].keys() == expected["state"].keys()
        for index, state in saved["state"].items():
            assert kinds(state) == kinds(expected["state"][index])
        successor = next(makers)(copies(params_of(relay)))
        successor.load_state_dict(saved)
        relay = successor


@pytest.mark.parametrize("make", [ampopt.AdamW, partial(ampopt.SGD, momentum=0.5)])
def test_a_master_alone_that_equals_its_parameter_is_not_saved(make):
    params = [torch.nn.Parameter(torch.ones(3, dtype=torch.float16)) for _ in range(2)]
    optimizer = make(params, master_weights=True)
    list(optimizer.master_params())
    assert optimizer.state_dict()["state"] == {}
    del optimizer.state[params[0]]["master_param"]  # which leaves an empty state, saved as it is
    assert optimizer.state_dict()["state"] == {0: {}}


@every_backend
def test_sgd_without_momentum_has_no_state():
    options = named("SGD")
    optimizer = options.ours(initial(options))
    train(optimizer, [gradients(options)()])
    assert optimizer.state_dict()["state"] == {}


@every_backend
@pytest.mark.parametrize("taken", [0, 1, 2, 3])
def test_saving_dampened_sgd_loses_nothing(taken):
    def made():
        params = [Parameter(torch.ones(2)), Parameter(torch.ones(2))]
        return ampopt.SGD(params, lr=0.5, momentum=0.5, dampening=0.5)

    optimizer, loaded = made(), made()
    train(optimizer, [[torch.ones(2)] * 2] * taken)
    loaded.load_state_dict(optimizer.state_dict())
    for each in (optimizer, loaded):
        give(each, [torch.full((2,), 0.25), None])  # the second is not stepped again
        each.step()
    assert [*map(bits, optimizer.state.values())] == [*map(bits, loaded.state.values())]


@pytest.mark.parametrize("taken", [0, 1])
@pytest.mark.parametrize("options", [{}, {"momentum": 0.5}, {"momentum": 0.5, "dampening": 0.25}])
@pytest.mark.parametrize("backend", ["auto"], indirect=True)
def test_sgd_on_meta_parameters_is_saved_as_torchs(options, taken, backend):
    saved = []
    for optim in (ampopt, torch.optim):
        param = Parameter(torch.ones(2, device="meta"))
        optimizer = optim.SGD([param], **options)
        train(optimizer, [[torch.ones_like(param)]] * taken)
        state = optimizer.state_dict()["state"]
        saved.append({key: kinds(entry) for key, entry in state.items()})
    assert saved[0] == saved[1]


@pytest.mark.parametrize("options", [s for s in OPTION_SETS if s.name == "LBFGS"], ids=str)
def test_a_checkpoint_of_torchs_lbfgs_continues_here_and_back(options):
    target = torch.linspace(-1.0, 1.0, 5)

    def step(optimizer: Any) -> None:
        (p,) = params_of(optimizer)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = ((p - target) ** 4).sum() + (p.prod() - 1) ** 2
            loss.backward()
            return loss

        optimizer.step(closure)

    relay = options.torchs([torch.zeros(5, requires_grad=True)])
    steady = options.torchs([torch.zeros(5, requires_grad=True)])
    for maker in (options.ours, options.torchs, options.ours):
        step(relay)
        step(steady)
        assert bits(params_of(relay)) == bits(params_of(steady))
        saved = through_a_file(relay)
        assert bits(saved["state"]) == bits(steady.state_dict()["state"])
        relay = maker([p.requires_grad_() for p in copies(params_of(relay))])
        relay.load_state_dict(saved)


@every_backend
@each_optimizer
def test_a_checkpoint_taken_after_a_skipped_first_step_is_a_fresh_start_in_torch(options):
    skipped = options.ours(initial(options))
    source = gradients(options)
    give(skipped, spoiled(source()))
    assert skipped.unscale_and_step(grads_scaled_by=1.0).skipped
    relay, fresh = options.torchs(initial(options)), options.torchs(initial(options))
    relay.load_state_dict(through_a_file(skipped))
    grads = source()
    for optimizer in (relay, fresh):
        train(optimizer, [grads])
    assert bits(params_of(relay)) == bits(params_of(fresh))


@every_backend
@each_optimizer
def test_older_state_dicts_with_counts_as_python_numbers_load(options):
    torchs = options.torchs(initial(options))
    source = gradients(options)
    train(torchs, [source()])
    old = copy.deepcopy(torchs.state_dict())
    for state in old["state"].values():
        for key in ("step", "eta", "mu", "mu_product"):
            if key in state:
                state[key] = float(state[key])
    ours = options.ours(copies(params_of(torchs)))
    ours.load_state_dict(old)
    assert_train_alike(ours, torchs, source, range(2))


@every_backend
@each_optimizer
def test_a_group_added_mid_training_is_saved_with_the_others(options):
    """The new group steps as a group that existed from the start and had no gradients."""
    late = {"params": initial(options), "lr": 0.03125}
    ours = options.ours(initial(options))
    torchs = options.torchs([{"params": initial(options)}, copy.deepcopy(late)])
    source = gradients(options)
    first = source()
    train(ours, [first])
    train(torchs, [[*first, *[None] * len(first)]])  # type: ignore[list-item]
    ours.add_param_group(late)
    both, apart = lambda: [*source(), *source()], Distance(torchs)
    assert_train_alike(ours, torchs, both, range(2), apart=apart)
    resumed = options.torchs([{"params": copies(group["params"])} for group in ours.param_groups])
    resumed.load_state_dict(through_a_file(ours))
    assert resumed.param_groups[1]["lr"] == 0.03125
    assert_train_alike(resumed, torchs, both, range(2), apart=apart)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("to_ours", [True, False], ids=["to ours", "to torchs"])
@pytest.mark.parametrize("options", [*RICH_RULES, DAMPENED], ids=str)
def test_a_distributed_checkpoint_loads_strictly_and_continues(options, to_ours, tmp_path):
    makers = (options.torchs, options.ours) if to_ours else (options.ours, options.torchs)
    model, source = torch.nn.ParameterList(initial(options)), gradients(options)
    steady = makers[0](list(model))
    train(steady, [source()])
    saved = get_optimizer_state_dict(model, steady)
    save(saved, checkpoint_id=tmp_path)
    arrived = torch.nn.ParameterList(copies(params_of(steady)))
    relay = makers[1](list(arrived))
    found = get_optimizer_state_dict(arrived, relay)  # which takes a step to make the state
    load(found, checkpoint_id=tmp_path)
    set_optimizer_state_dict(arrived, relay, found)
    ours, torchs = (relay, steady) if to_ours else (steady, relay)
    assert_train_alike(ours, torchs, source, range(2))


# --- what users keep in the state ----------------------------------------------------------------


USERS = {"count": 3, "average": torch.tensor([0.5]), "nested": {"step": 7}, "empty": {}}


@every_backend
@pytest.mark.parametrize("loaded", [True, False], ids=["loaded", "copied"])
@pytest.mark.parametrize("options", [*RICH, DAMPENED], ids=str)
def test_entries_that_users_add_to_the_state_are_saved(options, loaded):
    """Also an entry whose key is no parameter, and an extra entry in a parameter's state."""
    optimizer, source = options.ours(initial(options)), gradients(options)
    optimizer.state.update(copy.deepcopy(USERS))
    first = params_of(optimizer)[0]
    optimizer.state[first]["of mine"] = 5
    give(optimizer, source())
    optimizer.unscale_and_step(grads_scaled_by=1.0)
    give(optimizer, spoiled(source()))
    assert optimizer.unscale_and_step(grads_scaled_by=1.0).skipped
    if loaded:
        saved = optimizer.state_dict()["state"]
        assert {key: saved[key] for key in USERS} == USERS
        assert saved[0]["of mine"] == 5
        arrived = options.ours(copies(params_of(optimizer)))
        arrived.load_state_dict(through_a_file(optimizer))
    else:
        arrived = copy.deepcopy(optimizer)
    train(arrived, [source()])
    assert {key: arrived.state[key] for key in USERS} == USERS
    assert arrived.state[params_of(arrived)[0]]["of mine"] == 5


# --- from here to here ---------------------------------------------------------------------------


def loaded(how: Callable[[Any], dict[str, Any]]) -> Callable[[OptionSet, Any], Any]:
    def transport(options: OptionSet, optimizer: Any) -> Any:
        fresh = options.ours(copies(params_of(optimizer)), **extras(optimizer))
        fresh.load_state_dict(how(optimizer))
        return fresh

    return transport


def extras(optimizer: Any) -> dict[str, Any]:
    return {"master_weights": True} if optimizer.defaults.get("master_weights") else {}


TRANSPORTS: dict[str, Callable[[OptionSet, Any], Any]] = {
    "state_dict": loaded(lambda optimizer: optimizer.state_dict()),
    "torch.save": loaded(through_a_file),
    "pickle": lambda _, optimizer: pickle.loads(pickle.dumps(optimizer)),
    "deepcopy": lambda _, optimizer: copy.deepcopy(optimizer),
}
each_transport = pytest.mark.parametrize("transport", TRANSPORTS)


def assert_continues(
    options: OptionSet, optimizer: Any, transport: str, steps: list[list[Tensor]]
) -> None:
    """Check that a copy equals the original, shares no memory with it, and steps like it."""
    arrived = TRANSPORTS[transport](options, optimizer)
    saved = bits(optimizer.state_dict()["state"])
    assert bits(arrived.state_dict()["state"]) == saved
    assert bits(params_of(arrived)) == bits(params_of(optimizer))
    before = everything(arrived)
    train(optimizer, steps)
    assert everything(arrived) == before
    before = everything(optimizer)
    train(arrived, steps)
    assert everything(optimizer) == before
    assert bits(params_of(arrived)) == bits(params_of(optimizer))
    assert bits(arrived.state_dict()["state"]) == bits(optimizer.state_dict()["state"])


@pytest.mark.parametrize("backend", ["compiled"], indirect=True)
def test_a_compiled_rule_continues_a_checkpoint_of_torchs(backend):
    options = named("Adam", "amsgrad")
    torchs, source = options.torchs(initial(options)), gradients(options)
    train(torchs, [source()])
    ours = options.ours(copies(params_of(torchs)))
    ours.load_state_dict(through_a_file(torchs))
    assert_train_alike(ours, torchs, source, range(2))
    assert_continues(options, ours, "torch.save", [source()])


@each_transport
@pytest.mark.parametrize("taken", [0, 2])
@each_optimizer
def test_copies_and_loaded_optimizers_step_bitwise_as_the_original(options, taken, transport):
    optimizer = options.ours(initial(options))
    source = gradients(options)
    give(optimizer, spoiled(source()))
    assert optimizer.unscale_and_step(grads_scaled_by=1.0).skipped
    train(optimizer, [source() for _ in range(taken)])
    assert_continues(options, optimizer, transport, [source() for _ in range(2)])


@each_transport
@pytest.mark.parametrize("masters", [False, True], ids=["plain", "masters"])
@each_rule
def test_half_precision_states_are_copied_and_loaded_bitwise(options, masters, transport):
    """Torch's loader casts masters, and scalars such as ASGD's ``eta``, to half precision."""
    optimizer = options.ours(initial(options, torch.bfloat16), master_weights=masters)
    source = gradients(options, torch.bfloat16)
    train(optimizer, [source()])
    assert_continues(options, optimizer, transport, [source()])


@each_transport
def test_a_pending_unscale_is_refused(transport):
    options = named("Adam", "amsgrad")
    optimizer = options.ours(initial(options))
    source = gradients(options)
    train(optimizer, [source()])
    give(optimizer, source(), 2.0)
    optimizer.unscale(grads_scaled_by=2.0)
    call = "state_dict" if transport in ("state_dict", "torch.save") else "copying or pickling"
    with pytest.raises(RuntimeError, match=f"^{call}: an unscale is pending. Call step_after"):
        TRANSPORTS[transport](options, optimizer)
    optimizer.step_after_unscale()
    assert_continues(options, optimizer, transport, [source()])


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
@each_rule
def test_an_optimizer_copied_with_its_model_steps_that_model(options, duplicate):
    optimizer = options.ours(initial(options))
    source = gradients(options)
    train(optimizer, [source()])
    twin, params = duplicate((optimizer, params_of(optimizer)))
    assert all(a is b for a, b in zip(params_of(twin), params, strict=True))
    grads = source()
    train(optimizer, [grads])
    train(twin, [grads])
    assert bits(params) == bits(params_of(optimizer))


def pickled(optimizer: Any) -> bytes:
    return pickle.dumps(optimizer.state_dict())


def saved(optimizer: Any) -> bytes:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    return file.getvalue()


@pytest.mark.parametrize("n", [1, 64])
@pytest.mark.parametrize("write", [pickle.dumps, pickled, saved])
def test_a_checkpoint_of_small_parameters_takes_as_much_as_torchs(write, n):
    sizes = []
    for cls in (ampopt.AdamW, torch.optim.AdamW):
        optimizer = cls([Parameter(torch.ones(n)) for _ in range(50)])
        train(optimizer, [[torch.ones(n)] * 50])
        sizes.append(len(write(optimizer)))
    assert sizes[0] < 1.02 * sizes[1]


@every_backend
def test_a_state_that_is_loaded_is_not_shared_with_the_checkpoint():
    options = named("Adam", "amsgrad")
    optimizer = options.ours(initial(options))
    source = gradients(options)
    train(optimizer, [source()])
    saved = copy.deepcopy(optimizer.state_dict())
    before = bits(saved["state"])
    fresh = options.ours(copies(params_of(optimizer)))
    fresh.load_state_dict(saved)
    train(fresh, [source()])
    assert bits(saved["state"]) == before
    assert state_of(fresh) != state_of(optimizer)


class Recent(ampopt.Optimizer):
    """Follows the sum of the last two gradients; counts its steps in a state of no parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        total = self.state.setdefault("total", {"steps": torch.zeros(())})  # type: ignore[call-overload]
        total["steps"] += 1
        for p in params_of(self):
            assert p.grad is not None
            state = self.state[p]
            kind, last = state.get("kind", "first"), state.setdefault("last", deque(maxlen=2))
            assert kind in ("first", "later")
            state["kind"] = "later"
            last.append(p.grad.double())
            p.sub_(torch.stack([*last]).sum(0).to(p.dtype))


def test_strings_deques_and_states_of_no_parameter_are_loaded_as_they_were_saved():
    p, q = Parameter(torch.ones(2).bfloat16()), Parameter(torch.ones(2).bfloat16())
    optimizer, loaded = Recent([p]), Recent([q])
    train(optimizer, [[torch.full((2,), x).bfloat16()] for x in (0.5, 0.25)])
    with torch.no_grad():
        q.copy_(p)
    loaded.load_state_dict(optimizer.state_dict())
    assert loaded.state[q]["last"][0].dtype == torch.float64
    for opt in (loaded, optimizer):
        train(opt, [[torch.full((2,), 0.125).bfloat16()]])
    assert bits(q) == bits(p) and state_of(loaded) == state_of(optimizer)
    assert loaded.state["total"] == {"steps": 3}  # type: ignore[index]


def test_the_momentum_of_sparse_gradients_can_be_copied():
    table = Parameter(torch.ones(2, 1))
    optimizer = ampopt.SGD([table], lr=0.5, momentum=0.5)
    train(optimizer, [[sparse_ones(table)]])
    twin, (copied,) = copy.deepcopy((optimizer, [table]))
    for opt, of in ((optimizer, table), (twin, copied)):
        train(opt, [[sparse_ones(of)]])
    assert bits(copied) == bits(table)


def test_the_step_count_of_sparse_adam_is_a_tensor_as_soon_as_it_is_loaded():
    """Also the count of a parameter without a gradient in the next step."""
    table = Parameter(torch.ones(2, 1))
    optimizer, loaded = ampopt.SparseAdam([table]), ampopt.SparseAdam([table])
    train(optimizer, [[sparse_ones(table)]])
    loaded.load_state_dict(optimizer.state_dict())
    assert state_of(loaded) == state_of(optimizer)


def sparse_ones(table: Tensor) -> Tensor:
    rows = torch.tensor([[0, 1]])
    return torch.sparse_coo_tensor(rows, torch.ones(2, 1), table.shape, check_invariants=True)
