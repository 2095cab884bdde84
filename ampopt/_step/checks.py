"""Checks, before a step changes anything, of parameters, gradients and options for a rule."""

import inspect
import numbers
import warnings
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampopt._step import gradients
from ampopt._step.declared_states import DeclaredStates
from ampopt._step.descriptors import RefersToOptimizer
from ampopt._step.hyperparameters import Variant, Variants, check_numbers
from ampopt._step.rule_state import is_complete
from ampopt._step.sharding import dtensor
from ampopt._step.small_states import KEYS, codes_key, scale_key
from ampopt._step.state_checks import CheckedParam, WrittenTensors, check_memory, check_states
from ampopt._step.torch_private import check_for_fused
from ampopt.loss_scale.arguments import check_bool
from ampopt.options import (
    MASTER_BITS,
    PARAM_ROUNDING,
    STATE_BITS,
    check_master_bits,
    check_rounding,
    check_state_bits,
    has_masters,
    is_stochastic,
    needs_master,
    state_bits,
)
from ampopt_kernels import rules
from ampopt_kernels.check_rule import try_out
from ampopt_kernels.rule import MASTER, Rule
from ampopt_kernels.tensors import overlaps_itself

__all__ = ["Checks", "PlannedParam", "check_loaded", "check_options", "check_rule"]

_DROP_INS = "ampopt.optim."
"""Prefix of the modules of classes whose constructors check hyperparameters."""

_FUSED_IN_TORCH = (torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Classes for which torch refuses ``fused=True`` with some parameters, at the first step."""


class PlannedParam(NamedTuple):
    """A parameter that a plan has a row for, and whose state has been checked.

    Attributes:
        one: the parameter.
        variant: its variant.
        state: its state, if it is complete; see :func:`ampopt._step.rule_state.is_complete`.
    """

    one: gradients.ParamWithGrad
    variant: Variant
    state: dict[str, Any] | None


class Checks(RefersToOptimizer):
    """Checks of the parameters, gradients, options and states of one optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Store the optimizer.

        Args:
            optimizer: the optimizer to check; stored as a weak reference.
        """
        super().__init__(optimizer)
        # No weak references: torch refuses to move a DTensor parameter to which there is one.
        self._dtypes: dict[Tensor, torch.dtype] = {}
        self._warned_of_float16 = False

    def need_torch(self) -> bool:
        """Whether torch's own step has to run: differentiable, or with a sparse gradient.

        Raises:
            RuntimeError: a gradient is sparse, and the optimizer does not support that.
        """
        optimizer = self.optimizer
        if optimizer.defaults.get("differentiable"):
            return True
        for index, param in gradients.present(optimizer.param_groups):
            assert param.grad is not None
            if param.grad.layout != torch.strided:
                group, how = optimizer.param_groups[index], ""
                if has_masters(group):
                    how = " with master_weights=True"
                elif is_stochastic(group):
                    how = " with param_rounding='stochastic'"
                elif state_bits(group) != 32:
                    how = f" with state_bits={state_bits(group)}"
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
        *,
        absent: Container[int] = (),
    ) -> tuple[list[PlannedParam], Variants]:
        """Raise for what no plan can be made for, before anything has changed.

        Args:
            rule: the update rule to run.
            absent: the ``id`` of each parameter that has a row in the plan without a gradient.

        Returns:
            The parameters to make rows for, and their variants.

        Raises:
            RuntimeError: a parameter was cast since the optimizer was made, or is expanded; torch's
                fused step refuses a parameter and ``fused=True`` is set; ``update`` or another
                function of the rule does not do what the rule declares.
            TypeError: a hyperparameter is not a number, an option is not a bool, or ``rule`` is not
                a ``Rule``.
            ValueError: a tuple of hyperparameters has another length than the default;
                ``param_rounding``, ``state_bits`` or ``master_bits`` is unknown.

            Each of them also as :func:`ampopt._step.gradients.params_with_grads` and
            :func:`ampopt._step.state_checks.check_states` raise it.
        """
        optimizer = self.optimizer
        groups, name = optimizer.param_groups, type(optimizer).__name__
        check_rule(rule, name)
        for group in groups:
            check_options(group)
        stepped_params = gradients.params_with_grads(groups, absent=absent)
        self.check_dtypes(gradients.params_of(groups))
        self._forget_removed()
        variants = Variants(rule)
        of = variants.add(groups, [(one.group, one.tensor) for one in stepped_params])
        for group, entries in variants.entries(groups):
            for entry in rule.hyper:
                if entry in entries:
                    like = optimizer.defaults.get(entry, entries[entry])
                    check_numbers(f"{entry} of group {group}", entries[entry], like)
        flags, hyper = variants.flags(groups), variants.hyper(groups)
        for own_flags, own_hyper in zip(flags, hyper, strict=True):
            try_out(rule, own_flags, len(own_hyper), name)
        planned, params_to_check, written = [], [], []
        no_state: dict[str, Any] = {}
        for one, variant in zip(stepped_params, of, strict=True):
            index, param, owner = one
            group, state = groups[index], optimizer.state.get(param, no_state)
            if not param.is_contiguous():
                _check_written_once(param, owner.name)
            if rule.averages is not None:
                _check_rows(param, owner.name, rule.averages_for(variant.flags), name)
            if group.get("fused") and isinstance(optimizer, _FUSED_IN_TORCH):
                check_for_fused(param)
            if is_complete(param, state, variant):
                planned.append(PlannedParam(one, variant, state))
                written.append((owner.name, None, param))
                written += [(owner.name, key, state[key]) for key in variant.keys]
            else:
                planned.append(PlannedParam(one, variant, None))
                declared = DeclaredStates.of(rule, group, param)
                params_to_check.append(CheckedParam(owner.name, state, declared))
        written += check_states(params_to_check)
        stepped_ids = {id(one.tensor) for one in stepped_params}
        others: WrittenTensors = [
            (gradients.name_at(group, index, position), None, param)
            for index, group in enumerate(groups)
            for position, param in enumerate(group["params"])
            if id(param) not in stepped_ids and param.layout == torch.strided
        ]
        check_memory(written, others)
        return planned, variants

    def check_states(self, rule: Rule, index: int, positions: Iterable[int]) -> None:
        """Raise for invalid states of some parameters of a group.

        Args:
            rule: the update rule, which declares the states.
            index: index of the param group.
            positions: positions of the parameters in the group.

        Raises:
            TypeError: see :func:`ampopt._step.state_checks.check_states`, as for ``ValueError`` and
                ``RuntimeError``.
        """
        group, params_to_check = self.optimizer.param_groups[index], []
        for position in positions:
            name, param = gradients.name_at(group, index, position), group["params"][position]
            declared = DeclaredStates.of(rule, group, param)
            params_to_check.append(
                CheckedParam(name, self.optimizer.state.get(param, {}), declared)
            )
        check_memory(check_states(params_to_check))

    def remember_dtypes(self) -> None:
        """Record the dtype of each parameter, to detect a model that is cast later."""
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                self._dtypes.setdefault(param, param.dtype)

    def check_dtypes(self, params: Iterable[Tensor]) -> None:
        """Raise if one of ``params`` was cast since the optimizer was made."""
        for param in params:
            made_with = self._dtypes.setdefault(param, param.dtype)
            if param.dtype != made_with:
                raise RuntimeError(
                    f"{gradients.name_of(self.optimizer.param_groups, param)} was {made_with} when "
                    f"the optimizer was made and is {param.dtype} now: cast the model first and "
                    "make the optimizer then (with master_weights=True it keeps float32 masters of "
                    "half-precision parameters)"
                )

    def _forget_removed(self) -> None:
        """Forget the parameters that were removed from the optimizer."""
        groups = self.optimizer.param_groups
        if len(self._dtypes) > sum(len(group["params"]) for group in groups):
            params = set(gradients.params_of(groups))
            self._dtypes = {p: dtype for p, dtype in self._dtypes.items() if p in params}

    def warn_of_float16(self, rule: Rule, params: Iterable[tuple[int, Tensor]]) -> None:
        """Warn once if a state of ``rule`` is kept in float16.

        Args:
            rule: the update rule to run.
            params: ``(group index, parameter)`` for each parameter to step.
        """
        if self._warned_of_float16:
            return
        optimizer = self.optimizer
        for index, param in params:
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
                warnings.warn(
                    f"{type(optimizer).__name__} keeps {', '.join(part.name for part in states)} "
                    f"of {gradients.name_of(optimizer.param_groups, param)} in float16, as torch's "
                    "optimizers do: small values become zero there, such as squares of gradients "
                    "below 2**-12, and steps then are much too long. Pass master_weights=True, or "
                    "keep the parameters in float32 and run the model under torch.autocast",
                    UserWarning,
                    stacklevel=2,
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


def check_loaded(optimizer: Any, state_dict: Mapping[str, Any]) -> None:
    """Raise for a state dict with states or hyperparameters that no step can use.

    Hyperparameters are checked by the constructor of the :mod:`ampopt.optim` class of
    ``optimizer``, if there is one. ``lr`` is not checked: a schedule may set it to any value.

    Raises:
        TypeError: ``state_dict`` is not a dict, or a state is neither a tensor nor a number.
        ValueError: ``state_dict`` is that of something else, the constructor refuses a
            hyperparameter, 8-bit codes are missing, a count is negative or NaN, or a state is on
            the meta device.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"load_state_dict takes what state_dict() returned, got {state_dict!r}")
    if not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(
            "load_state_dict takes what state_dict() of an optimizer returned, with the keys "
            f"'state' and 'param_groups', got one with the keys {list(state_dict)[:8]}: if this is "
            "a whole checkpoint, pass its entry of the optimizer"
        )
    _check_of_this_optimizer(optimizer, state_dict)
    for key, state in state_dict["state"].items():
        _check_codes_are_there(optimizer.rule, key, state)
        if isinstance(state, Mapping):
            _check_entries(optimizer, key, state)
    classes = (cls for cls in type(optimizer).__mro__ if cls.__module__.startswith(_DROP_INS))
    if (cls := next(classes, None)) is None:
        return
    names = set(optimizer.rule.hyper) & inspect.signature(cls).parameters.keys() - {"lr"}
    for index, group in enumerate(state_dict["param_groups"]):
        try:
            cls([torch.zeros(1, device="cpu")], **{n: group[n] for n in names if n in group})
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{cls.__name__} refuses param group {index} of the state to be loaded: "
                f"{error}. Nothing was loaded: fix the entry in state_dict['param_groups']"
            ) from error


def _check_of_this_optimizer(optimizer: Any, state_dict: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if ``state_dict`` is that of another optimizer.

    Entries that users keep under names of their own are allowed.
    """
    rule, name = optimizer.rule, type(optimizer).__name__
    wrong = f"Nothing was loaded: load the state_dict() of {name}"
    others_read, others_keep = _names_of_others(rule)
    reads = {*rule.hyper, *rule.flags} & optimizer.param_groups[0].keys()
    for index, group in enumerate(state_dict["param_groups"]):
        lacking = sorted(reads - group.keys())
        # torch adds flags that checkpoints of older versions lack.
        if not set(rule.hyper).isdisjoint(lacking) or (lacking and others_read & group.keys()):
            raise ValueError(
                f"param group {index} of the state to be loaded has no {lacking[0]!r}, which "
                f"{name} reads, but {sorted(group.keys() - {'params'})}, as another optimizer "
                f"has. {wrong}"
            )
    keys = {key for group in state_dict["param_groups"] for key in group["params"]}
    for key, state in state_dict["state"].items():
        if key not in keys or not isinstance(state, Mapping):  # users keep entries of their own
            continue
        if others := sorted(others_keep & state.keys()):
            raise ValueError(
                f"the state to be loaded has {others[0]!r} of parameter {key}, which another "
                f"optimizer has; {name} has {[part.name for part in rule.state]}. {wrong}"
            )
        counts = any(part.name == "step" for part in rule.scalar_state)
        if counts and "step" not in state and any(part.name in state for part in rule.state):
            raise ValueError(
                f"the state to be loaded has no 'step', the count of steps, of parameter {key}, "
                f"but {sorted(state)}. {wrong}"
            )


def _names_of_others(rule: Rule) -> tuple[set[str], set[str]]:
    """What other built-in rules read from param groups, and their states: what ``rule`` has not."""
    every = [other for other in vars(rules).values() if isinstance(other, Rule)]
    read = {name for other in every for name in (*other.hyper, *other.flags)}
    states = {part.name for other in every for part in (*other.state, *other.scalar_state)}
    own_states = {"step", *(part.name for part in (*rule.state, *rule.scalar_state))}
    return read - {*rule.hyper, *rule.flags}, states - own_states


def _check_entries(optimizer: Any, key: Any, state: Mapping[str, Any]) -> None:
    """Raise for an entry of ``state`` of parameter ``key`` that is of the wrong kind.

    Raises:
        TypeError: it is neither a tensor nor a number.
        ValueError: it is a count that no step makes, or has no values.
    """
    rule = optimizer.rule
    coded = {codes_key(name) for name in (MASTER, *(part.name for part in rule.state))}
    scales = {scale_key(part.name) for part in rule.state}
    scalars = {KEYS, *(part.name for part in rule.scalar_state)}
    names = {MASTER, *(part.name for part in rule.state), *coded, *scales, *scalars}
    for name in names.intersection(state):
        value, wrong = state[name], None
        if not isinstance(value, Tensor | numbers.Real | None) or (value is None and name in coded):
            wrong = TypeError, "must be a tensor" + " or a number" * (name in scalars)
        elif isinstance(value, Tensor) and value.is_meta and not _is_on_meta(optimizer):
            wrong = ValueError, "has no values: load it onto a device"
        elif name in ("step", KEYS) and not _is_count(value):
            wrong = ValueError, "must be a whole number, 0 or more"
        if wrong is not None:
            error, what = wrong
            raise error(
                f"the state to be loaded has {value!r}, of type {type(value).__name__}, for "
                f"{name!r} of parameter {key}, which {what}. Nothing was loaded: fix the entry in "
                "state_dict['state']"
            )


def _is_on_meta(optimizer: Any) -> bool:
    """Whether a parameter of ``optimizer`` is on the meta device."""
    return any(param.is_meta for param in gradients.params_of(optimizer.param_groups))


def _is_count(value: Any) -> bool:
    """Whether ``value`` may be a count: not if the host knows a number that is none."""
    if isinstance(value, Tensor):
        if value.device.type != "cpu" or value.numel() != 1:
            return True
        value = value.item()
    return value is None or (value >= 0 and value % 1 == 0)


def _check_codes_are_there(rule: Rule, key: Any, state: Any) -> None:
    """Raise if the codes of 8-bit states were lost on the way from a checkpoint.

    Some loaders look for the names that states have in memory, and take what they do not find to be
    an empty dict (torch's, of flattened state dicts), or leave it out (torchtitan's).
    """
    for name in (MASTER, *(part.name for part in rule.state)):
        if not isinstance(state, Mapping) or codes_key(name) in state:
            continue
        value = state.get(name, {} if scale_key(name) in state else None)
        if isinstance(value, Mapping) and not value:
            raise ValueError(
                f"the state to be loaded has no {codes_key(name)!r} of parameter {key}: the loader "
                f"looked for {name!r}, as it is called in memory. Nothing was loaded: pass the "
                "loader {key.removesuffix('_codes'): value for key, value in state_dict.items()}"
            )


def check_options(group: Mapping[str, Any]) -> None:
    """Raise for invalid options of a param group.

    Raises:
        TypeError: ``master_weights`` is not a bool.
        ValueError: ``param_rounding`` is unknown, ``state_bits`` not 8, 16 or 32, or
            ``master_bits`` not 24 or 32.
    """
    check_bool("master_weights", group.get("master_weights", False))
    check_rounding(group.get(PARAM_ROUNDING, "nearest"))
    check_state_bits(group.get(STATE_BITS, 32))
    check_master_bits(group.get(MASTER_BITS, 32))


def _check_written_once(param: Tensor, name: str) -> None:
    """Raise ``RuntimeError`` if several elements of ``param`` share one place in memory."""
    own = dtensor.local(param)
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
            "the rule, by Rule.entries, and declare its states of rows and columns with "
            "when='not FLAG', or the rule with averages_when='not FLAG'"
        )
