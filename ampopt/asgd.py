"""ASGD."""

import torch

from ampopt.elementwise import ElementwiseOptimizer
from ampopt_kernels import rules

__all__ = ["ASGD"]


class ASGD(ElementwiseOptimizer, torch.optim.ASGD):
    """``torch.optim.ASGD`` with mixed-precision control points.

    Constructor, defaults and results are torch's. ``foreach`` and ``capturable`` are accepted and
    change nothing: the backend decides (see :func:`ampopt.set_backend`), and step, ``eta`` and
    ``mu`` always live on the parameter's device. ``differentiable=True`` takes torch's own step.
    """

    rule = rules.asgd
