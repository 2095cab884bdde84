"""PyTorch optimizers with loss scaling, overflow skipping and replay built in.

Begin by changing ``from torch.optim import AdamW`` to ``from ampopt import AdamW``: nothing else
has to change, and every optimizer of ``torch.optim`` is here. Then let it scale the loss::

    scale = ampopt.DynamicLossScale()
    for inputs, labels in batches:
        with torch.autocast("cuda", torch.float16):
            loss = loss_fn(model(inputs), labels)
        optimizer.zero_grad()
        ampopt.scale_outputs(loss, scale).backward()
        _, found_inf, scale = optimizer.unscale_and_step(grads_scaled_by=scale)

An overflowed step is skipped where the gradients are, and the host waits for nothing.

- To step: ``help(ampopt.Optimizer)`` has the control points that every optimizer has, and
  ``TrainStep`` is the loop above as one object. ``unscale_and_step`` of this module is for several
  optimizers.
- To scale: ``DynamicLossScale``, ``StaticLossScale``, ``next_scale``; ``GradScaler`` for a loop
  that has a scaler.
- Your own: ``ElementwiseOptimizer`` from a rule, ``Optimizer`` from a ``step()``, and ``extend``
  and ``patch_optimizer`` for the optimizers of others. ``ampopt.testing`` tests them.
- To look: ``profile`` says where the host waits, ``set_backend`` what runs, and
  ``python -m ampopt.bench`` how fast.
"""

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


def __dir__() -> list[str]:
    """What is public: without it, every file of the package would be shown too."""
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
