"""Whether a step is the one that was prepared for, asked at every step.

As the guards of ``torch.compile``: what was prepared holds as long as they do. They cost less than
preparing by far, and next to nothing changes between steps but the gradients.
"""

import operator
from itertools import chain
from typing import Any

from torch import Tensor

from ampopt._step import dtensor
from ampopt._step.masters import Masters
from ampopt._step.param_rounding import PARAM_ROUNDING
from ampopt._step.ranks import REPLICATED
from ampopt_kernels.cpu.objects import Contents, Layouts, addresses
from ampopt_kernels.rule import Rule

__all__ = ["Guards"]

_OPTIONS = ("master_weights", PARAM_ROUNDING, REPLICATED)
"""Of param groups, besides those of their rule."""


class Guards:
    """What a plan takes for granted.

    That is the very parameters, each in its group, and states; where all of them are in memory and
    how parameters and gradients are laid out in it; which parameters have gradients; the flags
    and other options of the groups.
    """

    def __init__(
        self,
        optimizer: Any,
        rule: Rule,
        flags: list[tuple[bool, ...]],
        keeper: Masters,
        present: list[Tensor],
        masters: list[tuple[int, Tensor]],
        states: list[Tensor],
        grads: list[Tensor],
        *,
        spread: bool,
    ) -> None:
        """Take them down.

        Args:
            optimizer: whose plan it is, which is not kept alive.
            rule: that is planned.
            flags: of the rule, for each group.
            keeper: of the masters.
            present: the parameters that have gradients.
            masters: those of ``present`` whose place is said, which hold their gradients.
            states: what else a step works on.
            grads: of ``present``, as kernels see them.
            spread: whether some of the tensors are spread over ranks: of such a one, the part that
                is here counts.
        """
        groups = optimizer.param_groups
        self._rule, self._keeper = rule, keeper
        self._present, self._masters, self._spread = present, masters, spread
        self._params = list(chain.from_iterable(group["params"] for group in groups))
        kept = set(present)
        self._absent = [p for p in self._params if p not in kept]
        self._process_group, self._state = optimizer.process_group, optimizer.state
        # Users may keep other things there than the state of a parameter.
        of_params = [state for state in self._state.values() if isinstance(state, dict)]
        self._groups = [
            (group["params"], own, list(map(group.get, _OPTIONS)))
            for group, own in zip(groups, flags, strict=True)
        ]
        members = [group["params"] for group in groups]
        self._contents = Contents([*members, self._state, *of_params])
        # An object may stay and what it refers to be exchanged, as by an assignment to its data.
        self._held = [*self._params, *(master for _, master in masters), *states]
        held, params = self._held, self._params
        if spread:
            held, params = dtensor.local_of_each(held), dtensor.local_of_each(params)
        self._addresses, self._params_laid_out = addresses(held), Layouts(params)
        self._grads_laid_out = Layouts(grads)
        self._placements = dtensor.placements(list(map(_grad_of, present))) if spread else []

    def gradients(self, optimizer: Any) -> list[Tensor] | None:
        """The gradients of this step as kernels see them; ``None`` if anything else has changed."""
        if len(optimizer.param_groups) != len(self._groups):
            return None
        for group, (members, flags, options) in zip(
            optimizer.param_groups, self._groups, strict=True
        ):
            if (
                group["params"] is not members
                or self._rule.flag_values(group) != flags
                or list(map(group.get, _OPTIONS)) != options
            ):
                return None
        for param in self._absent:
            if param.grad is not None:
                return None
        held, params = self._held, self._params
        if self._spread:
            held, params = dtensor.local_of_each(held), dtensor.local_of_each(params)
        if not (
            optimizer.state is self._state
            and optimizer.process_group is self._process_group
            and self._contents.unchanged()
            and addresses(held) == self._addresses
            and self._params_laid_out.fit(params)
        ):
            return None
        grads = list(map(_grad_of, self._present))
        if self._spread and dtensor.placements(grads) != self._placements:
            for param in self._present:
                dtensor.settle(param)
            grads = list(map(_grad_of, self._present))
            self._placements = dtensor.placements(grads)
        if self._keeper.unscaled:
            for place, master in self._masters:
                if grads[place] is not None:
                    grads[place] = master.grad
        if self._spread:
            grads = dtensor.local_of_each(grads)
        return grads if self._grads_laid_out.fit(grads) else None


_grad_of: Any = operator.attrgetter("grad")  # over hundreds, half the time of a comprehension
