"""Drop-in ``torch.optim`` optimizers with loss scaling and overflow skipping built in.

Start by replacing ``from torch.optim import AdamW`` by ``from ampopt import AdamW``. Every
optimizer of torch is here, and some more. Then scale the loss, and pass the scale to each step::

    scale = ampopt.DynamicLossScale()
    for inputs, labels in batches:
        with torch.autocast("cuda", torch.float16):
            loss = loss_fn(model(inputs), labels)
        optimizer.zero_grad()
        ampopt.scale_outputs(loss, scale).backward()
        _, found_inf, scale = optimizer.unscale_and_step(grads_scaled_by=scale)

``unscale_and_step`` is a *control point*: a method that divides the gradients by the loss scale,
checks them for inf and NaN (overflow), and steps or skips the step. The skip is decided on the GPU,
without synchronization. With bfloat16, pass ``grads_scaled_by=1.0``: it skips, and scales nothing.

Read next ``help(ampopt.Optimizer)``, for all control points. By purpose:

- **Step**: ``TrainStep``, the loop above as one object; ``unscale_and_step``, for several
  optimizers; ``averaged``, an average of the model over the steps that were not skipped;
  ``lr_scheduler_gate``, a learning-rate schedule over those steps.
- **Scale**: ``DynamicLossScale``, ``StaticLossScale``, ``next_scale`` of several optimizers, and
  ``GradScaler`` in place of torch's.
- **Dtypes**: ``Precision``, a policy such as "O2"; ``cast``, a model in half precision with its
  norms (``NORMS``) in float32; ``run_in``, one module in its own dtype; ``autocast``, with more
  operators; ``state_bits``, states in 8 or 16 bits; ``full_state_dict``, states in float32.
- **Your optimizer**: ``ElementwiseOptimizer``, from a *rule* (an elementwise update, written once
  for all backends, see ``ampopt_kernels.Rule``); ``Optimizer``, from a ``step()``; ``extend`` and
  ``patch_optimizer``, from the class or instance of someone else. ``ampopt.testing`` tests them.
- **Frameworks**: ``ampopt.integrations``, for Lightning, Accelerate and transformers.
- **Many ranks**: ``process_group`` of ``Optimizer``, and ``ZeroRedundancyOptimizer``.
- **Outliers**: ``skip_when``, to skip steps with an unusually large gradient norm or loss, too.
- **Diagnosis**: ``Watch`` records overflows, ``first_nonfinite`` finds the module that causes one,
  ``profile`` shows where the host waits, ``set_backend`` chooses the backend, ``python -m ampopt``
  says what is installed and where ``/guides`` are, and ``python -m ampopt.bench`` measures speed.
"""

from typing import TYPE_CHECKING, Any

from ampopt import optim
from ampopt.averaging import SkipAwareAverage, averaged
from ampopt.backend import get_backend, set_backend
from ampopt.elementwise import ElementwiseOptimizer
from ampopt.errors import NonFiniteGradientError
from ampopt.full_states import full_state_dict
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
from ampopt.skip_conditions import skip_when
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
    "full_state_dict",
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
    """Import ``ZeroRedundancyOptimizer`` at its first use: its torch module takes seconds."""
    if name == "ZeroRedundancyOptimizer":
        from ampopt.optim.zero_redundancy_optimizer import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, without the modules of the package."""
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
