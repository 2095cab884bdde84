"""AdamW."""

import torch

from ampopt.elementwise import ElementwiseOptimizer
from ampopt_kernels import rules

__all__ = ["AdamW"]


class AdamW(ElementwiseOptimizer, torch.optim.AdamW):
    """``torch.optim.AdamW`` with mixed-precision control points.

    Constructor, defaults and results are torch's. ``foreach``, ``fused`` and ``capturable`` are
    accepted and change nothing: the backend decides (see :func:`ampopt.set_backend`), and the step
    count always lives on the parameter's device. ``differentiable=True`` takes torch's own step.
    """

    rule = rules.adam
