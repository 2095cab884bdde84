"""Scaling what gradients are taken of."""

from typing import Any, TypeVar

from torch import Tensor

from ampopt._step.torch_private import pytree
from ampopt.loss_scale.arguments import check_scale_number, check_scale_tensor, no_scale
from ampopt.loss_scale.base import LossScale
from ampopt.loss_scale.product import product

__all__ = ["check_scale_number", "scale_outputs"]

_Outputs = TypeVar("_Outputs")


def scale_outputs(outputs: _Outputs, S: Any) -> _Outputs:  # the name that scales go by
    """Multiply a loss, or every tensor of a nested structure, by the loss scale.

    The product is taken in float32 at least, so that the loss of a float16 model does not
    overflow by being scaled. Its gradient does if ``S`` is above float16's largest number, 65504:
    what reaches a float16 tensor is float16. Compute losses in float32, as autocast does.

    Does not synchronize. Gradients flow to ``outputs``, none to ``S``. A scale on another device
    is brought to each output's.

    Example:
        >>> loss = torch.tensor([1.5], dtype=torch.float16)
        >>> scale_outputs({"loss": loss}, 2.0**16)
        {'loss': tensor([98304.])}

    ``loss * scale`` is the same for one tensor and a :class:`~ampopt.LossScale`.

    Gradients of the result carry ``S``, which they do not show: hand the same ``S`` to the control
    point of each optimizer that steps with them. A plain ``step()`` takes them as they are.

    Differs from ``torch.amp.GradScaler.scale``, where a float16 loss of shape ``(1,)`` stays
    float16 and overflows.

    Args:
        outputs: a floating-point tensor, or lists, tuples, named tuples, dicts and other classes
            registered as pytrees of such tensors, nested at will.
        S: ``None`` for no scaling, a positive number, a floating-point tensor of one element, or a
            :class:`~ampopt.LossScale`.

    Returns:
        The same structure of products: float64 for float64, else float32. For ``S=None``,
        ``outputs`` itself.

    Raises:
        TypeError: ``outputs`` holds something other than floating-point tensors, or ``S`` is
            nothing that can be a scale.
        ValueError: ``S`` is a tensor that has not one floating-point element, or is on meta and
            an output is not, or is a ``found_inf``; or a number that is not positive and in
            float32's normal range.
    """
    if S is None:
        return outputs
    scale = _factor(S)
    if isinstance(outputs, Tensor):
        return product(outputs, scale)
    return pytree.tree_map(lambda leaf: product(leaf, scale), outputs)


def _factor(scale: Any) -> float | Tensor:
    if isinstance(scale, LossScale):
        return scale.value
    if isinstance(scale, Tensor):
        check_scale_tensor("S", scale)
        # 0-d, so that the shape of the outputs is not broadcast against that of the scale.
        return scale.detach().reshape(())
    try:
        return check_scale_number(scale, "S")
    except TypeError:
        raise no_scale("S", scale) from None
