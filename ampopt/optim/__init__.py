"""The optimizers of ``torch.optim``, and others, one in each file; import them from ``ampopt``.

The update rule of an optimizer is in the file of the same name in ``ampopt_kernels/rules``; AdamW's
is that of Adam. ``LBFGS``, ``Muon`` and ``SparseAdam`` have none: their ``step()`` is torch's, or
written by hand.
"""

from ampopt.optim.adadelta import Adadelta
from ampopt.optim.adafactor import Adafactor
from ampopt.optim.adagrad import Adagrad
from ampopt.optim.adam import Adam
from ampopt.optim.adamax import Adamax
from ampopt.optim.adamw import AdamW
from ampopt.optim.adan import Adan
from ampopt.optim.asgd import ASGD
from ampopt.optim.lamb import LAMB
from ampopt.optim.lars import LARS
from ampopt.optim.lbfgs import LBFGS
from ampopt.optim.lion import Lion
from ampopt.optim.muon import Muon
from ampopt.optim.nadam import NAdam
from ampopt.optim.novograd import NovoGrad
from ampopt.optim.radam import RAdam
from ampopt.optim.rmsprop import RMSprop
from ampopt.optim.rprop import Rprop
from ampopt.optim.schedule_free_adamw import ScheduleFreeAdamW
from ampopt.optim.sgd import SGD
from ampopt.optim.sophia import Sophia
from ampopt.optim.sparse_adam import SparseAdam

__all__ = [
    "ASGD",
    "LAMB",
    "LARS",
    "LBFGS",
    "SGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Adan",
    "Lion",
    "Muon",
    "NAdam",
    "NovoGrad",
    "RAdam",
    "RMSprop",
    "Rprop",
    "ScheduleFreeAdamW",
    "Sophia",
    "SparseAdam",
]
