"""Muon."""

import torch

from ampopt.optimizer import Optimizer

__all__ = ["Muon"]


class Muon(Optimizer, torch.optim.Muon):
    """``torch.optim.Muon`` with mixed-precision control points.

    Constructor, defaults and results are torch's, and so is the step: it orthogonalizes whole
    matrices, in bfloat16, which no elementwise rule can.
    """
