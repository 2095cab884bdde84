"""What every loss scale is: a value on a device, an identity, and what optimizers ask of it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ampopt.loss_scale.product import product
from ampopt_kernels.policy import PolicyConstants
from ampopt_kernels.transfers import carried

__all__ = [
    "AnyScale",
    "Device",
    "LossScale",
    "drops",
    "host_may_read",
]

Device = torch.device | str | int


class _Generation:
    """The identity of one value of a scale; held weakly by the optimizers that stepped with it."""

    __slots__ = ("__weakref__",)


class AnyScale(ABC):
    """What optimizers ask of the scale of their gradients, whatever the caller gave.

    * :attr:`value` and :attr:`drop_overflow_update`;
    * ``_policy``: the schedule's ``PolicyConstants``, for the device to compute the successor; or
      ``None`` where nothing is to be computed;
    * ``_counters``, with ``_policy``: int32 of shape (2,): finite steps counted towards the next
      growth, and overflows left before the scale is lowered;
    * ``_successor(value, counters)``: what the caller goes on with, from what the device computed;
    * ``_unstepped()``: what the caller goes on with where there were no gradients to learn from;
    * ``_generation``: an opaque, weakly referenceable object that stands for this value, with which
      an optimizer may step once; ``None`` if it may again.
    """

    _policy: PolicyConstants | None = None
    _drop: bool = True

    _value: Tensor
    _counters: Tensor | None = None
    _generation: _Generation | None = None

    @property
    def value(self) -> Tensor:
        """The scale: of one element and floating point."""
        return self._value

    @property
    def drop_overflow_update(self) -> bool:
        """Whether an update whose gradients overflowed is left out."""
        return self._drop

    @abstractmethod
    def _successor(self, value: Tensor, counters: Tensor) -> Any: ...

    @abstractmethod
    def _unstepped(self) -> Any: ...


class LossScale(AnyScale):
    """What gradients are multiplied by: a float32 number on the device.

    Stepping never changes a scale. It is passed in, and its successor is returned::

        scale = DynamicLossScale()
        for batch in batches:
            optimizer.zero_grad()
            scale_outputs(loss_of(batch), scale).backward()
            _, _, scale = optimizer.unscale_and_step(grads_scaled_by=scale)

    For a loss that is one tensor, ``(loss_of(batch) * scale).backward()`` does the same.

    Only being placed on its device, once, and :meth:`load_state_dict` change a scale.

    The final classes are :class:`StaticLossScale` and :class:`DynamicLossScale`. A subclass must
    provide what is abstract here, set ``_value``, and be what :class:`AnyScale` says; where
    ``_policy`` is ``None``, a scale is its own successor, to step with again. Successors, copies
    and unpickled scales have a ``_generation`` of their own, and loading makes a new one.
    ``_warn_if_collapsed()`` is called where the host has the number anyway.
    """

    _placed: bool = False

    def _set(self, value: Tensor, counters: Tensor | None, placed: bool) -> None:
        self._value, self._counters, self._placed = value, counters, placed
        self._generation = None if counters is None else _Generation()

    @property
    def value(self) -> Tensor:
        """The scale: float32, 0-d, on its device, or on the CPU while it has none.

        Does not synchronize. Not to be written to: a loss scaled by it may still need it for its
        backward pass.
        """
        return self._value

    @property
    def device(self) -> torch.device | None:
        """Where the scale lives; ``None`` while nothing has decided that."""
        return self._value.device if self._placed else None

    @abstractmethod
    def next(self, found_inf: Any) -> "LossScale":
        """The scale that follows this one. Does not synchronize.

        For authors who write their own hooks; optimizers compute the same in their own launches.

        Args:
            found_inf: whether the step overflowed: a bool, a number, or a tensor of one element;
                more than 0 means that it did, so sums of flags will do. A tensor that is NaN or
                negative, which the host cannot see, is not more than 0. A scale without a device
                goes to that of the tensor.

        Returns:
            A new scale, or this one if it is static.

        Raises:
            TypeError: ``found_inf`` is not a real number or tensor.
            ValueError: it has not one element, is a number that is NaN or negative, or is on a
                device while the scale is on the CPU, which would have to wait for it.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """All there is to save, as plain Python numbers and strings. Synchronizes."""

    @abstractmethod
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Become the scale that was saved, settings included, on this scale's device.

        A state of ``torch.amp.GradScaler`` will do for a dynamic scale, which then goes on where
        the scaler stopped; what that does not say, such as a floor, stays as it is. So will one of
        ``ampopt.GradScaler``.

        The one thing that changes a scale in place. Its successors and the tensors it has handed
        out stay as they are.

        Args:
            state_dict: what :meth:`state_dict` of a scale or a scaler returned.

        Raises:
            TypeError: an entry is of the wrong type.
            ValueError: an entry is missing, unknown or out of range, or the state is that of
                another kind of scale. Nothing has changed then.
        """

    def item(self) -> float:
        """The scale as a Python number. Synchronizes: the host waits for the device."""
        return self._value.item()

    def _warn_if_collapsed(self) -> None:  # most cannot
        """Warn, once, of a scale that has fallen to where it is of no use. Synchronizes."""

    def __float__(self) -> float:
        """As :meth:`item`; synchronizes."""
        return self.item()

    def __mul__(self, output: Tensor) -> Tensor:
        """``scale * loss`` and ``loss * scale``, as :func:`ampopt.scale_outputs` of one tensor.

        Does not synchronize.

        Args:
            output: a floating-point tensor of any shape.

        Returns:
            The product: float64 for float64, else float32, so that a float16 loss does not
            overflow.

        Raises:
            TypeError: ``output`` is something else, such as a list of tensors, which
                ``scale_outputs`` takes.
        """
        return product(output, self.value, "a LossScale is multiplied by")

    __rmul__ = __mul__

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Multiply where a tensor comes first, so that ``torch.compile`` can compile it, too."""
        multiplies = func in (torch.mul, torch.Tensor.mul, torch.Tensor.__mul__)
        if not multiplies or len(args) != 2 or kwargs:
            raise TypeError(
                f"{getattr(func, '__name__', func)}() of a {cls.__name__}: a loss scale multiplies "
                "tensors, as in loss * scale, and no more; as a tensor it is scale.value"
            )
        output, scale = args if isinstance(args[1], LossScale) else args[::-1]
        return scale.__mul__(output)  # `*` would have the compiler come here again

    def _place(self, device: Device) -> None:
        device = _resolved(device)
        if not self._placed:
            self._value = carried(self._value, device)
            if self._counters is not None:
                self._counters = carried(self._counters, device)
            self._placed = True
        elif self._value.is_meta and device.type != "meta":
            raise ValueError(
                f"this loss scale lives on meta, where it has no number, but is used on {device}: "
                "make it without device=, and it goes where it is first used"
            )
        elif self._value.device != device:
            raise ValueError(
                f"this loss scale lives on {self._value.device}, but is used on {device}. Make one "
                "for each device, or pass device= when you make it; without, it goes to the device "
                "where it is first used."
            )

    @abstractmethod
    def _successor(self, value: Tensor, counters: Tensor) -> "LossScale": ...

    def _unstepped(self) -> "LossScale":
        return self

    @abstractmethod
    def _settings(self) -> dict[str, Any]:
        """The arguments that make a scale like this, but for the device."""

    def _rules(self) -> dict[str, Any]:
        """Its settings, but for the number that it began with."""
        return {k: v for k, v in self._settings().items() if k not in ("init_scale", "value")}

    def __repr__(self) -> str:
        """The number, if it is not on a device that it would have to be waited for, and settings.

        Does not synchronize; ``item()`` waits.
        """
        known = self._known
        value = f"<on {self._value.device}>" if known is None else repr(known)
        settings = {**self._rules(), "device": None if self.device is None else str(self.device)}
        others = ", ".join(f"{k}={v!r}" for k, v in settings.items())
        return f"{type(self).__name__}(value={value}, {others})"

    def __format__(self, spec: str) -> str:
        """The number, as in ``f"{scale:g}"``, or where it is, as for ``repr``.

        Does not synchronize; ``f"{scale.item():g}"`` waits.
        """
        if not spec:
            return str(self)
        known = self._known
        return f"<on {self._value.device}>" if known is None else format(known, spec)

    @property
    def _known(self) -> float | None:
        """The number, where having it does not synchronize."""
        return self._value.item() if host_may_read(self._value) else None

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and copy: everything but the identity."""
        return {
            "settings": self._settings(),
            "value": self._value,
            "counters": self._counters,
            "placed": self._placed,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """For pickle and copy: the same scale with an identity of its own."""
        self.__init__(**state["settings"])
        self._set(state["value"], state["counters"], state["placed"])


def drops(given: Any) -> bool:
    """Whether an overflowed update is left out under what a caller gave as a scale."""
    return not isinstance(given, LossScale) or given.drop_overflow_update


def host_may_read(*values: Any) -> bool:
    """Whether every tensor is a plain one on the CPU, whose number can be had without waiting."""
    if torch.compiler.is_compiling():
        return False
    # Subclasses (fake tensors, distributed ones) may have no number to read.
    return all(
        not isinstance(v, Tensor) or (type(v) in (Tensor, torch.nn.Parameter) and v.is_cpu)
        for v in values
    )


def _resolved(device: Device) -> torch.device:
    """``device`` with its index, as tensors have it."""
    device = torch.device(device)
    if device.index is None and device.type not in ("cpu", "meta"):
        device = torch.empty((), device=device).device
    return device
