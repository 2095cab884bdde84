"""Accelerate on the CPU, where it does not train in float16.

``Accelerator(mixed_precision="fp16")`` has no scaler on a CPU, and trains in float32 without a
warning. The tests give it a scaler and autocast, as it has on a GPU. Only a test on a GPU can show
that it uses them in the same way there.
"""

# The extra may not be installed.
# pyright: reportMissingImports=false

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import readme
from support.requirements import needs

import ampopt
from ampopt.testing.bits import bits

needs("accelerate")
from accelerate import Accelerator  # noqa: E402
from accelerate.state import AcceleratorState, GradientState  # noqa: E402
from accelerate.utils import DistributedType  # noqa: E402

from ampopt.integrations import StepRecord  # noqa: E402
from ampopt.integrations import accelerate as shipped  # noqa: E402

SCALERS = [torch.amp.GradScaler, ampopt.GradScaler]
OVERFLOWS = 2.0**24  # scales from here down to 2**17 overflow float16 here


def accelerator_for(scaler: Any, precision: str = "fp16", accumulated: int = 1) -> Accelerator:
    """A new accelerator with new state, as Accelerate would share that of the first one."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(
        cpu=True, mixed_precision=precision, gradient_accumulation_steps=accumulated
    )
    accelerator.native_amp = precision != "no"  # as it is on a GPU
    shipped.use_scaler(accelerator, scaler)
    return accelerator


def linear() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(4, 2)


def batches(size: int) -> Any:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(16, 4, generator=generator)
    labels = torch.randint(2, (16,), generator=generator)
    dataset = torch.utils.data.TensorDataset(images, labels)
    return torch.utils.data.DataLoader(dataset, batch_size=size)


def trained(accelerator: Any, make: Any, *, size: int = 2, clip: float | None = 0.5) -> Any:
    """The model, the optimizer in Accelerate's wrapper, and the scheduler, after 16 images."""
    net = linear()
    inner = make(net.parameters())
    scheduler: Any = torch.optim.lr_scheduler.StepLR(inner, step_size=1, gamma=0.5)
    if isinstance(inner, ampopt.Optimizer):
        scheduler = shipped.lr_scheduler_gate(scheduler)
    model, optimizer, scheduler, loader = accelerator.prepare(net, inner, scheduler, batches(size))
    for images, labels in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            if clip is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return net, inner, scheduler


def test_the_block_of_the_guide(tmp_path, capsys):
    names = readme.run("With Accelerate and transformers", tmp_path)
    assert capsys.readouterr().out == "False\n"
    assert names["scheduler"].get_last_lr() != [1e-3]
    assert float(names["norm"]) > 0


def test_on_the_cpu_it_has_no_scaler():
    """So the tests below give it a scaler; see the module's docstring."""
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    assert accelerator.scaler is None
    assert not accelerator.native_amp


@pytest.mark.parametrize("name", ["AdamW", "SGD", "RMSprop", "Adafactor"])
@pytest.mark.parametrize("scaler_class", SCALERS)
@pytest.mark.parametrize("accumulated", [1, 2])
def test_the_swap_changes_no_result(name, scaler_class, accumulated):
    results = []
    for of in (torch.optim, ampopt):
        scaler = scaler_class("cpu", init_scale=2.0**20)
        accelerator = accelerator_for(scaler, accumulated=accumulated)
        net, inner, scheduler = trained(
            accelerator, lambda params, of=of: getattr(of, name)(params, lr=0.1)
        )
        rate = inner.param_groups[0]["lr"]
        results.append((list(net.parameters()), scaler.state_dict(), rate))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-4, atol=1e-6)
    assert results[0][1:] == results[1][1:]
    assert results[0][1]["scale"] < 2.0**20
    assert results[0][2] < 0.1


def test_skips_are_known_to_the_gate_and_the_scaler_only():
    scaler = ampopt.GradScaler("cpu", init_scale=2.0**60)
    accelerator = accelerator_for(scaler)
    net, inner, scheduler = trained(accelerator, lambda params: ampopt.SGD(params, lr=0.5))
    assert bits(list(net.parameters())) == bits(list(linear().parameters()))
    assert scheduler.get_last_lr() == [0.5]
    assert scaler.was_skipped(inner)
    assert not accelerator.optimizer_step_was_skipped


def test_accumulated_batches_are_one_batch():
    """In float32, the sum of halves and half of the sum are rounded in the same way."""
    results = []
    for accumulated in (1, 2):
        scaler = ampopt.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        accelerator = accelerator_for(scaler, "no", accumulated)
        net, _, _ = trained(
            accelerator, lambda p: ampopt.SGD(p, lr=0.5), size=4 // accumulated, clip=None
        )
        results.append(list(net.parameters()))
        assert scaler.get_scale() == 2.0**11  # four steps, whatever the number of batches
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cls", [ampopt.AdamW, ampopt.LBFGS])
@pytest.mark.parametrize("scaler_class", SCALERS)
def test_t1_a_closure_which_accelerate_passes_by_position(cls, scaler_class):
    """Torch's scaler gets an error that names the fix; ``ampopt.GradScaler`` replays."""
    scaler = scaler_class("cpu", init_scale=OVERFLOWS)
    accelerator = accelerator_for(scaler)
    net = linear()
    model, optimizer = accelerator.prepare(net, cls(net.parameters(), lr=0.1))
    ((images, labels),) = batches(16)
    losses: list[float] = []

    def closure() -> Any:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        accelerator.backward(loss)
        losses.append(float(loss.detach()))
        return loss

    if scaler_class is torch.amp.GradScaler:
        closure()  # or it would find no gradients to judge
        before = bits(list(net.parameters()))
        with pytest.raises(RuntimeError, match=r"Use ampopt\.GradScaler"):
            optimizer.step(closure)
        assert len(losses) == 1
        assert bits(list(net.parameters())) == before
        return
    for _ in range(3):
        optimizer.step(closure)
    assert losses[-1] < losses[0]
    assert scaler.get_scale() < OVERFLOWS


def test_bfloat16_with_a_scale_of_1_skips_overflows():
    scaler = ampopt.GradScaler("cpu", loss_scale=ampopt.StaticLossScale(1.0))
    accelerator = accelerator_for(scaler, "bf16")
    net = linear()
    model, optimizer = accelerator.prepare(net, ampopt.AdamW(net.parameters()))
    before = bits(list(net.parameters()))
    for factor in (float("inf"), 1.0):
        accelerator.backward(model(torch.ones(2, 4)).sum() * factor)
        accelerator.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert scaler.skipped is (factor != 1.0)
        assert (bits(list(net.parameters())) == before) is (factor != 1.0)


def test_a_run_resumed_from_a_checkpoint_is_the_same_run(tmp_path):
    """Accelerate saves and loads parameters, optimizer, scheduler and scaler."""

    def run(scaler: Any, steps: Any, load: bool = False, save: bool = False) -> Any:
        accelerator = accelerator_for(scaler)
        net = linear()
        inner = ampopt.AdamW(net.parameters(), lr=0.1)
        gate = shipped.lr_scheduler_gate(torch.optim.lr_scheduler.StepLR(inner, 1))
        model, optimizer, scheduler = accelerator.prepare(net, inner, gate)
        if load:
            accelerator.load_state(str(tmp_path))
        for images, labels in [*batches(2)][steps]:
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if save:
            accelerator.save_state(str(tmp_path))
        return bits(list(net.parameters())), scaler.state_dict(), gate.state_dict()

    def scaler(init_scale: float = 2.0**20) -> Any:
        return ampopt.GradScaler("cpu", init_scale=init_scale)

    straight = run(scaler(), slice(None))
    run(scaler(), slice(0, 5), save=True)
    assert run(scaler(1.0), slice(5, None), load=True) == straight


# --- what is shipped -----------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "scale"), [("fp16", 2.0**16), ("bf16", 1.0), ("no", 1.0)])
def test_the_scaler_that_a_precision_asks_for(precision, scale):
    scaler: Any = accelerator_for(None, precision).scaler
    assert scaler.get_scale() == scale


def test_a_scaler_that_comes_too_late_is_refused():
    accelerator = accelerator_for(None)
    accelerator.prepare(ampopt.SGD(linear().parameters()))
    with pytest.raises(RuntimeError, match="before accelerator.prepare, which has given SGD"):
        shipped.use_scaler(accelerator)


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_clipping_sees_unscaled_gradients_in_every_precision(precision, accumulated):
    """Without the helper, Accelerate unscales before it clips in float16 only."""
    results = []
    for scale in (1.0, 2.0**10):
        scaler = ampopt.GradScaler("cpu", loss_scale=ampopt.StaticLossScale(scale))
        accelerator = accelerator_for(scaler, precision, accumulated)
        net, *_ = trained(accelerator, lambda p: ampopt.SGD(p, lr=0.5), clip=0.1)
        results.append(list(net.parameters()))
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)


def stepped_with_masters(clip: Any, version: int | None = None) -> tuple[Any, list[Any]]:
    """What ``clip(accelerator, net, optimizer)`` returned, and how far the masters moved.

    The rate is 1.0, so they moved by their clipped gradients. With ``version``, Accelerate takes
    itself to run that version of FSDP.
    """
    accelerator = accelerator_for(None, "bf16")
    net = linear().bfloat16()
    inner = ampopt.SGD(net.parameters(), lr=1.0, master_weights=True)
    _, optimizer = accelerator.prepare(net, inner)
    before = [p.detach().float() for p in net.parameters()]
    accelerator.backward(net(torch.ones(2, 4, dtype=torch.bfloat16)).sum())
    if version is not None:
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = SimpleNamespace(fsdp_version=version)
    returned = clip(accelerator, net, inner)
    optimizer.step()
    return returned, [
        old - new.detach() for old, new in zip(before, inner.master_params(), strict=True)
    ]


NORM = (8 * 2.0**2 + 2 * 2.0**2) ** 0.5  # of the sum over two rows of ones, for weight and bias


@pytest.mark.parametrize("version", [None, 2])
@pytest.mark.parametrize("of", ["parameters", "masters"])
def test_the_gradients_of_masters_are_clipped(of, version):
    """Whether the parameters are passed, as a Trainer does, or the masters."""

    def clip(accelerator: Any, net: Any, optimizer: Any) -> Any:
        tensors = net.parameters() if of == "parameters" else optimizer.master_params()
        return accelerator.clip_grad_norm_(tensors, 2.0**-6)

    norm, changes = stepped_with_masters(clip, version)
    assert norm.dtype == torch.float32 and float(norm) == pytest.approx(NORM)
    assert float(torch.nn.utils.get_total_norm(changes)) == pytest.approx(2.0**-6, rel=1e-2)


def test_the_gradients_of_masters_are_clipped_by_value():
    _, changes = stepped_with_masters(
        lambda accelerator, net, _: accelerator.clip_grad_value_(net.parameters(), 0.5)
    )
    assert all(torch.equal(change, torch.full_like(change, 0.5)) for change in changes)


def test_accelerate_refuses_to_clip_by_value_under_fsdp():
    with pytest.raises(Exception, match="do not support `clip_grad_value_`"):
        stepped_with_masters(
            lambda accelerator, net, _: accelerator.clip_grad_value_(net.parameters(), 0.5), 2
        )


def test_masters_under_fsdp1_are_refused():
    """Under FSDP1, the model computes the norm, from the gradients of its parameters."""
    with pytest.raises(RuntimeError, match="under FSDP1, .* choose fsdp_version=2"):
        stepped_with_masters(
            lambda accelerator, net, _: accelerator.clip_grad_norm_(net.parameters(), 1.0), 1
        )


@pytest.mark.parametrize("processes", [1, 3])
@pytest.mark.parametrize("split_batches", [False, True])
def test_a_gate_counts_as_accelerate_does_with_many_processes(
    processes, split_batches, monkeypatch
):
    """Accelerate steps a scheduler once for each process, unless the processes split batches."""
    counts = []
    for gate in (shipped.lr_scheduler_gate, lambda scheduler: scheduler):
        accelerator = accelerator_for(ampopt.GradScaler("cpu", init_scale=2.0**10), "no")
        accelerator.dataloader_config.split_batches = split_batches
        net = linear()
        optimizer = ampopt.SGD(net.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 0.5**count)
        outer, prepared = accelerator.prepare(optimizer, gate(scheduler))
        monkeypatch.setattr(
            "accelerate.scheduler.AcceleratorState",
            lambda: SimpleNamespace(num_processes=processes),
        )
        for factor in (1.0, float("inf"), 1.0):
            accelerator.backward(net(torch.ones(2, 4)).sum() * factor)
            outer.step()
            prepared.step()
            outer.zero_grad()
        counts.append(scheduler.last_epoch)
        monkeypatch.undo()
    each = 1 if split_batches else processes
    assert counts == [2 * each, 3 * each]  # without a gate, the skipped step counts


def test_a_record_counts_steps_and_skips():
    scaler = ampopt.GradScaler("cpu", init_scale=2.0**20)
    accelerator = accelerator_for(scaler)
    records = []

    def make(params: Any) -> Any:
        optimizer = ampopt.SGD(params, lr=0.5)
        records.append(StepRecord(optimizer, scaler))
        return optimizer

    trained(accelerator, make)
    found = records[0].read()
    assert found["steps"] == 8 and 0 < found["skips"] < 8 and found["skipped"] == 0
    assert found["scale"] == 2 ** (20 - found["skips"])
