"""The rows of a step: for each parameter, the tensors that kernels read and write."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ampopt._step import gradients
from ampopt._step.declared_states import DeclaredStates
from ampopt._step.gradients import ParamWithGrad
from ampopt._step.hyperparameters import Variant
from ampopt._step.masters import Masters, needs_low_bits
from ampopt._step.param_checks import PlannedParam
from ampopt._step.rank_agreement import Agreement
from ampopt._step.rule_state import is_complete, state_of, widen_scalars
from ampopt._step.sharding import dtensor
from ampopt._step.sharding.shards import ShardedMatrix, indices_of
from ampopt._step.small_states import RANDOM_KEY
from ampopt._step.torch_private import any_flattened_by_fsdp1, is_flattened_by_fsdp1
from ampopt.options import rounds_stochastically
from ampopt_kernels.element_indices import ElementIndices
from ampopt_kernels.low_bits import LOW_BITS
from ampopt_kernels.random_numbers import PLACE_STRIDE
from ampopt_kernels.row_column_means import RowColumnMeans
from ampopt_kernels.rule import MASTER, Rule
from ampopt_kernels.state import scale_key
from ampopt_kernels.step_tensors import ParamRow
from ampopt_kernels.stochastic import KEY_STRIDE
from ampopt_kernels.tensors import dense_like

__all__ = ["RuleRows", "random_key_of"]


class RuleRows:
    """The rows of a plan.

    Rows of one variant of a param group are adjacent, so that a backend runs them in one launch.
    They hold references to the gradients, so they are not kept after the plan is made.

    Attributes:
        rule: the rule to run on the rows; with float64 scalar states if a scalar state is float64.
        stepped_params: the parameter of each row.
        masters: ``(index, master)`` for each row whose parameter has a master; of a 24-bit one,
            the low bits.
        rows: the rows.
        grads: the gradient of each row, as kernels read it; ``None`` without a gradient.
        layouts: for each row, its gradient, or a tensor with the same layout.
        states: for each row, the state of its parameter.
        state_keys: for each row, the keys of the tensors that the step reads from its state.
        has_copied: whether one of ``grads`` is a copy, in the layout of its parameter.
        copies: ``(original, copy)`` for tensors whose layout kernels cannot use. The step writes to
            the copy, and :meth:`Plan.finish` writes it back.
    """

    def __init__(
        self,
        optimizer: Any,
        rule: Rule,
        masters: Masters,
        agreement: Agreement | None,
        planned: list[PlannedParam],
    ) -> None:
        """Make the rows, and the states that are missing.

        Args:
            optimizer: the optimizer to step.
            rule: the update rule to run.
            masters: the master weights of the optimizer.
            agreement: the ranks that all-reduce overflow flag and norm; ``None`` for this rank
                alone.
            planned: what :meth:`ampopt._step.param_checks.Checks.check_plannable` returned.
        """
        self._optimizer, self._rule, self._master_weights = optimizer, rule, masters
        if masters.holders:
            planned = [p for p in planned if self._is_stepped(p)]
        planned = sorted(planned, key=lambda p: p.variant.place)
        groups = optimizer.param_groups
        if any_flattened_by_fsdp1(p.one.tensor for p in planned):
            for index, param, owner in (p.one for p in planned):
                if is_flattened_by_fsdp1(param):
                    _refuse_flattened(owner.name, DeclaredStates.of(rule, groups[index], param))
        states = list(map(self._completed, planned))
        self.rule = rule.with_float64_scalars if widen_scalars(rule, states) else rule
        self.stepped_params: list[ParamWithGrad] = [p.one for p in planned]
        self.masters: list[tuple[int, Tensor]] = []
        self.copies: list[tuple[Tensor, Tensor]] = []
        self.has_copied = False
        self.rows: list[ParamRow] = []
        self.grads: list[Tensor | None] = []
        self.layouts: list[Tensor] = []
        self.state_keys: list[Sequence[str]] = []
        self.states: list[dict[str, Any]] = []
        for p, state in zip(planned, states, strict=True):
            index, param, owner = p.one
            holder = masters.holder(index, param) if masters.holders else param
            # After unscale, a gradient can be removed from the parameter or from its master.
            is_absent = param.grad is None or holder.grad is None
            values = None if is_absent else gradients.values_of(holder)
            grad_dtype = p.absent if values is None else values.dtype
            assert grad_dtype is not None
            if p.declared is None or is_complete(param, state, p.variant):
                row = self._plain_row(param, state, p.variant, grad_dtype)
                keys = p.variant.state_keys
            else:
                row = self._row(p, p.declared, state, grad_dtype)
                # The row may have made a state: the random key.
                state = optimizer.state.get(param, state)
                keys = p.declared.keys_in(state)
                if (master := state.get(MASTER)) is not None:
                    self.masters.append((len(self.rows), master))
            like = _like_gradient(row) if values is None else values
            assert row.param is not None
            grad = dense_like(like, row.param)
            row.variant, row.owner = p.variant.place, owner
            if agreement is not None:
                row.in_norm = agreement.in_norm[owner.key]
            self.has_copied = self.has_copied or grad is not like
            self.rows.append(row)
            self.grads.append(None if values is None else grad)
            self.layouts.append(grad)
            self.state_keys.append(keys)
            self.states.append(state)

    def _is_stepped(self, planned: PlannedParam) -> bool:
        """Whether a parameter with a master still has the gradient on its master."""
        holder = self._master_weights.holder(planned.one.group, planned.one.tensor)
        return holder.grad is not None or planned.absent is not None

    def _completed(self, planned: PlannedParam) -> dict[str, Any]:
        """The state of one parameter, with master and states that were missing."""
        declared = planned.declared
        if declared is None:
            return planned.state
        self._master_weights.of(declared.group, declared.param)
        return state_of(self._optimizer, declared)

    @cached_property
    def _numbers(self) -> dict[int, int]:
        """The index of each parameter among all of the optimizer, by ``id``."""
        params = gradients.params_of(self._optimizer.param_groups)
        return {id(param): number for number, param in enumerate(params)}

    def _plain_row(
        self, param: Tensor, state: dict[str, Any], variant: Variant, grad_dtype: torch.dtype
    ) -> ParamRow:
        """The row of a parameter whose state is complete: all elements have all their digits."""
        scalars = tuple([None if key is None else state[key] for key in variant.scalar_keys])
        states = tuple([state[name] for name in variant.states])
        row = ParamRow(grad_dtype, param, states, None, None, scalars, variant.flags)
        if self._rule.draws:
            row.indices = self._drawn_indices(param, param)
        return row

    def _row(
        self,
        planned: PlannedParam,
        declared: DeclaredStates,
        state: dict[str, Any],
        grad_dtype: torch.dtype,
    ) -> ParamRow:
        """The row of one parameter.

        Args:
            planned: the parameter.
            declared: the states that the rule declares for it.
            state: its state, complete.
            grad_dtype: dtype of its gradient.
        """
        rule, group, param, flags, codecs = declared
        local, dense = dtensor.local, self._dense
        master, rounds = state.get(MASTER), rounds_stochastically(group, param)
        low = master if master is not None and master.dtype == LOW_BITS else None
        full, is_coded, random_key = master if low is None else None, any(codecs), None
        if rounds or is_coded or low is not None:
            random_key = random_key_of(self._optimizer, param, self._numbers[id(param)])
        p = like = gradients.real(local(param.detach() if full is None else full))
        averaged_over = rule.averages_for(flags)
        # An index must give row and column, and the block and random number of an element.
        in_order = bool(averaged_over) or is_coded or low is not None
        if in_order and not p.is_contiguous():
            like = torch.empty_like(p, memory_format=torch.contiguous_format)
        values, indices = dense(p, like), ElementIndices()
        if random_key is not None or rule.draws:
            indices = self._drawn_indices(param, values, in_order=in_order)
        keys = planned.variant.scalar_keys
        row = ParamRow(
            grad_dtype,
            param=values,
            copy=None if full is None else dense(local(param.detach()), like),
            low=None if low is None else dense(local(low), like),
            state=tuple(
                dense(gradients.real(local(state[part.name])), like)
                for part in rule.state_for(flags)
            ),
            scalars=tuple([None if key is None else state[key] for key in keys]),
            flags=flags,
            random_key=random_key,
            rounds=rounds,
            indices=indices,
            codecs=codecs,
            scales=tuple(
                local(state[scale_key(part.name)]).view(-1)
                if codec is not None and codec.has_scales
                else None
                for part, codec in zip(rule.state_for(flags), codecs, strict=True)
            ),
        )
        if averaged_over:
            of_lines = [local(state[part.name]) for part in rule.row_column_states_for(flags)]
            shard = ShardedMatrix(param) if dtensor.is_dtensor(param) else None
            row.row_column_means = RowColumnMeans(averaged_over, of_lines, tuple(p.shape), shard)
        return row

    def _drawn_indices(
        self, param: Tensor, values: Tensor, *, in_order: bool = False
    ) -> ElementIndices:
        """The indices of ``values``, the elements of ``param``; others for each if the rule draws.

        Args:
            param: the parameter.
            values: its elements on this rank, as kernels read them.
            in_order: whether they are contiguous in any case.
        """
        indices = indices_of(param, values, contiguous=in_order)
        if self._rule.draws:
            first = indices.first + self._numbers[id(param)] * PLACE_STRIDE
            indices = replace(indices, first=first)
        return indices

    def _dense(self, tensor: Tensor, like: Tensor) -> Tensor:
        """``tensor`` if its layout is that of ``like``; else a copy, noted in :attr:`copies`."""
        copy = dense_like(tensor, like)
        if copy is not tensor:
            self.copies.append((tensor, copy))
        return copy


def _like_gradient(row: ParamRow) -> Tensor:
    """A tensor that has the layout of the gradient of ``row``."""
    assert row.param is not None
    for tensor in (row.param, row.copy):
        if tensor is not None and tensor.dtype == row.grad_dtype:
            return tensor
    return torch.empty_like(row.param, dtype=row.grad_dtype)


def _refuse_flattened(name: str, declared: DeclaredStates) -> None:
    """Raise if a step depends on the shape of a parameter that FSDP1 has flattened and cut.

    Raises:
        RuntimeError: the rule sums over whole parameters, or an element's bits depend on its place.
    """
    rule, group, param, _, codecs = declared
    if rule.sums_up:
        what = "sums over whole parameters"
    elif rule.draws or any(codecs) or rounds_stochastically(group, param):
        what = "uses the index of each element in its parameter, for random numbers or blocks"
    elif needs_low_bits(group, param):
        what = "uses the index of each element in its parameter, to round master weights"
    else:
        return
    raise RuntimeError(
        f"the step of {name} {what}, but FullyShardedDataParallel has flattened "
        "parameters into one tensor and split it, so that the optimizer does not know where each "
        "begins: shard the model by torch.distributed.fsdp.fully_shard (FSDP2)"
    )


def random_key_of(optimizer: Any, param: Tensor, place: int) -> Tensor:
    """The random key of ``param``, made if it is missing.

    Each parameter has a key of its own, which depends on its index ``place`` among all parameters.
    """
    state = optimizer.state[param]
    saved_key = KEY_STRIDE * place if state.get(RANDOM_KEY) is None else state[RANDOM_KEY]
    if not (
        isinstance(saved_key, Tensor)
        and (saved_key.dtype, saved_key.device, saved_key.ndim) == (torch.int64, param.device, 0)
    ):
        state[RANDOM_KEY] = torch.full((), int(saved_key), dtype=torch.int64, device=param.device)
    return state[RANDOM_KEY]
