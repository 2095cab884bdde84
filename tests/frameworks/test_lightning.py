"""Lightning's ``Trainer``, on the CPU, where float16 autocast and scaling run as on a GPU."""

# The extra may not be installed.
# pyright: reportMissingImports=false

from pathlib import Path
from typing import Any

import pytest
import torch
from support import readme
from support.requirements import needs

import ampopt
from ampopt.testing.bits import bits

needs("lightning")
from lightning.fabric.utilities.exceptions import MisconfigurationException  # noqa: E402
from lightning.pytorch import LightningModule, Trainer  # noqa: E402
from lightning.pytorch.plugins.precision import MixedPrecision  # noqa: E402

from ampopt.integrations import lightning as shipped  # noqa: E402

pytestmark = [
    # Lightning asks torch's pytrees by a name that torch has deprecated.
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
    # Nothing to load here is worth workers.
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    # The block of the guide has its model summed up, as most do.
    pytest.mark.filterwarnings("ignore:Precision 16-mixed is not supported by the model summary"),
    # It finds, and does not use, what this machine may have.
    pytest.mark.filterwarnings("ignore:GPU available but not used"),
]

SCALERS = [torch.amp.GradScaler, ampopt.GradScaler]
OVERFLOWS = 2.0**24  # scales from here down to 2**17 overflow float16 here


class Net(LightningModule):
    """A linear layer, trained by the optimizer that ``make`` makes."""

    def __init__(self, make: Any, *, manual: bool = False, returns_none_at: int = -1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 2)
        self.make = make
        self.automatic_optimization = not manual
        self.returns_none_at = returns_none_at
        self.norms: list[float] = []

    def loss(self, batch: Any) -> Any:
        images, labels = batch
        return torch.nn.functional.cross_entropy(self.layer(images), labels)

    def training_step(self, batch: Any, index: int) -> Any:
        if index == self.returns_none_at:
            return None
        loss = self.loss(batch)
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
        self.norms.append(float(torch.nn.utils.get_total_norm([g for g in grads if g is not None])))

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


def data(batch_size: int = 2) -> Any:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(16, 4, generator=generator)
    labels = torch.randint(2, (16,), generator=generator)
    dataset = torch.utils.data.TensorDataset(images, labels)
    return torch.utils.data.DataLoader(dataset, batch_size=batch_size)


def trained(
    net: Net, plugin: Any = None, *, batch_size: int = 2, resume: Any = None, **options: Any
) -> Any:
    """The parameters of ``net`` after an epoch of its 16 images, and the trainer."""
    trainer = Trainer(
        accelerator="cpu",
        plugins=None if plugin is None else [plugin],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 1, **options},
    )
    trainer.fit(net, data(batch_size), ckpt_path=resume)
    return bits(list(net.parameters())), trainer


def mixed(scaler_class: Any, plugin_class: Any = MixedPrecision, init_scale: float = OVERFLOWS):
    return plugin_class("16-mixed", "cpu", scaler=scaler_class("cpu", init_scale=init_scale))


@pytest.mark.parametrize("name", ["AdamW", "SGD", "RMSprop", "Adafactor"])
@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("scaler_class", SCALERS)
def test_mixed_precision_as_it_comes(name, manual, scaler_class):
    """Without clipping, only the import changes."""
    results = []
    for of in (torch.optim, ampopt):
        plugin = mixed(scaler_class)
        net = Net(lambda params, of=of: getattr(of, name)(params, lr=0.01), manual=manual)
        trained(net, plugin)
        results.append((list(net.parameters()), plugin.scaler.state_dict()))
    # Adafactor's last bits differ from torch's, and so, now and then, does what float16 makes of
    # them in the next forward pass; a step is 1e-2.
    atol = 1e-4 if name == "Adafactor" else 1e-6
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-4, atol=atol)
    assert results[0][1] == results[1][1]
    assert results[0][1]["scale"] < OVERFLOWS


@pytest.mark.parametrize("scaler_class", SCALERS)
@pytest.mark.parametrize("manual", [False, True])
def test_the_plugin_clips_and_shows_true_gradients(scaler_class, manual):
    """The trainer does the same with torch's optimizer and torch's scaler."""
    clip: dict[str, Any] = {} if manual else {"gradient_clip_val": 0.5}
    reference = Net(lambda params: torch.optim.SGD(params, lr=0.5), manual=manual)
    trained(reference, mixed(torch.amp.GradScaler), **clip)
    net = Net(lambda params: ampopt.SGD(params, lr=0.5), manual=manual)
    plugin = mixed(scaler_class, shipped.MixedPrecision)
    trained(net, plugin, **clip)
    torch.testing.assert_close(list(net.parameters()), list(reference.parameters()))
    assert net.norms == pytest.approx(reference.norms, rel=1e-5, nan_ok=True)
    assert 0 < plugin.scaler.get_scale() < OVERFLOWS
    assert max(n for n in net.norms if n < float("inf")) > 0.5  # so that it was clipped


def test_a_training_step_that_returns_none_is_accepted():
    net = Net(lambda params: ampopt.SGD(params, lr=0.5), returns_none_at=0)
    plugin = mixed(ampopt.GradScaler, shipped.MixedPrecision, 2.0)
    with pytest.warns(UserWarning, match="`training_step` returned `None`"):
        trained(net, plugin)
    assert plugin.scaler.loss_scale._counters.tolist()[0] == 7  # finite steps of eight batches


def test_batches_are_accumulated():
    """Four steps of two batches each are four steps of batches twice as large."""
    results = []
    for accumulated in (1, 2):
        net = Net(lambda params: ampopt.SGD(params, lr=0.5))
        plugin = mixed(ampopt.GradScaler, shipped.MixedPrecision, 2.0**10)
        options: dict[str, Any] = {"accumulate_grad_batches": accumulated, "gradient_clip_val": 0.5}
        trained(net, plugin, batch_size=4 // accumulated, **options)
        assert plugin.scaler.loss_scale._counters.tolist()[0] == 4
        results.append(list(net.parameters()))
    torch.testing.assert_close(*results, rtol=1e-2, atol=1e-3)  # autocast rounds to float16


@pytest.mark.parametrize("cls", [ampopt.LBFGS, ampopt.AdamW])
def test_closures_are_replayed(cls):
    """Lightning alone refuses LBFGS. With replay, no batch is lost to an overflow."""
    net = Net(lambda params: cls(params, lr=0.1))
    scaler = ampopt.GradScaler("cpu", init_scale=OVERFLOWS)
    plugin = shipped.MixedPrecision("16-mixed", "cpu", scaler, replay=True)
    (everything,) = data(16)
    before = net.loss(everything)
    trained(net, plugin, batch_size=16, max_epochs=2)
    assert plugin.scaler.get_scale() < OVERFLOWS
    assert not plugin.scaler.skipped
    assert net.loss(everything) < before
    if cls is ampopt.AdamW:
        assert [s["step"] for s in state_of(net)] == [2.0, 2.0]


def state_of(net: Net) -> list[dict[str, Any]]:
    return list(net.trainer.optimizers[0].state.values())


def test_a_gated_scheduler_counts_steps_that_happened():
    def make(params: Any) -> Any:
        optimizer = ampopt.AdamW(params, lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        gate = ampopt.lr_scheduler_gate(scheduler)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": gate, "interval": "step"}}

    net = Net(make)
    plugin = mixed(ampopt.GradScaler, shipped.MixedPrecision, 2.0**20)
    trained(net, plugin)
    (happened,) = {float(s["step"]) for s in state_of(net)}
    assert 0 < happened < 8
    assert net.trainer.optimizers[0].param_groups[0]["lr"] == 0.5**happened


def test_a_run_resumed_from_a_checkpoint_is_the_same_run(tmp_path: Path):
    def make(params: Any) -> Any:
        optimizer = ampopt.AdamW(params, lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
        return {"optimizer": optimizer, "lr_scheduler": ampopt.lr_scheduler_gate(scheduler)}

    def counts(trainer: Any) -> dict[str, float]:
        return {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("ampopt/")}

    straight = mixed(ampopt.GradScaler, shipped.MixedPrecision)
    whole = {"max_epochs": 2, "callbacks": [shipped.StepMonitor()]}
    expected, through = trained(Net(make), straight, **whole)
    plugin, monitor = mixed(ampopt.GradScaler, shipped.MixedPrecision), shipped.StepMonitor()
    _, trainer = trained(Net(make), plugin, callbacks=[monitor])
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed = mixed(ampopt.GradScaler, shipped.MixedPrecision, 1.0)
    whole["callbacks"] = [shipped.StepMonitor()]
    got, trainer = trained(Net(make), resumed, resume=tmp_path / "half.ckpt", **whole)
    assert got == expected
    assert resumed.scaler.state_dict() == straight.scaler.state_dict()
    assert counts(trainer) == counts(through) and counts(trainer)["ampopt/steps"] == 16


def test_manual_optimization_without_a_scaler():
    """The step calls ``unscale_and_step``, and Lightning's precision stays float32."""

    class Own(Net):
        scale: Any = ampopt.DynamicLossScale(init_scale=OVERFLOWS)

        def training_step(self, batch: Any, index: int) -> None:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = self.loss(batch)
            self.manual_backward(ampopt.scale_outputs(loss, self.scale))
            result = optimizer.unscale_and_step(grads_scaled_by=self.scale, max_norm=0.5)
            self.scale = result.scale

    net = Own(lambda params: ampopt.SGD(params, lr=0.5), manual=True)
    reference = Net(lambda params: torch.optim.SGD(params, lr=0.5))
    plugin = mixed(torch.amp.GradScaler)
    trained(reference, plugin, gradient_clip_val=0.5)
    trained(net)
    torch.testing.assert_close(list(net.parameters()), list(reference.parameters()))
    assert net.scale.item() == plugin.scaler.get_scale()


# --- what is shipped -----------------------------------------------------------------------------


def test_the_block_of_the_guide(tmp_path, capsys):
    names = readme.run("With Lightning", tmp_path)
    assert capsys.readouterr().out.splitlines()[-1] == "0.0 65536.0"  # beside the Trainer's own
    assert float(names["plugin"].grad_norm) > 0


def test_the_error_that_leads_here_and_what_is_below_it():
    page = readme.ROOT / "examples" / "guides" / "your_error.md"
    (heading,) = (title for title in readme.headings(page) if title.startswith("does not allow"))
    net = Net(lambda params: ampopt.AdamW(params))
    with pytest.raises(RuntimeError, match=heading):
        trained(net, mixed(torch.amp.GradScaler), gradient_clip_val=1.0)
    trained(net, shipped.MixedPrecision("16-mixed", "cpu"), gradient_clip_val=1.0)
    assert len(net.norms) > 0


def test_a_replayed_step_is_clipped_as_any_other():
    results = []
    for replay in (False, True):
        net = Net(lambda params: ampopt.SGD(params, lr=0.5))
        scaler = ampopt.GradScaler("cpu", init_scale=OVERFLOWS if replay else 2.0**10)
        plugin = shipped.MixedPrecision("16-mixed", "cpu", scaler, replay=replay)
        trained(net, plugin, gradient_clip_val=0.25)
        results.append(list(net.parameters()))
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)  # the scale changes roundings


def test_what_cannot_be_replayed_is_refused():
    with pytest.raises(MisconfigurationException, match=r"needs an ampopt\.GradScaler, got Grad"):
        shipped.MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"), replay=True)
    plugin = shipped.MixedPrecision("16-mixed", "cpu", replay=True)
    net = Net(lambda params: ampopt.SGD(params))
    with pytest.raises(MisconfigurationException, match="clips by norm, not by 'value'"):
        trained(net, plugin, gradient_clip_val=1.0, gradient_clip_algorithm="value")


def test_gradients_are_clipped_by_value():
    net = Net(lambda params: ampopt.SGD(params, lr=1.0))
    before = [p.detach().clone() for p in net.parameters()]
    plugin = shipped.MixedPrecision("16-mixed", "cpu")
    trained(net, plugin, batch_size=16, gradient_clip_val=1e-3, gradient_clip_algorithm="value")
    pairs = zip(before, net.parameters(), strict=True)
    change = max(float((old - new.detach()).abs().max()) for old, new in pairs)
    assert change == pytest.approx(1e-3, rel=1e-3)


class Overflowing(Net):
    """A model whose loss is infinite for the first batch."""

    def training_step(self, batch: Any, index: int) -> Any:
        return self.loss(batch) * (float("inf") if index == 0 else 1.0)


@pytest.mark.parametrize("clip", [None, 1.0])
def test_an_overflow_in_bfloat16_is_skipped(clip):
    net = Overflowing(lambda params: ampopt.AdamW(params, lr=0.1))
    trained(net, shipped.MixedPrecision("bf16-mixed", "cpu"), gradient_clip_val=clip)
    assert {float(state["step"]) for state in state_of(net)} == {7.0}
    assert all(p.isfinite().all() for p in net.parameters())


def test_the_gradients_of_masters_are_clipped():
    net = Net(lambda params: ampopt.SGD(params, lr=1.0, master_weights=True)).bfloat16()
    before = [p.detach().float() for p in net.parameters()]
    plugin = shipped.MixedPrecision("bf16-mixed", "cpu")
    _, trainer = trained(net, plugin, batch_size=16, gradient_clip_val=2.0**-6)
    masters = list(trainer.optimizers[0].master_params())
    assert {p.dtype for p in masters} == {torch.float32}
    changes = [old - new for old, new in zip(before, masters, strict=True)]
    norm = torch.nn.utils.get_total_norm([change.detach() for change in changes])
    assert float(norm) == pytest.approx(2.0**-6, rel=1e-2)
    assert plugin.grad_norm is not None and plugin.grad_norm > 2.0**-6


@pytest.mark.parametrize("scaler_class", SCALERS)
def test_the_monitor_logs_steps_and_skips(scaler_class):
    net = Net(lambda params: ampopt.AdamW(params, lr=0.1))
    plugin = mixed(scaler_class, shipped.MixedPrecision, 2.0**20)
    options: dict[str, Any] = {"gradient_clip_val": 0.5, "callbacks": [shipped.StepMonitor()]}
    _, trainer = trained(net, plugin, **options)
    logged = {name: float(number) for name, number in trainer.callback_metrics.items()}
    (happened,) = {float(s["step"]) for s in state_of(net)}
    assert logged["ampopt/steps"] == 8
    assert logged["ampopt/skips"] == 8 - happened > 0
    assert logged["ampopt/skipped"] == 0
    assert logged["ampopt/scale"] == plugin.scaler.get_scale() == 2 ** (20 - 8 + happened)
    assert logged["ampopt/norm"] == pytest.approx(net.norms[-1], rel=1e-5)
    assert not trainer.optimizers[0]._optimizer_step_post_hooks


def test_the_monitor_logs_what_a_watch_of_the_optimizer_would():
    told: list[Any] = []

    def watched(params: Any) -> Any:
        optimizer = ampopt.AdamW(params, lr=0.1)
        ampopt.Watch(optimizer).log_to(told.append)
        return optimizer

    plugin = mixed(ampopt.GradScaler, shipped.MixedPrecision, 2.0**20)
    _, trainer = trained(Net(watched), plugin, callbacks=[shipped.StepMonitor()])
    logged = {name: float(number) for name, number in trainer.callback_metrics.items()}
    last = {"steps": told[-1].pop("step"), **told[-1]}
    assert {"scale", "norm", "skips", "skips_in_a_row"} < set(last)
    # Lightning keeps them in float32.
    assert logged == pytest.approx({f"ampopt/{name}": float(n) for name, n in last.items()})
