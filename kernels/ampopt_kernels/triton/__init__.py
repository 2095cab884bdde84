"""The Triton backend: multi-tensor kernels over a table of addresses, and their launches."""
