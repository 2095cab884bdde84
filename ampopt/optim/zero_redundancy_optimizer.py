"""ZeRO: each rank keeps the state of some parameters, and updates only these."""

import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed.optim

from ampopt._step.rank_settings import REPLICATED
from ampopt._step.ranks import check_process_group
from ampopt.optimizer import Optimizer

__all__ = ["ZeroRedundancyOptimizer"]


class ZeroRedundancyOptimizer(Optimizer, torch.distributed.optim.ZeroRedundancyOptimizer):
    """torch's ``ZeroRedundancyOptimizer`` with loss scaling, overflow tests and skips built in.

    Constructor, defaults and results are torch's. Every rank of ``process_group`` has all
    gradients, as ``DistributedDataParallel`` leaves them, and all ranks step or skip together; so
    every rank has to make the same calls. Gradients are unscaled in place. Each step synchronizes
    to read the overflow flag, unless the wrapped optimizer skips by itself, as ampopt's do, and
    torch's with ``fused=True``.

    Example:
        >>> optimizer = ampopt.ZeroRedundancyOptimizer(
        ...     model.parameters(), optimizer_class=ampopt.AdamW, lr=1e-3
        ... )
        >>> _, found_inf, scale = optimizer.unscale_and_step(grads_scaled_by=scale, max_norm=1.0)

    Args:
        params, optimizer_class, process_group, parameters_as_bucket_view, defaults: as in torch's
            class.
        overlap_with_ddp: must be ``False``: with ``True``, torch steps within the backward pass,
            before all gradients exist and can be tested.

    Raises:
        ValueError: ``overlap_with_ddp`` is true; ``process_group`` does not contain this rank.
    """

    def __init__(
        self,
        params: Any,
        optimizer_class: type[torch.optim.Optimizer],
        process_group: Any = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        **defaults: Any,
    ) -> None:
        """Make the optimizer; see the class."""
        if overlap_with_ddp:
            raise ValueError(
                "overlap_with_ddp=True steps within the backward pass, before all gradients exist "
                "and can be tested: leave it out"
            )
        check_process_group(process_group)
        # Not by the name of torch's class, which may be that of this one by now.
        super(Optimizer, self).__init__(
            params, optimizer_class, process_group, parameters_as_bucket_view, **defaults
        )
        skips = inspect.getattr_static(self.optim, "_step_supports_amp_scaling", False)
        self.skip_by = "step" if skips else "host"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, as torch does. Every rank has the gradients of all its parameters."""
        param_group.setdefault(REPLICATED, True)
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update the parameters that this rank owns, then broadcast them, as torch does."""
        flag = self.found_inf
        if flag is None:
            return super().step(closure, **kwargs)
        # In this way torch's GradScaler passes the flag to an optimizer that skips by itself.
        self.optim.grad_scale, self.optim.found_inf = None, flag  # type: ignore[attr-defined]
        try:
            return super().step(closure, **kwargs)
        finally:
            del self.optim.grad_scale, self.optim.found_inf  # type: ignore[attr-defined]
