"""Loss scales: values on the device that a step never changes, but returns a successor of."""

import torch

from ampopt.loss_scale.base import LossScale
from ampopt.loss_scale.combining import next_scale
from ampopt.loss_scale.dynamic import DynamicLossScale
from ampopt.loss_scale.outputs import scale_outputs
from ampopt.loss_scale.static import StaticLossScale

__all__ = ["DynamicLossScale", "LossScale", "StaticLossScale", "next_scale", "scale_outputs"]

# Scales that torch.save has written whole, as parts of a checkpoint, hold numbers and tensors.
torch.serialization.add_safe_globals([DynamicLossScale, StaticLossScale])
