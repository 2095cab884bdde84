"""Which dtype arithmetic is done in."""

import torch

__all__ = ["arithmetic", "widest"]


def arithmetic(*dtypes: torch.dtype) -> torch.dtype:
    """What a rule computes in on tensors of these ``dtypes``: float64 if one is, else float32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def widest(device: torch.device) -> torch.dtype:
    """What step counts, scales and norms are computed in on ``device``: float64 where it has it."""
    return torch.float32 if device.type == "mps" else torch.float64  # Metal has no float64
