"""``extend`` and ``patch_optimizer``: control points for optimizers that someone else wrote.

Both create a class that derives from the other optimizer's class and from
:class:`ampopt.Optimizer`, as ampopt's own classes derive from torch's.
"""

import copyreg
import functools
import inspect
from collections import OrderedDict
from types import MethodType
from typing import Any, cast

import torch
from torch.optim.lr_scheduler import LRScheduler

from ampopt import optim
from ampopt._step.descriptors import StrategyAttribute
from ampopt._step.handwritten_step import HandwrittenStep
from ampopt._step.ranks import check_process_group
from ampopt._step.step_rollback import SKIP_BY
from ampopt._step.stepping import StepStrategy
from ampopt._step.torch_private import HOOKS, is_wrapped_by_scheduler, put_step_hooks
from ampopt._step.torch_scaler import following_unscale
from ampopt.optimizer import Optimizer

__all__ = ["extend", "patch_optimizer"]

_NAME = "_ampopt"
"""The one attribute that ampopt adds to an instance. The other class must not use it."""

_COOPERATIVE = frozenset({"state_dict", "load_state_dict", "zero_grad"})
"""Methods of ampopt.Optimizer that call the other class's method of that name."""

_TORCHS = torch.optim.Optimizer.__mro__
_OURS = {name for name in vars(Optimizer) if not name.startswith("_")} - _COOPERATIVE


def extend(cls: type[torch.optim.Optimizer]) -> Any:
    """A subclass of ``cls`` with the control points of :class:`ampopt.Optimizer`.

    For an optimizer that someone else wrote, without support for loss scaling::

        optimizer = ampopt.extend(Prodigy)(model.parameters(), lr=1.0)
        _, found_inf, scale = optimizer.unscale_and_step(grads_scaled_by=scale)

    The result is a subclass of ``ampopt.Optimizer`` and of ``cls``, with the constructor, the step
    and the state of ``cls``; state dicts of either class load into the other. A step is skipped
    like every hand-written step: see ``skip_by``. Where ``step`` takes no closure, a control point
    evaluates the closure before the step.

    **Name conflicts.** Methods and attributes of ``cls`` keep their meaning, even if they are named
    like control points: ``unscale``, ``unscale_and_step``, ``step_after_unscale``, ``grad_norm``,
    ``pending``. If the constructor of ``cls`` takes ``process_group``, or its instances have an
    attribute of that name, it keeps its meaning, too. Set ampopt's process group then by
    ``ampopt.GradScaler(process_group=...)`` or ``ampopt.unscale_and_step(process_group=...)``.
    Otherwise the constructor also takes ampopt's ``process_group``: see :class:`ampopt.Optimizer`.

    Calls with the same ``cls`` return the same class, so set ``skip_by`` on an instance or a
    subclass. The class can be pickled, and its instances too, if ``cls`` can. For a class of torch
    the result is ampopt's class of that name, and an ampopt class is returned unchanged.

    Args:
        cls: a subclass of ``torch.optim.Optimizer``.

    Returns:
        The class.

    Raises:
        TypeError: ``cls`` is not a subclass of ``torch.optim.Optimizer``, or it uses the attribute
            name ``_ampopt``. If only its instances do, or if they have no ``param_groups``, their
            constructor raises.
    """
    if isinstance(cls, torch.optim.Optimizer):
        raise TypeError(
            f"extend takes a class, got an instance of {type(cls).__name__}: "
            "use patch_optimizer(optimizer), or extend its class before making it"
        )
    if not isinstance(cls, type) or not issubclass(cls, torch.optim.Optimizer):
        name = cls.__name__ if isinstance(cls, type) else type(cls).__name__
        raise TypeError(f"extend takes a subclass of torch.optim.Optimizer, got {name}")
    return cls if issubclass(cls, Optimizer) else _twin(cls) or _extended_class(cls)


def patch_optimizer(optimizer: torch.optim.Optimizer) -> Optimizer:
    """Add the control points to an existing optimizer, in place.

    For optimizers that a framework or a factory made. The class of the instance is changed to
    ``extend`` of its class. Param groups, state, hooks, schedulers, and methods that were set on
    the instance are kept. This may be done in the middle of training.

    A loss scale is not part of the optimizer: start with ``scale = ampopt.DynamicLossScale()``, for
    instance.

    Args:
        optimizer: an instance of ``torch.optim.Optimizer``. One of ampopt's is returned unchanged.

    Returns:
        ``optimizer``, typed as an :class:`ampopt.Optimizer`.

    Raises:
        TypeError: ``optimizer`` is not a torch optimizer, or cannot be extended; see
            :func:`extend`. Nothing has changed then.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            "patch_optimizer takes an instance of torch.optim.Optimizer, got "
            f"{type(optimizer).__name__}: use extend(cls) for a class; for a wrapper, pass the "
            "optimizer inside it"
        )
    if isinstance(optimizer, Optimizer):
        return optimizer
    was, step = type(optimizer), type(optimizer).step
    cls = extend(was)
    _check_instance(cls, optimizer)
    optimizer.__class__ = cls
    instance_step: Any = vars(optimizer).get("step")
    is_schedulers = is_wrapped_by_scheduler(instance_step) and instance_step.__wrapped__ is step
    if instance_step is not None and not is_schedulers:
        # Someone has set a step on the instance, which may call the step of the former class. That
        # step does not read the flag of a scaler.
        optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
        optimizer.step = MethodType(following_unscale(instance_step), optimizer)  # type: ignore[method-assign]
        optimizer._ampopt = cls._ampopt.for_another_step().new(optimizer)  # type: ignore[attr-defined]
    _complete(optimizer, was)
    if is_schedulers:
        del optimizer.step  # a scheduler's wrapper around the step of the former class
        _Tracker(optimizer)
    return cast("Optimizer", optimizer)


class ExtendedStep(HandwrittenStep):
    """The strategy of an extended class.

    Attributes:
        names_of_theirs: which of the names ``skip_by`` and ``process_group`` the class uses for
            something else.
    """

    names_of_theirs: frozenset[str] = frozenset()
    _process_group: Any = None

    @property
    def skip_by(self) -> str:
        """See :class:`StepStrategy`."""
        return "auto" if "skip_by" in self.names_of_theirs else self.optimizer.skip_by

    @property
    def process_group(self) -> Any:
        """See :class:`StepStrategy`."""
        is_theirs = "process_group" in self.names_of_theirs
        return self._process_group if is_theirs else self.optimizer.process_group

    @process_group.setter
    def process_group(self, process_group: Any) -> None:
        if "process_group" in self.names_of_theirs:
            self._process_group = process_group
        else:
            self.optimizer.process_group = process_group


class _Tracker(LRScheduler):
    """Makes torch wrap the step of an optimizer again, to count it; schedules nothing."""

    def step(self, epoch: int | None = None) -> None:
        """Do nothing."""
        pass


def _twin(cls: type) -> type | None:
    """The class of ampopt that has the name of a class of torch."""
    twin = getattr(optim, cls.__name__, None)
    return twin if isinstance(twin, type) and cls in twin.__bases__ else None


def _extended_class(cls: type) -> type:
    """The subclass of ``cls`` with control points; made once for each ``cls``."""
    for subclass in cls.__subclasses__():
        if vars(subclass).get("_extends") is cls:
            return subclass
    theirs = {name for base in cls.__mro__ if base not in _TORCHS for name in vars(base)}
    if _NAME in theirs:
        raise _no_free_name(cls)
    their_attributes = {name: inspect.getattr_static(cls, name) for name in theirs & _OURS}

    takes_group = "process_group" in inspect.signature(cls.__init__).parameters

    @functools.wraps(cls.__init__)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        group = None if takes_group else kwargs.pop("process_group", None)
        check_process_group(group)
        cls.__init__(self, *args, **kwargs)
        _check_instance(cls, self)
        _complete(self, cls)
        if group is not None:
            self._ampopt.process_group = group

    @functools.wraps(cls.zero_grad)
    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
        Optimizer.zero_grad(self, *args, **kwargs)

    namespace = {
        "__doc__": cls.__doc__,
        "__init__": __init__,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "_ampopt": StrategyAttribute(ExtendedStep),
        "_extends": cls,
        "zero_grad": zero_grad,
        **their_attributes,
    }
    return _meta(type(cls))(cls.__name__, (cls, Optimizer), namespace)


@functools.cache
def _meta(of_theirs: type) -> type:
    """A metaclass whose classes are pickled by the class that they extend, as no module has them.

    The base class from the other library comes first, because Python requires equal memory layouts
    to change the ``__class__`` of an instance. In the method resolution order, ``Optimizer`` still
    comes before it.
    """

    def mro(cls: Any) -> list[type]:
        extends = vars(cls).get("_extends")
        return type.mro(cls) if extends is None else [cls, Optimizer, *extends.__mro__]

    meta = type(of_theirs.__name__, (of_theirs,), {"mro": mro})
    copyreg.pickle(meta, _reduction)
    return meta


def _reduction(cls: Any) -> Any:
    """How ``copyreg`` pickles an extended class: as the call of :func:`extend` that makes it."""
    # A subclass that a user derives from an extended class is pickled by its name, as usual.
    extends = vars(cls).get("_extends")
    return cls.__qualname__ if extends is None else (extend, (extends,))


def _check_instance(cls: type, optimizer: Any) -> None:
    """Refuse an instance that uses the attribute ``_ampopt``, or that has no param groups."""
    if not isinstance(vars(optimizer).get(_NAME), (StepStrategy, type(None))):
        raise _no_free_name(cls)
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"{cls.__name__} cannot be extended: its instances have no param_groups. If it is a "
            "wrapper, extend or patch the optimizer inside it"
        )


def _no_free_name(cls: type) -> TypeError:
    """The error for a class that uses the attribute ``_ampopt`` for something else."""
    return TypeError(
        f"{cls.__name__} cannot be extended: it has its own {_NAME}, which "
        "ampopt.Optimizer has another use for; rename it in a subclass, or step this "
        "optimizer with ampopt.GradScaler, which takes any"
    )


def _complete(optimizer: Any, cls: type) -> None:
    """Add what the constructors of torch's and ampopt's ``Optimizer`` would have set.

    A wrapper may not call them. Attributes that ``cls`` uses in another meaning are left to it.
    """
    for name in HOOKS:
        vars(optimizer).setdefault(name, OrderedDict())
    if not hasattr(optimizer, "defaults"):
        optimizer.defaults = {}
    skip_by = vars(optimizer).get("skip_by", getattr(cls, "skip_by", "auto"))
    has_group = "process_group" in (*vars(optimizer), *dir(cls))
    optimizer._ampopt.names_of_theirs = frozenset(
        ["skip_by"] * (skip_by not in SKIP_BY) + ["process_group"] * has_group
    )
    put_step_hooks(optimizer)  # torch wraps the step of a class when it makes the first instance
