"""The triton backend: kernels over a table of addresses, and what launches them."""
