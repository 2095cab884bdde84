"""Which optimizer works in which setting, found by running both: ``python -m evidence.matrix``."""
