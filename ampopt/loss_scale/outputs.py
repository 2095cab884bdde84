"""Multiply a loss by the loss scale, before the backward pass."""

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from torch import Tensor

from ampopt._step.torch_private import pytree
from ampopt.loss_scale.arguments import check_scale
from ampopt.loss_scale.base import LossScale, product
from ampopt.loss_scale.scaled_losses import note_scaled_loss

__all__ = ["scale_outputs"]

_Outputs = TypeVar("_Outputs")
_P = ParamSpec("_P")


def _also_as_s(function: Callable[_P, _Outputs]) -> Callable[_P, _Outputs]:
    """``function``, which also takes its argument ``scale`` under the former name ``S``."""

    @wraps(function)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _Outputs:
        if "S" in kwargs and "scale" not in kwargs:
            kwargs["scale"] = kwargs.pop("S")
        return function(*args, **kwargs)

    return called


@_also_as_s
def scale_outputs(outputs: _Outputs, scale: Any) -> _Outputs:
    """Multiply a loss, or every tensor of a nested structure, by the loss scale.

    The product is float32 or wider, so that the loss of a float16 model does not overflow
    (``torch.amp.GradScaler.scale`` keeps a float16 loss of shape ``(1,)`` in float16). For one
    tensor and a :class:`~ampopt.LossScale`, ``loss * scale`` is the same. Does not synchronize.

    Example:
        >>> loss = torch.tensor([1.5], dtype=torch.float16)
        >>> scale_outputs({"loss": loss}, 2.0**16)
        {'loss': tensor([98304.])}

    Traps: pass the same scale as ``grads_scaled_by`` to every optimizer that steps with the
    gradients, because a gradient does not show its scale. Compute losses in float32, as autocast
    does: the gradient of ``outputs`` is ``scale``, and float16 holds no more than 65504.

    Args:
        outputs: a floating-point tensor, or nested lists, tuples, named tuples, dicts and other
            classes registered as pytrees of such tensors.
        scale: ``None`` for no scaling, a positive number, a floating-point tensor of one element,
            or a :class:`~ampopt.LossScale`. It is copied to the device of each output, and gets no
            gradient.

    Returns:
        The same structure of products: float64 for float64, else float32. For ``scale=None``,
        ``outputs`` itself.

    Raises:
        TypeError: ``outputs`` holds something other than floating-point tensors, or ``scale`` is
            not ``None``, a number, a tensor or a ``LossScale``.
        ValueError: ``scale`` is a number that is not positive, or outside float32's normal range; a
            tensor that is not one floating-point element; a ``found_inf``; or on meta while an
            output is not.
    """
    if isinstance(outputs, LossScale):
        raise TypeError("the loss comes first: scale_outputs(loss, scale)")
    if scale is None:
        return outputs
    factor = check_scale("scale", scale)
    if isinstance(factor, LossScale):
        factor = factor.value
    elif isinstance(factor, Tensor):
        # 0-d, so that the shape of the outputs is not broadcast against that of the scale.
        factor = factor.detach().reshape(())

    def scaled(output: Any) -> Any:
        return note_scaled_loss(product(output, factor), scale)

    return scaled(outputs) if isinstance(outputs, Tensor) else pytree.tree_map(scaled, outputs)
