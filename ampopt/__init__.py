"""PyTorch optimizers with loss scaling, overflow skipping and replay built in."""

from ampopt.adam import Adam
from ampopt.adamw import AdamW
from ampopt.backend import get_backend, set_backend
from ampopt.elementwise import ElementwiseOptimizer
from ampopt.errors import NonFiniteGradientError
from ampopt.lbfgs import LBFGS
from ampopt.loss_scale import DynamicLossScale, LossScale, StaticLossScale, next_scale
from ampopt.optimizer import Optimizer
from ampopt.results import StepResult, Unscaled
from ampopt.scaling import scale_outputs
from ampopt.sgd import SGD

__version__ = "0.1.0"

__all__ = [
    "LBFGS",
    "SGD",
    "Adam",
    "AdamW",
    "DynamicLossScale",
    "ElementwiseOptimizer",
    "LossScale",
    "NonFiniteGradientError",
    "Optimizer",
    "StaticLossScale",
    "StepResult",
    "Unscaled",
    "get_backend",
    "next_scale",
    "scale_outputs",
    "set_backend",
]
