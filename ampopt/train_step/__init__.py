"""A whole training step as one call; see :class:`ampopt.TrainStep`."""

from ampopt.train_step.train_step import TrainStep

__all__ = ["TrainStep"]
