"""A rule is tried, and shown to Triton's compiler, before it is let near a parameter."""

from ampopt_kernels.check_rule.on_numbers import try_out

__all__ = ["try_out"]
