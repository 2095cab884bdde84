"""Checks of a rule before its first step: of its source, on expressions, and by Triton."""

from ampopt_kernels.check_rule.trial import try_out

__all__ = ["try_out"]
