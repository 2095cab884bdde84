"""Limited-memory BFGS."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ampopt._step.ordinary import Ordinary
from ampopt._step.step_hooks import beneath_hooks
from ampopt._step.stepping import Attached
from ampopt._step.torch_private import uncompiled
from ampopt.optimizer import Optimizer

__all__ = ["LBFGS"]


class LBFGS(Optimizer, torch.optim.LBFGS):
    """``torch.optim.LBFGS`` with mixed-precision control points and replay.

    The step is torch's own and evaluates the closure many times; an evaluation whose gradients
    overflow is run again with a smaller scale, so the line search only ever sees finite
    gradients. The scale counts one finite step for a call, however many evaluations it took.

    Always needs a closure, and always synchronizes, as torch's does.

    Args:
        params, lr, max_iter, max_eval, tolerance_grad, tolerance_change, history_size,
            line_search_fn: as in ``torch.optim.LBFGS``.
        maximize: likewise, with torch 2.15 or later.
        process_group: the ranks that decide together; see :class:`ampopt.Optimizer`.

    Differs from torch: it can be copied and pickled.
    """

    # As torch leaves it, too: where it is compiled, a line search rounds otherwise.
    step = uncompiled(beneath_hooks(torch.optim.LBFGS.step))

    # One history of 2 * history_size gradients is enough: torch's step writes into none of them.
    _ampopt = Attached(Ordinary, never_written=frozenset({"d", "old_dirs", "old_stps", "ro", "al"}))

    if TYPE_CHECKING:  # the constructor is torch's; this is what it takes

        def __init__(
            self,
            params: ParamsT,
            lr: float | Tensor = 1,
            max_iter: int = 20,
            max_eval: int | None = None,
            tolerance_grad: float = 1e-7,
            tolerance_change: float = 1e-9,
            history_size: int = 100,
            line_search_fn: str | None = None,
            *,
            maximize: bool = False,
            process_group: Any = None,
        ) -> None:
            """Make the optimizer; see the class."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Support loading, copying and pickling."""
        super().__setstate__(state)
        # torch's constructor keeps these beside the state, where copies do not find them.
        self._params = self.param_groups[0]["params"]
        self._numel_cache = None
