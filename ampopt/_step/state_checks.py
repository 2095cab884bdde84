"""Checks that the states of parameters are what the rule declares.

Kernels read and write as many elements of a state as its parameter has, so a state that is too
small would be accessed out of bounds. States come from checkpoints and from users, and a parameter
may be resized between steps, so states are checked whenever a plan is made.
"""

import bisect
import numbers
import operator
from collections.abc import Sequence
from itertools import chain, compress, count
from typing import Any

import torch
from torch import Tensor

from ampopt._step import small_states
from ampopt._step.declared_states import DeclaredStates
from ampopt._step.sharding import dtensor
from ampopt._step.small_states import RANDOM_KEY
from ampopt_kernels.low_bits import LOW_BITS
from ampopt_kernels.memory import all_have_memory, overlapping_ranges, share_memory
from ampopt_kernels.rule import MASTER, State
from ampopt_kernels.tensors import is_dense

__all__ = [
    "WrittenTensors",
    "check_master",
    "check_memory",
    "check_state",
]

_REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
_WITH_ADDRESSES = ("cpu", "cuda", "xpu")
"""Device types whose ``data_ptr`` is an address in bytes."""


WrittenTensors = tuple[str, Sequence[str], list[Tensor]]
"""Tensors that a step writes: the name of a parameter, names of states, and the tensors, first the
parameter and then these states.
"""

_device_of, _tensors_of = operator.attrgetter("device"), operator.itemgetter(2)


def check_state(name: str, state: Any, declared: DeclaredStates) -> WrittenTensors:
    """Raise for states, masters included, that are not what a rule declares. Changes nothing.

    A step makes states that are missing or ``None``. It converts a dtype that it can convert, a
    scalar of another dtype or device, and a state whose own elements overlap in memory: these do
    not raise.

    Args:
        name: the name of a parameter in messages.
        state: its state; an empty dict before the first step.
        declared: the states that the rule declares for it.

    Returns:
        The parameter and its states, for :func:`check_memory`.

    Raises:
        TypeError: a state is not a tensor, or has a dtype or layout that kernels do not support.
        ValueError: a state has another shape than declared.
        RuntimeError: a state is on another device than its parameter, or sharded differently.
    """
    param = declared.param
    small_states.check_whole_blocks(name, param, declared.codecs)
    if not isinstance(state, dict):
        raise TypeError(
            f"the state of {name} is a {type(state).__name__}, and must be a dict of its states: "
            "delete it (del optimizer.state[p]) to start with a new state"
        )
    if not state:
        return name, (), [param]
    if declared.has_master and (master := state.get(MASTER)) is not None:
        check_master(name, param, master)
    for part in declared.tensors:
        if (value := state.get(part.name)) is None:
            continue
        _check_tensor(name, param, part.name, value, part)
        small_states.check_codes(_state_name(part.name, name), state, part, param)
    for part in declared.scalars:
        _check_scalar(name, part.name, state.get(part.name))
    _check_scalar(name, RANDOM_KEY, state.get(RANDOM_KEY))
    keys = declared.keys_in(state)
    return name, keys, [param, *map(state.__getitem__, keys)]


def check_memory(written: list[WrittenTensors], others: Sequence[WrittenTensors] = ()) -> None:
    """Raise for tensors without memory, and for states that share memory with another tensor.

    Two parameters may share memory, as users tie them on purpose, unless one of them is not dense:
    a step works on a copy of it, and would overwrite the update of the other.

    Args:
        written: the tensors that a step writes.
        others: further parameters, with which none of ``written`` that is a state may share memory.

    Raises:
        TypeError: the values of one of ``written`` are in other tensors.
        RuntimeError: the storage of a tensor was freed, or has less memory than its elements take.
        ValueError: a state shares memory with another tensor, or a parameter that is not dense
            with another one of ``written``.
    """
    # No Python runs for each of thousands of tensors, if all are as they should be.
    everything = [*written, *others]
    own = dtensor.local_of_each(list(chain.from_iterable(map(_tensors_of, everything))))
    n_written = len(own) - len(everything) + len(written)
    kinds = [kind for kind in set(map(type, own)) if hasattr(kind, "__tensor_flatten__")]
    for (what, _), tensor in zip(_names_of(written), own, strict=False) if kinds else ():
        if type(tensor) in kinds:
            raise TypeError(
                f"{what} is a {type(tensor).__name__}, whose values are in other tensors, which a "
                "rule cannot update: leave the parameter to an optimizer of torch, or replace it "
                "by an ordinary tensor"
            )
    devices = list(map(_device_of, own))
    for device in set(devices):
        if device.type not in _WITH_ADDRESSES:
            continue
        on_device = list(compress(count(), map(device.__eq__, devices)))
        tensors = list(map(own.__getitem__, on_device))
        stepped = tensors[: bisect.bisect_left(on_device, n_written)]
        if not all_have_memory(stepped):
            place = next(i for i in on_device if not all_have_memory([own[i]]))
            what, _ = _names_of(everything)[place]
            raise RuntimeError(
                f"the memory of {what} was freed (by untyped_storage().resize_()), so that no step "
                "can use it: restore its storage before the step"
            )
        pairs = list(overlapping_ranges(tensors))
        names = _names_of(everything) if pairs else []
        for pair in pairs:
            (what, is_state), (with_, with_state) = (names[on_device[index]] for index in pair)
            both = [tensors[index] for index in pair]
            if is_state or with_state:
                problem = "updating one would change the other: replace the state by its clone()"
            elif all(map(is_dense, both)) or max(pair) >= len(stepped):
                continue
            else:
                problem = (
                    "of the updates of both, of which one works on a copy, as it is not dense in "
                    "memory, one would be lost: use one parameter in both places, or a clone()"
                )
            if share_memory(*both):
                raise ValueError(f"{what} shares memory with {with_}, so that {problem}")


def _names_of(written: list[WrittenTensors]) -> list[tuple[str, bool]]:
    """What messages call each tensor of ``written``, and whether it is a state."""
    return [
        (name, False) if key is None else (_state_name(key, name), True)
        for name, keys, _ in written
        for key in (None, *keys)
    ]


def check_master(name: str, param: Tensor, master: Any) -> None:
    """Raise if ``master``, the master in the state of ``param``, is invalid.

    Raises:
        TypeError: ``master`` is neither a float32 tensor nor the int8 part of a 24-bit master;
            else see :func:`check_state`.
        ValueError: see :func:`check_state`.
        RuntimeError: see :func:`check_state`.
    """
    _check_tensor(name, param, MASTER, master, State(MASTER))
    if master.dtype not in (torch.float32, LOW_BITS):
        raise TypeError(
            f"{_state_name(MASTER, name)} is {master.dtype}, and must be torch.float32, or the "
            "torch.int8 of master_bits=24: convert it, or delete it to have it made from the "
            "parameter"
        )


def _state_name(state: str, param: str) -> str:
    """The name of a state for a message."""
    return f"the state {state} of {param}"


def _check_tensor(name: str, param: Tensor, key: str, value: Any, part: State) -> None:
    """Raise unless ``value``, the state ``key`` of ``param``, is a tensor as ``part`` declares."""
    what, expected_shape = _state_name(key, name), torch.Size(part.beside(param.shape))
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{what} is {value!r}, of type {type(value).__name__}, and must be a tensor of shape "
            f"{tuple(expected_shape)}: delete it to start with a new one"
        )
    if value.layout != torch.strided:
        raise TypeError(
            f"{what} is {value.layout}, and must be dense: replace it by its to_dense()"
        )
    has_codes = value.dtype in ((LOW_BITS,) if key == MASTER else small_states.CODES)
    if not has_codes and value.dtype not in (_COMPLEX if param.is_complex() else _REAL):
        raise TypeError(
            f"{what} is {value.dtype}, which a parameter of {param.dtype} cannot have as state: "
            "convert it to the parameter's dtype"
        )
    if value.shape != expected_shape:
        raise ValueError(
            f"{what} has shape {tuple(value.shape)}, and must have {tuple(expected_shape)}, "
            f"since the parameter has shape {tuple(param.shape)}: load a checkpoint of this model, "
            "or, where the parameter was resized, resize the state too, or delete "
            "optimizer.state[p] to start with a new state"
        )
    if value.device != param.device:
        raise RuntimeError(
            f"{what} is on {value.device}, the parameter on {param.device}: move the state there, "
            "as optimizer.load_state_dict(optimizer.state_dict()) does with all states, or move "
            "the model before the first step"
        )
    if part.shape is None:
        _check_sharding(what, param, value)


def _check_sharding(what: str, param: Any, value: Any) -> None:
    """Raise unless a state has the mesh and placements of its parameter."""
    distributed = dtensor.is_dtensor(param)
    if dtensor.is_dtensor(value) != distributed:
        raise RuntimeError(
            f"{what} is a {type(value).__name__}, which the parameter is not: load it with "
            "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict, which shards states "
            "like their parameters"
        )
    if not distributed:
        return
    if value.device_mesh != param.device_mesh or value.placements != param.placements:
        raise RuntimeError(
            f"{what} is placed as {value.placements}, the parameter as {param.placements}: "
            "redistribute the state, state.redistribute(param.device_mesh, param.placements)"
        )
    state_shape, param_shape = dtensor.local(value).shape, dtensor.local(param).shape
    if state_shape != param_shape:
        raise ValueError(
            f"{what} has a local shard of shape {tuple(state_shape)}, the parameter one of "
            f"{tuple(param_shape)}: load a checkpoint of this model"
        )


def _check_scalar(name: str, key: str, value: Any) -> None:
    """Raise unless the scalar state ``key`` of a parameter is one real number, or ``None``."""
    if value is None or (type(value) is Tensor and not value.ndim and value.is_floating_point()):
        return
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return
    what = _state_name(key, name)
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{what} is {value!r}, of type {type(value).__name__}, and must be a number or a "
            "tensor of one element: delete it to start with a new one"
        )
    if value.is_complex() or value.layout != torch.strided:
        raise TypeError(
            f"{what} is {value.dtype}, {value.layout}, and must be one real number: replace it, or "
            "delete it to start with a new one"
        )
    if value.numel() != 1:
        raise ValueError(
            f"{what} has shape {tuple(value.shape)}, and must have one element, shape (): load a "
            "checkpoint of this model, or delete it to start with a new one"
        )
