"""trl's trainers for DPO and GRPO, with a tiny Llama of random weights: nothing is downloaded."""

# The extra may not be installed.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

from typing import Any

import pytest
import torch
from support.requirements import needs

import ampopt

needs("accelerate")
needs("transformers")
needs("trl")
from accelerate.state import AcceleratorState, GradientState  # noqa: E402
from datasets import Dataset  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: E402
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer  # noqa: E402

from ampopt.integrations.transformers import prepare  # noqa: E402

# What trl's own settings and imports are warned of.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

WORDS = ["<pad>", "<eos>", "<unk>", *"abcdefgh"]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forbid downloads, and give each test a new ``Accelerator``."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def tokenizer() -> Any:
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


def policy() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=16,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )
    return LlamaForCausalLM(config).half()


def dpo(model: Any, optimizer: Any, options: dict[str, Any]) -> Any:
    data = Dataset.from_list([{"prompt": "a b", "chosen": " c d", "rejected": " e f"}] * 8)
    return DPOTrainer(
        model,
        ref_model=policy(),
        args=DPOConfig(**options),
        train_dataset=data,
        processing_class=tokenizer(),
        optimizers=(optimizer, None),
    )


def grpo(model: Any, optimizer: Any, options: dict[str, Any]) -> Any:
    def reward(completions: Any, **_: Any) -> list[float | None]:
        return [float(number) for number, _ in enumerate(completions)]

    return GRPOTrainer(
        model,
        reward_funcs=reward,
        args=GRPOConfig(**options, num_generations=2, max_completion_length=4),
        train_dataset=Dataset.from_list([{"prompt": "a b"}] * 8),
        processing_class=tokenizer(),
        optimizers=(optimizer, None),
    )


@pytest.mark.parametrize("make", [dpo, grpo])
@pytest.mark.parametrize("fp16", [True, False])
def test_float16_parameters_with_masters(make, fp16, tmp_path):
    """Clipped to 2**-6 by norm, each step of SGD at a rate of 1 moves the masters by at most that.

    The first loss is infinite, so that its step is skipped.
    """
    model = policy()
    optimizer = ampopt.SGD(model.parameters(), lr=1.0, master_weights=True)
    options = {
        "output_dir": str(tmp_path),
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "max_steps": 3,
        "max_grad_norm": 2.0**-6,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "bf16": False,
        "fp16": fp16,
    }
    trainer = make(model, optimizer, options)
    trainer.accelerator.native_amp = fp16  # as on a GPU
    scaler = prepare(trainer)
    compute_loss = trainer.compute_loss

    def infinite_at_first(*args: Any, **kwargs: Any) -> Any:
        loss = compute_loss(*args, **kwargs)
        return loss * (float("inf") if trainer.state.global_step == 0 else 1.0)

    trainer.compute_loss = infinite_at_first
    masters = [p.detach().clone() for p in optimizer.master_params()]
    trainer.train()

    steps = [log for log in trainer.state.log_history if "loss" in log]
    assert [log["ampopt/skipped"] for log in steps] == [1.0, 0.0, 0.0]
    assert scaler.get_scale() == 2.0**15
    assert all(log["grad_norm"] > 2.0**-6 for log in steps[1:])
    moved = [
        old - new.detach() for old, new in zip(masters, optimizer.master_params(), strict=True)
    ]
    assert 2.0**-7 < float(torch.nn.utils.get_total_norm(moved)) <= 2.0**-5 * 1.001
    for param, master in optimizer.params_and_masters():
        assert param.dtype == torch.float16 and torch.equal(param, master.half())
