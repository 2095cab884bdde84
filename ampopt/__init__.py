"""PyTorch optimizers with loss scaling, overflow skipping and replay built in.

Begin by changing ``from torch.optim import AdamW`` to ``from ampopt import AdamW``: nothing else
has to change, and every optimizer of ``torch.optim`` is here, with some that torch lacks. Then let
it scale the loss::

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
  optimizers; ``averaged`` averages a model over the steps that happened.
- To scale: ``DynamicLossScale``, ``StaticLossScale``, ``next_scale``; ``GradScaler`` for a loop
  that has a scaler.
- To choose dtypes: ``Precision``, ``autocast`` with operators of your choice, ``cast`` with
  ``NORMS`` kept in float32, and ``run_in``.
- Your own: ``ElementwiseOptimizer`` from a rule, ``Optimizer`` from a ``step()``, and ``extend``
  and ``patch_optimizer`` for the optimizers of others. ``ampopt.testing`` tests them.
- In loops of others: ``ampopt.integrations`` for Lightning, Accelerate and transformers.
- On many ranks: ``process_group`` of ``Optimizer``, and ``ZeroRedundancyOptimizer``, which is
  loaded when it is asked for, and so not listed here: the module behind it takes seconds.
- To skip for more than overflow: ``skip_when`` a gradient norm or a loss is out of the ordinary.
- To look: ``Watch`` notes what overflows and when, ``first_nonfinite`` names the module that does,
  ``profile`` says where the host waits, ``set_backend`` chooses what runs, ``python -m ampopt``
  says what is here, and ``python -m ampopt.bench`` how fast.
"""

from typing import TYPE_CHECKING, Any

from ampopt import optim
from ampopt.averaging import SkipAwareAverage, averaged
from ampopt.backend import get_backend, set_backend
from ampopt.elementwise import ElementwiseOptimizer
from ampopt.errors import NonFiniteGradientError
from ampopt.grad_scaler.scaler import GradScaler
from ampopt.loss_scale.base import LossScale
from ampopt.loss_scale.combining import next_scale
from ampopt.loss_scale.dynamic import DynamicLossScale
from ampopt.loss_scale.outputs import scale_outputs
from ampopt.loss_scale.static import StaticLossScale
from ampopt.nonfinite import FirstNonFinite, NonFiniteOutput, first_nonfinite
from ampopt.optim import *  # noqa: F403  # its `__all__` is the one list of optimizers
from ampopt.optimizer import Optimizer
from ampopt.precision.autocast import autocast
from ampopt.precision.cast import NORMS, cast, run_in
from ampopt.precision.levels import Precision
from ampopt.profiling import profile
from ampopt.results import StepResult, Unscaled
from ampopt.scheduler_gate import lr_scheduler_gate
from ampopt.skipping.when import skip_when
from ampopt.third_party import extend, patch_optimizer
from ampopt.together import unscale_and_step
from ampopt.train_step import TrainStep
from ampopt.watching.watch import Watch

if TYPE_CHECKING:
    from ampopt.optim.zero_redundancy_optimizer import ZeroRedundancyOptimizer as _Zero

    ZeroRedundancyOptimizer = _Zero

__version__ = "0.1.0"

__all__ = [
    "DynamicLossScale",
    "ElementwiseOptimizer",
    "FirstNonFinite",
    "GradScaler",
    "LossScale",
    "NORMS",
    "NonFiniteGradientError",
    "NonFiniteOutput",
    "Optimizer",
    "Precision",
    "SkipAwareAverage",
    "StaticLossScale",
    "StepResult",
    "TrainStep",
    "Unscaled",
    "Watch",
    "autocast",
    "averaged",
    "cast",
    "extend",
    "first_nonfinite",
    "get_backend",
    "lr_scheduler_gate",
    "next_scale",
    "patch_optimizer",
    "profile",
    "run_in",
    "scale_outputs",
    "set_backend",
    "skip_when",
    "unscale_and_step",
]
__all__ += optim.__all__


def __getattr__(name: str) -> Any:
    """``ZeroRedundancyOptimizer``, once somebody asks for it."""
    if name == "ZeroRedundancyOptimizer":
        from ampopt.optim.zero_redundancy_optimizer import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """What is public: without it, every file of the package would be shown too."""
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
