"""Adagrad."""

import torch

from ampopt.elementwise import ElementwiseOptimizer
from ampopt_kernels import rules

__all__ = ["Adagrad"]


class Adagrad(ElementwiseOptimizer, torch.optim.Adagrad):
    """``torch.optim.Adagrad`` with mixed-precision control points.

    Constructor, defaults and results are torch's. ``foreach`` and ``fused`` are accepted and
    change nothing: the backend decides (see :func:`ampopt.set_backend`), and the step count moves
    to the parameter's device at the first step. Sparse gradients and ``differentiable=True`` take
    torch's own step.
    """

    rule = rules.adagrad
    sparse_gradients = True
