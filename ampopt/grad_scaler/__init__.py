"""``ampopt.GradScaler``, a drop-in for ``torch.amp.GradScaler`` in existing training loops."""

from ampopt.grad_scaler.scaler import GradScaler

__all__ = ["GradScaler"]
