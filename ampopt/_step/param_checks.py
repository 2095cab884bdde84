"""Checks, before a step changes anything, of parameters, gradients and options for a rule."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampopt._step import gradients
from ampopt._step.declared_states import DeclaredStates
from ampopt._step.descriptors import RefersToOptimizer
from ampopt._step.hyperparameters import Variant, Variants, check_numbers
from ampopt._step.rule_state import is_complete
from ampopt._step.sharding import dtensor
from ampopt._step.state_checks import WrittenTensors, check_memory, check_state
from ampopt._step.torch_private import check_for_fused
from ampopt._warnings import warn_user
from ampopt.options import (
    MASTER_WEIGHTS,
    PARAM_ROUNDING,
    STATE_BITS,
    check_options,
    needs_master,
)
from ampopt_kernels.check_rule import try_out
from ampopt_kernels.memory import overlaps_itself
from ampopt_kernels.rule import Rule
from ampopt_kernels.tensors import arithmetic

__all__ = ["Checks", "PlannedParam", "check_rule"]

_FUSED_IN_TORCH = (torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Classes for which torch refuses ``fused=True`` with some parameters, at the first step."""


class PlannedParam(NamedTuple):
    """A parameter that a plan has a row for, and whose state has been checked.

    Attributes:
        one: the parameter.
        variant: its variant.
        state: its state; an empty dict before the first step.
        declared: the states that the step has to make, or may have to convert; ``None`` if the
            state is complete; see :func:`ampopt._step.rule_state.is_complete`.
        absent: the dtype of its gradients, if it has none in this step.
    """

    one: gradients.ParamWithGrad
    variant: Variant
    state: dict[str, Any]
    declared: DeclaredStates | None
    absent: torch.dtype | None


class Checks(RefersToOptimizer):
    """Checks of the parameters, gradients, options and states of one optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Store the optimizer.

        Args:
            optimizer: the optimizer to check; stored as a weak reference.
        """
        super().__init__(optimizer)
        self._warned_of_float16 = False

    def need_torch(self) -> bool:
        """Whether torch's own step has to run: differentiable, or with a sparse gradient.

        Raises:
            RuntimeError: a gradient is sparse, and the optimizer does not support that.
        """
        optimizer = self.optimizer
        if optimizer.defaults.get("differentiable"):
            return True
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.grad is None or param.grad.layout == torch.strided:
                    continue
                how = ""
                # Not MASTER_BITS, which says nothing of a group without master weights.
                options = MASTER_WEIGHTS, PARAM_ROUNDING, STATE_BITS
                if option := next((o for o in options if o.is_set(group)), None):
                    how = f" with {option.name}={option.of(group)!r}"
                elif group.get("weight_decay"):  # torch raises when it has stepped others
                    how = f" with weight_decay={float(group['weight_decay'])}"
                if optimizer.sparse_gradients and not how:
                    return True
                how *= optimizer.sparse_gradients
                raise RuntimeError(
                    f"{type(optimizer).__name__}{how} does not support sparse gradients, which "
                    f"{gradients.name_of(optimizer.param_groups, param)} has; make the layer with "
                    "sparse=False, or choose an optimizer that takes them"
                )
        return False

    def check_plannable(
        self,
        rule: Rule,
        absent: Mapping[int, torch.dtype],
    ) -> tuple[list[PlannedParam], Variants]:
        """Raise for what no plan can be made for, before anything has changed.

        Args:
            rule: the update rule to run.
            absent: the ``id`` of each parameter that has a row in the plan without a gradient, and
                the dtype of its gradients.

        Returns:
            The parameters to make rows for, and their variants.

        Raises:
            RuntimeError: a parameter is expanded or a lazily negated view; torch's fused step
                refuses a parameter and ``fused=True`` is set; ``update`` or another function of the
                rule does not do what it declares.
            TypeError: a hyperparameter is not a number, an option is not a bool, or ``rule`` is not
                a ``Rule``.
            ValueError: a tuple of hyperparameters has another length than the default, or than in
                another group;
                ``param_rounding``, ``state_bits`` or ``master_bits`` is unknown.

            Each of them also as :func:`ampopt._step.gradients.params_with_grads` and
            :func:`ampopt._step.state_checks.check_state` raise it.
        """
        optimizer = self.optimizer
        groups, name = optimizer.param_groups, type(optimizer).__name__
        check_rule(rule, name)
        for group in groups:
            check_options(group)
        stepped_params = gradients.params_with_grads(groups, absent=absent)
        variants = Variants(rule)
        of = variants.add(groups, [(one.group, one.tensor) for one in stepped_params])
        likes = dict(optimizer.defaults)  # without a default, other groups must be like the first
        for group, entries in variants.entries(groups):
            for entry in rule.hyper:
                if entry in entries:
                    like = likes.setdefault(entry, entries[entry])
                    check_numbers(f"{entry} of group {group}", entries[entry], like)
        flags, hyper = variants.flags(groups), variants.hyper(groups)
        pairs = dict.fromkeys(
            (p.dtype, p.dtype if p.grad is None else p.grad.dtype) for _, p, _ in stepped_params
        )
        dtypes = dict.fromkeys(arithmetic(*(d.to_real() for d in pair)) for pair in pairs)
        for own_flags, own_hyper in zip(flags, hyper, strict=True):
            for dtype in dtypes:
                try_out(rule, own_flags, len(own_hyper), name, dtype)
        planned: list[PlannedParam] = []
        written: list[WrittenTensors] = []
        no_state: dict[str, Any] = {}
        for one, variant in zip(stepped_params, of, strict=True):
            index, param, owner = one
            group, state = groups[index], optimizer.state.get(param, no_state)
            if rule.averages is not None:
                _check_rows(param, owner.name, rule.averages_for(variant.flags), name)
            if group.get("fused") and isinstance(optimizer, _FUSED_IN_TORCH):
                check_for_fused(param)
            if is_complete(param, state, variant):
                declared, keys = None, variant.state_keys
                written.append((owner.name, keys, [param, *map(state.__getitem__, keys)]))
            else:
                _check_writable(param, owner.name)
                declared = DeclaredStates.of(rule, group, param)
                written.append(check_state(owner.name, state, declared))
            planned.append(PlannedParam(one, variant, state, declared, absent.get(owner.key)))
        stepped_ids = {id(one.tensor) for one in stepped_params}
        others: list[WrittenTensors] = [
            (name, (), [param])
            for _, param, name in gradients.named_params(groups)
            if id(param) not in stepped_ids and param.layout == torch.strided
        ]
        check_memory(written, others)
        return planned, variants

    def check_states(
        self, rule: Rule, group: dict[str, Any], named: Iterable[tuple[str, Tensor]]
    ) -> None:
        """Raise for invalid states of some parameters of a group.

        Args:
            rule: the update rule, which declares the states.
            group: the param group.
            named: name and parameter of each.

        Raises:
            TypeError: see :func:`ampopt._step.state_checks.check_state`, as for ``ValueError`` and
                ``RuntimeError``.
        """
        written = []
        for name, param in named:
            declared = DeclaredStates.of(rule, group, param)
            written.append(check_state(name, self.optimizer.state.get(param, {}), declared))
        check_memory(written)

    def warn_of_float16(self, rule: Rule) -> None:
        """Warn once if a state of ``rule``, the update rule to run, is kept in float16."""
        if self._warned_of_float16:
            return
        optimizer = self.optimizer
        for index, param in gradients.present(optimizer.param_groups):
            group = optimizer.param_groups[index]
            if param.dtype != torch.float16 or needs_master(group, param):
                continue
            declared = DeclaredStates.of(rule, group, param)
            codecs = declared.by_codec
            states = [
                part
                for part in declared.tensors
                if part.dtype in (None, torch.float16) and codecs.get(part) is None
            ]
            if states:
                self._warned_of_float16 = True
                warn_user(
                    f"{type(optimizer).__name__} keeps {', '.join(part.name for part in states)} "
                    f"of {gradients.name_of(optimizer.param_groups, param)} in float16, as torch's "
                    "optimizers do: small values become zero there, such as squares of gradients "
                    "below 2**-12, and steps then are much too long. Pass master_weights=True, or "
                    "keep the parameters in float32 and run the model under torch.autocast",
                )
                return


def check_rule(rule: Any, owner: str) -> None:
    """Raise unless ``rule``, the attribute of the optimizer class ``owner``, is a ``Rule``.

    Raises:
        TypeError: ``rule`` is not a ``Rule``.
    """
    if not isinstance(rule, Rule):
        raise TypeError(
            f"{owner} has no rule: it is {rule!r}. Set the class attribute, as in "
            "rule = Rule(update=update, hyper=('lr',))"
        )


def _check_writable(param: Tensor, name: str) -> None:
    """Raise ``RuntimeError`` unless each element of ``param`` has a place in memory of its own.

    A lazily negated or conjugated view has other values than its memory.
    """
    own = dtensor.local(param)
    if own.is_neg() or own.is_conj():
        how = "negated" if own.is_neg() else "conjugated"
        raise RuntimeError(
            f"{name} is a lazily {how} view, whose memory has other values: make the parameter "
            "from view.resolve_conj().resolve_neg()"
        )
    if overlaps_itself(own):
        how = "is expanded" if 0 in own.stride() else "overlaps itself"
        raise RuntimeError(
            f"{name} {how}: several of its elements share one place in memory, and each would be "
            "updated; make the parameter from expanded.clone()"
        )


def _check_rows(param: Tensor, name: str, over: Sequence[str], optimizer: str) -> None:
    """Raise if a rule averages over rows or columns of a parameter that is complex or below 2-d."""
    if param.is_complex():
        raise RuntimeError(
            f"{optimizer} does not support complex parameters, as {name} is: leave it to another "
            "optimizer"
        )
    if over and param.ndim < 2:
        raise RuntimeError(
            f"{optimizer} averages over {' and '.join(dict.fromkeys(over))}, but {name} has shape "
            f"{tuple(param.shape)} and so no rows and columns: add a flag for such parameters to "
            "the rule, by Rule.entries, and turn averages off under the flag: pass when='not FLAG' "
            "to each State with a shape, or, without such states, averages_when='not FLAG' to Rule"
        )
