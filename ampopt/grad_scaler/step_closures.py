"""The closures that ``ampopt.GradScaler.step`` takes: with or without the scale as an argument."""

import inspect
from collections.abc import Callable
from typing import Any

__all__ = ["evaluation", "refusal", "split"]


def split(args: Any, kwargs: Any) -> tuple[Callable[..., Any] | None, Any, dict[str, Any]]:
    """Split the arguments of ``step`` into the closure, the other positional ones, and keywords."""
    kwargs = dict(kwargs)
    if args and (args[0] is None or callable(args[0])):
        return args[0], args[1:], kwargs
    return kwargs.pop("closure", None), args, kwargs


def evaluation(scaler: Any, closure: Callable[..., Any]) -> Callable[[Any], Any]:
    """Wrap ``closure`` as ``closure(scale) -> loss``, as ``unscale_and_step`` calls it.

    Args:
        scaler: the ``GradScaler``; its ``scale`` multiplies by the scale of the evaluation
            meanwhile.
        closure: the user's closure, with or without an argument for the scale.
    """
    takes_scale = _takes_scale(closure)

    def evaluate(scale: Any) -> Any:
        scaler._replaying, scaler._has_scaled = scale, False
        try:
            loss = closure(scale) if takes_scale else closure()
            if not (takes_scale or scaler._has_scaled or scale is None):
                raise RuntimeError(
                    "the closure has not scaled its loss: call scaler.scale(loss).backward() "
                    "in the closure, or write `def closure(scale)` and call "
                    "scale_outputs(loss, scale).backward()"
                )
        finally:
            scaler._replaying = None
        return loss

    return evaluate


def refusal(optimizer: Any, controlled: bool) -> Exception:
    """Make the error that says why ``optimizer`` cannot run a closure, and what to do.

    Args:
        optimizer: the optimizer that was passed to ``GradScaler.step``.
        controlled: whether it has ampopt's ``unscale_and_step`` and the arguments fit that.
    """
    name = type(optimizer).__name__
    if controlled:
        return RuntimeError(
            "step(optimizer, closure) computes new gradients, but unscale_() was called for the "
            "old ones: leave unscale_() out, or call discard(optimizer) first"
        )
    if hasattr(type(optimizer), "unscale_and_step"):
        return TypeError(
            f"with a closure, scaler.step passes only max_norm, max_replays and preserve_rng to "
            f"{name}: remove the other arguments"
        )
    return RuntimeError(
        f"{name} cannot run a closure again when its gradients overflow. Use the class of that "
        "name in ampopt, or derive one from ampopt.Optimizer; or call the closure yourself and "
        "then scaler.step(optimizer)"
    )


def _takes_scale(closure: Callable[..., Any]) -> bool:
    """Whether ``closure`` has to be called with the scale, not without arguments.

    Raises:
        TypeError: ``closure`` requires more than one argument.
    """
    try:
        signature = inspect.signature(closure)
    except ValueError:  # some built-in callables have no signature
        return False
    for takes, arguments in ((False, ()), (True, (object(),))):
        try:
            signature.bind(*arguments)
        except TypeError:
            continue
        return takes
    raise TypeError(
        f"closure{signature} must take no argument and use scaler.scale(loss), or take the scale "
        "as its one argument"
    )
