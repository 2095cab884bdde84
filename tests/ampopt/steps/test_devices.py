"""One optimizer with parameters on several devices, under one decision.

Devices are pretended (see ``support.pretended_device``), in a process of their own. Kernels run in
Triton's interpreter, and may touch the memory of their own device alone.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from support.gpus import DEVICE, needs_gpu
from support.object_loops import unavailable_loops
from support.preloaded import Preloaded, python_path
from support.pretended_device import launch, looks, pretending
from support.quick_interpreter import make_it_quick
from support.torch_options import RICH, OptionSet
from torch import Tensor
from torch.nn import Parameter

import ampopt
from ampopt_kernels.language import HAS_TRITON
from ampopt_kernels.native import objects

PLACES = [
    ["pretend:0", "pretend:0"],
    ["pretend:0", "pretend:1"],
    ["pretend:0", "cpu"],
    ["cpu", "pretend:0"],
]
THREE = [
    ["pretend:0", "pretend:1", "pretend:2"],
    ["pretend:0", "cpu", "pretend:0"],
]
INF = float("inf")


def host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu").clone()


def train(options: OptionSet, places: list[str]) -> list[Any]:
    """The results and bits of three steps, of which the second overflows on the last device."""
    params = [Parameter(torch.linspace(-1.0, 2.0, 6).reshape(3, 2).to(d)) for d in places]
    optimizer = options.ours(params)
    scale = ampopt.DynamicLossScale(init_scale=4.0)
    seen: list[Any] = []
    for number in (0.5, INF, 0.25):
        for p in params:
            last = p is params[-1]
            p.grad = torch.full((3, 2), 4 * (number if last else 0.5)).to(p.device)
        looks.clear()
        _, found_inf, scale = optimizer.unscale_and_step(grads_scaled_by=scale, max_norm=1.0)
        assert not (looks and "cpu" not in places), looks
        assert found_inf.device == scale.value.device == params[0].device
        seen += [host(found_inf), host(scale.value), host(optimizer.grad_norm)]
        seen += [host(p) for p in params]
    optimizer.unscale(grads_scaled_by=scale)
    optimizer.step_after_unscale()
    for p in params:
        assert all(value.device == p.device for value in optimizer.state[p].values())
        seen += [host(p), *(host(v) for v in optimizer.state[p].values())]
    # Loaded where the devices are others, counts go there too.
    moved = options.ours([host(p) for p in params])
    moved.load_state_dict(optimizer.state_dict())
    for p in moved.param_groups[0]["params"]:
        p.grad = torch.ones(3, 2)
    moved.step()
    return seen + [p.detach() for p in moved.param_groups[0]["params"]]


def check_a_scaler() -> None:
    """A scaler has one flag and one scale for all devices of an optimizer, and all optimizers."""
    places = ["pretend:0", "pretend:1", "pretend:0"]
    params = [Parameter(torch.ones(3, device=d)) for d in places]
    optimizers = [ampopt.SGD(params[:2], lr=0.5), ampopt.SGD(params[2:], lr=0.5)]
    scaler = ampopt.GradScaler("cpu", loss_scale=ampopt.DynamicLossScale(init_scale=4.0))
    for overflowed in (True, False):
        for p in params:
            p.grad = torch.full((3,), 4.0, device=p.device)
        if overflowed:
            params[1].grad = torch.full((3,), INF, device="pretend:1")
        scaler.scale(torch.ones((), device="pretend:0"))  # as the loss of a loop is
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        stepped = [host(p).lt(1).all().item() for p in params]
        assert stepped == ([False, False, True] if overflowed else [True, True, True])
        assert scaler.get_scale() == 2.0


def check_states_on_the_host() -> None:
    """An error names states that were moved to the host, and the fix, before any launch."""
    for masters, first in ((True, "master_param"), (False, "exp_avg")):
        dtype = torch.bfloat16 if masters else torch.float32
        params = [Parameter(torch.ones(3, dtype=dtype, device="pretend:0")) for _ in range(2)]
        named = [(f"layer{i}", p) for i, p in enumerate(params)]
        optimizer = ampopt.AdamW(named, master_weights=masters)
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
        stepped = [host(p) for p in params]
        for p in params[1:]:
            for key, value in optimizer.state[p].items():
                optimizer.state[p][key] = host(value)
        match = f"{first} of layer1 is on cpu, the parameter on pretend:0: move the state"
        with pytest.raises(RuntimeError, match=match):
            optimizer.unscale_and_step(grads_scaled_by=1.0)
        assert all(torch.equal(host(p), before) for p, before in zip(params, stepped, strict=True))
        assert all(host(optimizer.state[p]["step"]) == 1 for p in params)
        optimizer.load_state_dict(optimizer.state_dict())  # which is what the message says
        optimizer.unscale_and_step(grads_scaled_by=1.0)
        assert all(host(optimizer.state[p]["step"]) == 2 for p in params)


def check_the_device() -> None:
    """The pretended device raises errors for what a real one would not do or wait for."""
    here, other = torch.ones(2, device="pretend:0"), torch.ones(2, device="pretend:1")
    with pytest.raises(AssertionError, match="add of tensors on"):
        _ = here + other
    with pytest.raises(AssertionError, match="not waited for"):
        here.to("cpu", non_blocking=True)
    with pytest.raises(AssertionError, match="that is not pinned is not waited for"):
        torch.ones(2).to("pretend:0", non_blocking=True)
    assert not looks
    here.sum().item()
    assert looks == ["_local_scalar_dense"]


def with_everything(places: list[str]) -> list[Any]:
    """The results and bits of five cycles of two gradients, three of which are skipped.

    Parameters are bfloat16 with master weights; steps are watched, averaged, clipped and
    accumulated.
    """
    params = [Parameter(torch.linspace(-1.0, 2.0, 6).bfloat16().to(d)) for d in places]
    model = torch.nn.ParameterList(params)
    optimizer = ampopt.AdamW(params, lr=0.1, master_weights=True)
    watch, average = ampopt.Watch(optimizer), ampopt.averaged(model, optimizer)
    ampopt.skip_when(optimizer, norm=100.0, loss=50.0)
    scale: Any = ampopt.DynamicLossScale(init_scale=4.0)
    seen: list[Any] = []
    for number, loss in ((0.5, 1.0), (INF, 1.0), (1000.0, 1.0), (0.5, 100.0), (0.25, 1.0)):
        for makes_step in (False, True):
            for p in params:
                last = p is params[-1]
                p.grad = torch.full((6,), 4 * (number if last else 0.5)).bfloat16().to(p.device)
            if not makes_step:
                optimizer.accumulate(grads_scaled_by=scale)
        loss = torch.tensor(loss).to(params[-1].device)
        seen.append(host(ampopt.scale_outputs(loss, scale)))
        _, found_inf, scale = optimizer.unscale_and_step(
            grads_scaled_by=scale, max_norm=1.0, loss=loss
        )
        average.update_parameters(model)
        seen += [host(found_inf), host(scale.value)]
        seen += [host(p) for p in params] + [host(p) for p in average.parameters()]
    for p in params:
        seen += [host(value) for value in optimizer.state[p].values()]
    read = watch.read()
    assert read["skipped_by"] == {"overflow": 1, "norm": 1, "loss": 1}
    overflowed = {name for name, p in read["parameters"].items() if p["overflows"]}
    assert overflowed == {f"group 0, parameter {len(params) - 1}"}
    return seen


def check_a_watch(places: list[str]) -> None:
    """The norm that a watch computes, where the step does not, is that of all devices."""
    params = [Parameter(torch.ones(1).to(d)) for d in places]
    optimizer = ampopt.SGD(params)
    watch = ampopt.Watch(optimizer)
    for scale in (None, 2.0):
        for p, number in zip(params, (3.0, 4.0), strict=True):
            p.grad = torch.full((1,), number * (scale or 1.0)).to(p.device)
        optimizer.unscale_and_step(grads_scaled_by=scale)
    assert [step["norm"] for step in watch.read()["recent"]] == [5.0, 5.0]
    assert [p["largest"] for p in watch.read()["parameters"].values()] == [3.0, 4.0]


class FilledByHand(ampopt.TrainStep):
    """Sets gradients itself, since torch's engine has no queue for two pretended devices."""

    def backward(self, loss: Tensor, scale: Any) -> None:
        factor = float(host(scale.value))
        for p in self.optimizer.param_groups[0]["params"]:
            p.grad = torch.full((3,), factor * float(host(loss)), device=p.device)


def check_a_train_step() -> None:
    """The model's output, and so its loss, is on another device than its input."""
    params = [Parameter(torch.ones(3).to(d)) for d in ("pretend:0", "pretend:1")]
    optimizer = ampopt.SGD(params, lr=0.5)
    scale = ampopt.DynamicLossScale(init_scale=4.0)
    step = FilledByHand(
        lambda x: x.to("pretend:1"), torch.sum, optimizer, scale, autocast=None, max_norm=1.0
    )
    for value, stepped in ((INF, False), (0.5, True)):
        result = step(torch.full((1,), value))
        assert result.loss.device == params[1].device
        assert [host(p).lt(1).all().item() for p in params] == [stepped, stepped]
        assert host(result.scale.value) == 2.0


class CompilerThatFails:
    """Launches kernels, but fails to compile one of them: launch kind number ``failing``."""

    def __init__(self, failing: int) -> None:
        self.failing, self.compiled = failing, set()

    def __call__(self, device: Any, variant: Any, programs: int, arguments: dict[str, Any]) -> None:
        dtypes = [value.dtype for value in arguments.values() if isinstance(value, Tensor)]
        kind = [device, variant, *dtypes]
        if tuple(kind) not in self.compiled:
            if len(self.compiled) == self.failing:
                raise RuntimeError("does not compile")
            self.compiled.add(tuple(kind))
        launch(device, variant, programs, arguments)


def check_what_fails(name: str, **limits: Any) -> None:
    """If any compilation fails, nothing has changed on any device, nor in ``skip_when``."""
    for failing in range(100):
        params = [Parameter(torch.ones(3, 2).to(d)) for d in ("pretend:0", "pretend:1")]
        optimizer = getattr(ampopt, name)(params)
        skips = ampopt.skip_when(optimizer, **limits) if limits else None
        for p in params:
            p.grad = torch.ones(3, 2).to(p.device)
        with use_triton(CompilerThatFails(failing)):
            try:
                optimizer.unscale_and_step(grads_scaled_by=2.0, max_norm=1.0)
            except RuntimeError as error:
                assert str(error) == "does not compile"
            else:
                assert failing > 4  # of each kernel, one for each device at least
                return
        assert all(host(p).eq(1).all() for p in params), f"{name}, compilation {failing}"
        states = [value for p in params for value in optimizer.state[p].values()]
        assert not any(host(t).any() for t in states), f"{name}, compilation {failing}"
        statistics = () if skips is None else skips._statistics.values()
        assert not any(host(s).any() for s in statistics), f"{name}, compilation {failing}"


def check_what_fails_of_gradients(way: str, **limits: Any) -> None:
    """If any compilation fails, no gradient and no sum has changed on any device."""
    scale = ampopt.DynamicLossScale(init_scale=2.0)

    def call(optimizer: Any, launcher: Any) -> None:
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.ones(3, 2).to(p.device)
        with use_triton(launcher):
            getattr(optimizer, way)(grads_scaled_by=scale)

    for failing in range(100):
        params = [Parameter(torch.ones(3, 2).to(d)) for d in ("pretend:0", "pretend:1")]
        optimizer = ampopt.SGD(params, lr=1.0)
        if limits:
            ampopt.skip_when(optimizer, **limits)
        if way == "accumulate":
            call(optimizer, launch)
        failed = True
        try:
            call(optimizer, CompilerThatFails(failing))
        except RuntimeError as error:
            assert str(error) == "does not compile"
            changed = [p for p in params if p.grad is None or not host(p.grad).eq(1).all()]
            assert not changed, f"{way}, compilation {failing}"
            call(optimizer, launch)
        else:
            failed = False
        with use_triton(launch):
            optimizer.step_after_unscale() if way == "unscale" else optimizer.step()
        expected = 0.5 if way == "unscale" else 0.0  # 1 less a gradient of 1 / 2, or two of them
        assert all(host(p).eq(expected).all() for p in params), f"{way}, compilation {failing}"
        if not failed:
            assert failing > 2  # the kernel that writes, on each device, and control
            return


@contextmanager
def use_triton(launcher: Any) -> Iterator[None]:
    """Treat pretended devices as accelerators, on which ``launcher`` launches kernels."""
    from ampopt_kernels.triton.backend import Triton

    backend = Triton(launcher)
    backend._compiles = True
    with (
        # Its C++ would find no memory in a pretended tensor.
        mock.patch.object(objects, "loops", unavailable_loops()),
        mock.patch("ampopt.backend._chosen", None),
        mock.patch("ampopt.backend.ACCELERATORS", ("pretend",)),
        mock.patch("ampopt.backend._triton_backend", lambda: backend),
    ):
        yield


def compare(actual: list[Any], expected: list[Any], what: str) -> None:
    for a, b in zip(actual, expected, strict=True):
        same = torch.allclose(a, b, rtol=1e-5, atol=1e-6)
        assert same, f"{what}: {a}, and on the CPU {b}"


def check_the_eager_backend() -> None:
    rules = [options for options in RICH if options.name in ("SGD", "Adam", "ASGD", "NAdam")]
    expected = {options.name: train(options, ["cpu", "cpu"]) for options in rules}
    everything = with_everything(["cpu"] * 3)
    check_the_device()
    for options in rules:
        for places in PLACES:
            compare(train(options, places), expected[options.name], f"{options} on {places}")
    for places in PLACES:
        check_a_watch(places)
    for places in THREE:
        compare(with_everything(places), everything, str(places))
    check_a_scaler()
    check_a_train_step()
    check_states_on_the_host()
    there = torch.tensor(2.0, device="pretend:0")
    scaled = ampopt.scale_outputs([torch.ones(2), torch.ones(2, device="pretend:0")], there)
    assert [t.device.type for t in scaled] == ["cpu", "pretend"]
    assert all(host(t).eq(2).all() for t in scaled)


def rules_of_kernels() -> list[OptionSet]:
    names = ("Adam", "NAdam", "Adafactor")
    rules = [next(options for options in RICH if options.name == name) for name in names]
    return [*rules, OptionSet("LAMB", "plain"), OptionSet("NovoGrad", "plain")]


def check_the_triton_backend() -> None:
    make_it_quick()
    rules = rules_of_kernels()
    expected = {options.name: train(options, ["cpu", "cpu"]) for options in rules}
    everything = with_everything(["cpu"] * 3)
    with use_triton(launch):
        for options in rules:
            for places in PLACES[1:] if options.name == "Adam" else PLACES[1:2]:
                compare(train(options, places), expected[options.name], f"{options} on {places}")
        for places in THREE:
            compare(with_everything(places), everything, str(places))
        check_a_scaler()
        check_a_train_step()
        check_what_fails("LAMB")
        check_what_fails("Adafactor")
        check_what_fails("SGD", norm_deviations=6.0)
        check_what_fails_of_gradients("unscale", norm_deviations=6.0)
        check_what_fails_of_gradients("accumulate")


def test_devices_step_skip_and_clip_together_and_the_host_never_reads_too_early(
    with_torch: Preloaded,
):
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": python_path()}
    done = with_torch.run(__file__, environment=environment)
    assert done.returncode == 0, done.stderr


def check_two(first: str, second: str) -> None:
    """Check that two devices, or one and the CPU, give the results of the CPU alone."""
    for options in rules_of_kernels():
        expected = train(options, ["cpu", "cpu"])
        for places in ([first, second], [second, first], [second, "cpu"]):
            compare(train(options, places), expected, f"{options} on {places}")
    places = [first, second, first]
    compare(with_everything(places), with_everything(["cpu"] * 3), str(places))


@needs_gpu
def test_two_gpus_step_skip_and_clip_together():
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two CUDA devices, this machine has {torch.cuda.device_count()}")
    check_two(f"{DEVICE}:0", f"{DEVICE}:1")


if __name__ == "__main__":
    ampopt.set_backend("eager")  # of the CPU
    with pretending():
        check_the_eager_backend()
        if HAS_TRITON:
            check_the_triton_backend()
