"""The compiled backend for CPU tensors: C++ made from a rule, over a table of addresses."""
