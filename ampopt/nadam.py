"""NAdam."""

import torch

from ampopt.elementwise import ElementwiseOptimizer
from ampopt_kernels import rules

__all__ = ["NAdam"]


class NAdam(ElementwiseOptimizer, torch.optim.NAdam):
    """``torch.optim.NAdam`` with mixed-precision control points.

    Constructor, defaults and results are torch's. ``foreach`` and ``capturable`` are accepted and
    change nothing: the backend decides (see :func:`ampopt.set_backend`), and step and mu_product
    always live on the parameter's device. ``differentiable=True`` takes torch's own step.
    """

    rule = rules.nadam
