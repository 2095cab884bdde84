"""PyTorch optimizers with loss scaling, overflow skipping and replay built in."""

from ampopt.adadelta import Adadelta
from ampopt.adafactor import Adafactor
from ampopt.adagrad import Adagrad
from ampopt.adam import Adam
from ampopt.adamax import Adamax
from ampopt.adamw import AdamW
from ampopt.asgd import ASGD
from ampopt.backend import get_backend, set_backend
from ampopt.elementwise import ElementwiseOptimizer
from ampopt.errors import NonFiniteGradientError
from ampopt.extend import extend, patch_optimizer
from ampopt.grad_scaler import GradScaler
from ampopt.lbfgs import LBFGS
from ampopt.loss_scale import DynamicLossScale, LossScale, StaticLossScale, next_scale
from ampopt.lr_scheduler_gate import lr_scheduler_gate
from ampopt.muon import Muon
from ampopt.nadam import NAdam
from ampopt.optimizer import Optimizer
from ampopt.profile import profile
from ampopt.radam import RAdam
from ampopt.results import StepResult, Unscaled
from ampopt.rmsprop import RMSprop
from ampopt.rprop import Rprop
from ampopt.scaling import scale_outputs
from ampopt.several import unscale_and_step
from ampopt.sgd import SGD
from ampopt.sparse_adam import SparseAdam
from ampopt.train_step import TrainStep

__version__ = "0.1.0"

__all__ = [
    "ASGD",
    "LBFGS",
    "SGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "DynamicLossScale",
    "ElementwiseOptimizer",
    "GradScaler",
    "LossScale",
    "Muon",
    "NAdam",
    "NonFiniteGradientError",
    "Optimizer",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SparseAdam",
    "StaticLossScale",
    "StepResult",
    "TrainStep",
    "Unscaled",
    "extend",
    "get_backend",
    "lr_scheduler_gate",
    "next_scale",
    "patch_optimizer",
    "profile",
    "scale_outputs",
    "set_backend",
    "unscale_and_step",
]
