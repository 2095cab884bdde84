"""Which optimizer works in which setting, found by running both: ``python -m ampopt.matrix``."""
