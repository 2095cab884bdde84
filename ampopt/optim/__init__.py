"""The optimizers of ``torch.optim``, one a file; import them from ``ampopt``."""
