"""The state that a rule keeps of a parameter: made, completed, taken as checkpoints have it.

And where it lives: small states, and step counts, end to end, so that a CPU can take them as one.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ampopt._step import dtensor, gradients
from ampopt._step.spread_marginals import SpreadMarginals, on_each_rank
from ampopt_kernels.cpu.bundles import SMALL
from ampopt_kernels.rule import MASTER, PARAM, State
from ampopt_kernels.tensors import real, widest
from ampopt_kernels.transfers import carried

if TYPE_CHECKING:
    from ampopt._step.by_rule import RuleSteps

__all__ = ["lay_end_to_end", "shares_storage", "state_of"]


def state_of(steps: "RuleSteps", param: Tensor, flags: tuple[bool, ...]) -> dict[str, Any]:
    """The state of ``param``, made where it is missing, and on the device where it is not."""
    optimizer, rule = steps.optimizer, steps.rule
    if not rule.all_state_for(flags):
        return optimizer.state.get(param, {})  # as in torch's, where there is nothing to keep
    state = optimizer.state[param]
    master = state.get(MASTER)
    like = param if master is None else master
    scalars = rule.scalar_state_for(flags)
    if scalars and steps.complete_state is not None:
        steps.complete_state(state)
    for part in rule.tensor_state_for(flags):
        value = state.get(part.name)
        if value is not None and dtensor.is_spread(value) != dtensor.is_spread(param):
            raise RuntimeError(
                f"{part.name} of {gradients.name_of(optimizer.param_groups, param)} is a "
                f"{type(value).__name__}, which the parameter is not: load it with "
                "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict, which "
                "places states as their parameters"
            )
        dtype = _dtype_of(part, like)
        if value is not None and (master is not None or part.dtype is not None):
            # From torch, or from a run without masters: in the parameter's dtype.
            value = state[part.name] = value.to(dtype)
        if value is not None and part.shape is not None:
            state[part.name] = on_each_rank(value).contiguous()
        if value is None:
            initial = None if part.init == PARAM else _initial(part, optimizer.param_groups, param)
            state[part.name] = _made(part, like, dtype, initial)
    undeclared = [state.get(part.name) for part in scalars if part.dtype is None]
    dtype = _scalar_dtype(undeclared, param.device)
    for part in scalars:
        own = widest(param.device) if part.dtype == torch.float64 else part.dtype or dtype
        value = state.get(part.name)
        if value is None:
            value = torch.zeros((), dtype=own, device=param.device)
            value.fill_(_initial(part, optimizer.param_groups, param))
        state[part.name] = _scalar(value, own, param.device)
    return state


def _made(part: State, like: Tensor, dtype: torch.dtype, initial: Any) -> Tensor:
    """The state ``part`` of a parameter, or master, ``like``; a copy of it without ``initial``."""
    if part.shape is not None:
        made = torch.empty(part.beside(like.shape), dtype=dtype, device=like.device).fill_(initial)
        return SpreadMarginals(like).replicated(part, made) if dtensor.is_spread(like) else made
    made = torch.empty_like(dtensor.local(like), dtype=dtype)
    if initial is None:
        made.copy_(dtensor.local(like))
    else:
        real(made).fill_(initial)
    return dtensor.spread_like(made, like)


def lay_end_to_end(params: Sequence[Tensor], states: Sequence[dict[str, Any]], name: str) -> None:
    """Move ``state[name]`` of CPU parameters, where it is small, into one buffer, as views of it.

    Values, shapes and dtypes stay. A tensor that shares its storage already, such as one that was
    moved before, stays where it is: parameters whose gradients come and go do not make it move
    at every step. The buffer lives as long as any of its views.
    """
    moved = [
        (state, state[name], part)
        for param, state in zip(params, states, strict=True)
        if param.device.type == "cpu"
        and isinstance(state.get(name), Tensor)
        # Of large parameters, step counts.
        and 0 < (part := dtensor.local(state[name])).numel() <= SMALL
        and not shares_storage(part)
        and part.is_contiguous()
    ]
    by_dtype: dict[torch.dtype, list[tuple[dict[str, Any], Tensor, Tensor]]] = {}
    for entry in moved:
        by_dtype.setdefault(entry[1].dtype, []).append(entry)
    for entries in by_dtype.values():
        if len(entries) < 2:
            continue
        buffer = torch.cat([old.detach().reshape(-1) for _, _, old in entries])
        parts = buffer.split([old.numel() for _, _, old in entries])
        for (state, whole, old), part in zip(entries, parts, strict=True):
            state[name] = dtensor.spread_like(part.view(old.shape), whole)


def shares_storage(tensor: Tensor) -> bool:
    """Whether there is more in the memory of ``tensor`` than ``tensor``."""
    tensor = dtensor.local(tensor)
    if tensor.layout != torch.strided:  # as the momentum of sparse gradients, which has no storage
        return False
    return tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()


def _initial(part: State, groups: list[dict[str, Any]], param: Tensor) -> Any:
    """The value of ``part`` before the first step. Reads no device tensor."""
    if not isinstance(part.init, str):
        return part.init
    group = next(g for g in groups if any(p is param for p in g["params"]))
    if part.init not in group:
        raise KeyError(
            f"State {part.name!r} begins with the entry {part.init!r} of each param group, which "
            f"has {sorted(k for k in group if k != 'params')}: add it to the optimizer's defaults, "
            "or have it begin with a number, or as a copy of the parameter, 'param'"
        )
    value = group[part.init]
    return value.detach().reshape(()) if isinstance(value, Tensor) else value


def _dtype_of(part: State, like: Tensor) -> torch.dtype:
    """Of a state beside the parameter, or master, ``like``."""
    dtype = part.dtype or like.dtype
    # Of bfloat16 that is complex64, on a torch that has a narrower one, which fills none, too.
    return torch.promote_types(dtype, torch.complex32) if like.is_complex() else dtype


def _scalar_dtype(values: list[Any], device: torch.device) -> torch.dtype:
    """Of the scalar states of a parameter: torch's, float64 where that is the default dtype."""
    kept = [value.dtype for value in values if isinstance(value, Tensor)]
    wide = torch.float64 in (kept or [torch.get_default_dtype()])
    return widest(device) if wide else torch.float32


def _scalar(value: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A scalar state, from wherever a checkpoint of torch's may keep it."""
    if not isinstance(value, Tensor):
        return torch.full((), float(value), dtype=dtype, device=device)
    if value.device == device and value.dtype == dtype and value.ndim == 0:
        return value
    return carried(value.detach().reshape(()), device, dtype)
