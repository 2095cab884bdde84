"""Limited-memory BFGS."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from ampopt._step.descriptors import StrategyAttribute
from ampopt._step.handwritten_step import HandwrittenStep
from ampopt._step.step_hooks import beneath_hooks
from ampopt._step.torch_private import uncompiled
from ampopt.optimizer import Optimizer
from ampopt.options import OptimizerOptions

__all__ = ["LBFGS"]


class LBFGS(Optimizer, torch.optim.LBFGS):
    """``torch.optim.LBFGS`` with loss scaling, overflow tests and skips built in.

    The step is torch's own and evaluates the closure many times. If the gradients of an evaluation
    overflow, the closure is evaluated again with a smaller scale, so that the line search sees
    finite gradients only. For the growth of the scale, a call counts as one step.

    Needs a closure, and synchronizes, in every step, as torch's LBFGS does.

    Args:
        params, lr, max_iter, max_eval, line_search_fn: as in ``torch.optim.LBFGS``.
        tolerance_grad, tolerance_change, history_size: likewise.
        maximize: as in torch 2.14.1 and later; with earlier versions, an error.
        **options: see :class:`ampopt.options.OptimizerOptions`.

    Differs from torch: it can be copied and pickled.
    """

    # torch does not compile its step either: a compiled line search would round differently.
    step = uncompiled(beneath_hooks(torch.optim.LBFGS.step))

    # One history of 2 * history_size gradients is enough: torch's step writes into none of them.
    _ampopt = StrategyAttribute(
        HandwrittenStep, never_written=frozenset({"d", "old_dirs", "old_stps", "ro", "al"})
    )

    if TYPE_CHECKING:  # type checkers see torch's arguments, with ampopt's

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
            **options: Unpack[OptimizerOptions],
        ) -> None:
            """Make the optimizer; see the class."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Support loading, copying and pickling."""
        super().__setstate__(state)
        # torch's constructor stores these as attributes, which a copy does not get.
        self._params = self.param_groups[0]["params"]
        self._numel_cache = None
