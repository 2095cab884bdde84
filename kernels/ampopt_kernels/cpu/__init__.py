"""The backends for CPU tensors: torch operations or compiled C++, with small tensors in bundles."""
