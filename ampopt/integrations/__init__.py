"""Adapters for the training loops of other frameworks; each imports only its own framework.

- ``ampopt.integrations.lightning``: a precision plugin that clips and replays, and a callback.
- ``ampopt.integrations.accelerate``: a scaler for an ``Accelerator``, and an LR scheduler gate.
- ``ampopt.integrations.transformers``: both for a ``Trainer``, and a callback.

The callbacks log the numbers of a :class:`StepRecord`, which works in any loop.
"""

from ampopt.integrations.step_record import StepRecord

__all__ = ["StepRecord"]
