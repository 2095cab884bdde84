"""The tests marked ``gpu`` on the simulated card: ``pytest --simulated-card -m gpu``.

Their tensors are the CPU's. What these tests ask of CUDA besides has no effect.
"""

import torch

from simulated_card.driver import install

install()
torch.cuda.synchronize = lambda *device: None
torch.cuda.get_sync_debug_mode = lambda: 0
torch.cuda.set_sync_debug_mode = lambda mode: None
