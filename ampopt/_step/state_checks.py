"""The states that a step is handed, compared with what the rule declares for each parameter.

Kernels read and write as many elements of a state as its parameter has, whatever its own size: a
smaller state would be read and written past its end. States come from checkpoints and from users,
and a parameter may be resized between steps, so they are checked whenever rows are made.
"""

import numbers
import operator
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampopt._step.sharding import dtensor
from ampopt_kernels.rule import MASTER, Rule, State
from ampopt_kernels.tensors import is_dense, memory_of, share_memory

__all__ = ["KEYS", "Stepped", "check_master", "check_states"]

KEYS = "rounding_key"
"""Where ``optimizer.state[p]`` keeps the key of the last step of ``p``; see ``stochastic``."""

_REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
_PLAIN = (Tensor, torch.nn.Parameter)
_WITH_ADDRESSES = ("cpu", "cuda", "xpu")
"""Types of devices whose ``data_ptr`` is an address in bytes."""


class Stepped(NamedTuple):
    """A parameter that a step is to update, and what it is handed for it.

    Attributes:
        name: how messages call it.
        param: the parameter.
        state: of it; empty where there is none yet.
        flags: of the rule, for it.
        has_master: whether the step updates a master of it.
    """

    name: str
    param: Tensor
    state: Any
    flags: tuple[bool, ...]
    has_master: bool


def check_states(rule: Rule, stepped: Iterable[Stepped]) -> None:
    """Refuse states, masters among them, that are not what ``rule`` declares. Changes nothing.

    What is missing or ``None`` is made by the step; a dtype that can be kept, a scalar of another
    dtype or device, and a state whose elements share memory with each other, are converted by it.

    Raises:
        TypeError: a state is no tensor, or of a dtype or layout that no kernel takes.
        ValueError: its shape is another than declared, or it shares memory with another tensor that
            the step writes.
        RuntimeError: it is on another device than its parameter, or spread over ranks otherwise.
    """
    written: dict[torch.device, list[_Written]] = {}
    for one in stepped:
        name, param, state, flags, has_master = one
        if not isinstance(state, dict):
            raise TypeError(
                f"the state of {name} is a {type(state).__name__}, and must be a dict of its "
                "states: delete it (del optimizer.state[p]) to begin anew"
            )
        tensors = []
        if has_master and (master := state.get(MASTER)) is not None:
            check_master(name, param, master)
            tensors.append((MASTER, master))
        shape, dtype, device = param.shape, param.dtype, param.device
        for part in rule.tensor_state_for(flags):
            if (value := state.get(part.name)) is None:
                continue
            # Of hundreds of parameters most states are plain tensors just like them.
            alike = type(value) is Tensor and type(param) in _PLAIN and part.shape is None
            if not (
                alike
                and value.shape == shape
                and value.dtype == dtype
                and value.device == device
                and value.layout == torch.strided
            ):
                _check_tensor(name, param, part.name, value, part)
            tensors.append((part.name, value))
        for part in rule.scalar_state_for(flags):
            _check_scalar(name, part.name, state.get(part.name))
        _check_scalar(name, KEYS, state.get(KEYS))
        if device.type in _WITH_ADDRESSES:
            memory = written.setdefault(device, [])
            for key, tensor in ((None, param), *tensors):
                tensor = dtensor.local(tensor)
                memory.append((*memory_of(tensor), name, key, tensor))
    for memory in written.values():
        _check_apart(memory)


def check_master(name: str, param: Tensor, master: Any) -> None:
    """Refuse what stands in the state of ``param`` for its float32 master.

    Raises:
        TypeError: see :func:`check_states`, as for the others.
        ValueError: likewise.
        RuntimeError: likewise.
    """
    _check_tensor(name, param, MASTER, master, State(MASTER))
    if master.dtype != torch.float32:
        raise TypeError(
            f"{_named(MASTER, name)} is {master.dtype}, and must be torch.float32: convert it, or "
            "delete it to have it made of the parameter"
        )


def _named(state: str, param: str) -> str:
    return f"the state {state} of {param}"


def _check_tensor(name: str, param: Tensor, key: str, value: Any, part: State) -> None:
    """Refuse the state ``key`` of ``param`` unless it is a tensor as ``part`` declares it."""
    what, wanted = _named(key, name), torch.Size(part.beside(param.shape))
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{what} is {value!r}, of type {type(value).__name__}, and must be a tensor of shape "
            f"{tuple(wanted)}: delete it to begin anew"
        )
    if value.layout != torch.strided:
        raise TypeError(
            f"{what} is {value.layout}, and must be dense: replace it by its to_dense()"
        )
    if value.dtype not in (_COMPLEX if param.is_complex() else _REAL):
        raise TypeError(
            f"{what} is {value.dtype}, which cannot be kept beside a parameter of {param.dtype}: "
            "convert it to the parameter's dtype"
        )
    if value.shape != wanted:
        raise ValueError(
            f"{what} has shape {tuple(value.shape)}, and must have {tuple(wanted)}, since the "
            f"parameter has shape {tuple(param.shape)}: load a checkpoint of this model, or, where "
            "the parameter was resized, resize the state too, or delete optimizer.state[p] to "
            "begin anew"
        )
    if value.device != param.device:
        raise RuntimeError(
            f"{what} is on {value.device}, the parameter on {param.device}: move the state there, "
            "as optimizer.load_state_dict(optimizer.state_dict()) does with all states, or move "
            "the model before the first step"
        )
    if part.shape is None:
        _check_spread(what, param, value)


def _check_spread(what: str, param: Any, value: Any) -> None:
    """Refuse a state that is not spread over ranks as its parameter is."""
    spread = dtensor.is_spread(param)
    if dtensor.is_spread(value) != spread:
        raise RuntimeError(
            f"{what} is a {type(value).__name__}, which the parameter is not: load it with "
            "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict, which places states "
            "as their parameters"
        )
    if not spread:
        return
    if value.device_mesh != param.device_mesh or value.placements != param.placements:
        raise RuntimeError(
            f"{what} is placed as {value.placements}, the parameter as {param.placements}: "
            "redistribute the state, state.redistribute(param.device_mesh, param.placements)"
        )
    here, wanted = dtensor.local(value).shape, dtensor.local(param).shape
    if here != wanted:
        raise ValueError(
            f"{what} has a local part of shape {tuple(here)}, that of the parameter has "
            f"{tuple(wanted)}: load a checkpoint of this model"
        )


def _check_scalar(name: str, key: str, value: Any) -> None:
    """Refuse the scalar state ``key`` of a parameter unless it is one real number, or ``None``."""
    if value is None or (type(value) is Tensor and not value.ndim and value.is_floating_point()):
        return
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return
    what = _named(key, name)
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{what} is {value!r}, of type {type(value).__name__}, and must be a number or a "
            "tensor of one element: delete it to begin anew"
        )
    if value.is_complex() or value.layout != torch.strided:
        raise TypeError(
            f"{what} is {value.dtype}, {value.layout}, and must be one real number: replace it, or "
            "delete it to begin anew"
        )
    if value.numel() != 1:
        raise ValueError(
            f"{what} has shape {tuple(value.shape)}, and must have one element, shape (): load a "
            "checkpoint of this model, or delete it to begin anew"
        )


# --- memory that two tensors share ----------------------------------------------------------------


_Written = tuple[int, int, str, str | None, Tensor]
"""First byte and end of a tensor that a step writes, its parameter, its state (``None`` for the
parameter itself), and the tensor."""

_start_of = operator.itemgetter(0)


def _check_apart(memory: list[_Written]) -> None:
    """Refuse a state that shares memory with another tensor of ``memory``.

    Two parameters may, of which users know.
    """
    memory.sort(key=_start_of)
    open_: list[_Written] = []  # those that may reach beyond where the next one starts
    reach = 0
    for one in memory:
        start, end, name, state, tensor = one
        if start >= reach:
            open_.clear()
        for _, other_end, other_name, other_state, other in open_:
            if other_end <= start or state is None is other_state:
                continue
            if _meet(tensor, other):
                what, with_ = (
                    param if key is None else _named(key, param)
                    for param, key in ((name, state), (other_name, other_state))
                )
                raise ValueError(
                    f"{what} shares memory with {with_}, so that updating one would change the "
                    "other: replace the state by its clone()"
                )
        if end > start:
            open_.append(one)
            reach = max(reach, end)


def _meet(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors whose ranges of memory meet have an element in the same place."""
    return (is_dense(one) and is_dense(other)) or share_memory(one, other)
