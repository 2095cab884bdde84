"""Measure ampopt against torch on the machine at hand: ``python -m ampopt.bench --help``."""
