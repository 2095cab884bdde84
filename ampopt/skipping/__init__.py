"""Skipping steps for more than overflow: a gradient norm, or a loss, out of the ordinary."""

from ampopt.skipping.when import skip_when

__all__ = ["skip_when"]
