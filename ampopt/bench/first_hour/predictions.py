"""The predictions of ``kernels/PREDICTIONS.md``: shares of the bandwidth of a copy."""

import torch

__all__ = ["AT_HAND", "predicted"]

AT_HAND = {
    "float32": (torch.float32, False),
    "bfloat16": (torch.bfloat16, False),
    "with masters": (torch.bfloat16, True),
}
"""The storages of that table: the parameters' dtype, and whether there are master weights."""

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
"""By (log2 of elements, storage): detect, detect with norm, update, step, step with clipping."""


def predicted(power: int, storage: str, launch: str, *, clipped: bool) -> float | None:
    """The predicted bandwidth of a launch, as a share of a copy's; ``None`` if not predicted.

    Args:
        power: log2 of the number of elements.
        storage: a key of ``AT_HAND``.
        launch: ``"detect"``, ``"update"``, or ``"step"`` for all launches.
        clipped: whether gradients are clipped to a norm.
    """
    shares = _SHARES.get((power, storage))
    places = {"detect": 0 + clipped, "update": 2, "step": 3 + clipped}
    return None if shares is None or launch not in places else shares[places[launch]]
