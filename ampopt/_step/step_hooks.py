"""Distinguishes torch's wrapper around ``step``, which runs step hooks, from the wrapped function.

When a class makes its first instance, torch replaces ``cls.step``, written or inherited, by a
wrapper (``profile_hook_step``). So ``vars(cls)`` depends on which instances were made before. The
functions here return the same before and after.
"""

from typing import Any

import torch

from ampopt._step import torch_private

__all__ = [
    "SCALER_WRAPPER",
    "beneath_hooks",
    "has_hooks",
    "has_own_step",
    "has_step",
    "hooked",
    "is_replaced",
    "is_watched",
    "run_step_hooks",
    "written_step",
]

hooked = torch.optim.Optimizer.profile_hook_step
"""Torch's decorator that puts the wrapper around a function."""

_WRAPPER = hooked(lambda self: None).__code__


def beneath_hooks(step: Any) -> Any:
    """The function inside torch's wrapper; ``step`` itself if it is not wrapped.

    Wrappers are recognised by their code object. Torch also marks them by an attribute, but
    ``functools.wraps`` copies that to other functions.
    """
    while getattr(step, "__code__", None) is _WRAPPER:
        step = step.__wrapped__
    return step


SCALER_WRAPPER = "_scaler_wrapper"
"""Attribute of ampopt's own wrapper around a step (see ``torch_scaler``). Its value is the wrapper
itself: on another function, the attribute is a copy that ``functools.wraps`` made."""


def written_step(cls: type[torch.optim.Optimizer]) -> Any:
    """The ``step`` of ``cls`` as its author wrote it, without torch's and ampopt's wrappers."""
    step = beneath_hooks(cls.step)
    return step.__wrapped__ if getattr(step, SCALER_WRAPPER, None) is step else step


def has_own_step(cls: type) -> bool:
    """Whether ``cls`` itself defines ``step``, and not only torch's wrapper of an inherited one."""
    inherited_step = getattr(super(cls, cls), "step", None)
    return "step" in vars(cls) and beneath_hooks(cls.step) is not beneath_hooks(inherited_step)  # type: ignore[attr-defined]


def has_step(cls: type[torch.optim.Optimizer]) -> bool:
    """Whether ``cls`` has a ``step`` other than that of torch's base class, which only raises."""
    return beneath_hooks(cls.step) is not beneath_hooks(torch.optim.Optimizer.step)


def is_replaced(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``step`` was replaced on the instance, other than by a learning-rate scheduler."""
    step = vars(optimizer).get("step")
    if step is None:
        return False
    is_scheduled = torch_private.is_wrapped_by_scheduler(step)
    return not (is_scheduled and step.__wrapped__ is type(optimizer).step)


def is_watched(optimizer: torch.optim.Optimizer, step: Any) -> bool:
    """Whether the step has to go through ``optimizer.step`` and torch's wrapper.

    That is so if there are step hooks, if a profiler is on, or if ``step`` was replaced on the
    instance or on the class. Otherwise the wrapper is skipped, because it costs time.

    Args:
        optimizer: the optimizer that is about to step.
        step: the function that its class defines.
    """
    return bool(
        has_hooks(optimizer)
        or ("step" in vars(optimizer) and is_replaced(optimizer))
        or beneath_hooks(type(optimizer).step) is not step
    )


def has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether torch's wrapper around the step has something to do: step hooks, or a profiler."""
    return bool(
        any(torch_private.hooks_of(optimizer))
        or torch_private.global_pre_hooks
        or torch_private.global_post_hooks
        or torch_private.is_profiled()
    )


def run_step_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Run the step hooks without a step, and mark ``step`` as called for torch's schedulers."""
    _no_step(optimizer)
    torch_private.mark_as_called(optimizer)


# A step pre-hook may replace the arguments of the step, so it takes any.
_no_step = hooked(lambda self, *args, **kwargs: None)
