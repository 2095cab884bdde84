"""``extend`` and ``patch_optimizer`` with classes of every kind."""

import abc
import copy
import functools
import inspect
import pickle
import types
from collections import defaultdict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.optimizers import CLOSURE_FREE, Plain
from support.strategies import fewer
from support.training_loops import Step, give, made, steps
from torch.nn import Parameter
from torch.optim.lr_scheduler import StepLR
from torch.utils._python_dispatch import TorchDispatchMode

import ampopt
from ampopt import extend, patch_optimizer
from ampopt.testing.bits import bits, everything

INF = float("inf")


class Sign(torch.optim.Optimizer):
    """A third-party optimizer: it steps by the sign of a mean, and counts steps in a tensor."""

    def __init__(self, params: Any, lr: float = 0.25, *, decay: float = 0.5) -> None:
        """Store the hyperparameters."""
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.update()
        return loss

    def update(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["mean"], state["step"] = torch.zeros_like(p), torch.zeros(())
                state["step"] += 1
                state["mean"].mul_(group["decay"]).add_(p.grad)
                p.sub_(group["lr"] * state["mean"].sign())


def some_params() -> list[Parameter]:
    return [Parameter(torch.tensor([1.0, -2.0])), Parameter(torch.tensor([[0.5]]))]


def set_gradients(optimizer: Any, *numbers: float) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for p, number in zip(params, numbers, strict=True):
        p.grad = torch.full_like(p, number)


def works(optimizer: Any, original: Any) -> None:
    """Check that ``optimizer`` steps like ``original`` under a scale, and skips."""
    for numbers in ((1.0, -2.0), (-0.5, 0.25), (-1.0, -1.0)):
        set_gradients(optimizer, *(8 * number for number in numbers))
        set_gradients(original, *numbers)
        assert not optimizer.unscale_and_step(grads_scaled_by=8.0).skipped
        original.step()
        set_gradients(optimizer, 1.0, INF)
        before = everything(optimizer)
        assert optimizer.unscale_and_step(grads_scaled_by=8.0).skipped
        assert everything(optimizer) == before
        set_gradients(optimizer, INF, 1.0)
        optimizer.unscale(grads_scaled_by=8.0)
        assert optimizer.step_after_unscale().skipped
        assert everything(optimizer) == before
    assert everything(optimizer) == everything(original)


# --- the class -----------------------------------------------------------------------------------


def test_an_extended_class_derives_from_both_with_their_constructor():
    cls = extend(Sign)
    assert issubclass(cls, Sign) and issubclass(cls, ampopt.Optimizer)
    assert inspect.signature(cls) == inspect.signature(Sign)
    assert (cls.__name__, cls.__qualname__, cls.__doc__) == ("Sign", "Sign", Sign.__doc__)
    optimizer = cls(some_params(), 0.5, decay=0.25)
    assert optimizer.defaults == {"lr": 0.5, "decay": 0.25}
    assert repr(optimizer).startswith("Sign (\nParameter Group 0\n")
    works(optimizer, Sign(some_params(), 0.5, decay=0.25))


def test_extending_twice_gives_the_same_class_and_ampopts_classes_themselves():
    assert extend(Sign) is extend(Sign) is extend(extend(Sign))
    for cls in (Plain, ampopt.AdamW, ampopt.Optimizer):
        assert extend(cls) is cls

    class Derived(Sign):
        pass

    class DerivedFromExtended(extend(Sign)):
        skip_by = "host"

    assert extend(Derived) is not extend(Sign)
    assert extend(DerivedFromExtended) is DerivedFromExtended
    assert extend(Sign) is not DerivedFromExtended


@pytest.mark.parametrize("cls", [*CLOSURE_FREE, ampopt.LBFGS])
def test_extending_a_class_of_torch_gives_ampopts_class(cls):
    assert extend(getattr(torch.optim, cls.__name__)) is cls


def test_a_class_that_only_has_the_name_of_torchs_is_extended():
    class AdamW(Sign):
        pass

    assert issubclass(extend(AdamW), AdamW)


@pytest.mark.parametrize(
    "thing, shown",
    [(3, "got int"), (torch.nn.Linear, "got Linear"), ("AdamW", "got str"), (None, "got NoneType")],
)
def test_an_object_that_is_no_optimizer_class_is_refused(thing, shown):
    with pytest.raises(TypeError, match=f"a subclass of torch.optim.Optimizer, {shown}"):
        extend(thing)


def test_extending_an_instance_is_refused_and_names_patch_optimizer():
    with pytest.raises(TypeError, match=r"got an instance of Sign: use patch_optimizer\(optimizer"):
        extend(Sign(some_params()))  # type: ignore[arg-type]


def test_classes_and_instances_are_pickled_and_copied():
    cls = extend(Sign)
    optimizer = cls(some_params())
    set_gradients(optimizer, 1.0, -1.0)
    optimizer.step()
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(cls, protocol)) is cls
        again = pickle.loads(pickle.dumps(optimizer, protocol))
        assert type(again) is cls
        assert everything(again) == everything(optimizer)
    assert copy.copy(cls) is copy.deepcopy(cls) is cls
    copied = copy.deepcopy(optimizer)
    for one in (copied, optimizer):
        set_gradients(one, 2.0, INF)
        assert one.unscale_and_step(grads_scaled_by=2.0).skipped
        set_gradients(one, 2.0, 2.0)
        one.unscale_and_step(grads_scaled_by=2.0)
    assert everything(copied) == everything(optimizer)


class DerivedFromExtended(extend(Sign)):
    """A subclass of an extended class, which pickle finds by its name."""


def test_a_class_derived_from_an_extended_one_is_pickled_by_its_name():
    assert pickle.loads(pickle.dumps(DerivedFromExtended)) is DerivedFromExtended
    assert b"DerivedFromExtended" in pickle.dumps(DerivedFromExtended(some_params()))


def test_a_class_that_cannot_be_pickled_cannot_when_extended():
    class Local(Sign):
        pass

    with pytest.raises((AttributeError, pickle.PicklingError), match="Local"):
        pickle.dumps(extend(Local))


def test_their_metaclass_is_kept():
    class Meta(abc.ABCMeta):
        pass

    class Abstract(Sign, metaclass=Meta):
        @abc.abstractmethod
        def missing(self) -> None: ...

    class Concrete(Abstract):
        def missing(self) -> None: ...

    assert isinstance(extend(Abstract), Meta)
    with pytest.raises(TypeError, match="abstract"):
        extend(Abstract)(some_params())
    works(extend(Concrete)(some_params()), Concrete(some_params()))


def test_their_init_subclass_is_called():
    class Registering(Sign):
        known: list[str] = []

        def __init_subclass__(cls, **kwargs: Any) -> None:
            super().__init_subclass__(**kwargs)
            Registering.known.append(cls.__name__)

    extend(Registering)
    assert Registering.known == ["Registering"]


def test_a_class_that_was_used_before_is_not_stepped_with_hooks_twice():
    class Used(Sign):
        def step(self) -> None:  # type: ignore[override]
            with torch.no_grad():
                self.update()

    Used(some_params())
    optimizer = extend(Used)(some_params())
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    for number in (1.0, INF):
        set_gradients(optimizer, 1.0, number)
        optimizer.unscale_and_step(grads_scaled_by=1.0)
    assert len(calls) == 2
    works(extend(Used)(some_params()), Used(some_params()))


# --- what authors do -----------------------------------------------------------------------------


class WithoutClosure(Sign):
    def step(self) -> None:  # type: ignore[override]
        with torch.no_grad():
            self.update()


class KeywordClosure(Sign):
    def step(self, extra: int = 3, *, closure: Any = None) -> Any:  # type: ignore[override]
        assert extra == 3
        return super().step(closure)


class ClosureSecond(Sign):
    def step(self, extra: int = 3, closure: Any = None) -> Any:  # type: ignore[override]
        assert extra == 3
        return super().step(closure)


class AnyArguments(Sign):
    def step(self, *args: Any, **kwargs: Any) -> Any:
        return super().step(*args, **kwargs)


class Attributes(Sign):
    """Sets attributes with names that ampopt might use."""

    def __init__(self, params: Any) -> None:
        self._device, self._scale, self._zero, self._plan = torch.device("cpu"), 0.5, None, 2
        super().__init__(params)
        self._request = self._decision = self._step = self.scale = self.device = "theirs"

    def update(self) -> None:
        assert (self._scale, self._plan, self._decision) == (0.5, 2, "theirs")
        assert self._device == torch.device("cpu")
        super().update()


class StepsAtOnce(Sign):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        set_gradients(self, 0.0, 0.0)
        self.step()
        self.zero_grad()


class OtherMethods(Sign):
    """Overrides torch's methods with other signatures."""

    def zero_grad(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None

    def state_dict(self, *, note: str = "") -> dict[str, Any]:  # type: ignore[override]
        return {**super().state_dict(), "note": note}

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:  # type: ignore[override]
        assert strict or state_dict["note"] == "loose"
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "note"})


class AddsInLoading(Sign):
    """Converts state of older checkpoints when it is loaded."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for entries in self.state.values():
            entries["more"] = [torch.zeros(2)]
            entries["step"] = (entries["step"],)

    def update(self) -> None:
        for entries in self.state.values():
            if isinstance(entries.get("step"), tuple):
                entries["step"] = entries["step"][0]
        super().update()


class OwnFlag(Sign):
    """Asks torch's scaler to read the flag."""

    _step_supports_amp_scaling = False


class AbstractFirst(abc.ABC, Sign):
    """Has a base class before the optimizer's, as implementations of interfaces have."""


class Slots(Sign):
    """Declares slots for its instances."""

    __slots__ = ("more",)


class Wrapper(torch.optim.Optimizer):
    """Lets another optimizer do the work, as Lookahead does, and shares its groups and state."""

    def __init__(self, params: Any) -> None:
        self.inner, self.count = Sign(params), 0
        self.defaults = self.inner.defaults

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state

    def zero_grad(self, set_to_none: bool = False) -> None:
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> Any:
        return {"inner": self.inner.state_dict(), "count": self.count}

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict["inner"])
        self.count = state_dict["count"]

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = self.inner.step(closure)
        self.count += 1
        return loss

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)


AUTHORS = (
    Sign, WithoutClosure, KeywordClosure, ClosureSecond, AnyArguments, Attributes, StepsAtOnce,
    OtherMethods, AddsInLoading, OwnFlag, AbstractFirst, Slots, Wrapper,
)  # fmt: skip
every_author = pytest.mark.parametrize("cls", AUTHORS, ids=lambda cls: cls.__name__)


@every_author
@pytest.mark.parametrize("patched", [False, True])
def test_a_step_is_that_of_the_class_and_a_skip_changes_nothing(cls, patched):
    optimizer: Any = patch_optimizer(cls(some_params())) if patched else extend(cls)(some_params())
    assert type(optimizer) is extend(cls)
    works(optimizer, cls(some_params()))
    if cls is Wrapper:
        assert optimizer.count == 3


@every_author
def test_a_plain_step_after_unscale_ends_the_pending_state(cls):
    optimizer = extend(cls)(some_params())
    for _ in range(2):
        set_gradients(optimizer, 1.0, 2.0)
        optimizer.unscale(grads_scaled_by=2.0)
        optimizer.step()
    optimizer.unscale(grads_scaled_by=2.0)
    optimizer.zero_grad()
    assert optimizer.pending is None
    optimizer.unscale_and_step(grads_scaled_by=2.0)


@every_author
def test_closures_are_replayed(cls):
    optimizer, original = extend(cls)(some_params()), cls(some_params())

    def loss_of(optimizer: Any) -> torch.Tensor:
        optimizer.zero_grad()
        params = [p for group in optimizer.param_groups for p in group["params"]]
        return torch.stack([(p - 3).square().sum() for p in params]).sum()

    scales = []

    def closure(scale: Any) -> torch.Tensor:
        loss = loss_of(optimizer)
        ampopt.scale_outputs(loss, scale).backward()
        scales.append(scale.item())
        return loss

    result = optimizer.unscale_and_step(closure, ampopt.DynamicLossScale(init_scale=2.0**126))
    loss = loss_of(original)
    loss.backward()
    original.step()
    assert scales[:2] == [2.0**126, 2.0**125]
    assert bits(result.loss) == bits(loss)
    assert everything(optimizer) == everything(original)


@every_author
def test_checkpoints_are_exchanged(cls):
    for saves, loads in ((cls, extend(cls)), (extend(cls), cls)):
        saved, loaded = saves(some_params()), loads(some_params())
        set_gradients(saved, 1.0, -1.0)
        saved.step()
        loaded.load_state_dict(copy.deepcopy(saved.state_dict()))
        with torch.no_grad():
            for group, copied in zip(saved.param_groups, loaded.param_groups, strict=True):
                for p, q in zip(group["params"], copied["params"], strict=True):
                    q.copy_(p)
        for optimizer in (saved, loaded):
            set_gradients(optimizer, -0.25, 0.5)
            optimizer.step()
        for optimizer in (saved, loaded):
            for state in optimizer.state.values():
                state.pop("more", None)
        assert everything(saved) == everything(loaded)


def test_their_arguments_reach_their_methods():
    optimizer = extend(OtherMethods)(some_params())
    saved = optimizer.state_dict(note="loose")
    optimizer.load_state_dict(saved, strict=False)
    assert not inspect.signature(optimizer.zero_grad).parameters
    with pytest.raises(TypeError, match="zero_grad"):
        optimizer.zero_grad(True)


@every_author
@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("scaler", [torch.amp.GradScaler, ampopt.GradScaler])
def test_a_grad_scaler_skips_and_steps(cls, patched, scaler):
    optimizer = patch_optimizer(cls(some_params())) if patched else extend(cls)(some_params())
    original = cls(some_params())
    scaler = scaler("cpu", init_scale=8.0)
    for numbers in ((8.0, 8.0), (INF, 1.0), (-16.0, 4.0)):
        before = everything(optimizer)
        scaler.scale(torch.zeros(()))
        set_gradients(optimizer, *numbers)
        scaler.step(optimizer)
        scaler.update(8.0)
        if INF in numbers:
            assert everything(optimizer) == before
        else:
            set_gradients(original, *(number / 8 for number in numbers))
            original.step()
    assert everything(optimizer) == everything(original)


class WithFlag(torch.optim.SGD):
    """Its step has a first argument that is no closure."""

    def step(self, zero_after: Any = False) -> None:  # type: ignore[override]
        super().step()
        if zero_after:
            self.zero_grad()


class WithRate(torch.optim.SGD):
    """Its step has an argument that is passed by name only."""

    def step(self, *, lr: float = 1.0) -> None:  # type: ignore[override]
        self.param_groups[0]["lr"] = lr
        super().step()


@pytest.mark.parametrize("cls", [WithFlag, WithRate])
def test_a_closure_is_evaluated_before_a_step_that_takes_none(cls):
    param = Parameter(torch.ones(2))
    optimizer = ampopt.extend(cls)([param], lr=1.0)

    def closure(scale: Any) -> Any:
        optimizer.zero_grad()
        ampopt.scale_outputs(param.sum(), scale).backward()
        return 7.0

    loss, found_inf, _ = optimizer.unscale_and_step(closure, grads_scaled_by=8.0)
    assert (loss, found_inf.item()) == (7.0, 0.0)
    assert param.tolist() == [0.0, 0.0]


def test_a_closure_that_step_requires_is_checked_before_anything_happens():
    class Required(Sign):
        def step(self, closure: Any) -> Any:  # type: ignore[override]
            return super().step(closure)

    optimizer = extend(Required)(some_params())
    set_gradients(optimizer, 8.0, 8.0)
    with pytest.raises(TypeError, match=r"Required needs a closure: unscale_and_step\(closure"):
        optimizer.unscale_and_step(grads_scaled_by=8.0)
    assert optimizer.param_groups[0]["params"][0].grad.tolist() == [8.0, 8.0]


def test_control_points_of_their_class_take_precedence():
    class Own(Sign):
        def unscale_and_step(self, *args: Any) -> str:
            return "theirs"

        def grad_norm(self) -> str:
            return "a method of theirs"

        @property
        def pending(self) -> str:
            return "theirs too"

    optimizers: list[Any] = [extend(Own)(some_params()), patch_optimizer(Own(some_params()))]
    for optimizer in optimizers:
        assert optimizer.unscale_and_step(1.0) == "theirs"
        assert optimizer.pending == "theirs too"
        set_gradients(optimizer, 3.0, 0.0)
        found_inf, _ = optimizer.unscale(grads_scaled_by=1.0)
        assert not optimizer.step_after_unscale().skipped
        assert optimizer.grad_norm() == "a method of theirs"


class Multiplications(TorchDispatchMode):
    """Counts the operations that multiply tensors in place."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Count the operation, and run it."""
        self.count += func.overloadpacket in (torch.ops.aten.mul_, torch.ops.aten._foreach_mul_)
        return func(*args, **(kwargs or {}))


class Nothing(torch.optim.Optimizer):
    """Changes no parameter, so that no multiplication comes from its step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


@given(
    st.lists(
        st.tuples(
            st.sampled_from([torch.float32, torch.bfloat16, torch.float64]), st.integers(0, 5)
        ),
        min_size=1,
        max_size=20,
    )
)
def test_gradients_are_clipped_by_one_operation_for_each_dtype(kinds):
    params = [Parameter(torch.zeros(n, dtype=dtype)) for dtype, n in kinds]
    grads = [torch.linspace(-3.0, 2.0, n, dtype=dtype) for dtype, n in kinds]
    for p, grad in zip(params, grads, strict=True):
        p.grad = grad.clone()
    norm = torch.stack([grad.double().square().sum() for grad in grads]).sum().sqrt()
    coefficient = (1.5 / (norm + 1e-6)).clamp(max=1.0)
    optimizer = extend(Nothing)(params)
    with Multiplications() as multiplications:
        optimizer.unscale_and_step(max_norm=1.5)
    for p, grad in zip(params, grads, strict=True):
        torch.testing.assert_close(p.grad, grad * coefficient.to(grad.dtype), atol=0, rtol=1e-6)
    assert multiplications.count <= len({dtype for dtype, _ in kinds})


def test_a_norm_to_clip_to_leaves_their_grad_norm_alone():
    class Norm(Sign):
        def grad_norm(self) -> str:
            return "theirs"

    optimizer = extend(Norm)(some_params())
    set_gradients(optimizer, 3.0, 0.0)
    optimizer.unscale_and_step(grads_scaled_by=1.0, max_norm=1.0)
    assert optimizer.grad_norm() == "theirs"


def test_a_class_that_uses_the_private_attribute_is_refused():
    class OnClass(Sign):
        def _ampopt(self) -> None: ...

    class OnInstance(Sign):
        def __init__(self, params: Any) -> None:
            super().__init__(params)
            self._ampopt = 3

    says = "cannot be extended: it has its own _ampopt, which ampopt.Optimizer has another use for"
    with pytest.raises(TypeError, match="OnClass " + says):
        extend(OnClass)
    with pytest.raises(TypeError, match="OnInstance " + says):
        extend(OnInstance)(some_params())
    optimizer = OnInstance(some_params())
    with pytest.raises(TypeError, match="OnInstance " + says):
        patch_optimizer(optimizer)
    assert type(optimizer) is OnInstance


PUBLIC = ("pending", "grad_norm", "found_inf", "skip_by", "master_params")


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("on_class", [False, True])
@pytest.mark.parametrize("name", PUBLIC)
def test_attributes_of_their_class_keep_their_meaning(name, on_class, patched):
    class Theirs(Sign):
        def __init__(self, params: Any) -> None:
            super().__init__(params)
            if not on_class:
                setattr(self, name, ["theirs"])
            getattr(self, name).append(0)

        def update(self) -> None:
            getattr(self, name).append(len(getattr(self, name)) - 1)
            super().update()

    if on_class:
        setattr(Theirs, name, ["theirs"])
    optimizer = patch_optimizer(Theirs(some_params())) if patched else extend(Theirs)(some_params())
    taken = 0
    for value, max_norm in ((1.0, None), (float("inf"), 1.0), (2.0, 1.0)):
        set_gradients(optimizer, value, 1.0)
        skipped = optimizer.unscale_and_step(grads_scaled_by=2.0, max_norm=max_norm).skipped
        assert skipped is (value == float("inf"))
        taken += not skipped
        assert getattr(optimizer, name) == ["theirs", *range(1 + taken)]
    set_gradients(optimizer, 1.0, 1.0)
    optimizer.unscale(grads_scaled_by=2.0)
    with pytest.raises(RuntimeError, match="an unscale is pending"):
        optimizer.unscale(grads_scaled_by=2.0)
    assert not optimizer.step_after_unscale().skipped
    assert getattr(optimizer, name) == ["theirs", *range(2 + taken)]


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("skip_by", ["auto", "step"])
def test_skip_by_of_an_instance_decides(skip_by, patched):
    params = some_params()
    optimizer: Any = patch_optimizer(Sign(params)) if patched else extend(Sign)(params)
    optimizer.skip_by = skip_by
    set_gradients(optimizer, INF, 1.0)
    assert optimizer.unscale_and_step(grads_scaled_by=2.0).skipped
    # "step" leaves the skip to the step, and that of Sign reads no flag.
    assert bool(optimizer.state) is (skip_by == "step")


def test_attributes_of_an_instance_with_a_step_of_its_own_keep_their_meaning():
    optimizer: Any = Sign(some_params())
    optimizer.skip_by, optimizer.step = ["theirs"], optimizer.step
    patch_optimizer(optimizer)
    set_gradients(optimizer, float("inf"), 1.0)
    assert optimizer.unscale_and_step(grads_scaled_by=2.0).skipped
    assert optimizer.skip_by == ["theirs"]


def test_attributes_of_a_constructor_that_was_not_called_are_added():
    class NeverConstructed(Sign):
        def __init__(self, params: Any) -> None:
            self.param_groups = [{"params": list(params), "lr": 0.25, "decay": 0.5}]
            self.state, self.defaults = defaultdict(dict), {}

    optimizer = extend(NeverConstructed)(some_params())
    original = Sign(some_params())
    calls: list[int] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    works(optimizer, original)
    assert len(calls) == 9
    optimizer.load_state_dict(original.state_dict())
    set_gradients(optimizer, 1.0, 1.0)
    optimizer.unscale(grads_scaled_by=2.0)
    optimizer.step()
    assert optimizer.pending is None


def test_a_wrapper_without_defaults_has_a_state_dict():
    class WithoutDefaults(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            self.inner = Sign(params)
            self.param_groups, self.state = self.inner.param_groups, self.inner.state

        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            return self.inner.step(closure)

    optimizer = extend(WithoutDefaults)(some_params())
    works(optimizer, WithoutDefaults(some_params()))
    optimizer.param_groups[0]["replicated"] = True
    assert "replicated" not in optimizer.state_dict()["param_groups"][0]


def test_a_wrapper_without_param_groups_is_refused_and_left_as_it_was():
    class Without(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner = inner

    message = "its instances have no param_groups. If it is a wrapper, extend or patch"
    optimizer = Without(Sign(some_params()))
    before = dict(vars(optimizer))
    with pytest.raises(TypeError, match=message):
        patch_optimizer(optimizer)
    assert type(optimizer) is Without and vars(optimizer) == before
    with pytest.raises(TypeError, match=message):
        extend(Without)(Sign(some_params()))


# --- an instance that is there -------------------------------------------------------------------


def test_patching_returns_the_optimizer_and_leaves_ampopts_alone():
    optimizer = Sign(some_params())
    assert patch_optimizer(optimizer) is optimizer is patch_optimizer(optimizer)
    assert isinstance(optimizer, ampopt.Optimizer) and type(optimizer) is extend(Sign)
    ours: Any = Plain(some_params())
    ours.step, ours.skip_by = ours.step, "step"  # as a program may set it, to count steps
    before = dict(vars(ours))
    assert patch_optimizer(ours) is ours and type(ours) is Plain
    assert vars(ours) == before


def test_a_param_group_of_an_extended_optimizer_is_checked():
    optimizer = extend(Sign)(some_params())
    with pytest.raises(TypeError, match="replicated of a param group must be True or False"):
        optimizer.add_param_group({"params": some_params(), "replicated": "yes"})


@pytest.mark.parametrize("thing", [Sign, 3, torch.nn.Linear(1, 1)])
def test_an_object_that_is_no_optimizer_is_not_patched(thing):
    with pytest.raises(TypeError, match="an instance of torch.optim.Optimizer, got"):
        patch_optimizer(thing)


@pytest.mark.parametrize("cls", CLOSURE_FREE)
@fewer(0.1)
@given(history=steps(max_size=5), at=st.integers(0, 4))
def test_an_optimizer_of_torchs_is_patched_in_the_middle_of_a_training(cls, history, at):
    theirs = getattr(torch.optim, cls.__name__)
    patched, params = made(theirs)
    clean, clean_params = made(cls)
    for index, step in enumerate(history):
        if index == at:
            patch_optimizer(patched)
            assert type(patched) is cls
        if index < at:
            step = Step(step.numbers)
        give(patched, step, 8.0 if index >= at else 1.0)
        if index >= at:
            assert patched.unscale_and_step(grads_scaled_by=8.0).skipped is (step.bad is not None)
        else:
            patched.step()
        if step.bad is None:
            give(clean, step)
            clean.step()
    for p, q in zip(params, clean_params, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("scaled", [False, True])
def test_schedulers_and_hooks_stay(when, scaled):
    class NewSign(Sign):
        """Has an extended class without instances; torch wraps its step at the first one."""

    optimizer: Any = NewSign(some_params(), lr=1.0)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    if when == "after":
        patch_optimizer(optimizer)
    scheduler = StepLR(optimizer, 1, gamma=0.5)
    if when == "before":
        patch_optimizer(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    lrs = []
    for number in (1.0, INF, 1.0):
        before = bits(optimizer.param_groups[0]["params"])
        set_gradients(optimizer, number, 1.0)
        if scaled:
            scaler.scale(torch.zeros(()))
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.unscale_and_step(grads_scaled_by=2.0)
        assert (bits(optimizer.param_groups[0]["params"]) == before) is (number == INF)
        scheduler.step()  # which warns if it has not seen the step
        lrs.append(optimizer.param_groups[0]["lr"])
    assert lrs == [0.5, 0.25, 0.125]
    assert calls == ["pre", "post"] * 3


@pytest.mark.parametrize("cls", [Sign, torch.optim.SGD, torch.optim.Muon], ids=lambda c: c.__name__)
@pytest.mark.parametrize("scheduled", [False, True])
def test_methods_set_on_the_instance_stay(cls, scheduled):
    """Also if the method calls the step of the optimizer's original class."""
    optimizer, clean = (cls([Parameter(torch.ones(2, 2))], lr=0.5) for _ in range(2))
    taken: list[int] = []
    original = optimizer.step

    @functools.wraps(cls.step)
    def counted(self: Any, closure: Any = None) -> Any:
        taken.append(1)
        return original(closure)

    optimizer.step = types.MethodType(counted, optimizer)
    optimizer.zero_grad = lambda: "theirs"
    if scheduled:
        StepLR(optimizer, 1)
        StepLR(clean, 1)
    patch_optimizer(optimizer)
    assert optimizer.zero_grad() == "theirs"

    def by_scaler(scaler: Any) -> None:
        scaler.scale(torch.zeros(()))
        scaler.step(optimizer)

    for attempt in (
        lambda: optimizer.unscale_and_step(grads_scaled_by=2.0),
        lambda: (optimizer.unscale(grads_scaled_by=2.0), optimizer.step_after_unscale()),
        lambda: by_scaler(torch.amp.GradScaler("cpu", init_scale=2.0)),
        lambda: by_scaler(ampopt.GradScaler("cpu", init_scale=2.0)),
    ):
        for number in (1.0, INF):
            taken.clear()
            before = everything(optimizer)
            set_gradients(optimizer, 2.0 * number)
            attempt()
            assert len(taken) == (number != INF)
            assert (everything(optimizer) == before) is (number == INF)
        set_gradients(clean, 1.0)
        clean.step()
    assert everything(optimizer) == everything(clean)
