"""What training loops of others need to use ampopt, each imported only where its framework is.

- ``ampopt.integrations.lightning``: a precision plugin that clips and replays, and a callback.
- ``ampopt.integrations.accelerate``: a scaler for an ``Accelerator``, and a gate for schedulers.
- ``ampopt.integrations.transformers``: both for a ``Trainer``, and a callback.

The callbacks log what a :class:`StepRecord` knows, which is for any loop.
"""

from ampopt.integrations.step_record import StepRecord

__all__ = ["StepRecord"]
