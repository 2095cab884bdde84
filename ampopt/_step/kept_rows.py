"""The rows of a pass over gradients alone, kept from call to call of ``accumulate`` or ``unscale``.

To check every gradient, and to make a row for it, takes longer than the pass over hundreds of small
ones. Usually the next call has gradients of the same parameters, with the same layouts, so that the
rows of the last one fit. A step keeps a :class:`~ampopt._step.plan.Plan` for the same reason.
"""

from typing import Any

import torch
from torch import Tensor

from ampopt._step.gradients import ParamWithGrad, params_of
from ampopt.options import MASTER_WEIGHTS
from ampopt_kernels.native.objects import IdentityGuard, LayoutGuard
from ampopt_kernels.step_tensors import Work

__all__ = ["KeptRows"]

_ENTRIES = {"params", MASTER_WEIGHTS.name}
"""The entries of param groups on which the rows depend."""


class KeptRows:
    """The rows of one call.

    Attributes:
        present: the parameters that have gradients.
        ids: their ``id``.
        work: the rows, with the gradients of this call.
    """

    def __init__(
        self, groups: list[dict[str, Any]], present: list[ParamWithGrad], work: Work
    ) -> None:
        """Record what :meth:`take_gradients` compares later.

        Args:
            groups: the param groups.
            present: the parameters that have gradients.
            work: the rows; see :meth:`fit`.
        """
        self.present, self.work = present, work
        self.ids = {id(one.tensor) for one in present}
        self._params = [one.tensor for one in present]
        self._others = [param for param in params_of(groups) if id(param) not in self.ids]
        self._groups = groups
        self._identities = IdentityGuard(
            [groups, *(group["params"] for group in groups)],
            [(group, _ENTRIES & group.keys()) for group in groups],
        )
        self._layouts = LayoutGuard(self._params)
        self._grad_layouts = LayoutGuard(work.grads)

    @staticmethod
    def fit(present: list[ParamWithGrad], works: list[Work]) -> bool:
        """Whether the rows ``works`` can be kept.

        They can if they are of one device and one kind of sum, and their gradients are those of
        plain parameters: no copies, shards, or gradients of masters.
        """
        if len(works) != 1 or len({row.flags for row in works[0].rows}) != 1:
            return False
        return all(
            type(one.tensor) in (Tensor, torch.nn.Parameter) and one.tensor.grad is grad
            for one, grad in zip(present, works[0].grads, strict=True)
        )

    def take_gradients(self, groups: list[dict[str, Any]]) -> bool:
        """Replace the gradients by those of this call.

        Returns:
            Whether the rows fit: the same parameters have gradients, with the same layouts.
        """
        if groups is not self._groups or not self._identities.unchanged():
            return False
        if any(param.grad is not None for param in self._others):
            return False
        _, fits = self._layouts.read(self._params)
        addresses, grads_fit = self._grad_layouts.read(self._params, of_gradients=True)
        if not {*fits, *grads_fit} <= {1}:
            return False
        self.work.refresh(lambda: [param.grad for param in self._params], (), None, addresses)
        return True
