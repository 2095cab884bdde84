"""The rules of the built-in optimizers, one optimizer family a file."""

from ampopt_kernels.rules.adam import adam
from ampopt_kernels.rules.sgd import sgd

__all__ = ["adam", "sgd"]
