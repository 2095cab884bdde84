"""What works with what, found by running it in small: ``python -m ampopt.matrix``."""
