"""The states of parameters: creates missing ones, and converts loaded ones."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ampopt._step import small_states
from ampopt._step.declared_states import DeclaredStates
from ampopt._step.hyperparameters import Variant, check_numbers
from ampopt._step.masters import full_master
from ampopt._step.sharding import dtensor
from ampopt_kernels.devices import to_device
from ampopt_kernels.memory import overlaps_itself
from ampopt_kernels.rule import MASTER, PARAM, Rule, State
from ampopt_kernels.tensors import real, widest

__all__ = [
    "complete",
    "convert",
    "is_complete",
    "state_of",
    "widen_scalars",
]

_PLAIN = (Tensor, torch.nn.Parameter)
_REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def is_complete(param: Tensor, state: Any, variant: Variant) -> bool:
    """Whether a quick look shows that ``state`` of ``param`` needs nothing made or converted.

    ``False`` also where a quick look cannot tell: with options, entries of a user's own, or a
    parameter that is not contiguous, or lazily negated.
    """
    n, dtype = len(variant.state_keys), param.dtype
    if not (
        variant.is_plain
        and type(param) in _PLAIN
        and dtype in _REAL
        and param.is_contiguous()
        and not param.is_neg()
    ):
        return False
    if not state:
        return not n
    if len(state) != n or type(state) is not dict:
        return False
    shape, device = param.shape, param.device
    for name, own_dtype, own_shape in variant.forms:
        value = state.get(name)
        if not (
            type(value) is Tensor
            and value.dtype == (own_dtype or dtype)
            and value.shape == (shape if own_shape is None else own_shape)
            and value.device == device
            and value.layout is torch.strided
            and value.is_contiguous()
            and not value.is_neg()
        ):
            return False
    return True


def state_of(optimizer: Any, declared: DeclaredStates) -> dict[str, Any]:
    """The state of a parameter, as :func:`complete` leaves it.

    Present states have passed :func:`ampopt._step.state_checks.check_state`.
    """
    if not (declared.tensors or declared.scalars):
        return optimizer.state.get(declared.param, {})  # like torch, add no empty state
    state = optimizer.state[declared.param]
    complete(declared, state)
    return state


def complete(declared: DeclaredStates, state: dict[str, Any]) -> None:
    """Convert the values in ``state``, and add missing ones as they are before the first step.

    Args:
        declared: the states that the rule declares for the parameter.
        state: its state; changed in place.
    """
    group, param, scalars = declared.group, declared.param, declared.scalars
    small_states.restore_names(state, declared.rule.state)
    convert(declared, state)
    master, dtype, codecs = state.get(MASTER), declared.dtype or param.dtype, declared.by_codec
    for part in declared.tensors:
        if state.get(part.name) is None:
            initial = None if part.init == PARAM else _initial(part, group)
            if (codec := codecs.get(part)) is not None:
                small_states.add(state, part, param, codec, initial)
                continue
            like = param if master is None or initial is not None else full_master(param, master)
            state[part.name] = _new_state(part, like, _dtype_of(part, dtype), initial)
    of_any_dtype = [state.get(part.name) for part in scalars if part.dtype is None]
    wide = torch.float64 in (
        [value.dtype for value in of_any_dtype if value is not None] or [torch.get_default_dtype()]
    )
    for part in scalars:
        if state.get(part.name) is None:
            dtype = part.dtype or (torch.float64 if wide else torch.float32)
            value = torch.zeros((), dtype=_dtype_on(dtype, param.device), device=param.device)
            state[part.name] = value.fill_(_initial(part, group))


def convert(declared: DeclaredStates, state: dict[str, Any]) -> None:
    """Convert values of ``state`` that a step cannot use: loaded from torch, or with other options.

    A tensor state for which the rule declares no dtype gets :attr:`DeclaredStates.dtype`. How many
    bits a state is kept in is decided by the codecs, not by what was loaded.
    """
    param, own, codecs = declared.param, declared.dtype, declared.by_codec
    for part in declared.tensors:
        if (value := state.get(part.name)) is None:
            continue
        if small_states.convert_to_codec(state, part, param, codecs.get(part)):
            continue
        value = state[part.name]
        has_declared_form = own is None and part.dtype is None and part.shape is None
        if has_declared_form and value.is_contiguous() and not (value.is_neg() or value.is_conj()):
            continue
        if own is not None or part.dtype is not None:
            value = value.to(_dtype_of(part, own or param.dtype))
        if part.shape is not None:
            value = dtensor.as_replicated(value).contiguous()
        if value.is_conj() or value.is_neg():  # kernels read memory without the lazy sign
            value = value.resolve_conj().resolve_neg()
        if overlaps_itself(dtensor.local(value)):
            value = value.clone(memory_format=torch.contiguous_format)
        state[part.name] = value
    for part in declared.scalars:
        if (value := state.get(part.name)) is not None:
            state[part.name] = _scalar(value, part.dtype or _loaded_dtype(value), param.device)


def widen_scalars(rule: Rule, states: Sequence[dict[str, Any]]) -> bool:
    """If a scalar state is float64 in one of ``states``, make it float64 in all of them.

    States with a declared dtype keep it. Backends need one dtype per scalar state in all rows.

    Returns:
        Whether a scalar state is float64.
    """
    widened = False
    for part in rule.scalar_state:
        with_part = [state for state in states if state.get(part.name) is not None]
        if part.dtype is None and any(s[part.name].dtype == torch.float64 for s in with_part):
            widened = True
            for state in with_part:
                if state[part.name].dtype != torch.float64:
                    state[part.name] = state[part.name].double()
    return widened


def _new_state(part: State, like: Tensor, dtype: torch.dtype, initial: Any) -> Tensor:
    """A new tensor for the state ``part``.

    Args:
        part: the declaration of the state.
        like: the parameter or its master, for shape, device and sharding.
        dtype: the dtype of the new tensor.
        initial: its value; ``None`` to copy ``like``.
    """
    if part.shape is not None:
        new = torch.empty(part.beside(like.shape), dtype=dtype, device=like.device).fill_(initial)
        return dtensor.replicated_like(new, like) if dtensor.is_dtensor(like) else new
    new = torch.empty_like(dtensor.local(like), dtype=dtype)
    if initial is None:
        new.copy_(dtensor.local(like))
    else:
        real(new).fill_(initial)
    return dtensor.from_local_like(new, like)


def _initial(part: State, group: dict[str, Any]) -> Any:
    """The initial value of the state ``part``. Does not synchronize."""
    if not isinstance(part.init, str):
        return part.init
    if part.init not in group:
        raise KeyError(
            f"State {part.name!r} has init={part.init!r}, an entry of the param group, which has "
            f"only {sorted(k for k in group if k != 'params')}: add it to the optimizer's "
            "defaults, or make init a number, or 'param' for a copy of the parameter"
        )
    value = group[part.init]
    check_numbers(f"{part.init} of the param group, the init of State {part.name!r},", value, 0.0)
    return value.detach().reshape(()) if isinstance(value, Tensor) else value


def _dtype_of(part: State, own: torch.dtype) -> torch.dtype:
    """The dtype of the state ``part`` for a parameter, or master, of dtype ``own``."""
    dtype = part.dtype or own
    # complex64 for bfloat16, also in a torch with a narrower complex dtype, which it cannot fill.
    return torch.promote_types(dtype, torch.complex32) if own.is_complex else dtype


def _loaded_dtype(value: Any) -> torch.dtype:
    """The dtype for a loaded scalar state: float32, or float64 if float32 would lose digits."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            return torch.float64 if value.dtype == torch.float64 else torch.float32
        if value.device.type != "cpu":  # reading its value would synchronize
            return torch.float32
    whole = isinstance(value, Tensor | int)
    return torch.float64 if whole and abs(int(value)) > 2**24 else torch.float32


def _dtype_on(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """``dtype``, or the widest dtype of ``device`` in place of float64."""
    return widest(device) if dtype == torch.float64 else dtype


def _scalar(value: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Convert a scalar state, from any type or device that a checkpoint of torch uses."""
    dtype = _dtype_on(dtype, device)
    if not isinstance(value, Tensor):
        return torch.full((), float(value), dtype=dtype, device=device)
    if value.is_neg():  # kernels read memory without the lazy sign
        value = value.resolve_neg()
    if value.device == device and value.dtype == dtype and value.ndim == 0:
        return value
    return to_device(value.detach().reshape(()), device, dtype)
