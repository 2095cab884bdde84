"""Multiply a loss by the loss scale, before the backward pass."""

from typing import Any, TypeVar

from torch import Tensor

from ampopt._step.torch_private import pytree
from ampopt.loss_scale.arguments import check_scale_number, check_scale_tensor, no_scale
from ampopt.loss_scale.base import LossScale, product
from ampopt.loss_scale.scalings import note_scaling

__all__ = ["check_scale_number", "scale_outputs"]

_Outputs = TypeVar("_Outputs")


def scale_outputs(outputs: _Outputs, S: Any) -> _Outputs:  # the name that scales go by
    """Multiply a loss, or every tensor of a nested structure, by the loss scale.

    The product is float32 or wider, so scaling does not overflow the loss of a float16 model. The
    gradient of the unscaled loss is ``S``: if the loss is a float16 tensor and ``S`` is above
    65504, float16's largest number, that gradient is inf. Compute losses in float32, as autocast
    does.

    Does not synchronize. Gradients flow to ``outputs``, none to ``S``. A scale on another device is
    copied to that of each output.

    Example:
        >>> loss = torch.tensor([1.5], dtype=torch.float16)
        >>> scale_outputs({"loss": loss}, 2.0**16)
        {'loss': tensor([98304.])}

    ``loss * scale`` is the same for one tensor and a :class:`~ampopt.LossScale`.

    The gradients are ``S`` times those of the loss. Pass the same ``S`` as ``grads_scaled_by`` to
    every optimizer that steps with them: nothing in a gradient shows its scale. The first step that
    is told of no scale after this call warns.

    Differs from ``torch.amp.GradScaler.scale``, which keeps a float16 loss of shape ``(1,)`` in
    float16, where it overflows.

    Args:
        outputs: a floating-point tensor, or nested lists, tuples, named tuples, dicts and other
            classes registered as pytrees of such tensors.
        S: the loss scale: ``None`` for no scaling, a positive number, a floating-point tensor of
            one element, or a :class:`~ampopt.LossScale`.

    Returns:
        The same structure of products: float64 for float64, else float32. For ``S=None``,
        ``outputs`` itself.

    Raises:
        TypeError: ``outputs`` holds something other than floating-point tensors, or ``S`` is not
            ``None``, a number, a tensor or a ``LossScale``.
        ValueError: ``S`` is a tensor that is not one floating-point element, that is on meta while
            an output is not, or that is a ``found_inf``; or a number that is not positive and in
            float32's normal range.
    """
    if S is None:
        return outputs
    scale = _factor(S)

    def scaled(output: Any) -> Any:
        return note_scaling(product(output, scale), S)

    return scaled(outputs) if isinstance(outputs, Tensor) else pytree.tree_map(scaled, outputs)


def _factor(scale: Any) -> float | Tensor:
    """The number or 0-d tensor to multiply by: the value of ``scale``, checked."""
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
