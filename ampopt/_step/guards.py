"""What must not change while a plan is reused, compared at each step in a few calls.

These guards are like those of ``torch.compile``: they cost far less than a new plan.
"""

import operator
from itertools import chain, compress
from typing import Any

from torch import Tensor

from ampopt._step.gradients import name_of
from ampopt._step.hyperparameters import Hyper, Variants, forms_of
from ampopt._step.masters import Masters
from ampopt._step.ranks import REPLICATED
from ampopt._step.rows import RuleRows
from ampopt._step.sharding import dtensor
from ampopt.options import MASTER_BITS, PARAM_ROUNDING, STATE_BITS
from ampopt_kernels.native.objects import IdentityGuard, LayoutGuard, addresses
from ampopt_kernels.rule import Rule

__all__ = ["GroupGuard", "TensorGuard"]


_OPTIONS = ("master_weights", PARAM_ROUNDING, STATE_BITS, MASTER_BITS, REPLICATED)
"""Entries of param groups, besides those of the rule, on which a plan depends."""


class GroupGuard:
    """The flags and options of the param groups of a plan, and its hyperparameters.

    Flags and options must not change while a plan is reused; hyperparameters may change every step.

    Attributes:
        hyper: the hyperparameters of each variant, as ``rule.hyper_values`` returns them.
    """

    def __init__(self, rule: Rule, variants: Variants, groups: list[dict[str, Any]]) -> None:
        """Store the present entries.

        Args:
            rule: the rule of the plan.
            variants: the variants of ``groups``.
            groups: the param groups of the optimizer.
        """
        self._rule, self._variants = rule, variants
        self._members = [group["params"] for group in groups]
        self.hyper = variants.hyper(groups)
        self._fixed = self._fixed_values(groups, self.hyper)
        self._groups, self._entries = groups, None
        # A tensor may change in place, and ``Rule.entries`` may read any entry of the group.
        of_numbers = not any(isinstance(value, Tensor) for value in chain(*self.hyper))
        self._by_identity = of_numbers and rule.entries is None

    def revalidate(self, groups: list[dict[str, Any]]) -> bool:
        """Update :attr:`hyper` for this step.

        Returns:
            Whether the plan is still valid: only hyperparameters have changed.
        """
        if self._entries is not None and groups is self._groups and self._entries.unchanged():
            return True
        if len(groups) != len(self._members):
            return False
        for group, members in zip(groups, self._members, strict=True):
            if group["params"] is not members:
                return False
        hyper = self._variants.hyper(groups)
        if self._fixed_values(groups, hyper) != self._fixed:
            return False
        # A guard would not pay if a scheduler changes numbers at every step.
        stays = self._by_identity and hyper == self.hyper and not self._has_lists(groups)
        self._entries = IdentityGuard([groups, *groups]) if stays else None
        self._groups, self.hyper = groups, hyper
        return True

    def reason(self, groups: list[dict[str, Any]]) -> str | None:
        """Why :meth:`revalidate` has returned ``False``; ``None`` if it has not."""
        if len(groups) != len(self._members):
            return "a param group was added or removed"
        for index, (group, members) in enumerate(zip(groups, self._members, strict=True)):
            if group["params"] is not members:
                return f"the list of parameters of group {index} was replaced"
        flags, options, forms = self._fixed_values(groups, self._variants.hyper(groups))
        known = self._fixed
        if flags != known[0]:
            return f"a flag of the rule was changed, one of {', '.join(self._rule.flags)}"
        if options != known[1]:
            return f"an option of a group was changed, one of {', '.join(_OPTIONS)}"
        return None if forms == known[2] else "a hyperparameter has another type"

    def _fixed_values(self, groups: list[dict[str, Any]], hyper: Hyper) -> tuple[Any, ...]:
        """What requires a new plan when it changes: flags, options, types of hyperparameters."""
        options = [list(map(group.get, _OPTIONS)) for group in groups]
        return self._variants.flags(groups), options, forms_of(hyper)

    def _has_lists(self, groups: list[dict[str, Any]]) -> bool:
        """Whether a hyperparameter is a list, whose elements may change in place."""
        names = self._rule.hyper
        return any(isinstance(group.get(name), list) for group in groups for name in names)


class TensorGuard:
    """The tensors of a plan, as they were when it was made.

    That is: the identity of each parameter, its group, and its states; the addresses of parameters,
    masters and states; the layouts of parameters and gradients; which parameters have never had a
    gradient.
    """

    def __init__(self, optimizer: Any, masters: Masters, rows: RuleRows) -> None:
        """Record what :meth:`gradients` compares later.

        Args:
            optimizer: the optimizer of the plan.
            masters: its master weights.
            rows: the rows of the plan.
        """
        groups = optimizer.param_groups
        self._masters = masters
        self._stepped = [one.tensor for one in rows.stepped]
        self._indexed_masters = rows.masters
        self._params = list(chain.from_iterable(group["params"] for group in groups))
        self._dtensors = any(map(dtensor.is_dtensor, self._params))
        planned = set(self._stepped)
        self._unplanned = [p for p in self._params if p not in planned]
        self._process_group, self._state = optimizer.process_group, optimizer.state
        # Users may store other things in optimizer.state than states of parameters.
        param_states = [state for state in self._state.values() if isinstance(state, dict)]
        members = [group["params"] for group in groups]
        self._identities = IdentityGuard([*members, self._state, *param_states])
        # `param.data = ...` keeps the object and changes its memory.
        masters_of_params = [master for _, master in rows.masters]
        self._held = [*self._params, *masters_of_params, *rows.states]
        held, params = self._held, self._params
        if self._dtensors:  # kernels work on the local shards
            held, params = dtensor.local_of_each(held), dtensor.local_of_each(params)
        self._addresses, self._params_laid_out = addresses(held), LayoutGuard(params)
        self._grads_laid_out = LayoutGuard(rows.layouts)
        grads = list(map(_grad_of, self._stepped))
        self._placements = dtensor.placements(grads) if self._dtensors else []

    def gradients(self, optimizer: Any) -> tuple[list[Tensor | None], int] | None:
        """The gradients of this step, as kernels read them; ``None`` if anything else changed.

        Returns:
            For each row its gradient, or ``None`` without one; and how many rows have none.
        """
        for param in self._unplanned:
            if param.grad is not None:
                return None
        held, params = self._held, self._params
        if self._dtensors:
            held, params = dtensor.local_of_each(held), dtensor.local_of_each(params)
        if not (
            optimizer.state is self._state
            and optimizer.process_group is self._process_group
            and self._identities.unchanged()
            and addresses(held) == self._addresses
            and self._params_laid_out.missing(params) == 0
        ):
            return None
        grads: list[Any] = list(map(_grad_of, self._stepped))
        if self._dtensors and dtensor.placements(grads) != self._placements:
            for param in self._stepped:
                dtensor.redistribute_gradient(param)
            grads = list(map(_grad_of, self._stepped))
            self._placements = dtensor.placements(grads)
        if self._masters.unscaled:
            for place, _ in self._indexed_masters:
                if grads[place] is not None:
                    grads[place] = self._masters.unscaled_gradient(self._stepped[place])
        if self._dtensors:
            grads = dtensor.local_of_each(grads)
        missing = self._grads_laid_out.missing(grads)
        return None if missing is None else (grads, missing)

    # --- why a plan cannot be reused --------------------------------------------------------------

    def reason(self, optimizer: Any) -> str:
        """What has changed, in words; call this after :meth:`gradients` has returned ``None``."""
        groups = optimizer.param_groups
        for param in self._unplanned:
            if param.grad is not None:
                return f"{name_of(groups, param)} has a gradient for the first time"
        if optimizer.state is not self._state:
            return "optimizer.state was replaced"
        if optimizer.process_group is not self._process_group:
            return "optimizer.process_group was replaced"
        container = self._identities.changed()
        if container is self._state:
            return "states were added to optimizer.state, or removed"
        if isinstance(container, dict):
            return f"a state of {self._owner_of(container, groups)} was replaced"
        if container is not None:
            return "the parameters of a group were replaced, or are in another order"
        held, params = self._held, self._params
        if self._dtensors:
            held, params = dtensor.local_of_each(held), dtensor.local_of_each(params)
        moved = map(operator.ne, addresses(held), self._addresses)
        if (tensor := next(compress(self._held, moved), None)) is not None:
            if any(tensor is param for param in self._params):
                return f"{name_of(groups, tensor)} was moved to other memory"
            states = (s for s in self._state.values() if isinstance(s, dict))
            state = next(s for s in states if any(value is tensor for value in s.values()))
            return f"a state of {self._owner_of(state, groups)} was moved to other memory"
        if self._params_laid_out.missing(params) != 0:
            return "a parameter has another shape, dtype or layout"
        return "a gradient has another dtype or layout"

    def _owner_of(self, state: dict[str, Any], groups: list[dict[str, Any]]) -> str:
        """The name of the parameter that has ``state``."""
        return name_of(groups, next(p for p, own in self._state.items() if own is state))


_grad_of: Any = operator.attrgetter("grad")  # over hundreds, half the time of a comprehension
