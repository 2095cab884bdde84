"""Torch's wrapper around the ``step`` of a class, which runs step hooks, told from what is in it.

Torch puts it there when the class makes its first instance: around the step that its author wrote,
or around the one that it inherits, which from then on stands in the class itself. So what a class
has depends on what was made before; what these functions answer does not.
"""

from typing import Any

import torch

from ampopt._step import torch_private

__all__ = [
    "HEEDS",
    "beneath_hooks",
    "has_own_step",
    "has_step",
    "hooked",
    "is_replaced",
    "is_watched",
    "run_step_hooks",
    "written_step",
]

hooked = torch.optim.Optimizer.profile_hook_step
"""Put that wrapper around a function."""

_WRAPPER = hooked(lambda self: None).__code__


def beneath_hooks(step: Any) -> Any:
    """The function ``step`` without torch's wrapper, if it is in one.

    Torch marks its wrappers, but ``functools.wraps`` copies the mark to what an author makes of
    one, so they are told by their code.
    """
    while getattr(step, "__code__", None) is _WRAPPER:
        step = step.__wrapped__
    return step


HEEDS = "_heeds_scaler"
"""Of what heeds a scaler around a step (see ``torch_scaler``): itself, as ``wraps`` copies this."""


def written_step(cls: type[torch.optim.Optimizer]) -> Any:
    """The ``step`` of ``cls`` as its author wrote it, which no scaler and no hook is to see."""
    step = beneath_hooks(cls.step)
    return step.__wrapped__ if getattr(step, HEEDS, None) is step else step


def has_own_step(cls: type) -> bool:
    """Whether ``cls`` itself defines a ``step``, and does not merely have hooks around another."""
    inherited = getattr(super(cls, cls), "step", None)
    return "step" in vars(cls) and beneath_hooks(cls.step) is not beneath_hooks(inherited)  # type: ignore[attr-defined]


def has_step(cls: type[torch.optim.Optimizer]) -> bool:
    """Whether anybody wrote a ``step`` for ``cls``: torch's base has one that only raises."""
    return beneath_hooks(cls.step) is not beneath_hooks(torch.optim.Optimizer.step)


def is_replaced(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the instance has a step of its own, but for a scheduler's wrapper."""
    given = vars(optimizer).get("step")
    if given is None:
        return False
    scheduled = torch_private.is_wrapped_by_scheduler(given)
    return not (scheduled and given.__wrapped__ is type(optimizer).step)


def is_watched(optimizer: torch.optim.Optimizer, step: Any) -> bool:
    """Whether anybody would miss a ``step`` that is not taken through ``optimizer.step``.

    Hooks would, a profiler, which is shown each step, and who has put another step on the instance
    or, since it was made, on its class. Going through torch's wrapper for none of them is a tenth
    of a small network's step.

    Args:
        optimizer: about to step.
        step: what its class defines.
    """
    return bool(
        any(torch_private.hooks_of(optimizer))
        or torch_private.global_pre_hooks
        or torch_private.global_post_hooks
        or torch_private.is_profiled()
        or ("step" in vars(optimizer) and is_replaced(optimizer))
        or beneath_hooks(type(optimizer).step) is not step
    )


def run_step_hooks(optimizer: torch.optim.Optimizer) -> None:
    """What an attempt that does not step still does: hooks run, and schedulers see a step."""
    _no_step(optimizer)
    torch_private.mark_as_called(optimizer)


# A step hook may hand the step other arguments.
_no_step = hooked(lambda self, *args, **kwargs: None)
