"""The loss-scale schedules of other systems, as data for ``DynamicLossScale.like``.

Each schedule was read from the file in ``source``. What a system does in addition, on the host, is
omitted, and described in ``left_out``. Scales are float32 here: a system without a floor gets
float32's smallest normal number, and a scale does not grow past float32's largest.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ["PRESETS", "Preset"]


class Preset(NamedTuple):
    """The schedule of one system.

    Attributes:
        source: the file that the schedule was read from.
        left_out: how the system differs in other respects; empty if it does not.
        settings: the arguments of ``DynamicLossScale`` that differ from its defaults.
    """

    source: str
    left_out: str
    settings: Mapping[str, Any]


PRESETS: dict[str, Preset] = {
    "torch": Preset(
        source="pytorch torch/amp/grad_scaler.py, GradScaler",
        left_out="no floor: there the scale goes on to 0 and stays",
        settings={},
    ),
    "apex": Preset(
        source="apex apex/amp/scaler.py, LossScaler (removed from apex in 2025)",
        left_out="no floor unless min_loss_scale is given",
        settings={"max_scale": 2.0**24},
    ),
    "deepspeed": Preset(
        source="DeepSpeed deepspeed/runtime/fp16/loss_scaler.py, DynamicLossScaler, with the "
        "defaults of deepspeed/runtime/precision_config.py",
        left_out="raises on an overflow at the floor. Older releases first grew at step N, not "
        "N + 1, and ignored hysteresis without ZeRO",
        settings={
            "growth_interval": 1000,
            "growth_offsets": (1, 0),
            "hysteresis": 2,
            "hysteresis_mode": "cumulative",
            "min_scale": 1.0,
        },
    ),
    "megatron": Preset(
        source="Megatron-LM megatron/core/optimizer/grad_scaler.py, DynamicGradScaler, with the "
        "defaults of its training arguments",
        left_out="its documentation says consecutive, its code refills on growth only",
        settings={
            "init_scale": 2.0**32,
            "growth_interval": 1000,
            "hysteresis": 2,
            "hysteresis_mode": "cumulative",
            "min_scale": 1.0,
        },
    ),
    "paddle": Preset(
        source="Paddle python/paddle/amp/grad_scaler.py, GradScaler (eager)",
        left_out="no floor",
        # It counts overflows as Paddle's static operator does. As one overflow already lowers the
        # scale, this makes no difference.
        settings={"hysteresis_mode": "per_backoff"},
    ),
    "paddle-fleet": Preset(
        source="Paddle paddle/fluid/framework/distributed_strategy.proto, AMPConfig, run by "
        "paddle/phi/kernels/impl/amp_kernel_impl.h",
        left_out="the operator multiplies by 0.8 rounded to float32, so its scales may differ in "
        "the last bit",
        settings={
            "init_scale": 2.0**15,
            "backoff_factor": 0.8,
            "growth_interval": 1000,
            "hysteresis": 2,
            "hysteresis_mode": "per_backoff",
            "min_scale": 1.0,
        },
    ),
    "mindspore": Preset(
        source="MindSpore python/mindspore/train/loss_scale_manager.py, DynamicLossScaleManager",
        left_out="raises after more than 1000 overflows in a row",
        settings={"init_scale": 2.0**24, "min_scale": 1.0},
    ),
    "nnabla": Preset(
        source="NNabla python/src/nnabla/experimental/mixed_precision_training.py, "
        "DynamicLossScalingUpdater",
        left_out="retries an overflowed update on new data, up to 100 times; no floor",
        settings={"init_scale": 8.0, "growth_offsets": (2, 1)},
    ),
    "keras": Preset(
        source="Keras 3 keras/src/optimizers/loss_scale_optimizer.py, LossScaleOptimizer",
        left_out="no floor",
        settings={"init_scale": 2.0**15},
    ),
    "jmp": Preset(
        source="jmp jmp/_src/loss_scale.py, DynamicLossScale",
        left_out="the caller gives the start there; its documentation uses 2**15",
        settings={"init_scale": 2.0**15, "min_scale": 1.0},
    ),
    "flax": Preset(
        source="flax flax/training/dynamic_scale.py, DynamicScale",
        left_out="",
        # Growth past float32's largest number ends at that number, so it is a ceiling.
        settings={"growth_offsets": (1, 1), "max_scale": (2.0 - 2.0**-23) * 2.0**127},
    ),
}
