"""The ``Trainer`` of transformers with a tiny Llama of random weights: nothing is downloaded.

On the CPU, ``TrainingArguments(fp16=True)`` trains in float32 without a word, so the scaler and
autocast that it has on a GPU are given to its ``Accelerator``; see ``test_accelerate``.
"""

# The extra may not be installed.
# pyright: reportMissingImports=false

from pathlib import Path
from typing import Any

import pytest
import torch
from support.requirements import needs

import ampopt
from ampopt.testing.bits import bits

needs("accelerate")  # without which it has no Trainer
needs("transformers")
from accelerate.state import AcceleratorState, GradientState  # noqa: E402
from transformers import (  # noqa: E402
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

OVERFLOWS = 2.0**20  # which scales of 2**18 and more do here


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No network, and an ``Accelerator`` of each test's own."""
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
    model: Any, folder: Path, scaler: Any = None, given: Any = None, **options: Any
) -> Trainer:
    arguments = TrainingArguments(
        str(folder),
        use_cpu=True,
        fp16=scaler is not None,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        **{"save_strategy": "no", "max_steps": 6, **options},
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=TEXTS, **(given or {}))
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


def test_a_callback_asks_the_scaler_about_skips(tmp_path):
    """What to ask in place of ``optimizer_step_was_skipped``: the scaler."""
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
        optimizer = ampopt.AdamW(model.parameters(), lr=0.05)
        scaler = ampopt.GradScaler("cpu", init_scale=1.0 if resume else OVERFLOWS)
        given = {"optimizers": (optimizer, gated(optimizer))}
        saving = {"save_strategy": "steps", "save_steps": 4, "seed": 0}
        trainer = trainer_of(model, tmp_path, scaler, given, **saving)
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4") if resume else None)
        results.append((bits(list(model.parameters())), scaler.state_dict()))
    assert results[0] == results[1]
