"""Adam."""

import torch

from ampopt.elementwise import ElementwiseOptimizer
from ampopt_kernels import rules

__all__ = ["Adam"]


class Adam(ElementwiseOptimizer, torch.optim.Adam):
    """``torch.optim.Adam`` with mixed-precision control points.

    Constructor, defaults and results are torch's. ``foreach``, ``fused`` and ``capturable`` are
    accepted and change nothing: the backend decides (see :func:`ampopt.set_backend`), and the step
    count always lives on the parameter's device. ``differentiable=True`` takes torch's own step.
    """

    rule = rules.adam
