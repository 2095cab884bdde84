"""Device code of ampopt: update rules, Triton kernels, and the engines that run them."""
