"""What a step of a rule works on, kept from one step to the next.

Going through every parameter, state and layout in Python costs more than a small network's whole
step, and next to nothing changes between steps but the gradients. A plan is made once and holds
until something else changes; that it does hold is checked at every step.
"""

import functools
import operator
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ampopt import gradients
from ampopt.alike import Alike
from ampopt.arena import lay_end_to_end
from ampopt_kernels.trial import try_out
from ampopt_kernels.work import Row, Work

if TYPE_CHECKING:
    from ampopt.elementwise import ElementwiseOptimizer

__all__ = ["Plan", "check_plannable"]


class Plan:
    """The rows of every parameter that has a gradient, by device.

    Attributes:
        works: what to run, the first parameter's device first; empty without gradients.
        lasts: whether it may serve a second step; not where it works on copies.
    """

    def __init__(self, optimizer: "ElementwiseOptimizer") -> None:
        """Make state where it is missing, and the rows.

        Raises:
            RuntimeError: see :func:`ampopt.gradients.check`; nothing has changed then.
        """
        groups, rule = optimizer.param_groups, optimizer.rule
        check_plannable(optimizer)
        self._staged = gradients.Staged()
        self._flags = [rule.flag_values(group) for group in groups]
        self._params = [p for group in groups for p in group["params"]]
        present = [
            (group, p)
            for group, p in gradients.present(groups)
            if optimizer._holder(groups[group], p).grad is not None
        ]
        masters = {p: optimizer._master_of(groups[group], p) for group, p in present}
        self._absent = [p not in masters for p in self._params]
        self._masters = [
            (place, master)
            for place, p in enumerate(self._params)
            if (master := masters.get(p)) is not None
        ]
        states = [optimizer._state_of(p, self._flags[group]) for group, p in present]
        for part in (*rule.state, *rule.scalar_state):
            lay_end_to_end([p for _, p in present], states, part.name)
        self._rows = [
            self._row(optimizer, group, param, state)
            for (group, param), state in zip(present, states, strict=True)
        ]
        self.works: list[Work] = optimizer._works(self._rows, rule=rule)
        self._addresses = list(map(Tensor.data_ptr, self._params))
        self._params_alike = Alike(self._params)
        self._grads_alike = Alike([row.grad for row in self._rows])
        self._written = list(masters)
        self._state = optimizer.state
        self._states = list(self._state.values())
        self._entries = list(map(dict.values, self._states))
        self._values = list(chain.from_iterable(self._entries))
        self.lasts = not self._staged.copies and not any(p.is_complex() for p in self._params)

    def _row(
        self, optimizer: "ElementwiseOptimizer", group: int, param: Tensor, state: dict
    ) -> Row:
        rule, flags, staged = optimizer.rule, self._flags[group], self._staged
        master = optimizer._master_of(optimizer.param_groups[group], param)
        holder = optimizer._holder(optimizer.param_groups[group], param)
        p = gradients.real(param.detach() if master is None else master)
        copy = None if master is None else staged.dense(param.detach(), p, written=True)
        return Row(
            grad=staged.dense(gradients.values_of(holder), p, written=False),
            param=staged.dense(p, p, written=True),
            copy=copy,
            state=tuple(
                staged.dense(gradients.real(state[part.name]), p, written=True)
                for part in rule.state_for(flags)
            ),
            scalars=tuple(
                state[part.name] if part in rule.scalar_state_for(flags) else None
                for part in rule.scalar_state
            ),
            flags=flags,
            group=group,
        )

    def renew(self, optimizer: "ElementwiseOptimizer") -> bool:
        """Take up the gradients of this step; ``False`` if anything but them has changed."""
        params, groups = self._params, optimizer.param_groups
        if not (
            self.lasts
            and _are(chain.from_iterable(group["params"] for group in groups), params)
            and list(map(Tensor.data_ptr, params)) == self._addresses
            and self._params_alike.to(params)
            and self._has_state_of(optimizer)
            and [optimizer.rule.flag_values(group) for group in groups] == self._flags
        ):
            return False
        grads = list(map(_grad_of, params))
        if optimizer._masters_have_gradients:
            for place, master in self._masters:
                if grads[place] is not None:
                    grads[place] = master.grad
        if list(map(_is_none, grads)) != self._absent:
            return False
        found = [g for g in grads if g is not None] if True in self._absent else grads
        if not self._grads_alike.to(found):
            return False
        for row, grad in zip(self._rows, found, strict=True):
            row.grad = grad
        for work in self.works:
            work.stamp += 1
        return True

    def _has_state_of(self, optimizer: "ElementwiseOptimizer") -> bool:
        """Whether the state still is, tensor by tensor, what the rows were made from."""
        return (
            optimizer.state is self._state
            and _are(self._state.values(), self._states)
            and _are(chain.from_iterable(self._entries), self._values)
        )

    def finish(self) -> None:
        """What follows a step: copies go where they belong, and gradients are let go of.

        Autograd is told of the writes, which kernels make behind its back, so that a backward pass
        through a graph that needs the old values is refused, as after a step of torch's.
        """
        self._staged.store()
        torch.autograd.graph.increment_version(self._written)
        for row in self._rows:
            row.grad = _RELEASED  # the next backward pass may need the memory


_RELEASED = torch.empty(0)


def check_plannable(optimizer: "ElementwiseOptimizer") -> None:
    """Refuse what no plan can be made for, before anything has changed.

    Raises:
        RuntimeError: see :func:`ampopt.gradients.check`; a parameter was cast, or is expanded; the
            rule breaks its word.
        TypeError: see :func:`ampopt.gradients.check`.
    """
    groups, rule = optimizer.param_groups, optimizer.rule
    gradients.check(groups)
    optimizer._check_dtypes()
    for group in groups:
        flags, n_hyper = rule.flag_values(group), len(rule.hyper_values(group))
        try_out(rule, flags, n_hyper, type(optimizer).__name__)
    for _, param in gradients.present(groups):
        _check_written_once(groups, param)


def _check_written_once(groups: list[dict[str, Any]], param: Tensor) -> None:
    if torch._debug_has_internal_overlap(param) == 1:  # pyright: ignore[reportPrivateImportUsage]
        raise RuntimeError(
            f"{gradients.name_of(groups, param)} is expanded: several of its elements share one "
            "place in memory, and each would be updated; make it of expanded.clone()"
        )


_grad_of = operator.attrgetter("grad")
_is_none = functools.partial(operator.is_, None)
_END = object()


def _are(found: Iterable[Any], known: Sequence[Any]) -> bool:
    """Whether ``found`` are the very objects ``known``. Runs no Python for each."""
    return all(map(operator.is_, chain(found, (_END,)), chain(known, (_END,))))
