"""What a plan compares with the last step, to find out in a few calls whether it still fits.

Two guards, like those of ``torch.compile``: of the param groups, and of the tensors. If a guard
finds a change, it says in words what has changed.
"""

import operator
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, chain, compress, count, cycle
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampopt._step.gradients import (
    check_gradient,
    grad_of,
    name_of,
    params_of,
    values_of,
)
from ampopt._step.hyperparameters import Hyper, Variants, forms_of
from ampopt._step.masters import Masters
from ampopt._step.param_rows import RuleRows
from ampopt._step.rank_settings import REPLICATED, replicated_of
from ampopt._step.sharding import dtensor
from ampopt.options import GROUP_OPTIONS
from ampopt_kernels.native.objects import MISFIT, IdentityGuard, LayoutGuard, addresses
from ampopt_kernels.rule import Rule
from ampopt_kernels.tensors import dense_like

__all__ = ["GradientsNow", "GroupGuard", "TensorGuard"]

_OPTIONS = (*GROUP_OPTIONS, "fused")
"""Entries of param groups, besides those of the rule and ``replicated``, that a plan depends on."""


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
        self._values_at_plan = self._fixed_values(groups, self.hyper)
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
        hyper = self._hyper_of_kept(groups)
        if hyper is None:
            return False
        # A guard would not pay if a scheduler changes numbers at every step.
        stays = self._by_identity and hyper == self.hyper and not self._has_lists(groups)
        self._entries = IdentityGuard([groups], [(g, None) for g in groups]) if stays else None
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
        old_flags, old_options, old_forms = self._values_at_plan
        if name := _first_that_differs(self._rule.flags, flags, old_flags):
            return f"{name} was turned on or off in a group"
        if name := _first_that_differs((*_OPTIONS, REPLICATED), options, old_options):
            return f"{name} of a group was changed"
        if forms == old_forms:
            return None
        return "a hyperparameter of a group has another type, such as a tensor in place of a float"

    def _hyper_of_kept(self, groups: list[dict[str, Any]]) -> Hyper | None:
        """The hyperparameters of each variant; ``None`` if anything else has changed."""
        members = [group["params"] for group in groups]
        if len(members) != len(self._members) or not all(map(operator.is_, members, self._members)):
            return None
        hyper = self._variants.hyper(groups)
        return hyper if self._fixed_values(groups, hyper) == self._values_at_plan else None

    def _fixed_values(self, groups: list[dict[str, Any]], hyper: Hyper) -> tuple[Any, ...]:
        """Flags, options and types of hyperparameters; a change of any requires a new plan."""
        options = [[*map(group.get, _OPTIONS), replicated_of(group)] for group in groups]
        return self._variants.flags(groups), options, forms_of(hyper)

    def _has_lists(self, groups: list[dict[str, Any]]) -> bool:
        """Whether an entry is a list, whose elements may change in place."""
        names = (*self._rule.hyper, REPLICATED)
        return any(isinstance(group.get(name), list) for group in groups for name in names)


def _first_that_differs(names: Sequence[str], values: Any, old_values: Any) -> str | None:
    """The name of an entry that has another value in one of the groups; ``None`` if all are equal.

    Args:
        names: the names of the entries.
        values: the values of the entries now, for each group.
        old_values: the values of the entries before.
    """
    pairs = zip(chain(*values), chain(*old_values), cycle(names))
    return next((name for value, old, name in pairs if value != old), None)


class GradientsNow(NamedTuple):
    """The gradients of a step.

    Attributes:
        grads: the gradient of each row, or ``None`` without one; or a function that returns them.
        addresses: the address of each; see :func:`ampopt_kernels.native.objects.addresses`.
        present: for each row, whether it has a gradient.
    """

    grads: list[Any] | Callable[[], list[Any]]
    addresses: array
    present: bytearray


class TensorGuard:
    """The tensors of a plan, as they were when it was made.

    That is: the parameters of each group; for each row, identity, address and layout of the
    parameter, its master and its states; layout of its gradient; which parameters have never had a
    gradient. Entries of ``optimizer.state`` that no row reads are not compared.

    Attributes:
        has_copied: whether :meth:`gradients` has copied a gradient to the layout of its parameter.
        is_plain: whether all parameters are of the classes of torch that read ``grad`` as it is.
    """

    def __init__(self, optimizer: Any, masters: Masters, rows: RuleRows) -> None:
        """Record what :meth:`gradients` compares later.

        Args:
            optimizer: the optimizer of the plan.
            masters: its master weights.
            rows: the rows of the plan.
        """
        groups = optimizer.param_groups
        self._masters, self.has_copied = masters, rows.has_copied
        self._process_group, self._state = optimizer.process_group, optimizer.state
        self._stepped_params, self._rows = rows.stepped_params, rows.rows
        self._params = [one.tensor for one in rows.stepped_params]
        self._states, self._state_keys = rows.states, rows.state_keys
        self._indexed_masters = rows.masters
        planned_ids = set(map(id, self._params))
        self._unplanned_params = [p for p in params_of(groups) if id(p) not in planned_ids]
        own = [
            (param, state, keys)
            for param, state, keys in zip(self._params, self._states, self._state_keys, strict=True)
            if keys
        ]
        self._identities = IdentityGuard(
            [group["params"] for group in groups],
            [(self._state, {p for p, _, _ in own}), *((state, keys) for _, state, keys in own)],
        )
        # `param.data = ...` keeps the object and changes its memory.
        states = (map(state.__getitem__, keys) for _, state, keys in own)
        self._tensors = [*self._params, *chain.from_iterable(states)]
        self._dtensors = any(map(dtensor.is_dtensor, self._params))
        # Another class may have another attribute ``grad``.
        self.is_plain = {Tensor, torch.nn.Parameter}.issuperset(map(type, self._params))
        self._layouts = LayoutGuard(self._local(self._tensors))
        self._addresses = addresses(self._local(self._tensors))
        self._grad_layouts = LayoutGuard(rows.layouts)
        grads = list(map(grad_of, self._params)) if self._dtensors else []
        self._placements = dtensor.placements(grads)

    def _local(self, tensors: list[Any]) -> list[Any]:
        """The tensors that kernels work on: of ``DTensor``s their local shards."""
        return dtensor.local_of_each(tensors) if self._dtensors else tensors

    def is_current(self, optimizer: Any) -> bool:
        """Whether parameters, masters and states are the same tensors, in the same memory."""
        if optimizer.state is not self._state or not self._identities.unchanged():
            return False
        found, fits = self._layouts.read(self._local(self._tensors))
        return MISFIT not in fits and found == self._addresses

    def gradients(self, optimizer: Any) -> GradientsNow | None:
        """The gradients of this step, as kernels read them; ``None`` if anything else changed."""
        for param in self._unplanned_params:
            if param.grad is not None:
                return None
        if optimizer.process_group is not self._process_group or not self.is_current(optimizer):
            return None
        self.has_copied = False
        grads: list[Any] | Callable[[], list[Any]] = self._grads_now
        if self.is_plain and not self._masters.holders:
            found, fits = self._grad_layouts.read(self._params, of_gradients=True)
        else:
            grads = self._grads_now()
            found, fits = self._grad_layouts.read(grads)
        if MISFIT not in fits:
            return GradientsNow(grads, found, fits)
        grads = grads() if callable(grads) else grads
        if not self._convert(grads, fits):
            return None
        return GradientsNow(grads, addresses(grads), bytearray(g is not None for g in grads))

    def _grads_now(self) -> list[Any]:
        """The present gradient of each row, or ``None``; of a ``DTensor`` the local shard."""
        grads: list[Any] = list(map(grad_of, self._params))
        if self._dtensors:
            self._redistribute(grads)
        if holders := self._masters.holders:
            for place, master in self._indexed_masters:
                if grads[place] is not None:
                    grads[place] = holders.get(id(self._params[place]), master).grad
        return self._local(grads)

    def _redistribute(self, grads: list[Any]) -> None:
        """Redistribute each of ``grads`` that has other placements than its parameter.

        A gradient that is placed as the last one of its parameter needs no test.
        """
        specs = dtensor.placements(grads)
        if specs == self._placements:
            return
        for place, (spec, known) in enumerate(zip(specs, self._placements, strict=True)):
            if spec is not None and spec is not known and spec != known:
                param = self._params[place]
                dtensor.redistribute_gradient(param)
                grads[place] = param.grad
                self._placements[place] = dtensor.placements([param.grad])[0]

    def _convert(self, grads: list[Any], fits: bytearray) -> bool:
        """Convert gradients that have another layout than in the plan, as another plan would.

        Args:
            grads: what :meth:`_grads_now` returned; converted in place.
            fits: what :meth:`LayoutGuard.read` found of each.

        Returns:
            Whether the rows can take their gradients; not those of another dtype, or sparse ones.
        """
        for index in compress(count(), (fit == MISFIT for fit in fits)):
            one, row = self._stepped_params[index], self._rows[index]
            check_gradient(one.tensor, one.owner.name)
            if one.tensor.grad.layout != torch.strided:
                return False
            values = values_of(self._masters.holder(one.group, one.tensor))
            if values.dtype != row.grad_dtype:
                return False
            assert row.param is not None
            grads[index] = dense_like(values, row.param)
            self.has_copied = self.has_copied or grads[index] is not values
        return True

    def absent(self, optimizer: Any) -> dict[int, torch.dtype]:
        """The parameters that the next plan has rows for although they have no gradient now.

        Returns:
            The ``id`` of each parameter that has a row, no gradient, and the same states as when
            the plan was made; and the dtype of its gradients.
        """
        changed = set(map(id, self._identities.changed()))
        return {
            id(param): row.grad_dtype
            for param, row, own, keys in zip(
                self._params, self._rows, self._states, self._state_keys, strict=True
            )
            if param.grad is None
            and (not keys or (own is optimizer.state.get(param) and id(own) not in changed))
        }

    # --- why a plan cannot be reused --------------------------------------------------------------

    def reason(self, optimizer: Any) -> str:
        """The change in words; call this after :meth:`gradients` has returned ``None``."""
        groups = optimizer.param_groups
        for param in self._unplanned_params:
            if param.grad is not None:
                return f"{name_of(groups, param)} has a gradient for the first time"
        if optimizer.state is not self._state:
            return "optimizer.state was replaced"
        if optimizer.process_group is not self._process_group:
            return "optimizer.process_group was replaced"
        container = next(iter(self._identities.changed()), None)
        if container is self._state:
            return "states were added to optimizer.state, or removed"
        if isinstance(container, dict):
            return f"a state of {self._owner_of(container)} was replaced"
        if container is not None:
            return "parameters of a group were replaced or removed, or are in another order"
        found, fits = self._layouts.read(self._local(self._tensors))
        for place, fit in enumerate(fits):
            what = "" if place < len(self._stepped_params) else "a state of "
            if fit == MISFIT:
                return f"{what}{self._owner_at(place)} has another shape, dtype or layout"
            if found[place] != self._addresses[place]:
                return f"{what}{self._owner_at(place)} was moved to other memory"
        return "a gradient has another dtype"

    def _owner_of(self, state: dict[str, Any]) -> str:
        """The name of the parameter that has ``state``."""
        return next(
            one.owner.name
            for one, own in zip(self._stepped_params, self._states, strict=True)
            if own is state
        )

    def _owner_at(self, place: int) -> str:
        """The name of the parameter that has the tensor at ``place``, or is it."""
        if place < len(self._stepped_params):
            return self._stepped_params[place].owner.name
        ends = accumulate(map(len, self._state_keys), initial=len(self._stepped_params))
        return self._stepped_params[bisect_right(list(ends), place) - 1].owner.name
