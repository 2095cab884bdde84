"""Benchmarks of ampopt against torch on this machine: ``python -m ampopt.bench --help``."""
