"""RAdam."""

import torch

from ampopt.elementwise import ElementwiseOptimizer
from ampopt_kernels import rules

__all__ = ["RAdam"]


class RAdam(ElementwiseOptimizer, torch.optim.RAdam):
    """``torch.optim.RAdam`` with mixed-precision control points.

    Constructor, defaults and results are torch's. ``foreach`` and ``capturable`` are accepted and
    change nothing: the backend decides (see :func:`ampopt.set_backend`), and the step count always
    lives on the parameter's device. ``differentiable=True`` takes torch's own step.
    """

    rule = rules.radam
