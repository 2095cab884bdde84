"""Loading a state dict: what is refused, and the dtype of each loaded state."""

import contextlib
import inspect
import numbers
import reprlib
from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampopt._step import gradients
from ampopt._step.declared_states import DeclaredStates
from ampopt._step.hyperparameters import Variants
from ampopt._step.param_rows import random_key_of
from ampopt._step.rule_state import convert, is_complete, widen_scalars
from ampopt._step.small_states import CODES, RANDOM_KEY, restore_names
from ampopt._step.tensor_subclasses import copy_of, inner_names
from ampopt._step.torch_private import pytree
from ampopt.options import needs_master
from ampopt_kernels import rules
from ampopt_kernels.codecs import SIGNED
from ampopt_kernels.rule import MASTER, Rule
from ampopt_kernels.state import codes_key, scale_key

__all__ = ["check_loaded", "convert_loaded", "loaded_uncast"]

_DROP_INS = "ampopt.optim."
"""Prefix of the modules of classes whose constructors check hyperparameters."""


def check_loaded(optimizer: Any, state_dict: Mapping[str, Any]) -> None:
    """Raise for a state dict with states or hyperparameters that no step can use.

    A load-state-dict pre-hook, so that it checks what the user's pre-hooks have returned.
    Hyperparameters are checked by the constructor of the :mod:`ampopt.optim` class of
    ``optimizer``, if there is one. ``lr`` is not checked: a schedule may set it to any value.

    Raises:
        TypeError: the states or param groups are of another type than those that ``state_dict()``
            returns, or a state is neither a tensor nor a number.
        ValueError: ``state_dict`` is that of something else, the constructor refuses a
            hyperparameter, a state or 8-bit codes are missing beside other states, a count is no
            whole number from 0 on, or a state is on the meta device.
    """
    if not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(
            "load_state_dict takes what state_dict() of an optimizer returned, with the keys "
            f"'state' and 'param_groups', got one with the keys {list(state_dict)[:8]}: if this is "
            "a whole checkpoint, pass its entry of the optimizer"
        )
    for name, kind in (("state", Mapping), ("param_groups", (list, tuple))):
        if not isinstance(state_dict[name], kind):
            raise TypeError(
                f"the {name!r} to be loaded must be a {'dict' if kind is Mapping else 'list'}, got "
                f"{reprlib.repr(state_dict[name])}. Nothing was loaded: load what state_dict() "
                "returned"
            )
    names = _SavedNames.of(optimizer.rule)
    for key, state in state_dict["state"].items():
        if isinstance(state, Mapping):
            _check_codes_are_there(names, key, state)
            _check_entries(optimizer, names, key, state)
    _check_of_this_optimizer(optimizer, state_dict)
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


def convert_loaded(optimizer: Any) -> None:
    """Convert loaded states as a step would. States that a step refuses stay as they are.

    The param groups have the options of the optimizer again, so that it decides about masters.
    """
    rule, groups, states = optimizer.rule, optimizer.param_groups, []
    variants = Variants(rule)
    for place, (index, param, name) in enumerate(gradients.named_params(groups)):
        if not (state := optimizer.state.get(param)):
            continue
        group = groups[index]
        restore_names(state, rule.state)
        if not needs_master(group, param):
            state.pop(MASTER, None)
        with contextlib.suppress(KeyError, RuntimeError, TypeError, ValueError):
            (variant,) = variants.add(groups, [(index, param)])
            if not is_complete(param, state, variant):
                optimizer._ampopt.runner.checks.check_states(rule, group, [(name, param)])
                declared = DeclaredStates.of(rule, group, param)
                convert(declared, state)
                if any(declared.codecs):
                    random_key_of(optimizer, param, place)
            states.append(state)
    widen_scalars(rule, states)


def _check_of_this_optimizer(optimizer: Any, state_dict: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if ``state_dict`` is that of another optimizer, or ``TypeError``.

    Further entries are allowed: those of users, and the states of a second rule that ``run_rule``
    ran. They may have names that another optimizer uses.
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
                f"{name} reads. It has {sorted(group.keys() - {'params'})}, like a group of "
                f"another optimizer. {wrong}"
            )
    groups = {key: group for group in state_dict["param_groups"] for key in group["params"]}
    parts = (*rule.state, *rule.scalar_state)
    always = [part.name for part in parts if part.when is None]
    needed = [part.name for part in rule.state if part.when is None]
    needed += [part.name for part in rule.scalar_state if part.name == "step"]
    kept = {part.name for part in rule.state} | {codes_key(part.name) for part in rule.state}
    for key, state in state_dict["state"].items():
        if key not in groups:  # users keep entries of their own
            continue
        if not isinstance(state, Mapping):
            raise TypeError(
                f"the state of parameter {key} to be loaded must be a dict, got "
                f"{reprlib.repr(state)}. {wrong}"
            )
        if not others_keep.isdisjoint(state):
            lacks = any(name not in state and codes_key(name) not in state for name in always)
            other = min(others_keep & state.keys())
            if lacks or others_read & groups[key].keys():
                raise ValueError(
                    f"the state to be loaded has {other!r} for parameter {key}, a state of another "
                    f"optimizer; {name} has {[part.name for part in rule.state]}. {wrong}"
                )
        lost = [name for name in needed if name not in state and codes_key(name) not in state]
        if lost and not kept.isdisjoint(state):
            # From 0 on, it would not fit the others: without a second moment, steps are too long.
            raise ValueError(
                f"the state to be loaded has no {lost[0]!r} for parameter {key}, only "
                f"{sorted(state)}. {wrong}"
            )


def _names_of_others(rule: Rule) -> tuple[set[str], set[str]]:
    """What other built-in rules read from param groups, and their states: what ``rule`` has not."""
    every = [other for other in vars(rules).values() if isinstance(other, Rule)]
    read = {name for other in every for name in (*other.hyper, *other.flags)}
    states = {part.name for other in every for part in (*other.state, *other.scalar_state)}
    own_states = {"step", *(part.name for part in (*rule.state, *rule.scalar_state))}
    return read - {*rule.hyper, *rule.flags}, states - own_states


class _SavedNames(NamedTuple):
    """The names that the states of a rule may have in a state dict.

    Attributes:
        tensors: for the master, and each state that is a tensor: its name in memory, and the names
            of its codes and scales.
        codes: the dtypes that codes may have, by their names.
        scalars: the names of the states that may be numbers.
        every: all of these names.
    """

    tensors: list[tuple[str, str, str]]
    codes: dict[str, tuple[torch.dtype, ...]]
    scalars: set[str]
    every: set[str]

    @classmethod
    def of(cls, rule: Rule) -> "_SavedNames":
        """The names of the states of ``rule``."""
        names = [MASTER, *(part.name for part in rule.state)]
        tensors = [(name, codes_key(name), scale_key(name)) for name in names]
        codes = {codes_key(MASTER): CODES}
        codes |= {codes_key(p.name): (*CODES, (p.codec or SIGNED).dtype) for p in rule.state}
        scalars = {RANDOM_KEY, *(part.name for part in rule.scalar_state)}
        scales = {scale for name, _, scale in tensors if name != MASTER}
        return cls(tensors, codes, scalars, {*names, *codes, *scales, *scalars})


def _check_entries(optimizer: Any, names: _SavedNames, key: Any, state: Mapping[str, Any]) -> None:
    """Raise for an entry of ``state`` of parameter ``key`` that is of the wrong kind.

    Raises:
        TypeError: it is neither a tensor nor a number, or has codes that were cast.
        ValueError: it is a count that no step makes, or has no values.
    """
    for name in names.every.intersection(state):
        value, wrong = state[name], None
        is_coded, is_tensor = name in names.codes, isinstance(value, Tensor)
        is_number = not is_tensor and isinstance(value, numbers.Real | None)
        if not (is_tensor or is_number) or (value is None and is_coded):
            wrong = TypeError, "must be a tensor" + " or a number" * (name in names.scalars)
        elif isinstance(value, Tensor) and value.is_meta and not _is_on_meta(optimizer):
            wrong = ValueError, "has no values: load it onto a device"
        elif name in ("step", RANDOM_KEY) and not _is_count(value):
            wrong = ValueError, "must be a whole number, 0 or more"
        elif is_coded and getattr(value, "dtype", None) not in names.codes[name]:
            wrong = TypeError, "are codes: do not cast them, keep the dtype that was saved"
        if wrong is not None:
            error, what = wrong
            raise error(
                f"the state to be loaded has {reprlib.repr(value)}, of type "
                f"{type(value).__name__}, for {name!r} of parameter {key}, which {what}. Nothing "
                "was loaded: fix the entry in state_dict['state']"
            )


def _is_on_meta(optimizer: Any) -> bool:
    """Whether a parameter of ``optimizer`` is on the meta device."""
    return any(param.is_meta for param in gradients.params_of(optimizer.param_groups))


def _is_count(value: Any) -> bool:
    """Whether ``value`` may be a count: not if the host knows that it is none."""
    if isinstance(value, Tensor):
        if value.device.type != "cpu" or value.numel() != 1:
            return True
        value = value.item()
    return isinstance(value, numbers.Real) and float(value).is_integer() and float(value) >= 0


def _check_codes_are_there(names: _SavedNames, key: Any, state: Mapping[str, Any]) -> None:
    """Raise if the codes of 8-bit states were lost on the way from a checkpoint.

    Some loaders look for the names that states have in memory, and take what they do not find to be
    an empty dict (torch's, of flattened state dicts), or leave it out (torchtitan's).
    """
    for name, codes, scale in names.tensors:
        value = None if codes in state else state.get(name, {} if scale in state else None)
        if isinstance(value, Mapping) and not value:
            raise ValueError(
                f"the state to be loaded has no {codes!r} of parameter {key}: the loader "
                f"looked for {name!r}, as it is called in memory. Nothing was loaded: pass the "
                "loader {key.removesuffix('_codes'): value for key, value in state_dict.items()}"
            )


_Copies = list[tuple[Tensor, Tensor]]
"""New tensors, and those whose values they get."""


@contextlib.contextmanager
def loaded_uncast(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Context manager: ``load_state_dict`` copies state tensors, and keeps their saved dtypes.

    Torch casts state tensors to the parameter's dtype; this undoes the cast, also what it does to
    strings and to the ``maxlen`` of deques. It also shares tensors that need no cast with the state
    dict, so that two optimizers would write to one state.

    This runs after the user's load-state-dict pre-hooks and before the user's post-hooks.
    """
    state_dicts: list[dict[str, Any]] = []

    def remember(_: Any, state_dict: dict[str, Any]) -> None:
        state_dicts.append(state_dict)

    @torch.no_grad()  # a copy of a state that requires grad must not refer to the saved one
    def uncast(_: Any) -> None:
        (saved_dict,) = state_dicts
        keys = gradients.params_of(saved_dict["param_groups"])
        params = gradients.params_of(optimizer.param_groups)
        states, copies = saved_dict["state"], []
        for key, param in zip(keys, params, strict=True):
            if key in states:
                optimizer.state[param] = _uncast(optimizer.state[param], states[key], copies)
        copied = partial(_uncast_copy, copies=copies)
        for key in optimizer.state.keys() & states.keys() - set(keys):  # of no parameter, by name
            value = optimizer.state[key]
            optimizer.state[key] = pytree.tree_map(copied, value, value)
        if copies:  # one launch, where hundreds of clones were as many
            new, old = map(list, zip(*copies, strict=True))
            torch._foreach_copy_(new, old)  # pyright: ignore[reportPrivateImportUsage]

    handles = (
        optimizer.register_load_state_dict_pre_hook(remember),
        optimizer.register_load_state_dict_post_hook(uncast, prepend=True),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _uncast(value: Any, saved_value: Any, copies: _Copies) -> Any:
    """``value`` with the saved dtypes, except where the optimizer's class has restructured it."""
    if isinstance(saved_value, Tensor):  # most are, and pytree takes longer than the copies
        return _uncast_copy(value, saved_value, copies)
    if isinstance(value, dict) and isinstance(saved_value, dict):
        for key, saved in saved_value.items():
            if key in value:
                value[key] = _uncast(value[key], saved, copies)
        return value
    if isinstance(value, deque) and value.maxlen is None and isinstance(saved_value, deque):
        value = deque(value, saved_value.maxlen)
    if pytree.tree_structure(value) != pytree.tree_structure(saved_value):
        return value
    return pytree.tree_map(partial(_uncast_copy, copies=copies), value, saved_value)


def _uncast_copy(value: Any, saved_value: Any, copies: _Copies) -> Any:
    """A state tensor as it was saved: torch casts some to the dtype of the parameter."""
    if isinstance(value, str):  # torch makes the text "<generator object ...>" of it
        return saved_value
    if not (isinstance(value, Tensor) and isinstance(saved_value, Tensor)):
        return value  # torch makes tensors of the numbers in older state dicts: they stay tensors
    is_plain = type(value) is Tensor and value.layout is torch.strided
    if value is saved_value and is_plain and not value.requires_grad:
        copies.append((torch.empty_like(value), value))
        return copies[-1][0]
    if inner_names(saved_value):  # its `to` may change the dtype alone, and share its inner tensors
        return copy_of(saved_value.to(value.device))
    if value.dtype != saved_value.dtype:
        return saved_value.to(value.device, copy=True)
    if value is not saved_value:
        return value
    copy, requires_grad = copy_of(value), value.requires_grad
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(copy, requires_grad)
    return copy.requires_grad_(requires_grad)
