"""The ``Trainer`` of transformers with a tiny Llama of random weights: nothing is downloaded.

On the CPU, ``TrainingArguments(fp16=True)`` trains in float32 without a warning, so the scaler and
autocast that it has on a GPU are given to its ``Accelerator``; see ``test_accelerate``.
"""

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

needs("accelerate")  # without which it has no Trainer
needs("transformers")
from accelerate.state import AcceleratorState, GradientState  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor.parallel import (  # noqa: E402
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from transformers import (  # noqa: E402
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from ampopt.integrations import transformers as shipped  # noqa: E402

OVERFLOWS = 2.0**20  # which scales of 2**18 and more do here


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forbid downloads, and give each test a new ``Accelerator``."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def llama() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=8,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=8,
        )
    )


TEXTS = [{"input_ids": ids, "labels": ids} for ids in torch.arange(64).reshape(16, 4) % 7]


def gated(optimizer: Any) -> Any:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    ours = isinstance(optimizer, ampopt.Optimizer)
    return ampopt.lr_scheduler_gate(scheduler) if ours else scheduler


def trainer_of(
    model: Any,
    folder: Path,
    scaler: Any = None,
    given: Any = None,
    cls: Any = Trainer,
    **options: Any,
) -> Any:
    arguments = TrainingArguments(
        str(folder),
        use_cpu=True,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        report_to=[],
        disable_tqdm=True,
        **{
            "max_grad_norm": 0.5,
            "fp16": scaler is not None,
            "logging_strategy": "no",
            "save_strategy": "no",
            "max_steps": 6,
            **options,
        },
    )
    trainer = cls(model=model, args=arguments, train_dataset=TEXTS, **(given or {}))
    if scaler is not None:
        trainer.accelerator.scaler = scaler
        trainer.accelerator.native_amp = True  # as it is with float16 on a GPU
    return trainer


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adagrad"])
@pytest.mark.parametrize(
    ("scaler_class", "bf16"),
    [(None, False), (None, True), (torch.amp.GradScaler, False), (ampopt.GradScaler, False)],
)
def test_the_swap_changes_no_result(name, scaler_class, bf16, tmp_path):
    results = []
    for of in (torch.optim, ampopt):
        model = llama()
        optimizer = getattr(of, name)(model.parameters(), lr=0.05)
        scaler = scaler_class and scaler_class("cpu", init_scale=OVERFLOWS)
        given = {"optimizers": (optimizer, gated(optimizer))}
        trainer_of(model, tmp_path, scaler, given, bf16=bf16).train()
        rate = optimizer.param_groups[0]["lr"]
        results.append((list(model.parameters()), scaler and scaler.state_dict(), rate))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-3, atol=1e-5)
    assert results[0][1:] == results[1][1:]
    if scaler_class is not None:
        assert results[0][1]["scale"] < OVERFLOWS
        assert results[0][2] > 0.05 * 0.5**6  # the scheduler counted no skipped step


def test_it_makes_the_optimizer_from_a_class(tmp_path):
    given = {"optimizer_cls_and_kwargs": (ampopt.AdamW, {"lr": 0.05})}
    model = llama()
    before = bits(list(model.parameters()))
    trainer = trainer_of(model, tmp_path, ampopt.GradScaler("cpu", init_scale=2.0), given)
    trainer.train()
    optimizer: Any = trainer.optimizer
    assert isinstance(optimizer.optimizer, ampopt.AdamW)
    assert bits(list(model.parameters())) != before


def test_a_callback_reads_skips_from_the_scaler(tmp_path):
    """``scaler.skipped`` replaces ``optimizer_step_was_skipped``."""
    skipped: list[bool] = []
    scaler = ampopt.GradScaler("cpu", init_scale=OVERFLOWS)

    class Watch(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            skipped.append(scaler.skipped)

    model = llama()
    optimizer = ampopt.AdamW(model.parameters(), lr=0.05)
    given = {"optimizers": (optimizer, gated(optimizer)), "callbacks": [Watch()]}
    trainer_of(model, tmp_path, scaler, given).train()
    assert sorted(skipped, reverse=True) == skipped and 0 < sum(skipped) < 6
    assert {float(state["step"]) for state in optimizer.state.values()} == {6 - sum(skipped)}
    assert scaler.get_scale() == OVERFLOWS / 2 ** sum(skipped)


def test_a_run_resumed_from_a_checkpoint_is_the_same_run(tmp_path):
    results = []
    for resume in (False, True):
        AcceleratorState._reset_state(reset_partial_state=True)
        model = llama()
        optimizer = ampopt.AdamW(model.named_parameters(), lr=0.05)
        watch = ampopt.Watch(optimizer)
        scaler = ampopt.GradScaler("cpu", init_scale=1.0 if resume else OVERFLOWS)
        given = {"optimizers": (optimizer, gated(optimizer)), "callbacks": [shipped.StepMonitor()]}
        saving = {"save_strategy": "steps", "save_steps": 4, "seed": 0}
        logging = {"logging_strategy": "steps", "logging_steps": 6}
        trainer = trainer_of(model, tmp_path, scaler, given, **saving, **logging)
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4") if resume else None)
        logged = next(log for log in trainer.state.log_history if log["step"] == 6)
        counts = [logged["ampopt/steps"], logged["ampopt/skips"], watch.read()]
        results.append((bits(list(model.parameters())), scaler.state_dict(), counts))
    assert results[0] == results[1]


# --- what is shipped -----------------------------------------------------------------------------


def test_a_prepared_trainer_counts_steps_that_happened_and_logs_skips(tmp_path):
    """The Trainer's own scheduler counts; its optimizer is wrapped by Accelerate."""
    given = {"optimizer_cls_and_kwargs": (ampopt.AdamW, {"lr": 0.05})}
    options = {"logging_strategy": "steps", "logging_steps": 1, "fp16": True}
    trainer = trainer_of(llama(), tmp_path, None, given, **options)
    trainer.accelerator.native_amp = True
    seen: list[dict[str, Any]] = []

    class Reporter(TrainerCallback):
        def on_log(self, *args: Any, logs: Any = None, **kwargs: Any) -> None:
            seen.append(dict(logs))

    trainer.callback_handler.callbacks.insert(0, Reporter())  # where reporters are
    scaler = shipped.prepare(trainer, ampopt.GradScaler("cpu", init_scale=OVERFLOWS))
    assert trainer.accelerator.scaler is scaler
    trainer.train()

    steps = [log for log in seen if "loss" in log]
    skips = int(steps[-1]["ampopt/skips"])
    assert 0 < skips < 6
    assert [log["ampopt/steps"] for log in steps] == [1, 2, 3, 4, 5, 6]
    assert [log["ampopt/skipped"] for log in steps] == [1.0] * skips + [0.0] * (6 - skips)
    assert steps[-1]["ampopt/scale"] == OVERFLOWS / 2**skips
    assert trainer.state.log_history[-2]["ampopt/skips"] == skips
    # It falls linearly, to 0 after six steps.
    assert trainer.lr_scheduler.get_last_lr()[0] == pytest.approx(0.05 * skips / 6)
    inner = trainer.optimizer.optimizer
    assert not inner._ampopt.phase.pending
    assert len(inner._optimizer_step_post_hooks) == 1  # the gate's


def test_a_gate_that_it_was_given_is_kept_and_a_watch_is_logged(tmp_path):
    model = llama()
    optimizer = ampopt.AdamW(model.parameters(), lr=0.05)
    watch = ampopt.Watch(optimizer)
    gate = gated(optimizer)
    trainer = trainer_of(model, tmp_path, None, {"optimizers": (optimizer, gate)})
    shipped.prepare(trainer)
    trainer.train()
    assert trainer.lr_scheduler is gate
    assert gate.get_last_lr() == [0.05 * 0.5**6]
    logged, last = trainer.state.log_history[-1], watch.read()["recent"][-1]
    names = {"steps": "step", "scale": "scale", "norm": "norm", "skipped": "skipped"}
    assert {n: logged[f"ampopt/{n}"] for n in names} == {n: last[m] for n, m in names.items()}
    assert logged["ampopt/skips_in_a_row"] == 0


@pytest.mark.parametrize("fp16", [True, False])
@pytest.mark.parametrize("max_grad_norm", [0.5, 0.0])
def test_the_gradients_of_masters_are_clipped_and_logged(fp16, max_grad_norm, tmp_path):
    """Results of float16 parameters are those of float32 ones; SGD's rate is 1."""
    norms, changes = [], []
    for half in (False, True):
        AcceleratorState._reset_state(reset_partial_state=True)
        model = llama().half() if half else llama().half().float()
        optimizer = ampopt.SGD(model.parameters(), lr=1.0, master_weights=half)
        before = [p.detach().clone() for p in optimizer.master_params()]
        options = {"max_grad_norm": max_grad_norm, "fp16": fp16, "max_steps": 1}
        options |= {"logging_strategy": "steps", "logging_steps": 1}
        trainer = trainer_of(model, tmp_path, None, {"optimizers": (optimizer, None)}, **options)
        trainer.accelerator.native_amp = fp16  # as on a GPU
        shipped.prepare(trainer, ampopt.GradScaler("cpu", init_scale=2.0**10))
        trainer.train()
        moved = [b - p.detach() for b, p in zip(before, optimizer.master_params(), strict=True)]
        changes.append(float(torch.nn.utils.get_total_norm(moved)))
        norms.append(trainer.state.log_history[0]["grad_norm"])
    assert norms[0] > 0.5 and norms[1] == pytest.approx(norms[0], rel=2e-2)
    assert changes == pytest.approx([0.5] * 2 if max_grad_norm else norms, rel=1e-3)


class OfSeveralMeshes(Trainer):
    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """Do nothing: a module with some DTensors cannot be moved as a whole."""


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("max_grad_norm", [0.5, 0.0])
@pytest.mark.usefixtures("process_group")
def test_gradients_on_several_meshes_are_unscaled_and_clipped(half, max_grad_norm, tmp_path):
    """The Trainer's own method for these clips scaled gradients, and those of parameters."""
    mesh = init_device_mesh("cpu", (1,))
    model = llama().half() if half else llama()
    split = {"up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
    parallelize_module(model.model.layers[0].mlp, mesh, {"gate_proj": ColwiseParallel(), **split})
    optimizer = ampopt.SGD(model.parameters(), lr=1.0, master_weights=half)
    before = [p.detach().clone() for p in optimizer.master_params()]
    options = {"max_grad_norm": max_grad_norm, "fp16": False, "max_steps": 1}
    options |= {"logging_strategy": "steps", "logging_steps": 1, "cls": OfSeveralMeshes}
    trainer = trainer_of(model, tmp_path, None, {"optimizers": (optimizer, None)}, **options)
    shipped.prepare(trainer, ampopt.GradScaler("cpu", init_scale=2.0**10))
    trainer.train()
    masters = zip(before, optimizer.master_params(), strict=True)
    moved: list[Any] = [old - new.detach() for old, new in masters]
    whole = [change.full_tensor() if hasattr(change, "full_tensor") else change for change in moved]
    norm = float(torch.nn.utils.get_total_norm(whole))
    logged = trainer.state.log_history[0]["grad_norm"]
    assert 0.5 < logged < 2.0
    assert norm == pytest.approx(max_grad_norm or logged, rel=1e-3)


@pytest.mark.parametrize(
    ("dtype", "fp16", "scale"),
    [
        (torch.float16, False, 2.0**16),
        (torch.float32, True, 2.0**16),
        (torch.bfloat16, False, 1.0),
    ],
)
def test_the_scaler_that_a_model_asks_for(dtype, fp16, scale, tmp_path):
    trainer = trainer_of(llama().to(dtype), tmp_path, fp16=fp16)
    assert shipped.prepare(trainer).get_scale() == scale


def test_without_it_the_error_says_what_clips_masters(tmp_path):
    model = llama().half()
    optimizer = ampopt.AdamW(model.parameters(), master_weights=True)
    scaler = ampopt.GradScaler("cpu")
    trainer = trainer_of(model, tmp_path, scaler, {"optimizers": (optimizer, None)})
    with pytest.raises(RuntimeError, match=r"integrations.transformers.prepare\(trainer\)"):
        trainer.train()


def test_an_overflow_in_bfloat16_is_skipped(tmp_path):
    class Overflowing(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            factor = float("inf") if self.state.global_step == 2 else 1.0
            loss: Any = super().compute_loss(*args, **kwargs)
            return loss * factor

    model = llama()
    given = {"optimizer_cls_and_kwargs": (ampopt.AdamW, {"lr": 0.05})}
    trainer = trainer_of(model, tmp_path, None, given, bf16=True, cls=Overflowing)
    shipped.prepare(trainer)
    trainer.train()
    assert all(p.isfinite().all() for p in model.parameters())
    states = trainer.optimizer.optimizer.state.values()
    assert {float(state["step"]) for state in states} == {5.0}


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")  # no GPU
def test_the_block_of_the_guide(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = readme.run("Trainers of transformers and trl", tmp_path)
    assert names["scaler"].get_scale() > 0
    assert all(p.isfinite().all() for p in names["model"].parameters())
