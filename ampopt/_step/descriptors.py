"""How an optimizer and its parts refer to each other, and properties that can be overridden."""

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

import torch

__all__ = ["RefersToOptimizer", "StrategyAttribute", "overridable_property"]

_T = TypeVar("_T")


class RefersToOptimizer:
    """Base class of objects that belong to one optimizer and live as long as it does.

    They are attributes of the optimizer, or of its attributes. A strong reference back would be a
    cycle, which keeps parameters and states in memory until Python's garbage collector runs.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Store a weak reference to ``optimizer``."""
        self._optimizer = weakref.ref(optimizer)

    @property
    def optimizer(self) -> Any:
        """The optimizer that this object belongs to."""
        return self._optimizer()


class StrategyAttribute:
    """Descriptor that creates ``optimizer._ampopt``, a ``StepStrategy``, at its first use.

    A constructor would not do: optimizers are also unpickled, patched by ``patch_optimizer``, or
    wrappers that share the attributes of another optimizer.

    Attributes:
        step: the ``step`` function of the class that has this attribute, without hooks.
        has_own_control_points: whether the class unscales by methods of its own, so that its
            ``step()`` needs no scale.
    """

    def __init__(
        self,
        make: Callable[..., RefersToOptimizer],
        *,
        for_another_step: Callable[[Any], RefersToOptimizer] | None = None,
        **facts: Any,
    ) -> None:
        """Store how to make a strategy.

        Args:
            make: called as ``make(optimizer, **facts)``; returns the strategy.
            for_another_step: makes that of a subclass that overrides ``step``; ``None`` for
                ``make``, without the facts.
            facts: keyword arguments of ``make``, which describe the ``step`` of the class.
        """
        self._make, self._for_another_step, self._facts = make, for_another_step or make, facts
        self.step: Any = None
        self.has_own_control_points = False

    def for_another_step(self) -> "StrategyAttribute":
        """The descriptor for a subclass that overrides ``step``."""
        another = StrategyAttribute(self._for_another_step)
        another.has_own_control_points = self.has_own_control_points
        return another

    def new(self, optimizer: Any) -> RefersToOptimizer:
        """A new strategy for ``optimizer``, in the state *idle*."""
        return self._make(optimizer, **self._facts)

    def __get__(self, optimizer: Any, cls: Any) -> Any:
        """Return the strategy of ``optimizer``, or this descriptor if a class is asked."""
        if optimizer is None:
            return self
        stepping = vars(optimizer).get("_ampopt")
        if stepping is None or stepping._optimizer() is not optimizer:
            stepping = vars(optimizer)["_ampopt"] = self.new(optimizer)
        return stepping

    def __set__(self, optimizer: Any, stepping: RefersToOptimizer) -> None:
        """Give ``optimizer`` a strategy of its own."""
        vars(optimizer)["_ampopt"] = stepping


class overridable_property(Generic[_T]):
    """A property that an instance attribute, or a class attribute later in the MRO, overrides.

    So an optimizer of another library keeps an attribute that happens to have the same name.
    """

    def __init__(self, read: Callable[[Any], _T]) -> None:
        """Compute the property with ``read(optimizer)``."""
        self._read = read
        self.__doc__ = read.__doc__

    @overload
    def __get__(self, optimizer: None, cls: Any) -> "overridable_property[_T]": ...
    @overload
    def __get__(self, optimizer: object, cls: Any) -> _T: ...

    def __get__(self, optimizer: Any, cls: Any) -> Any:
        """The value that ``read`` returns."""
        return self if optimizer is None else self._read(optimizer)

    if TYPE_CHECKING:  # at run time, __set__ would hide instance attributes

        def __set__(self, optimizer: Any, value: _T) -> None:
            """Declared for type checkers: an instance attribute may be set."""
