"""What ``kernels/PREDICTIONS.md`` predicts for a GPU: shares of the bandwidth of a copy."""

import torch

__all__ = ["AT_HAND", "predicted"]

AT_HAND = {
    "float32": (torch.float32, False),
    "bfloat16": (torch.bfloat16, False),
    "with masters": (torch.bfloat16, True),
}
"""The storages of the table there: dtype of the parameters, and whether there are masters."""

_SHARES = {
    (24, "float32"): (0.83, 0.79, 0.97, 0.89, 0.89),
    (24, "bfloat16"): (0.71, 0.71, 0.95, 0.81, 0.81),
    (24, "with masters"): (0.71, 0.71, 0.95, 0.87, 0.87),
    (27, "float32"): (0.98, 0.96, 1.00, 0.98, 0.98),
    (27, "bfloat16"): (0.95, 0.95, 0.99, 0.97, 0.97),
    (27, "with masters"): (0.95, 0.95, 1.00, 0.98, 0.98),
    (30, "float32"): (1.00, 0.98, 1.00, 1.00, 1.00),
    (30, "bfloat16"): (0.99, 0.99, 1.00, 1.00, 1.00),
    (30, "with masters"): (0.99, 0.99, 1.00, 1.00, 1.00),
}
"""By the power of two of elements: detect, detect with norm, update, step, step with clipping."""


def predicted(power: int, storage: str, launch: str, *, clipped: bool) -> float | None:
    """The share of a copy that ``launch``, or the whole ``"step"``, was predicted to reach."""
    shares = _SHARES.get((power, storage))
    places = {"detect": 0 + clipped, "update": 2, "step": 3 + clipped}
    return None if shares is None or launch not in places else shares[places[launch]]
