"""Checks of a rule before its first step: on two numbers, and by Triton's compiler."""

from ampopt_kernels.check_rule.on_numbers import try_out

__all__ = ["try_out"]
