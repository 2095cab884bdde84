"""The CPU's backends: torch operations or compiled C++, small tensors together."""
