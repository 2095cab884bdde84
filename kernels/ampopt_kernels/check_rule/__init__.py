"""Checks of a rule before its first step: of its source, on two numbers, and by the compilers."""

from ampopt_kernels.check_rule.on_numbers import try_out

__all__ = ["try_out"]
