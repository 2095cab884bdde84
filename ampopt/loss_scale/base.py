"""The base class of loss scales, and what an optimizer reads from one."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from ampopt.loss_scale.scaled_losses import note_scaled_loss
from ampopt_kernels.devices import to_device
from ampopt_kernels.next_scale import PolicyConstants

__all__ = [
    "AnyScale",
    "Device",
    "LossScale",
    "drops",
    "host_may_read",
    "product",
]

Device = torch.device | str | int


class _Generation:
    """Identifies one value of a scale. Optimizers hold it weakly, to refuse its second use."""

    __slots__ = ("__weakref__",)


class AnyScale(ABC):
    """A scale as optimizers use it: a :class:`LossScale`, or a wrapped number or tensor.

    A subclass provides:

    * ``_value``, the scale: a floating-point tensor of one element;
    * ``_drop``: whether an update is skipped if its gradients overflowed;
    * ``_policy``: the schedule as ``PolicyConstants``, from which the device computes the next
      scale; ``None`` for a scale that never changes;
    * ``_counters``, if there is a ``_policy``: an int32 tensor of shape (2,) with the finite steps
      counted towards the next growth, and the overflows left before the scale is lowered;
    * ``_with(value, counters)``: the next scale, as the caller gets it, from the value and the
      counters that the device computed;
    * ``_unstepped()``: the next scale, as the caller gets it, if no parameter had a gradient;
    * ``_generation``: a weakly referenceable object that identifies this value of the scale. An
      optimizer steps with it once and refuses it the second time. ``None`` allows any number of
      steps.
    """

    _policy: PolicyConstants | None = None
    _drop: bool = True

    _value: Tensor
    _counters: Tensor | None = None
    _generation: _Generation | None = None

    @abstractmethod
    def _with(self, value: Tensor, counters: Tensor) -> Any:
        """The next scale as the caller gets it, from the value and counters of the device."""

    @abstractmethod
    def _unstepped(self) -> Any:
        """The next scale as the caller gets it, if no parameter had a gradient."""


class LossScale(AnyScale):
    """The number that losses, and so gradients, are multiplied by: float32, on the device.

    A step does not change the scale that it is passed. It returns the next one::

        scale = DynamicLossScale()
        for batch in batches:
            optimizer.zero_grad()
            scale_outputs(loss_of(batch), scale).backward()
            _, _, scale = optimizer.unscale_and_step(grads_scaled_by=scale)

    For a loss that is one tensor, ``(loss_of(batch) * scale).backward()`` does the same.

    There are two classes of scales: :class:`DynamicLossScale` and :class:`StaticLossScale`. A scale
    object is immutable, with two exceptions: it moves to a device when it is first used, and
    :meth:`load_state_dict` replaces its contents.
    """

    # For authors of subclasses: provide the abstract methods, and `_value`, `_policy` and the
    # others that `AnyScale` lists. Without a `_policy`, a scale is its own next scale and has no
    # `_generation`. With one, each next scale, copy and unpickled scale has its own, and loading
    # makes a new one.

    _placed: bool = False

    def _set(self, value: Tensor, counters: Tensor | None, placed: bool) -> None:
        """Store value and counters, with a new generation if the scale has counters.

        ``placed`` says whether the device of ``value`` is final; if not, the first use decides.
        """
        self._value, self._counters, self._placed = value, counters, placed
        self._generation = None if counters is None else _Generation()

    @property
    def value(self) -> Tensor:
        """The scale: a float32 0-d tensor on its device, or on the CPU before it has one.

        Does not synchronize. Do not write to it: the backward pass of a loss may still need it.
        """
        return self._value

    @property
    def drop_overflow_update(self) -> bool:
        """Whether an update is skipped if its gradients overflowed."""
        return self._drop

    @property
    def device(self) -> torch.device | None:
        """The device of the scale; ``None`` until the first use, or ``device=``, sets it."""
        return self._value.device if self._placed else None

    @abstractmethod
    def next(self, found_inf: Any) -> "LossScale":
        """The scale after one more step. Does not synchronize.

        For authors of their own step hooks or loops. Optimizers compute the same in the kernels of
        the step.

        Args:
            found_inf: whether the step overflowed: a bool, a number, or a tensor of one element.
                Values above 0 mean an overflow, so a sum of flags works. NaN or a negative number
                in a tensor counts as no overflow, and is no error, because checking it would
                synchronize. A scale without a device moves to that of the tensor.

        Returns:
            A new scale; a static scale returns itself.

        Raises:
            TypeError: ``found_inf`` is not a real number or tensor.
            ValueError: ``found_inf`` has more or fewer than one element; or is a number that is NaN
                or negative; or is on a device while the scale is on the CPU, so that the CPU would
                have to wait.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """All that has to be saved, as plain Python numbers and strings. Synchronizes."""

    def grad_scaler_state_dict(self) -> dict[str, Any]:
        """The state for ``torch.amp.GradScaler.load_state_dict``, to continue there. Synchronizes.

        Torch's scaler then has the scale, its factors and interval, and the finite steps counted so
        far. It has no other settings, such as ``hysteresis`` or ``min_scale``; a static scale stays
        constant there, too.
        """
        return {
            "scale": self.item(),
            "growth_factor": 1.0,
            "backoff_factor": 1.0,
            "growth_interval": 2000,
            "_growth_tracker": 0,
        }

    @abstractmethod
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replace value, counters and settings by saved ones; the scale stays on its device.

        The state may also come from a ``GradScaler``, of torch or of ampopt. A dynamic scale then
        continues where the scaler stopped. Settings that torch's scaler lacks, such as
        ``min_scale``, keep their present values.

        This is the one method that changes a scale in place. Scales that were computed from this
        one, and tensors that :attr:`value` returned, do not change.

        Args:
            state_dict: what :meth:`state_dict` of a scale or a scaler returned.

        Raises:
            TypeError: an entry is of the wrong type.
            ValueError: an entry is missing, unknown or out of range, or the state is that of
                another class of scale. The scale is unchanged then.
        """

    def item(self) -> float:
        """The scale as a Python number. Synchronizes: the host waits for the device."""
        return self._value.item()

    def __float__(self) -> float:
        """The same as :meth:`item`. Synchronizes."""
        return self.item()

    def __mul__(self, output: Tensor) -> Tensor:
        """``scale * loss`` and ``loss * scale``: :func:`ampopt.scale_outputs` for one tensor.

        Does not synchronize.

        Args:
            output: a floating-point tensor of any shape.

        Returns:
            The product: float64 for a float64 ``output``, else float32, so that a float16 loss does
            not overflow.

        Raises:
            TypeError: ``output`` is not a floating-point tensor. ``scale_outputs`` also takes lists
                and other structures of tensors.
        """
        return note_scaled_loss(product(output, self.value, "a LossScale is multiplied by"), self)

    __rmul__ = __mul__

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Implement ``tensor * scale``, in a form that ``torch.compile`` can trace."""
        if func not in (torch.mul, torch.Tensor.mul, torch.Tensor.__mul__) or kwargs:
            raise TypeError(
                f"{getattr(func, '__name__', func)}() of a {cls.__name__}: a loss scale can only "
                "multiply tensors, as in loss * scale; use the tensor scale.value for anything else"
            )
        output, scale = args  # the other way round, the product of the tensor calls this again
        return scale.__mul__(output)  # `*` would call this method again, without end

    def _place(self, device: Device) -> None:
        """Move the scale to ``device`` at its first use; later, refuse every other device.

        Raises:
            ValueError: the scale is on another device already.
        """
        device = torch.empty((), device=device).device  # with its index, as tensors have it
        if not self._placed:
            self._value = to_device(self._value, device)
            if self._counters is not None:
                self._counters = to_device(self._counters, device)
            self._placed = True
        elif self._value.is_meta and device.type != "meta":
            raise ValueError(
                f"this loss scale lives on meta, where it has no number, but is used on {device}: "
                "make it without device=, and it moves to the device where it is first used"
            )
        elif self._value.device != device:
            raise ValueError(
                f"this loss scale lives on {self._value.device}, but is used on {device}. Make one "
                "scale for each device, or pass device= when you make it; without device=, it "
                "moves to the device where it is first used."
            )

    def _with(self, value: Tensor, counters: Tensor) -> Self:
        """A scale with the same settings, and the value and counters that the device computed."""
        if self._policy is None:
            return self
        new = object.__new__(type(self))
        vars(new).update(vars(self))
        new._value, new._counters, new._generation = value, counters, _Generation()
        return new

    def _unstepped(self) -> "LossScale":
        """The scale itself: a step without gradients does not use it up."""
        return self

    @abstractmethod
    def _settings(self) -> dict[str, Any]:
        """The constructor arguments that make an equal scale, without ``device``."""

    def _rules(self) -> dict[str, Any]:
        """The settings without the initial number: what two scales must share to be combined."""
        return {k: v for k, v in self._settings().items() if k not in ("init_scale", "value")}

    def __repr__(self) -> str:
        """The settings, and the number if reading it does not synchronize."""
        number = self._host_number
        value = f"<on {self._value.device}>" if number is None else repr(number)
        settings = {**self._rules(), "device": None if self.device is None else str(self.device)}
        others = ", ".join(f"{k}={v!r}" for k, v in settings.items())
        return f"{type(self).__name__}(value={value}, {others})"

    def __format__(self, spec: str) -> str:
        """The number, as in ``f"{scale:g}"``; on an accelerator, the device instead of the number.

        Does not synchronize; ``f"{scale.item():g}"`` does, and always has the number.
        """
        if not spec:
            return str(self)
        number = self._host_number
        return f"<on {self._value.device}>" if number is None else format(number, spec)

    @property
    def _host_number(self) -> float | None:
        """The number, or ``None`` if reading it would synchronize."""
        return self._value.item() if host_may_read(self._value) else None

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and copy: everything except the identity."""
        return {
            "settings": self._settings(),
            "value": self._value,
            "counters": self._counters,
            "placed": self._placed,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """For pickle and copy: an equal scale with its own identity."""
        self.__init__(**state["settings"])
        self._set(state["value"], state["counters"], state["placed"])


def product(output: Any, scale: float | Tensor, what: str = "outputs holds") -> Tensor:
    """``output`` times ``scale``: float64 for a float64 output, else float32.

    Args:
        output: a floating-point tensor.
        scale: a number, or a 0-d tensor on any device.
        what: the subject and verb of the error messages.

    Raises:
        TypeError: ``output`` is not a floating-point tensor.
        ValueError: ``scale`` is on meta, and ``output`` is not.
    """
    if not isinstance(output, Tensor):
        raise TypeError(
            f"{what} a {type(output).__name__}; only floating-point tensors can be scaled. "
            "Leave out what has no gradient, and register a class of your own with "
            "torch.utils._pytree.register_pytree_node."
        )
    if not output.is_floating_point():
        raise TypeError(
            f"{what} a tensor of {output.dtype}; only floating-point tensors can be scaled. "
            "Leave out what has no gradient."
        )
    dtype = torch.float64 if output.dtype == torch.float64 else torch.float32
    if isinstance(scale, Tensor):
        if scale.is_meta and not output.is_meta:
            raise ValueError(
                "scale: it is on meta, where it has no number; make it without device=, or on "
                f"{str(output.device)!r}"
            )
        scale = to_device(scale, output.device, dtype)
    return output.to(dtype) * scale


def drops(scale: Any) -> bool:
    """Whether an overflowed update is skipped under ``scale``, an argument of a caller."""
    return not isinstance(scale, LossScale) or scale.drop_overflow_update


def host_may_read(*values: Any) -> bool:
    """Whether all tensors in ``values`` are ordinary CPU tensors, so that reading does not wait."""
    if torch.compiler.is_compiling():
        return False
    # Subclasses of Tensor, such as fake or distributed tensors, may have no number to read.
    return all(
        not isinstance(v, Tensor) or (type(v) in (Tensor, torch.nn.Parameter) and v.is_cpu)
        for v in values
    )
