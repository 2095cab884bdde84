"""The rows of a step: for each parameter, the tensors that kernels read and write."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ampopt._step import gradients
from ampopt._step.all_reduce import Agreement
from ampopt._step.masters import Masters, needs_master
from ampopt._step.rule_state import StateCompleter, lay_end_to_end, state_of, widen_scalars
from ampopt._step.settings import Variants
from ampopt._step.sharding import dtensor
from ampopt._step.sharding.shards import ShardedMarginals, places_of
from ampopt._step.state_checks import KEYS
from ampopt.options import is_stochastic
from ampopt_kernels.marginals import Marginals
from ampopt_kernels.places import Places
from ampopt_kernels.random_numbers import PLACE_STRIDE
from ampopt_kernels.rule import Rule
from ampopt_kernels.stochastic import KEY_STRIDE
from ampopt_kernels.tensors import dense_like
from ampopt_kernels.work import Row

__all__ = ["RuleRows", "keys_of"]


class RuleRows:
    """The rows of every parameter that has a gradient, sorted by variant of its param group.

    They hold references to the gradients, so they are not kept after the plan is made.

    Attributes:
        rule: the rule to run on the rows; with float64 scalar states if a scalar state is float64.
        variants: the variants of the param groups; see :class:`ampopt._step.settings.Variants`.
        flags: the flags of the rule, for each variant.
        held: the gradient of each parameter that has one.
        present: the parameters to step.
        masters: ``(index, master)`` for each parameter of ``present`` that has a master.
        rows: one row for each parameter of ``present``.
        grads: the gradient of each row, as kernels read it.
        states: all state tensors that the step writes, before a reshape or copy for the kernels.
        copies: ``(original, copy)`` for tensors whose layout kernels cannot use. The step writes to
            the copy, and :meth:`Plan.finish` writes it back.
    """

    def __init__(
        self,
        optimizer: Any,
        rule: Rule,
        masters: Masters,
        agreement: Agreement | None,
        complete_state: StateCompleter | None,
    ) -> None:
        """Make the rows, and the states that are missing.

        Args:
            optimizer: the optimizer to step.
            rule: the update rule to run.
            masters: the master weights of the optimizer.
            agreement: the ranks that all-reduce overflow flag and norm; ``None`` for this rank
                alone.
            complete_state: see :data:`ampopt._step.rule_state.StateCompleter`.
        """
        self._optimizer, self._rule, self._master_weights = optimizer, rule, masters
        self._agreement = agreement
        groups = optimizer.param_groups
        self.held = gradients.held(groups)
        stepped = [
            one
            for one in self.held
            if masters.holder(groups[one.group], one.tensor).grad is not None
        ]
        self.variants = Variants(rule, groups, [(one.group, one.tensor) for one in stepped])
        # Parameters of one variant are adjacent, so that a backend runs them in one launch.
        order = sorted(range(len(stepped)), key=self.variants.of.__getitem__)
        stepped = [stepped[i] for i in order]
        self.flags, of = self.variants.flags(groups), [self.variants.of[i] for i in order]
        self.present: list[Tensor] = [one.tensor for one in stepped]
        self.masters = [
            (place, master)
            for place, one in enumerate(stepped)
            if (master := masters.of(groups[one.group], one.tensor)) is not None
        ]
        flags = [self.flags[variant] for variant in of]
        states = [
            state_of(optimizer, rule, param, own, complete_state)
            for param, own in zip(self.present, flags, strict=True)
        ]
        self.rule = rule.with_float64_scalars if widen_scalars(rule, states) else rule
        for part in (*rule.state, *rule.scalar_state):
            lay_end_to_end(self.present, states, part.name)
        places = {id(p): place for place, p in enumerate(p for g in groups for p in g["params"])}
        self.copies: list[tuple[Tensor, Tensor]] = []
        self.rows: list[Row] = []
        self.grads: list[Tensor] = []
        self.states: list[Tensor] = []
        for one, variant, state in zip(stepped, of, states, strict=True):
            row, grad = self._row(one, variant, state, places[id(one.tensor)])
            self.rows.append(row)
            self.grads.append(grad)
            self.states += [state[part.name] for part in rule.all_state_for(row.flags)]
            self.states += [] if row.keys is None else [row.keys]

    def _row(
        self, held: gradients.ParamWithGrad, variant: int, state: dict[str, Any], place: int
    ) -> tuple[Row, Tensor]:
        """The row of one parameter, and its gradient.

        Args:
            held: the parameter and its name.
            variant: index of its variant.
            state: its state, complete.
            place: its index among all parameters of the optimizer.
        """
        index, param, owner = held
        rule, flags, local, dense = self._rule, self.flags[variant], dtensor.local, self._dense
        group = self._optimizer.param_groups[index]
        masters = self._master_weights
        master, holder = masters.of(group, param), masters.holder(group, param)
        keys = keys_of(self._optimizer, group, param, place)
        p = like = gradients.real(local(param.detach() if master is None else master))
        marginals = rule.marginals_for(flags)
        if marginals and not p.is_contiguous():  # an index must give row and column
            like = torch.empty_like(p, memory_format=torch.contiguous_format)
        stepped, places = dense(p, like), Places()
        if keys is not None or rule.draws:
            places = places_of(param, stepped, contiguous=bool(marginals))
        if rule.draws:  # different random numbers for each parameter
            places = replace(places, first=places.first + place * PLACE_STRIDE)
        copy = None if master is None else dense(local(param.detach()), like)
        grad = dense_like(gradients.values_of(holder), like)
        row = Row(
            grad.dtype,
            param=stepped,
            copy=copy,
            state=tuple(
                dense(gradients.real(local(state[part.name])), like)
                for part in rule.state_for(flags)
            ),
            scalars=tuple(
                state[part.name] if part in rule.scalar_state_for(flags) else None
                for part in rule.scalar_state
            ),
            flags=flags,
            group=variant,
            in_norm=self._agreement is None or self._agreement.in_norm(param, index, owner.key),
            owner=owner,
            keys=keys,
            places=places,
        )
        if marginals:
            kept = [local(state[part.name]) for part in marginals]
            shard = ShardedMarginals(param) if dtensor.is_dtensor(param) else None
            size = (param.shape[-2], param.shape[-1])
            row.marginals = Marginals.of(marginals, kept, p, row.compute_dtype, size, shard)
        return row, grad

    def _dense(self, tensor: Tensor, like: Tensor) -> Tensor:
        """``tensor`` if its layout is that of ``like``; else a copy, noted in :attr:`copies`."""
        copy = dense_like(tensor, like)
        if copy is not tensor:
            self.copies.append((tensor, copy))
        return copy

    def gradients_are_written(self) -> bool:
        """Whether unscaling in place, before the update, leaves every bit of the step unchanged.

        It does not for gradients of a narrower dtype than the arithmetic, and for copies of
        gradients.
        """
        return all(
            row.grad_dtype == row.compute_dtype
            and grad.data_ptr() == dtensor.local(param.grad).data_ptr()
            for row, grad, param in zip(self.rows, self.grads, self.present, strict=True)
        )


def keys_of(optimizer: Any, group: dict[str, Any], param: Tensor, place: int) -> Tensor | None:
    """The rounding key of ``param``, made if it is missing; ``None`` if it is rounded to nearest.

    Each parameter has a key of its own, which depends on its index ``place`` among all parameters.
    """
    of_bfloat16 = param.dtype == torch.bfloat16 and not needs_master(group, param)
    if not (of_bfloat16 and is_stochastic(group)):
        return None
    state = optimizer.state[param]
    kept = state.get(KEYS, KEY_STRIDE * place)
    if not (
        isinstance(kept, Tensor)
        and (kept.dtype, kept.device, kept.ndim) == (torch.int64, param.device, 0)
    ):
        state[KEYS] = torch.full((), int(kept), dtype=torch.int64, device=param.device)
    return state[KEYS]
