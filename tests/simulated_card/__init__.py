"""An NVIDIA card, simulated: runs the PTX that Triton compiles on a CPU. README.md says how."""

from types import SimpleNamespace

__all__ = ["STATE"]

STATE = SimpleNamespace(installed=False, order=0, changed=lambda text: text)
"""Whether CPU tensors run on the card; the order of its warps and programs (see ``Kernel.launch``);
and a function that may change the PTX of a kernel before a launch, to plant a fault."""
