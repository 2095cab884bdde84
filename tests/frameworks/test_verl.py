"""verl's engine for FSDP2 on two ranks: the class that the guide makes of it, and a tiny Llama.

verl knows no CPU, but lets one be declared as a device. With FSDP1 it needs a GPU all the same.
"""

# The package may not be installed.
# pyright: reportMissingImports=false

import importlib
import importlib.util
import os
from typing import Any

import pytest
import torch
from support import readme

if importlib.util.find_spec("verl") is None:
    pytest.skip("verl is not installed: .ci/run has the command", allow_module_level=True)

STEPS, SAVED = 4, 2
"""The number of steps of the run, and of those before it is saved."""


def declare_cpu() -> None:
    """Declare the CPU as a device for which verl has engines."""
    from verl.plugin.platform import set_platform
    from verl.plugin.platform.platform_cuda import PlatformCUDA

    class PlatformCPU(PlatformCUDA):
        device_name: Any = "cpu"
        device_module: Any = torch.cpu

        def current_device(self) -> Any:
            return torch.device("cpu")

    cpu: Any = PlatformCPU
    set_platform(cpu())
    os.environ.update(VERL_ENGINE_DEVICE="cuda", VERL_ENGINE_VENDOR="nvidia")
    # With trl it imports what newer versions of trl lack.
    patches: Any = importlib.import_module("verl.models.transformers.monkey_patch")
    patches.is_trl_available = lambda: False


def initialized(folder: str) -> Any:
    """The registered engine, with the model in ``folder``, and float16 within."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry

    model = HFModelConfig(
        path=folder,
        load_tokenizer=False,
        use_remove_padding=False,
        enable_gradient_checkpointing=False,
        override_config={"attn_implementation": "eager"},
    )
    half = {"param_dtype": "fp16", "reduce_dtype": "fp32"}
    options = FSDPEngineConfig(strategy="fsdp2", mixed_precision=half, use_torch_compile=False)
    optimizer = FSDPOptimizerConfig(
        lr=1e-2, optimizer_impl="ampopt", total_training_steps=STEPS, lr_scheduler_type="cosine"
    )
    cls = EngineRegistry.get_engine_cls("language_model", "fsdp2")
    engine: Any = cls(model, options, optimizer, CheckpointConfig())
    engine.initialize()
    return engine


def batch(step: int) -> Any:
    """Four sequences, which differ between ranks, as two micro-batches."""
    from verl.utils.tensordict_utils import get_tensordict

    generator = torch.Generator().manual_seed(2 * step + torch.distributed.get_rank())
    tokens = [torch.randint(1, 8, (n,), generator=generator) for n in (3, 5, 4, 2)]

    def nested(rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    tensors: dict[str, Any] = {
        "input_ids": nested(tokens),
        "position_ids": nested([torch.arange(len(row)) for row in tokens]),
        "loss_mask": nested([torch.ones(len(row)) for row in tokens]),
    }
    options = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2}
    return get_tensordict(tensors, {**options, "use_remove_padding": False, "temperature": 1.0})


def stepped(engine: Any, step: int) -> Any:
    """Take a step; the second one overflows on rank 1. Return what differs between steps."""

    def loss_of(model_output: Any, data: Any, dp_group: Any = None) -> Any:
        loss = -model_output["log_probs"].values().float().mean()
        return loss * (float("inf") if step == torch.distributed.get_rank() == 1 else 1.0), {}

    with engine.train_mode():
        norm = engine.train_batch(batch(step), loss_of)["metrics"]["grad_norm"]
    rate = engine.lr_scheduler_step()
    (count,) = {float(state["step"]) for state in engine.optimizer.state.values()}
    return norm, rate, engine.scaler.get_scale(), count


def trained(folder: str) -> Any:
    """Two runs on this rank: one from the beginning, and one from its checkpoint."""
    declare_cpu()
    exec(readme.blocks()["With verl"], {"__name__": "ampopt_verl"})
    engine = initialized(folder)
    steps = [stepped(engine, step) for step in range(SAVED)]
    engine.save_checkpoint(f"{folder}/checkpoint")
    steps += [stepped(engine, step) for step in range(SAVED, STEPS)]
    resumed = initialized(folder)
    resumed.load_checkpoint(f"{folder}/checkpoint", del_local_after_load=False)
    again = [stepped(resumed, step) for step in range(SAVED, STEPS)]
    return type(engine.optimizer).__module__, steps, again


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_all_ranks_skip_and_a_resumed_run_is_the_same_run(two_ranks, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=8,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    for module, steps, again in two_ranks.run(trained, str(tmp_path), timeout=120.0):
        assert module == "ampopt.optim.adamw"
        norms, rates, scales, counts = zip(*steps, strict=True)
        assert counts == (1, 1, 2, 3)
        assert scales == (2.0**16, 2.0**15, 2.0**15, 2.0**15)
        assert rates[0] == rates[1] > rates[2] > rates[3]  # the skipped step does not count
        assert 0 < norms[0] < float("inf") and not norms[1] < float("inf")
        assert again == steps[SAVED:]
