"""The loss-scale schedules of other systems, as arguments for ``DynamicLossScale.like``.

Each schedule was read from the file named above it. What the system does in addition, on the host,
is omitted, and described there. Scales are float32 here: a system without a floor gets float32's
smallest normal number, and a scale does not grow past float32's largest.
"""

from collections.abc import Mapping
from typing import Any

__all__ = ["PRESETS"]

PRESETS: dict[str, Mapping[str, Any]] = {
    # pytorch torch/amp/grad_scaler.py, GradScaler. It has no floor: there the scale goes on to 0
    # and stays.
    "torch": {},
    # apex apex/amp/scaler.py, LossScaler (removed from apex in 2025). No floor unless
    # min_loss_scale is given.
    "apex": {"max_scale": 2.0**24},
    # DeepSpeed deepspeed/runtime/fp16/loss_scaler.py, DynamicLossScaler, with the defaults of
    # deepspeed/runtime/precision_config.py. It raises on an overflow at the floor. Older releases
    # first grew at step N, not N + 1, and ignored hysteresis without ZeRO.
    "deepspeed": {
        "growth_interval": 1000,
        "growth_offsets": (1, 0),
        "hysteresis": 2,
        "hysteresis_mode": "cumulative",
        "min_scale": 1.0,
    },
    # Megatron-LM megatron/core/optimizer/grad_scaler.py, DynamicGradScaler, with the defaults of
    # its training arguments. Its documentation says consecutive, its code refills on growth only.
    "megatron": {
        "init_scale": 2.0**32,
        "growth_interval": 1000,
        "hysteresis": 2,
        "hysteresis_mode": "cumulative",
        "min_scale": 1.0,
    },
    # Paddle python/paddle/amp/grad_scaler.py, GradScaler (eager). No floor. Here overflows are
    # counted as Paddle's static operator does. As one overflow already lowers the scale, this makes
    # no difference.
    "paddle": {"hysteresis_mode": "per_backoff"},
    # Paddle paddle/fluid/framework/distributed_strategy.proto, AMPConfig, run by
    # paddle/phi/kernels/impl/amp_kernel_impl.h. The operator multiplies by 0.8 rounded to float32,
    # so its scales may differ in the last bit.
    "paddle-fleet": {
        "init_scale": 2.0**15,
        "backoff_factor": 0.8,
        "growth_interval": 1000,
        "hysteresis": 2,
        "hysteresis_mode": "per_backoff",
        "min_scale": 1.0,
    },
    # MindSpore python/mindspore/train/loss_scale_manager.py, DynamicLossScaleManager. It raises
    # after more than 1000 overflows in a row.
    "mindspore": {"init_scale": 2.0**24, "min_scale": 1.0},
    # NNabla python/src/nnabla/experimental/mixed_precision_training.py,
    # DynamicLossScalingUpdater. It retries an overflowed update on new data, up to 100 times. No
    # floor.
    "nnabla": {"init_scale": 8.0, "growth_offsets": (2, 1)},
    # Keras 3 keras/src/optimizers/loss_scale_optimizer.py, LossScaleOptimizer. No floor.
    "keras": {"init_scale": 2.0**15},
    # jmp jmp/_src/loss_scale.py, DynamicLossScale. There the caller gives the start; its
    # documentation uses 2**15.
    "jmp": {"init_scale": 2.0**15, "min_scale": 1.0},
    # flax flax/training/dynamic_scale.py, DynamicScale. Growth past float32's largest number ends
    # at that number, so it is a ceiling.
    "flax": {"growth_offsets": (1, 1), "max_scale": (2.0 - 2.0**-23) * 2.0**127},
}
