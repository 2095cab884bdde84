"""``ampopt.GradScaler``, for those who keep a scaler, and how torch's scaler steps optimizers."""

from ampopt.grad_scaler.scaler import GradScaler

__all__ = ["GradScaler"]
