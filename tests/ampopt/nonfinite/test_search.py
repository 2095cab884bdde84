"""``first_nonfinite`` names the first module with a non-finite output or gradient."""

import gc
import pickle
import weakref
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.counted_operations import counted
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import ampopt

INF, NAN = float("inf"), float("nan")
FLOAT16_MAX = 65504.0


class Explodes(nn.Module):
    """Returns infinities."""

    def forward(self, x: Tensor) -> Tensor:
        return x * INF


class Block(nn.Module):
    """A residual block with the module ``inner`` between its two layers."""

    def __init__(self, inner: nn.Module | None = None):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.inner = nn.ReLU() if inner is None else inner
        self.second = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.inner(self.first(x)))


class SteepRoot(nn.Module):
    """Returns small, finite values; the gradient at 0 is infinite."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * 0).sqrt()


def stack_of(n: int, at: int, inner: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(inner if i == at else None) for i in range(n)))


def run(model: nn.Module, x: Tensor) -> None:
    model(x).square().sum().backward()


@given(st.data())
def test_the_innermost_module_is_named_in_either_direction(data):
    n = data.draw(st.integers(1, 5), label="blocks")
    at = data.draw(st.integers(0, n - 1), label="the bad one")
    direction = data.draw(st.sampled_from(["forward", "backward"]))
    inner = Explodes() if direction == "forward" else SteepRoot()
    model = stack_of(n, at, inner)
    with ampopt.first_nonfinite(model) as found:
        run(model, torch.ones(2, 4))
    first = found.first
    assert first is not None
    assert (first.name, first.direction) == (f"{at}.inner", direction)
    assert first.kind == type(inner).__name__
    assert (first.dtype, first.shape, first.given_finite) == (torch.float32, (2, 8), True)
    assert repr(f"{at}.inner") in str(found)
    assert ("check the module for" in str(found)) == (direction == "forward")
    assert ("a smaller loss scale rarely helps" in str(found)) == (direction == "backward")
    assert ("The last finite output before" in str(found)) == (direction == "forward")


def test_the_model_itself_has_no_name():
    with ampopt.first_nonfinite(model := Explodes()) as found:
        model(torch.ones(1))
    assert str(found).startswith("the output of the model itself (Explodes) is not finite")


def test_an_overflow_under_autocast_is_shown_with_dtype_and_largest_value():
    layer = nn.Linear(2, 3, bias=False)
    layer.weight.data.copy_(torch.tensor([[1.0, 0.0], [300.0, 0.0], [0.0, 2.0]]))
    model = nn.Sequential(layer, nn.Linear(3, 1))
    with ampopt.first_nonfinite(model) as found, torch.autocast("cpu", torch.float16):
        model(torch.tensor([[300.0, 8.0]]))
    first = found.first
    assert first is not None
    assert (first.name, first.kind, first.direction) == ("0", "Linear", "forward")
    assert (first.dtype, first.shape, first.largest) == (torch.float16, (1, 3), 300.0)
    assert f"{FLOAT16_MAX:.4g}" in str(found) and "float32" in str(found)


def test_a_gradient_of_a_weight_that_overflows_where_activations_do_not():
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    for parameter in model.parameters():
        parameter.data.fill_(1.0)
    with ampopt.first_nonfinite(model) as found:
        with torch.autocast("cpu", torch.float16):
            out = model(torch.full((256, 1), 100.0))
        (out.float().sum() * 16.0).backward()  # 256 * 100 * 16 is too much, 16 is not
    first = found.first
    assert first is not None
    assert (first.name, first.direction, first.dtype) == ("1", "backward", torch.float16)
    assert first.given_finite and "a smaller loss scale may help" in str(found)
    assert "Backward" in str(first.operation) and str(first.operation) in str(found)


Pair = namedtuple("Pair", ["fine", "bad"])


@pytest.mark.parametrize(
    "contain",
    [
        lambda fine, bad: (fine, bad),
        lambda fine, bad: {"fine": fine, "bad": bad},
        lambda fine, bad: Pair(fine, [{"deep": bad, "none": None, "count": 3}]),
    ],
    ids=["tuple", "dict", "named tuple"],
)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_outputs_in_containers(contain, direction):
    class Returns(nn.Module):
        def forward(self, x):
            bad = (x * 0).sqrt() if direction == "backward" else x * INF
            return contain(x * 1, bad)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.returns = nn.Linear(2, 2), Returns()

        def forward(self, x):
            leaves = pytree.tree_leaves(self.returns(self.layer(x)))
            return sum(leaf.sum() for leaf in leaves if isinstance(leaf, Tensor))

    model = Net()
    with ampopt.first_nonfinite(model) as found:
        model(torch.ones(1, 2)).backward()
    assert found.first is not None
    assert (found.first.name, found.first.direction) == ("returns", direction)


class Converts(nn.Module):
    """Divides by its second input, and converts the result."""

    def __init__(self, to: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._to = to

    def forward(self, x: Tensor, divisor: Tensor) -> Tensor:
        return self._to(x / divisor)


@pytest.mark.filterwarnings("ignore:.*prototype stage:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
@pytest.mark.parametrize(
    ("to", "shape"),
    [
        (Tensor.to_sparse, (2, 2)),
        (Tensor.to_sparse_csr, (2, 2)),
        (lambda x: torch.nested.as_nested_tensor(list(x)), (4,)),
        (lambda x: torch.nested.as_nested_tensor(list(x), layout=torch.jagged), (4,)),
    ],
    ids=["sparse", "csr", "nested", "jagged"],
)
def test_outputs_that_are_sparse_or_nested(to, shape):
    divisor = torch.tensor([[1.0, 2.0], [0.0, 4.0]])
    with ampopt.first_nonfinite(model := Converts(to)) as search:
        model(torch.ones(2, 2), torch.ones(2, 2))
        assert not search
        model(torch.ones(2, 2), divisor)
    found = search.first
    assert found is not None
    assert (found.kind, found.shape, found.largest) == ("Converts", shape, 1.0)


def test_two_uses_of_a_module_are_distinguished_by_their_inputs():
    shared = nn.Linear(1, 1, bias=False)
    shared.weight.data.fill_(1e30)
    model = nn.Sequential(shared, nn.Tanh(), shared, shared)
    with ampopt.first_nonfinite(model) as found:
        model(torch.ones(1, 1))
    assert found.first is not None
    assert (found.first.name, found.first.given_finite) == ("0", True)
    assert found.calls == 5


def test_operations_between_submodules_are_blamed_on_the_parent():
    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x):
            x = self.first(x)
            return self.second((x * 0).sqrt())

    model = nn.Sequential(nn.Linear(2, 2), Parent())
    with ampopt.first_nonfinite(model) as found:
        run(model, torch.ones(1, 2))
    assert found.first is not None
    assert (found.first.name, found.first.kind, found.first.operation) == (
        "1",
        "Parent",
        "SqrtBackward0",
    )


def test_a_batch_that_is_not_finite_is_not_blamed_on_the_module():
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    with ampopt.first_nonfinite(model) as found:
        model(torch.full((1, 2, 2), float("nan")))
    assert found.first is not None
    assert (found.first.name, found.first.given_finite) == ("0", False)
    assert found.first.largest is None
    assert "check the batch" in str(found)


class Attention(nn.Module):
    """One attention head whose scores are not scaled down."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(4, 4, bias=False) for _ in range(4))
        for layer in self.children():
            layer.weight.data = torch.eye(4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        return self.out((q @ k.T).softmax(-1) @ v)


LARGE = torch.tensor([3e38, 3e38])
TWICE = torch.sparse_coo_tensor(torch.tensor([[0, 0]]), LARGE, (1,), check_invariants=True)
"""Not coalesced: two finite numbers, of which the sum is the element."""


class OffloadedInPart(nn.Module):
    """Returns its argument; one of its parameters is elsewhere, as Accelerate offloads them."""

    def __init__(self):
        super().__init__()
        self.offloaded = nn.Parameter(torch.empty(2, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(
    ("x", "finite"),
    [
        (torch.tensor([1e300], dtype=torch.float64), True),
        (torch.tensor([1e300, INF], dtype=torch.float64), False),
        (torch.tensor([complex(1.0, INF)]), False),
        (torch.tensor([1.0, NAN]).to(torch.float8_e4m3fn), False),
        (TWICE, False),
        (torch.empty(2, device="meta"), True),
    ],
    ids=lambda x: str(x.dtype) if isinstance(x, Tensor) else str(x),
)
def test_every_kind_of_tensor_is_checked(x, finite):
    with ampopt.first_nonfinite(model := OffloadedInPart()) as found:
        model(x)
    assert (not found) == finite
    assert finite or str(x.dtype).removeprefix("torch.") in str(found)


class PassesMinusInfinity(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x - INF)


def test_minus_infinity_of_which_a_gradient_is_needed_is_no_mask():
    with ampopt.first_nonfinite(model := PassesMinusInfinity()) as found:
        model(torch.ones(2, requires_grad=True))
    assert found.first is not None and (found.first.name, found.first.given_to) == ("", "out")


class Longs(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.long()


def test_outputs_after_the_first_that_is_not_finite_are_not_read():
    def reads(after: int) -> int:
        model = nn.Sequential(Explodes(), *(nn.ReLU() for _ in range(after)))
        with ampopt.first_nonfinite(model):
            return counted(lambda: model(torch.ones(2)))["local_scalar_dense"]

    assert reads(5) == reads(1) > 0


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_parameters_may_be_computed_as_in_meta_learning():
    model = nn.Linear(2, 1)
    weight = model.weight
    model._parameters["weight"] = weight - 0.1 * weight.detach()  # type: ignore[assignment]
    with ampopt.first_nonfinite(model) as found:
        model(torch.tensor([[INF, 1.0]])).sum().backward()
    assert found.first is not None and weight.grad is not None


def test_the_last_finite_output_is_before_modules_that_return_integers():
    model = nn.Sequential(nn.Identity(), Longs(), Explodes())
    with ampopt.first_nonfinite(model) as found:
        model(torch.ones(2))
    assert found.first is not None and found.first.last_finite is not None
    assert (found.first.name, found.first.last_finite.name) == ("2", "0")


class Catches(nn.Module):
    """Catches an error of the module within it, and returns infinities."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        with pytest.raises(KeyError):
            self.inner(x)
        return x * INF


def raises_key_error(module: nn.Module, args: Any) -> None:
    raise KeyError


def test_a_pre_hook_that_raises_before_the_module_is_watched():
    model: Any = nn.Sequential(Catches())
    model[0].inner.register_forward_pre_hook(raises_key_error)
    with ampopt.first_nonfinite(model) as found:
        model(torch.ones(1))
    assert found.first is not None and (found.first.name, found.calls) == ("0", 2)
    model.register_forward_pre_hook(raises_key_error)
    with ampopt.first_nonfinite(model), pytest.raises(KeyError):
        model(torch.ones(1))


class Doublings(nn.Module):
    """The graph has 2**64 paths."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for _ in range(64):
            x = x + x
        return x


def test_a_search_visits_a_node_once_and_is_forgotten():
    model: Any = Doublings()
    accumulator = (model.scale * 1).grad_fn.next_functions[0][0]  # which DDP keeps
    with ampopt.first_nonfinite(model) as found:
        model(torch.ones(1)).sum().backward()
    assert not found and accumulator is not None
    forgotten = weakref.ref(found)
    del found
    gc.collect()
    assert forgotten() is None


def test_operations_between_modules_are_blamed_on_the_forward_around_them():
    model = nn.Sequential(nn.Identity(), Attention()).half()
    with ampopt.first_nonfinite(model) as found:
        model(torch.full((2, 4), 200.0, dtype=torch.float16))
    first = found.first
    assert first is not None and first.last_finite is not None
    assert (first.name, first.kind, first.given_to) == ("1", "Attention", "1.out")
    assert first.given_finite and first.dtype == torch.float16
    assert (first.last_finite.name, first.last_finite.largest) == ("1.v", 200.0)
    for part in (
        "'1' (Attention)",
        "'1.out'",
        "'1.v' (Linear), float16",
        "between modules in float32",
    ):
        assert part in str(found)
    assert "batch" not in str(found)


class ExplodesUnderAMask(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x * INF + mask


class MakesAMask(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = ExplodesUnderAMask()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, mask=torch.full((2, 2), -INF).triu(1))


def test_a_mask_is_not_taken_for_the_cause():
    model = MakesAMask()
    with ampopt.first_nonfinite(model) as found:
        model(torch.ones(2, 2))
    assert found.first is not None
    assert (found.first.name, found.first.given_finite) == ("inner", True)


@pytest.mark.parametrize(
    ("layer", "given", "parameter"),
    [
        (nn.Linear(2, 2), torch.ones(1, 2), "1.weight"),
        (nn.Embedding(3, 2), torch.tensor([0, 1]), "1.weight"),
        (nn.BatchNorm1d(2).eval(), torch.ones(1, 2), "1.running_mean"),
        (Attention(), torch.ones(2, 4), "1.q.weight"),
    ],
)
def test_a_parameter_that_is_nan_is_distinguished_from_an_overflow(layer, given, parameter):
    model = nn.Sequential(nn.Identity(), layer)
    model.state_dict()[parameter][1] = NAN
    with ampopt.first_nonfinite(model) as found:
        model(given)
    assert found.first is not None and found.first.parameter == parameter
    assert "last finite output" not in str(found)
    assert "checkpoint" in str(found) and "float32 " not in found.first.advice


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float32_is_not_advised_where_it_has_no_larger_range(dtype):
    model = nn.Sequential(nn.Identity(), Explodes()).to(dtype)
    with ampopt.first_nonfinite(model) as found:
        model(torch.ones(1, 2, dtype=dtype))
    assert "in float32" not in str(found) and "division by 0" in str(found)


def test_a_loss_whose_gradient_is_not_finite_is_not_blamed_on_the_module():
    model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2))
    with ampopt.first_nonfinite(model) as found:
        (model(torch.ones(1, 4)) * 0).sqrt().sum().backward()
    assert found.first is not None
    assert (found.first.name, found.first.given_finite) == ("1", False)
    assert "check the loss" in str(found)


def test_a_module_that_works_in_place():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), SteepRoot(), nn.Linear(4, 1))
    with ampopt.first_nonfinite(model) as found:
        run(model, torch.ones(1, 4))
    assert found.first is not None
    assert (found.first.name, found.first.direction) == ("2", "backward")

    with ampopt.first_nonfinite(model[1:2]) as found:  # what it is given is gone by the end
        model[1:2](torch.tensor([INF]))
    assert found.first is not None and not found.first.given_finite


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_activation_checkpointing(reentrant):
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.inner = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), SteepRoot())

        def forward(self, x):
            return checkpoint(self.inner, self.layer(x), use_reentrant=reentrant)

    model = Checkpointed()
    with ampopt.first_nonfinite(model) as found:
        run(model, torch.ones(1, 4))
    assert found.first is not None
    assert (found.first.name, found.first.direction) == ("inner.1", "backward")


def test_compiled_modules_run_uncompiled_during_a_search():
    model = nn.Sequential(nn.Linear(4, 4), Explodes())
    compiled = torch.compile(model, backend="eager")
    compiled(torch.ones(1, 4))
    with ampopt.first_nonfinite(model) as found:
        compiled(torch.ones(1, 4))
    assert found.first is not None and found.first.name == "1"


def hooks_of(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_an_error_leaves_no_hooks_and_what_was_found_until_then():
    class Raises(nn.Module):
        def forward(self, x):
            raise KeyError("mine")

    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(Explodes(), Raises()))
    with pytest.raises(KeyError, match="mine"), ampopt.first_nonfinite(model) as found:
        with pytest.raises(KeyError):
            model(torch.ones(1, 2))
        model(torch.ones(1, 2))
    assert hooks_of(model) == 0
    assert found.first is not None and found.first.name == "1.0"


def test_a_hook_whose_error_before_a_module_the_parent_catches():
    class Falls(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Explodes(), Explodes()

        def forward(self, x):
            try:
                return self.first(x)
            except KeyError:
                return self.second(x)

    def refuse(module, args):
        raise KeyError("mine")

    falls = Falls()
    falls.first.register_forward_pre_hook(refuse)
    model = nn.Sequential(nn.Linear(2, 2), falls)
    with ampopt.first_nonfinite(model) as found:
        model(torch.ones(1, 2))
    assert found.first is not None and found.first.name == "1.second" and found.calls == 4


def test_a_graph_that_is_run_backward_later_is_no_longer_watched():
    model = nn.Sequential(nn.Linear(4, 4), SteepRoot())
    with ampopt.first_nonfinite(model) as found:
        out = model(torch.ones(1, 4))
    assert hooks_of(model) == 0
    out.sum().backward()
    assert not found
    assert "finite" in str(found) and "3 calls" in str(found)


def test_gradients_are_bitwise_what_they_are_without_it():
    def gradients(watched: bool) -> list[Tensor]:
        model = stack_of(3, 1, nn.Tanh())
        x = torch.linspace(-1, 1, 8).reshape(2, 4)
        if watched:
            with ampopt.first_nonfinite(model) as found:
                run(model, x)
            assert not found and found.calls == 13
        else:
            run(model, x)
        return [p.grad for p in model.parameters() if p.grad is not None]

    for a, b in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(a.view(torch.int32), b.view(torch.int32))


def test_a_search_in_which_no_module_ran_says_so():
    with ampopt.first_nonfinite(nn.Linear(1, 1)) as found:
        pass
    assert "no module of the model was called" in str(found)


def test_an_object_that_is_not_a_module_is_refused():
    model = nn.Linear(1, 1)
    step = ampopt.TrainStep(model, nn.MSELoss(), ampopt.SGD(model.parameters()), None)
    with (
        pytest.raises(TypeError, match=r"got TrainStep: .* step\.model"),
        ampopt.first_nonfinite(step),  # type: ignore[arg-type]
    ):
        pass


# --- with replay ------------------------------------------------------------------------------


def six_blocks_of_which_one_explodes(inner: nn.Module) -> nn.Sequential:
    model = stack_of(6, 3, inner)
    model.append(nn.Linear(4, 2))
    assert len(list(model.parameters())) == 26
    return model


@pytest.mark.parametrize("kind", ["train step", "unscale_and_step", "step_after_unscale"])
@pytest.mark.parametrize("watched", [True, False])
def test_the_error_names_the_module_that_explodes_among_26_parameters(kind, watched):
    model = six_blocks_of_which_one_explodes(SteepRoot())
    optimizer = ampopt.AdamW(model.named_parameters())
    images, labels = torch.ones(2, 4), torch.zeros(2, 2)

    def closure(scale):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(images), labels)
        ampopt.scale_outputs(loss, scale).backward()
        if kind == "step_after_unscale":
            return loss, *optimizer.unscale(scale)
        return loss

    def attempt():
        scale = ampopt.DynamicLossScale()
        if kind == "train step":
            options: Any = {"autocast": None, "max_replays": 3}
            step = ampopt.TrainStep(model, nn.MSELoss(), optimizer, scale, **options)
            step(images, labels)
        elif kind == "unscale_and_step":
            optimizer.unscale_and_step(closure, grads_scaled_by=scale, max_replays=3)
        else:
            optimizer.step_after_unscale(closure, current_grad_scale=scale, max_replays=3)

    with pytest.raises(ampopt.NonFiniteGradientError) as caught:
        if watched:
            with ampopt.first_nonfinite(model):
                attempt()
        else:
            attempt()
    error = caught.value
    assert len(error.parameters) > 10  # which says nothing
    assert error.module == ("3.inner" if watched else None)
    assert ("'3.inner' (SteepRoot)" in str(error)) == watched
    again = pickle.loads(pickle.dumps(error))
    assert (again.module, str(again)) == (error.module, str(error))


def test_the_error_names_no_module_of_an_earlier_call():
    model = nn.Sequential(nn.Linear(4, 4), SteepRoot())
    optimizer = ampopt.SGD(model.parameters(), lr=0.1)

    def attempt(extra: float) -> str | None:
        def closure(scale):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4)).sum() + extra
            ampopt.scale_outputs(loss, scale).backward()
            return loss

        with pytest.raises(ampopt.NonFiniteGradientError) as caught:
            optimizer.unscale_and_step(closure, grads_scaled_by=2.0, max_replays=1)
        return caught.value.module

    with ampopt.first_nonfinite(nn.Linear(1, 1)), ampopt.first_nonfinite(model):
        assert attempt(0.0) == "1"
        model[1] = nn.Identity()
        assert attempt(NAN) is None


class OverflowsAbove(nn.Module):
    """Its gradient is infinite where the incoming gradient exceeds ``limit``."""

    def __init__(self, limit: float):
        super().__init__()
        self.limit = limit

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0
        x.register_hook(lambda g: torch.where(g.abs() > self.limit, INF, g))
        return x * 1.0


def test_after_replays_the_result_is_that_of_the_last_one_that_overflowed():
    first = nn.Linear(1, 1)
    first.weight.data.fill_(1.0)
    model = nn.Sequential(first, OverflowsAbove(64.0), OverflowsAbove(256.0))
    optimizer = ampopt.SGD(model.parameters(), lr=0.0)
    step = ampopt.TrainStep(
        model,
        lambda out: out.mean(),
        optimizer,
        ampopt.DynamicLossScale(init_scale=1024.0),
        autocast=None,
        max_replays=20,
    )
    with ampopt.first_nonfinite(model) as found:
        assert step(torch.ones(1, 1)).scale.item() == 64.0
    assert found.first is not None and found.first.name == "1"  # at 128; "2" at 512 and above


# --- gradients that no module made ----------------------------------------------------------------


class Head(nn.Module):
    """A layer whose bias, at zero, may also be in a penalty."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(2, 2), nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def penalized(model: Head) -> Tensor:
    return model(torch.ones(3, 2)).sum() + (model.head.bias * 0).sum().sqrt()


def given_by_hand(model: Head) -> None:
    model.head.bias.grad = torch.tensor([INF])


@pytest.mark.parametrize("clears", [False, True], ids=["", "cleared at once"])
def test_a_gradient_made_outside_of_modules_is_named_by_its_parameter(clears):
    model = Head()
    with ampopt.first_nonfinite(model) as found:
        penalized(model).backward()
        if clears:
            model.zero_grad()
    first = found.first
    assert first is not None and (first.name, first.kind) == ("head", "Linear")
    assert (first.direction, first.parameter, first.operation) == ("backward", "head.bias", None)
    assert str(found).startswith(
        "the gradient of 'head.bias', made outside of modules, is not finite: float32 of shape "
        "(1,), without a finite element. All gradients that modules made were finite"
    )


def test_a_gradient_of_operations_before_the_model_is_not_found():
    model, x = Head(), torch.zeros(3, 2, requires_grad=True)
    with ampopt.first_nonfinite(model) as found:
        model(x.sqrt()).sum().backward()
    assert x.grad is not None and x.grad.isinf().all() and not found


def test_gradients_are_checked_at_the_end_too():
    model = Head()
    with ampopt.first_nonfinite(model) as found:
        model(torch.ones(3, 2)).sum().backward()
        given_by_hand(model)
    assert found.first is not None and found.first.parameter == "head.bias"


def test_what_a_gradient_was_before_is_not_found():
    model = Head()
    given_by_hand(model)
    with ampopt.first_nonfinite(model) as found:
        model(torch.ones(3, 2)).sum().backward()  # adds to it
    assert not found and not model.head.bias._post_accumulate_grad_hooks


def test_a_sum_with_a_finite_gradient_of_before_is_found():
    model = Head()
    model.body.requires_grad_(False)
    model.head.bias.grad = torch.tensor([3e38])
    with ampopt.first_nonfinite(model) as found:
        (model(torch.ones(3, 2)).sum() * 2e37).backward()
    assert found.first is not None and found.first.parameter == "head.bias"


def test_a_gradient_that_a_module_made_is_not_said_to_be_made_outside():
    model = nn.Sequential(nn.Linear(2, 2), SteepRoot())
    with ampopt.first_nonfinite(model) as found:
        run(model, torch.ones(2, 2))
    assert found.first is not None and found.first.parameter is None and found.first.name == "1"


def test_replays_name_a_parameter_whose_gradient_no_module_made():
    model = Head()
    optimizer = ampopt.SGD(model.named_parameters(), lr=0.1)

    def closure(scale: Any) -> Tensor:
        optimizer.zero_grad()
        loss = penalized(model)
        ampopt.scale_outputs(loss, scale).backward()
        return loss

    with (
        ampopt.first_nonfinite(model),
        pytest.raises(
            ampopt.NonFiniteGradientError,
            match="the gradient of 'head.bias', made outside of modules",
        ),
    ):
        optimizer.unscale_and_step(closure, grads_scaled_by=2.0, max_replays=1)


def test_of_several_finite_outputs_the_largest_is_told():
    class Several(torch.nn.Module):
        def forward(self, x):
            return x, 4 * x.half(), x[:0]

    several, relu = Several(), torch.nn.ReLU()
    model = torch.nn.ModuleList([several, relu])
    with ampopt.first_nonfinite(model) as found:
        several(torch.ones(2))
        relu(torch.full((2,), float("inf")))
    assert found.first is not None and found.first.last_finite is not None
    last = found.first.last_finite
    assert (last.name, last.dtype, last.largest) == ("0", torch.float16, 4.0)
