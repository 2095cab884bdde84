"""Loss scales: numbers on the device. A step does not change its scale, but returns the next."""

import torch

from ampopt.loss_scale.base import LossScale
from ampopt.loss_scale.combining import next_scale
from ampopt.loss_scale.dynamic import DynamicLossScale
from ampopt.loss_scale.outputs import scale_outputs
from ampopt.loss_scale.static import StaticLossScale

__all__ = ["DynamicLossScale", "LossScale", "StaticLossScale", "next_scale", "scale_outputs"]

# Lets torch.load(weights_only=True) read checkpoints in which a scale object was saved whole.
torch.serialization.add_safe_globals([DynamicLossScale, StaticLossScale])
