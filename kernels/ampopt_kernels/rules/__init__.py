"""The update rules of the built-in optimizers.

The class of an optimizer is in the file of the same name in ``ampopt/optim``; ``adam`` is also the
rule of AdamW. What several rules compute is in ``averages``.
"""

from ampopt_kernels.rules.adadelta import adadelta
from ampopt_kernels.rules.adafactor import adafactor
from ampopt_kernels.rules.adagrad import adagrad
from ampopt_kernels.rules.adam import adam
from ampopt_kernels.rules.adamax import adamax
from ampopt_kernels.rules.adan import adan
from ampopt_kernels.rules.asgd import asgd
from ampopt_kernels.rules.lamb import lamb
from ampopt_kernels.rules.lars import lars
from ampopt_kernels.rules.lion import lion
from ampopt_kernels.rules.nadam import nadam
from ampopt_kernels.rules.novograd import novograd
from ampopt_kernels.rules.radam import radam
from ampopt_kernels.rules.rmsprop import rmsprop
from ampopt_kernels.rules.rprop import rprop
from ampopt_kernels.rules.schedule_free_adamw import schedule_free_adamw
from ampopt_kernels.rules.sgd import sgd
from ampopt_kernels.rules.sophia import sophia, sophia_hessian

__all__ = [
    "adadelta",
    "adafactor",
    "adagrad",
    "adam",
    "adamax",
    "adan",
    "asgd",
    "lamb",
    "lars",
    "lion",
    "nadam",
    "novograd",
    "radam",
    "rmsprop",
    "rprop",
    "schedule_free_adamw",
    "sgd",
    "sophia",
    "sophia_hessian",
]
