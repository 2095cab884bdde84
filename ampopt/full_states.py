"""The state of an optimizer in full precision, as torch's optimizers load it."""

from typing import Any

import torch

from ampopt._step.gradients import params_of
from ampopt._step.masters import full_master
from ampopt._step.small_states import RANDOM_KEY, decode, has_codes, restore_names
from ampopt.elementwise import ElementwiseOptimizer
from ampopt.options import MASTER_BITS, STATE_BITS
from ampopt_kernels.rule import MASTER

__all__ = ["full_state_dict"]


def full_state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The ``state_dict`` of an optimizer, with every state in full precision.

    An optimizer with ``state_bits=8`` or ``16`` saves codes and scales, which another such
    optimizer loads bit for bit. Torch's optimizers, and other programs, need values::

        torch_optimizer.load_state_dict(ampopt.full_state_dict(optimizer))

    Args:
        optimizer: any optimizer, even a ``ZeroRedundancyOptimizer``. Without ``state_bits`` and
            ``master_bits``, the result is its ``state_dict()``.

    Returns:
        The state dict. States and masters that were kept in fewer bits are new float32 tensors,
        of the same sharding. All others are the optimizer's own tensors.
        Does not synchronize.

    Raises:
        TypeError: ``optimizer`` is not a ``torch.optim.Optimizer``.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"full_state_dict takes an optimizer, got {type(optimizer).__name__}")
    state_dict = optimizer.state_dict()
    ours = getattr(optimizer, "optim", optimizer)  # ZeRO steps by `optim`
    if not isinstance(ours, ElementwiseOptimizer):
        return state_dict
    parts = (*ours.rule.state, *ours._ampopt.runner.second_states)
    keys = params_of(state_dict["param_groups"])
    states, params = {}, dict(zip(keys, params_of(optimizer.param_groups), strict=True))
    for key, state in state_dict["state"].items():
        states[key] = state
        if key not in params:  # users may keep other values under their own keys
            continue
        states[key] = full = dict(state)
        restore_names(full, parts)
        own = torch.float32 if MASTER in full else params[key].dtype
        for part in parts:
            value = full.get(part.name)
            if isinstance(value, torch.Tensor) and has_codes(full, part):
                decode(full, part)
            elif (
                isinstance(value, torch.Tensor)
                and value.dtype.itemsize < 4
                and value.dtype != (part.dtype or own)
            ):
                full[part.name] = value.float()
        full.pop(RANDOM_KEY, None)
        if (master := full.get(MASTER)) is not None:
            full[MASTER] = full_master(params[key], master)
    groups = [dict(group) for group in state_dict["param_groups"]]
    for group in groups:
        group.pop(STATE_BITS.name, None)
        group.pop(MASTER_BITS.name, None)
    return {**state_dict, "state": states, "param_groups": groups}
